"""Learned scales of the residual stream, and earlier states of it that later layers use (Karpathy 2026, nanochat).

Before layer l, x ← λ[l] · x + μ[l] · x0, where x0 is the input of the first layer, λ is `residual_scales` and μ is
`embedding_scales`. After the last layer, x ← x - b · x_k, where x_k is the output of layer `model.backout_layer` and b
is `backout_scale`. All three are computed in float32.

Shapes: B batch, T length, D dim, L layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.linear import Initializer, parameter

# Logical axes of vectors, which are replicated and stay in float32.
VECTOR_AXES = ('norm',)


class LayerScales(NamedTuple):
    """Scales of consecutive layers, or of one layer without the axis L. Absent entries are None.

    Attributes:
        residual_L: factors λ of the stream, float32.
        embedding_L: factors μ of the input of the first layer, float32.
        is_backout_L: True for the layer whose output is kept.
    """

    residual_L: jax.Array | None
    embedding_L: jax.Array | None
    is_backout_L: jax.Array | None

    def of_layers(self, first: jax.Array | int, num: int) -> LayerScales:
        """Returns the scales of `num` layers from `first`."""
        return jax.tree.map(lambda x_L: jax.lax.dynamic_slice_in_dim(x_L, first, num), self)

    def of_layer(self, layer: int) -> LayerScales:
        return jax.tree.map(lambda x_L: x_L[layer], self)

    def mix(self, x_BTD: jax.Array, input_BTD: jax.Array | None) -> jax.Array:
        """Returns the input of a layer, λ · x + μ · x0, in the dtype of x."""
        if self.residual_L is None and self.embedding_L is None:
            return x_BTD
        return _mix(x_BTD, input_BTD, self.residual_L, self.embedding_L)

    def keep(self, backout_BTD: jax.Array | None, x_BTD: jax.Array) -> jax.Array | None:
        """Returns the output x of a layer if it is the one to keep, and otherwise the state before."""
        if self.is_backout_L is None or backout_BTD is None:
            return None
        return jnp.where(self.is_backout_L, x_BTD, backout_BTD)


# The backward pass of a loop keeps only the inputs, not their conversions to float32.
@partial(jax.checkpoint, prevent_cse=False)
def _mix(
    x_BTD: jax.Array, input_BTD: jax.Array | None, residual: jax.Array | None, embedding: jax.Array | None
) -> jax.Array:
    mixed_BTD = x_BTD.astype(jnp.float32)
    if residual is not None:
        mixed_BTD = residual * mixed_BTD
    if embedding is not None:
        assert input_BTD is not None, 'scales of the embedding multiply it'
        mixed_BTD = mixed_BTD + embedding * input_BTD
    return mixed_BTD.astype(x_BTD.dtype)


class Stream(NamedTuple):
    """The residual stream between two layers.

    Attributes:
        x_BTD: the stream.
        input_BTD: input of the first layer; None without `model.embedding_residual`.
        backout_BTD: output of layer `model.backout_layer`, and zeros before it; None without this key.
        scales: scales of all layers of the model.
    """

    x_BTD: jax.Array
    input_BTD: jax.Array | None
    backout_BTD: jax.Array | None
    scales: LayerScales

    def packed(self) -> jax.Array:
        """Returns one array [B, T, n · D] of all states, which a pipeline sends from stage to stage."""
        states = [x for x in self[:3] if x is not None]
        return states[0] if len(states) == 1 else jnp.concatenate(states, axis=-1)

    def unpacked(self, packed: jax.Array) -> Stream:
        """Returns the stream with the states of `packed`."""
        num = sum(x is not None for x in self[:3])
        x_BTD, *rest = [packed] if num == 1 else jnp.split(packed, num, axis=-1)
        input_BTD = None if self.input_BTD is None else rest.pop(0)
        backout_BTD = None if self.backout_BTD is None else rest.pop(0)
        return Stream(x_BTD, input_BTD, backout_BTD, self.scales)


def first_stream(
    config: ModelConfig, x_BTD: jax.Array, residual_scales: nnx.Param | None, embedding_scales: nnx.Param | None
) -> Stream:
    """Returns the stream before the first layer of a model with these parameters."""
    residual_L, embedding_L = (None if x is None else x[...] for x in (residual_scales, embedding_scales))
    input_BTD, zeros_BTD, is_backout_L = x_BTD if config.embedding_residual else None, None, None
    if config.backout_layer >= 0:
        zeros_BTD, is_backout_L = jnp.zeros_like(x_BTD), jnp.arange(config.num_layers) == config.backout_layer
    return Stream(x_BTD, input_BTD, zeros_BTD, LayerScales(residual_L, embedding_L, is_backout_L))


class StreamParameters(NamedTuple):
    """Parameters of a decoder, float32; None if it has no such parameter.

    Attributes:
        residual_scales, embedding_scales: [L], falling linearly over the layers from 1.15 to 1.05 and from 0.20 to
            0.05, the initial values of nanochat.
        smear_gate, smear_scale: [C] and [1]; initially U(0, 0.02) and 0.
        backout_scale: [1], initially 0.2.
    """

    residual_scales: nnx.Param | None
    embedding_scales: nnx.Param | None
    smear_gate: nnx.Param | None
    smear_scale: nnx.Param | None
    backout_scale: nnx.Param | None


def make_parameters(config: ModelConfig, rngs: nnx.Rngs) -> StreamParameters:
    """Creates the parameters of the enabled options. Others use no random keys."""

    def make(is_enabled: bool, num: int, init: Initializer) -> nnx.Param | None:
        return parameter(rngs, (num,), VECTOR_AXES, init) if is_enabled else None

    L, C, constant = config.num_layers, config.smear_channels, jax.nn.initializers.constant
    return StreamParameters(
        make(config.residual_scale, L, _linear(1.15, 1.05)),
        make(config.embedding_residual, L, _linear(0.20, 0.05)),
        make(C > 0, C, jax.nn.initializers.uniform(0.02)),
        make(C > 0, 1, constant(0.0)),
        make(config.backout_layer >= 0, 1, constant(0.2)),
    )


def without_backout(stream: Stream, scale_1: Any) -> jax.Array:
    """Returns the stream after the last layer, less the multiple of the kept state."""
    if stream.backout_BTD is None:
        return stream.x_BTD
    x_BTD = stream.x_BTD.astype(jnp.float32) - scale_1[0] * stream.backout_BTD
    return x_BTD.astype(stream.x_BTD.dtype)


def num_states(config: ModelConfig) -> int:
    """Returns the number of states [B, T, D] of a `Stream`."""
    return 1 + config.embedding_residual + (config.backout_layer >= 0)


def _linear(first: float, last: float) -> Initializer:
    def init(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        del key
        (num,) = shape
        return jnp.asarray(np.linspace(first, last, num), dtype)

    return init
