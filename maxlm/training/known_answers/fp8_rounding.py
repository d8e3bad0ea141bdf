"""Known answer of the kernel that computes activations and rounds to 8-bit floats.

Shapes: R rows, F width of the feed-forward layer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.families import GATED_ACTIVATIONS
from maxlm.model.fp8.kernel_feed_forward import UNSUPPORTED
from maxlm.model.fp8.products import E4M3, E5M2, Fp8Codes, quantize
from maxlm.model.fp8.rounding_kernel import Fp8Rounding, RoundedMatrix, round_matrices
from maxlm.model.layers.mlp import ACTIVATIONS
from maxlm.parallel.partitioning import SINGLE_DEVICE
from maxlm.training.known_answers.answer import KnownAnswer, floats, normal

# Scales of the activation and of its gradients. Some elements exceed their range.
SCALES = (2.0**-8, 2.0**-15)


def fp8_rounding_answer(model: ModelConfig, rows: int, width: int) -> KnownAnswer:
    """Returns the activation in E4M3 and the gradients of its inputs in E5M2, with their copies, maxima and sums."""
    rng = np.random.default_rng(0)
    count = 2 if model.activation in GATED_ACTIVATIONS else 1
    arrays = [normal(rng, (rows, width), model.dtype) for _ in range(count + 1)]
    name = model.activation
    if name in UNSUPPORTED:
        # In such a run, the kernel only rounds.
        name = 'swiglu' if count == 2 else 'silu'
    activation = ACTIVATIONS[name]
    scales: list[Any] = [np.float32(SCALES[0]), *[np.float32(SCALES[1])] * count]
    roundings = [Fp8Rounding(E4M3), *[Fp8Rounding(E5M2, has_sums=True)] * count]

    def compute(*tiles: jax.Array) -> tuple[jax.Array, ...]:
        *inputs, gradient = tiles
        result, pull = jax.vjp(activation, *inputs)
        return result, *pull(gradient)

    def run(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        matrices = round_matrices(inputs, scales, roundings, SINGLE_DEVICE, compute)
        return tuple(
            array for found, (kind, _) in zip(matrices, roundings, strict=True) for array in _values(found, kind)
        )

    def exact(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        results = []
        for x, scale, (kind, has_sums) in zip(compute(*floats(*inputs)), scales, roundings, strict=True):
            x = x.astype(inputs[0].dtype)
            codes, x = quantize(x, kind, scale), x.astype(jnp.float32)
            matrix = RoundedMatrix(
                codes, codes._replace(bits=codes.bits.T), jnp.abs(x).max(), x.sum(0) if has_sums else None
            )
            results += _values(matrix, kind)
        return tuple(results)

    names = ['activation', 'transposed activation', 'largest activation']
    for number in range(count):
        of = f'of the gradient of input {number + 1}'
        names += [f'codes {of}', f'transposed codes {of}', f'largest element {of}', f'sums {of}']
    kernel = f'{name} in fp8 (model.fp8_kernel=pallas)'
    return KnownAnswer(
        kernel,
        f'{rows:,} × {width:,}',
        run,
        exact,
        tuple(arrays),
        tuple(names),
        model.dtype,
        'set model.fp8_kernel=xla',
    )


def _values(matrix: RoundedMatrix, kind: type) -> list[jax.Array]:
    """Returns the rounded elements of a matrix and of its transposed copy, the largest element, and the sums."""

    def value(codes: Fp8Codes) -> jax.Array:
        return jax.lax.bitcast_convert_type(codes.bits, kind).astype(jnp.float32) * codes.scale

    found = [value(matrix.codes), value(matrix.transposed), matrix.largest]
    return found if matrix.sums is None else [*found, matrix.sums]
