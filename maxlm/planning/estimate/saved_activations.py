"""Counts the activations that a layer saves for its backward pass, from the trace of the model's layers.

Nothing is computed or compiled. Tracing takes about 0.1 s for each rematerialization policy, and its result is cached.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Literal

from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.model import RematPolicy
from maxlm.model.decoder import Decoder
from maxlm.parallel.partitioning import SingleDevice
from maxlm.planning.estimate.backends import SUBLANES, Backend
from maxlm.planning.estimate.experts import rows_of

# Operations whose result has the buffer of their operand, except in layers with experts: `jax.shard_map`, in which they
# run, returns separate arrays.
VIEWS = ('reshape', 'squeeze', 'expand_dims', 'transpose', 'copy', 'name')
# Sizes of the traced model and its sequence. What a layer saves is proportional to the length, and a short sequence has
# a single block of queries.
VOCAB_SIZE, LENGTH = 8, 256


class _Saved(NamedTuple):
    """Bytes that a layer saves for one sequence.

    Attributes:
        of_rows: arrays of the rows of experts.
        other: all other arrays.
    """

    of_rows: float
    other: float


def saved_bytes(config: Config, kind: ModelConfig, backend: Backend, policy: RematPolicy) -> float:
    """Returns the bytes of activations that a layer saves for the backward pass of a micro-batch on a device.

    Args:
        config: resolved config of the run.
        kind: model with only this kind of layers; see `layer_stacks`.
        backend: overheads of the compiler.
        policy: value of `model.remat_policy` that applies; not `offload`.
    """
    mesh, tokens = config.mesh, config.train.per_device_batch_size * config.data.seq_len // config.mesh.context
    length = min(LENGTH, config.data.seq_len // mesh.context)
    layers = dataclasses.replace(
        kind,
        # Two periods of the patterns of layers, in a loop.
        num_layers=2 * kind.layer_period,
        num_dense_layers=0,
        mtp_depth=0,
        vocab_size=VOCAB_SIZE,
        scan_layers=True,
        remat_policy='none',
        num_heads=kind.num_heads // mesh.tensor,
        num_kv_heads=kind.num_kv_heads // mesh.tensor,
        ffn_dim=kind.ffn_dim // mesh.tensor,
        expert_ffn_dim=kind.expert_ffn_dim // mesh.tensor,
        # All kernels of attention save their inputs, their output and the softmax statistics. Those of cuDNN and
        # Tokamax cannot be traced without a GPU.
        attention='xla',
        expert_matmul='ragged_dot' if kind.expert_matmul == 'tokamax' else kind.expert_matmul,
    )
    alone = dataclasses.replace(
        config,
        mesh=dataclasses.replace(mesh, context=1, expert=1),
        data=dataclasses.replace(config.data, seq_len=length),
        train=dataclasses.replace(config.train, per_device_batch_size=1),
    )
    num_rows = rows_of(alone, layers).stored
    saved = _trace(layers, policy, backend, length, config.data.document_mask, int(num_rows))
    scale = rows_of(config, kind).stored / num_rows if num_rows else 0.0
    return scale * saved.of_rows + tokens / length * saved.other


@functools.lru_cache(maxsize=64)
def _abstract_decoder(model: ModelConfig, platform: str) -> tuple[Any, Any]:
    """Returns the graph and the abstract parameters of a decoder."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0), partitioning=SingleDevice(platform))))


@functools.lru_cache(maxsize=256)
def _trace(
    model: ModelConfig, policy: RematPolicy, backend: Backend, length: int, has_segments: bool, num_rows: int
) -> _Saved:
    """Returns the bytes that a layer saves for a sequence; with a pattern of layers, the mean of its layers.

    The residuals of a loop over layers are the arrays that it stacks for its backward pass.
    """
    graph, params = _abstract_decoder(model, backend.platform)

    def linearized(params: Any, tokens_BT: jax.Array, segments_BT: jax.Array | None, positions_BT: jax.Array) -> Any:
        def forward(params: Any) -> jax.Array:
            decoder: Decoder = nnx.merge(graph, params)
            decoder.config = dataclasses.replace(model, remat_policy=policy)
            return decoder(tokens_BT, segments_BT=segments_BT, positions_BT=positions_BT)[0]

        return jax.vjp(forward, params)

    ints_BT = jax.ShapeDtypeStruct((1, length), jnp.int32)
    traced = jax.make_jaxpr(linearized)(params, ints_BT, ints_BT if has_segments else None, ints_BT)
    loops = [equation for equation in traced.jaxpr.eqns if equation.primitive.name == 'scan']
    loop = max(loops, key=lambda equation: len(equation.outvars))
    body = loop.params['jaxpr'].jaxpr
    # JAX 0.12 has no parameters with the numbers of constants and carried arrays, so their shapes are compared. Only
    # stacked arrays, which come last, have an axis of layers.
    num_carry = _num_unstacked(body.outvars, loop.outvars)
    start_of_layers = _num_unstacked(body.invars, loop.invars)
    # Arrays that follow from parameters alone, such as casts, are no activations.
    start_of_carry = start_of_layers - num_carry
    activations = set(body.invars[start_of_carry:start_of_layers])
    # Rows of value embeddings follow from the token ids.
    activations.update(value for value in body.invars[:start_of_carry] if value.aval.dtype == jnp.int32)
    buffers: dict[Any, Any] = {}
    for equation in body.eqns:
        inputs = [value for value in equation.invars if not isinstance(value, Literal)]
        if activations.intersection(inputs):
            activations.update(equation.outvars)
        if equation.primitive.name in VIEWS and not model.num_experts:
            buffers[equation.outvars[0]] = buffers.get(inputs[0], inputs[0])
    sizes: dict[Any, int] = {}
    of_rows = set()
    for value in body.outvars[num_carry:]:
        if value in activations:
            buffer = buffers.get(value, value)
            size = _stored_bytes(value.aval, backend.lanes)
            # The compiler stores the smallest view.
            sizes[buffer] = min(size, sizes.get(buffer, size))
            if value.aval.ndim == 2 and value.aval.shape[0] == num_rows:
                of_rows.add(buffer)
    total, in_rows = sum(sizes.values()), sum(sizes[buffer] for buffer in of_rows)
    period = model.layer_period
    return _Saved(in_rows / period, (total - in_rows) / period)


def _num_unstacked(of_body: Sequence[Any], of_loop: Sequence[Any]) -> int:
    """Returns the number of arrays of a loop that have the same shape in its body."""
    return sum(inner.aval.ndim == outer.aval.ndim for inner, outer in zip(of_body, of_loop, strict=True))


def _stored_bytes(array: Any, lanes: int) -> int:
    """Returns the bytes of an array whose last axes are padded to the compiler's tiles."""
    *outer, last = [size for size in array.shape if size > 1] or [1]
    width = array.dtype.itemsize
    if lanes > 1:
        last = -(-last // lanes) * lanes
        if outer and outer[-1] < SUBLANES:
            outer[-1] = SUBLANES * 4 // width
    return math.prod(outer) * last * width
