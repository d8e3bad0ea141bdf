"""Estimates the memory of a training step on a device, by kind.

Shapes, all per device: B rows of a micro-batch, T sequence length, D width, F feed-forward (of dense layers and shared
experts), N query heads, K key/value heads, H head dim, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from maxlm.config.mesh import padded_vocabulary
from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.families import GATED_ACTIVATIONS
from maxlm.model.attention.chunked import QUERY_BLOCK, query_ranges
from maxlm.model.attention.cudnn import documents_per_row
from maxlm.model.layers.masks import layer_windows
from maxlm.model.parameters import Weight, block_kernels, layer_stacks, weights
from maxlm.model.stream import num_states
from maxlm.parallel.layout import SAVING
from maxlm.planning.estimate.backends import BACKENDS, SUBLANES, Backend
from maxlm.planning.estimate.experts import backward_bytes, is_first, rows_of
from maxlm.planning.estimate.head import head_memory
from maxlm.planning.estimate.saved_activations import saved_bytes
from maxlm.planning.estimate.state_bytes import (
    StateBytes,
    is_quantized,
    moment_bytes,
    planned_state_bytes,
    replay_bytes,
    scorer_bytes,
    shard_shape,
    shard_size,
    stored_bytes,
)
from maxlm.training.batch import BATCH_TYPES
from maxlm.training.flops import attention_workspace, needs_mask
from maxlm.training.optimizers.trainable import is_trained


class Memory(NamedTuple):
    """Bytes per device while a step runs.

    Attributes:
        parameters: model parameters, including those of a reference.
        moments: optimizer state.
        average: moving average of the parameters.
        gradients: gradients of the current micro-batch, and their sum over micro-batches.
        activations: activations saved for the backward pass.
        temporary: all other memory at the peak: gathered weights, logits, buffers of a layer, copies.
        batch: arrays of the batch.
        replay: copy of the state before a step that is computed twice (`guard.replay_fraction`).
        reward_model: parameters of the reward model of rollouts (`grpo.reward_model`).
        host: a device's share of its host's memory.
        is_estimate: True for the formulas, False for the compiler's figures.
    """

    parameters: int
    moments: int
    average: int
    gradients: int
    activations: int
    temporary: int
    batch: int
    replay: int
    reward_model: int
    host: int
    is_estimate: bool

    @property
    def total(self) -> int:
        """Returns the bytes of device memory."""
        state = self.parameters + self.moments + self.average + self.batch
        return state + self.gradients + self.activations + self.temporary + self.replay + self.reward_model


class _Sizes(NamedTuple):
    """Sizes of a kind of layers on one device; see the module docstring.

    Attributes:
        padded_H: H padded to the lanes, for arrays whose last axis it is.
        width: bytes of an element in the compute dtype.
        layers: layers of this kind that run consecutively before recomputation.
        kind: model with only this kind of layers; see `layer_stacks`.
    """

    B: int
    T: int
    D: int
    F: int
    N: int
    K: int
    V: int
    H: int
    padded_H: int
    width: int
    gated: bool
    layers: int
    kind: ModelConfig


def estimate_memory(
    config: Config, platform: str, capability: tuple[int, int] | None = None, state: StateBytes | None = None
) -> Memory:
    """Estimates the memory of a resolved config's step without compiling it.

    The peak is the largest of these moments: the backward pass of a layer, that of the head, the optimizer update, and
    the forward pass of a layer of the teacher. In the first, the activations of all layers and most gradients exist; in
    the second, the logits exist.

    Args:
        config: config of the run.
        platform: platform of the devices: cpu, gpu or tpu.
        capability: compute capability of GPUs. None: other devices, or unknown.
        state: bytes of the state if they are already known.
    """
    backend = BACKENDS[platform]
    kinds = [_sizes(config, backend, kind) for kind in layer_stacks(config.model)]
    # Sizes that do not depend on the kind of the layers are those of the last layers.
    sizes = kinds[-1]
    state = state or planned_state_bytes(config)
    gradient, filler = _gradient_and_filler(config, backend)
    # A pipeline also sums gradients over its iterations.
    gradients = gradient + (_micro_batch_gradient(config, sizes) if config.accumulation > 1 else 0)
    activations, on_host = _saved_activation_bytes(config, kinds, backend)
    copies = _copied_weights(config, sizes, backend)
    head = head_memory(config, (sizes.B, sizes.T, sizes.V), backend)
    at_layers = gradients + head.table + max(_layer_work(config, kind, backend, capability) for kind in kinds)
    at_teacher = gradients + _teacher_work(config, backend)
    in_model = activations + copies + max(at_layers, gradient + head.work, at_teacher)
    fullest, copy = max(in_model, gradient + _update(config, gradient)), replay_bytes(config)
    return Memory(
        parameters=state.parameters,
        moments=state.moments,
        average=state.average,
        gradients=gradients,
        activations=activations,
        temporary=max(0, fullest - gradients - activations) + filler,
        batch=_batch(config),
        replay=copy.parameters + copy.moments + copy.average,
        reward_model=scorer_bytes(config),
        host=state.host + on_host + copy.host,
        is_estimate=True,
    )


def _sizes(config: Config, backend: Backend, kind: ModelConfig) -> _Sizes:
    model, mesh = config.model, config.mesh
    width = kind.num_shared_experts * kind.expert_ffn_dim if kind.num_experts else kind.ffn_dim
    # The first dense layers of a model with experts run before a pipeline, for all micro-batches.
    layers = kind.num_layers // (mesh.stage * mesh.num_pipeline_repeats)
    if is_first(config, kind) and mesh.stage > 1:
        layers = kind.num_layers * config.accumulation
    return _Sizes(
        B=config.train.per_device_batch_size,
        T=config.data.seq_len // mesh.context,
        D=model.dim,
        F=width // mesh.tensor,
        N=model.num_heads // mesh.tensor,
        K=model.num_kv_heads // mesh.tensor,
        V=padded_vocabulary(model.vocab_size, mesh.tensor) // mesh.tensor,
        H=model.head_dim,
        padded_H=_up(model.head_dim, backend.lanes),
        width=np.dtype(np.float32).itemsize if model.dtype == 'float32' else 2,
        gated=model.activation in GATED_ACTIVATIONS,
        layers=layers,
        kind=kind,
    )


def _gradient_and_filler(config: Config, backend: Backend) -> tuple[int, int]:
    """Returns the bytes of one gradient of all trained parameters, and the padding of the state to tiles."""
    zero = 3 if config.mesh.zero_stage >= 2 else config.mesh.zero_stage
    gradient = filler = 0.0
    for weight in weights(config.model):
        trained = is_trained(config, weight.name)
        if trained:
            gradient += 4 * shard_size(config, weight, zero=zero) * _tiled(config, weight, zero, backend)
        filler += stored_bytes(config, weight, zero=3) * (_tiled(config, weight, 3, backend) - 1)
        filler += trained * moment_bytes(config, weight) * (_tiled(config, weight, 3, backend) - 1)
    return int(gradient), int(filler)


def _micro_batch_gradient(config: Config, sizes: _Sizes) -> int:
    """Returns the bytes of the gradient of one micro-batch; that of a cast kernel has the compute dtype."""
    zero = 3 if config.mesh.zero_stage >= 2 else config.mesh.zero_stage
    trained = [weight for weight in weights(config.model) if is_trained(config, weight.name)]
    return sum(
        (sizes.width if _is_cast(config, weight) else 4) * shard_size(config, weight, zero=zero) for weight in trained
    )


def _is_cast(config: Config, weight: Weight) -> bool:
    # With current scaling, FP8 kernels are quantized in the model.
    is_current = config.model.matmul_precision == 'fp8' and config.model.fp8_scaling == 'current'
    is_cast = config.mesh.host_offload != 'all' and not is_current
    is_kernel = weight.kind == 'matrix' and not is_quantized(weight)
    return is_cast and is_kernel and not weight.name.startswith('mtp.')


def _tiled(config: Config, weight: Weight, zero: int, backend: Backend) -> float:
    """Returns the size of a shard in tiles of SUBLANES × lanes relative to its unpadded size.

    The compiler chooses which of two axes is along the lanes: the width or one other axis, which is not that of the
    heads.
    """
    if backend.lanes == 1 or weight.kind == 'vector':
        return 1.0
    sizes = dict(zip(weight.axes, shard_shape(config, weight, zero=zero), strict=True))
    names = (
        'embed',
        'expert_embed',
        'head_dim',
        'latent',
        'ffn',
        'expert_ffn',
        'routes',
        'vocab',
        'position',
        'adapter',
    )
    a, b = [sizes[axis] for axis in (*names, 'activation') if axis in sizes][:2]
    lanes = backend.lanes
    return min(_up(a, lanes) * _up(b, SUBLANES), _up(b, lanes) * _up(a, SUBLANES)) / (a * b)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _matrices(config: Config, sizes: _Sizes) -> int:
    """Returns the elements of the matrices of one layer as they are used. Latents are not sharded over heads."""
    mesh, elements = config.mesh, 0
    for name, kernel in block_kernels(sizes.kind).items():
        num_shards = 1 if name.endswith('latent') else mesh.tensor * (mesh.expert if kernel.is_of_experts else 1)
        elements += kernel.size // num_shards
    return elements


def _saved_activation_bytes(config: Config, kinds: list[_Sizes], backend: Backend) -> tuple[int, int]:
    """Returns the bytes saved for the backward pass of all layers, on the device and on the host."""
    model, mesh = config.model, config.mesh
    stream = kinds[-1].B * kinds[-1].T * kinds[-1].D * kinds[-1].width
    on_host = 0
    if model.remat_policy == 'offload':
        on_host = sum(sizes.layers for sizes in kinds) * stream
    by_layer = [_saved_bytes_of_layer(config, sizes, backend) for sizes in kinds]
    saved = sum(sizes.layers * size for sizes, size in zip(kinds, by_layer, strict=True))
    # A module of multi-token prediction saves its block, both inputs of its projection and the inputs of its norms.
    of_module = by_layer[-1]
    if backend.keeps_outside_loops:
        kept = dataclasses.replace(config, model=dataclasses.replace(model, remat_policy='none'))
        of_module = _saved_bytes_of_layer(kept, kinds[-1], backend)
    saved += model.mtp_depth * (of_module + 5 * stream)
    # The earlier states of the stream that later layers use, and the embeddings before they are smeared.
    saved += stream * (num_states(model) - 1 + (model.smear_channels > 0))
    if mesh.stage > 1:
        # The chunk's input of every iteration, and the buffers of all micro-batches, twice, in the loop's carry.
        iterations = mesh.num_pipeline_repeats * config.accumulation + mesh.stage - 1
        saved += num_states(model) * stream * (iterations + 2 * config.accumulation)
    return int(saved), int(on_host)


def _saved_bytes_of_layer(config: Config, sizes: _Sizes, backend: Backend) -> float:
    mesh, policy = config.mesh, config.model.remat_policy
    if policy == 'offload':
        return 0
    # The output of attention and the softmax statistics.
    attended = sizes.B * sizes.T * (sizes.N * sizes.H * sizes.width + 4 * sizes.N)
    more = 0
    if _keeps_all(config, backend):
        policy = 'none'
    elif policy == 'dots_no_batch' and mesh.stage > 1:
        # The stages are a batch dimension of every product.
        policy, more = 'full', attended
    elif policy in ('dots', 'dots_no_batch') and mesh.context > 1:
        # The output of ring attention has no checkpoint name, so a policy cannot save it.
        more = -attended
    return saved_bytes(config, sizes.kind, backend, policy) + more


def _keeps_all(config: Config, backend: Backend) -> bool:
    """Returns True if rematerialization saves no memory.

    In the programs of unrolled layers below ZeRO stage 3, XLA for GPUs recomputes activations before the backward pass.
    """
    is_unrolled_on_gpu = backend.lanes == 1 and not config.model.scan_layers
    return is_unrolled_on_gpu and _gathers_once(config) and config.mesh.stage == 1


def _saves(config: Config) -> bool:
    return config.mesh.fsdp * config.mesh.expert * config.mesh.context > 1


def _gathers(config: Config) -> bool:
    return config.mesh.zero_stage == 3 and _saves(config)


def _gathers_once(config: Config) -> bool:
    return config.mesh.zero_stage < 3 and _saves(config)


def _copied_weights(config: Config, sizes: _Sizes, backend: Backend) -> int:
    """Returns the bytes of parameters that exist a second time in another layout or dtype.

    These are the kernels of blocks in the compute dtype and, below ZeRO stage 3, all gathered parameters. XLA keeps the
    gathered kernels of unrolled layers without rematerialization for the backward pass.
    """
    zero, copies = config.mesh.zero_stage, 0
    if config.mesh.host_offload != 'all':
        is_gathered = _gathers_once(config)
        is_kept = _gathers(config) and config.model.remat_policy == 'none' and not config.model.scan_layers
        for weight in weights(config.model):
            cast_width = 1 if config.model.fp8_scaling == 'delayed' else sizes.width
            is_cast = _is_cast(config, weight) and cast_width < 4
            if is_cast or is_gathered:
                copies += stored_bytes(config, weight, zero=zero, width=cast_width if is_cast else 4)
            if is_kept and weight.kind == 'matrix':
                copies += stored_bytes(config, weight, zero=1, width=sizes.width)
    if backend.turns_stacks and _gathers(config):
        split_last = (weight for weight in weights(config.model) if _is_split_last(weight))
        copies += sum(stored_bytes(config, weight, zero=3) for weight in split_last)
    if config.teacher is not None and _gathers_once(config):
        taught = config.of_teacher
        copies += sizes.width * sum(shard_size(taught, weight, zero=zero) for weight in weights(taught.model))
    return copies


def _is_split_last(weight: Weight) -> bool:
    return weight.axes[-1] in SAVING


def _layer_work(config: Config, sizes: _Sizes, backend: Backend, capability: tuple[int, int] | None) -> int:
    model = config.model
    tokens = sizes.B * sizes.T
    again = model.remat_policy in ('full', 'offload')
    ffn = (backend.gated_again if again else backend.gated) if sizes.gated else backend.ffn
    work = tokens * sizes.width * (ffn * sizes.F + backend.stream * sizes.D)
    work += backend.layer * _matrices(config, sizes) * sizes.width
    # The table of a layer with a value embedding in the compute dtype, and its gradient, which is summed in float32.
    has_values = bool(model.value_embedding_pattern)
    work += (sizes.width + 4) * sizes.V * model.num_kv_heads * model.head_dim * has_values
    work += backward_bytes(config, sizes.kind, ffn, backend.platform)
    if config.mesh.context > 1:
        return int(work)
    work += attention_workspace(config, capability)
    if needs_mask(config, capability):
        # The mask, and the array from which it is computed.
        work += (sizes.width + 1) * sizes.B * sizes.T**2
    elif model.attention == 'cudnn' and config.data.document_mask:
        # Softmax statistics for every slot in the list of documents.
        work += 4 * tokens * sizes.N * documents_per_row(sizes.T)
    elif model.attention == 'splash':
        # Queries, keys, values and output in the layout of the kernels, and the gradient of each.
        work += sizes.width * tokens * 4 * (sizes.N + sizes.K) * sizes.padded_H
    elif model.attention == 'xla':
        work += backend.scores * 4 * sizes.B * sizes.N * _scores_at_once(config)
        # Gradients of keys and values are summed in float32.
        work += 2 * 4 * tokens * sizes.K * sizes.padded_H
    return int(work)


def _teacher_work(config: Config, backend: Backend) -> int:
    """Returns the bytes of a layer of the teacher in its forward pass: gathered matrices and activations."""
    if config.teacher is None:
        return 0
    taught, largest = config.of_teacher, 0.0
    for kind in layer_stacks(config.teacher):
        sizes = _sizes(taught, backend, kind)
        tokens, rows = sizes.B * sizes.T, rows_of(taught, kind).stored
        inner = tokens * sizes.F + rows * (kind.expert_ffn_dim / config.mesh.tensor + kind.dim)
        work = sizes.width * (2 * inner + 4 * tokens * sizes.D + _matrices(taught, sizes) * _gathers(config))
        if config.teacher.attention == 'xla' and config.mesh.context == 1:
            work += 4 * sizes.B * sizes.N * _scores_at_once(taught)
        largest = max(largest, work)
    return int(largest)


def _scores_at_once(config: Config) -> int:
    """Returns queries × keys of the largest block, for one row and head."""
    ranges = [part for window in set(layer_windows(config.model)) for part in query_ranges(config.data.seq_len, window)]
    queries = [part.last - part.first for part in ranges]
    blocks = [number if number % QUERY_BLOCK else QUERY_BLOCK for number in queries]
    return max(block * (part.last - part.start) for block, part in zip(blocks, ranges, strict=True))


def _update(config: Config, gradient: int) -> int:
    """Returns the bytes of temporary arrays in the update: AdamW is one fused pass; others store their directions."""
    return 0 if config.optimizer.name == 'adamw' else gradient


def _batch(config: Config) -> int:
    """Returns the bytes of the batch on a device, with 4 bytes per element."""
    elements = config.train.global_batch_size * config.data.seq_len
    stored = 2 * config.distill.top_k if config.distill.logits_dir else 0
    return 4 * (len(BATCH_TYPES) + stored) * elements // (config.batch_shards * config.mesh.context)
