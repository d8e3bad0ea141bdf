"""Memory of the experts of a layer in a training step, on one device.

Shapes: R rows of experts, D width; see `maxlm.planning.estimate.experts`.
"""

from __future__ import annotations

import jax.numpy as jnp

from maxlm.config.schema import Config, ModelConfig
from maxlm.model.parameters import block_kernels
from maxlm.planning.estimate.experts import rows_of

# Float32 arrays of the router, with one element per token and expert, in the backward pass of a layer.
ROUTER_ARRAYS = 3
# Arrays [R, D] in the backward pass of a layer. Read off programs for TPU v5p.
ROW_ARRAYS = 3.0


def kernel_elements(config: Config, kind: ModelConfig) -> int:
    """Returns the elements of the experts' matrices of a layer as they are used."""
    mesh = config.mesh
    kernels = [kernel for kernel in block_kernels(kind).values() if kernel.is_of_experts]
    return sum(kernel.size for kernel in kernels) // (mesh.tensor * mesh.expert)


def backward_bytes(config: Config, kind: ModelConfig, ffn: float, platform: str) -> float:
    """Returns the bytes of temporary arrays in the backward pass of a layer's experts.

    Args:
        config: config of the run.
        kind: model with only this kind of layers.
        ffn: number of arrays of the feed-forward's width; see `Backend`.
        platform: platform of the devices.
    """
    if not kind.num_experts:
        return 0.0
    rows, width = rows_of(config, kind), jnp.dtype(kind.dtype).itemsize
    inner = ffn * kind.expert_ffn_dim / config.mesh.tensor
    of_rows = rows.stored * (inner + ROW_ARRAYS * kind.dim)
    if platform == 'gpu' and kind.expert_matmul == 'ragged_dot' and not kind.expert_capacity_factor:
        # XLA expands the rows to all experts. Read off a program for H100.
        expanded = rows.stored * kind.num_experts / config.mesh.expert
        of_rows += expanded * (2 * kind.dim + kind.expert_ffn_dim / config.mesh.tensor)
    return width * of_rows + 4 * ROUTER_ARRAYS * _tokens(config) * kind.num_experts


def _tokens(config: Config) -> float:
    return config.train.per_device_batch_size * config.data.seq_len / config.mesh.context
