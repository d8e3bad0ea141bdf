"""Memory of the experts of a layer in a training step, on one device.

Shapes: A selections of experts by tokens, R rows of experts, D width; see `maxlm.planning.estimate.experts`.
"""

from __future__ import annotations

import jax.numpy as jnp

from maxlm.config.families import GATED_ACTIVATIONS
from maxlm.config.schema import Config, ModelConfig
from maxlm.model.parameters import block_kernels
from maxlm.planning.estimate.experts import rows_of

# Float32 arrays of the router, with one element per token and expert, that are saved for the backward pass.
ROUTER_ARRAYS = 3
# Read off programs for TPU v5p: arrays [R, D] in the backward pass of a layer, and arrays [A, D] that are saved without
# rematerialization.
ROW_ARRAYS, SAVED_ROW_ARRAYS = 3.0, 5.5


def kernel_elements(config: Config, kind: ModelConfig) -> int:
    """Returns the elements of the experts' matrices of a layer as they are used."""
    mesh = config.mesh
    kernels = [kernel for kernel in block_kernels(kind).values() if kernel.is_of_experts]
    return sum(kernel.size for kernel in kernels) // (mesh.tensor * mesh.expert)


def saved_bytes(config: Config, kind: ModelConfig, policy: str) -> float:
    """Returns the bytes of a layer's experts that are saved for the backward pass, with a policy other than `full`.

    Without rematerialization, these are the rows before and after the experts, and the inputs of their products and of
    the activation. Policies do not save the products of groups of rows.
    """
    if not kind.num_experts:
        return 0.0
    router = 4 * _tokens(config) * kind.num_experts
    if policy != 'none':
        return router
    rows, width = rows_of(config, kind), jnp.dtype(kind.dtype).itemsize
    inner = (3 if kind.activation in GATED_ACTIVATIONS else 2) * kind.expert_ffn_dim / config.mesh.tensor
    return (
        width * (rows.stored * (kind.dim + inner) + SAVED_ROW_ARRAYS * rows.assigned * kind.dim)
        + ROUTER_ARRAYS * router
    )


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
