"""Rounding of matrices to 8-bit floats in one GPU kernel, for products with delayed scaling.

The kernel reads a matrix once. It writes the codes, their transposed copy and the largest element, and optionally the
sums of the columns, which are the gradient of a bias. cuBLAS multiplies 8-bit floats only along the last axis of both
factors, so a matrix is needed in both orders. XLA reads the matrix again for the largest element if it writes both.

The kernel can also compute the matrices from others element by element, so an activation or its backward pass needs no
kernel of its own.

Results are deterministic: every program writes the largest element and the sums of its own tile, and small reductions
combine them.

Shapes: R rows, C columns, N rows and W columns of a tile, P and Q numbers of tiles along both axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.model.fp8.products import SCALE, Fp8Codes
from maxlm.parallel.partitioning import Axes, Partitioning

# Rows and columns of a tile. A row of a tile and a column of its transposed copy fill lines of the cache.
TILE = (128, 64)
# Threads of a program in warps.
WARPS = 8
MATRIX_AXES: Axes = ('batch', 'activation')
TRANSPOSED_AXES: Axes = MATRIX_AXES[::-1]


class RoundedMatrix(NamedTuple):
    """A matrix in 8-bit floats.

    Attributes:
        codes: the matrix, [R, C].
        transposed: the transposed matrix, [C, R].
        largest: largest absolute element before rounding, float32; NaN if an element is NaN.
        sums: sums of the columns before rounding, float32 [C]; None if they are not requested.
    """

    codes: Fp8Codes
    transposed: Fp8Codes
    largest: jax.Array
    sums: jax.Array | None


class Fp8Rounding(NamedTuple):
    """Properties of a matrix that the kernel rounds.

    Attributes:
        kind: E4M3 or E5M2.
        has_sums: True also returns the sums of the columns.
    """

    kind: Any
    has_sums: bool = False


def identity(x: jax.Array) -> tuple[jax.Array]:
    """Returns its argument as the only matrix, for `round_matrices`."""
    return (x,)


def round_matrices(
    inputs: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    roundings: Sequence[Fp8Rounding],
    partitioning: Partitioning,
    function: Callable[..., tuple[jax.Array, ...]] = identity,
) -> list[RoundedMatrix]:
    """Computes matrices element by element and rounds them as `maxlm.model.fp8.products.quantize` does.

    Args:
        inputs: matrices [R, C] in bfloat16, sharded along the rows only.
        scales: power of two of each result.
        roundings: properties of each result.
        partitioning: partitioning of the model; each device rounds its own rows. On a CPU, the kernel is interpreted,
            which is slow.
        function: function of the elements of the inputs in float32. Its results are rounded to the dtype of the inputs
            first, as XLA rounds an array that it stores.
    """
    outputs: dict[str, Axes] = {}
    for number, rounding in enumerate(roundings):
        outputs |= {f'codes{number}': MATRIX_AXES, f'transposed{number}': TRANSPOSED_AXES}
        outputs[f'largest{number}'] = MATRIX_AXES
        if rounding.has_sums:
            outputs[f'sums{number}'] = MATRIX_AXES
    arrays = {f'input{number}': x for number, x in enumerate(inputs)}
    arrays |= {f'scale{number}': scale.reshape(1) for number, scale in enumerate(scales)}
    run = partial(
        _run, function=function, roundings=tuple(roundings), names=tuple(outputs), platform=partitioning.platform
    )
    if partitioning.num_shards('batch') > 1:
        in_axes = {name: MATRIX_AXES if x.ndim == 2 else ('norm',) for name, x in arrays.items()}
        found = partitioning.per_shard(run, [in_axes], outputs)(arrays)
    else:
        found = run(arrays)
    return [_result(found, number, scale) for number, scale in enumerate(scales)]


def _result(found: dict[str, jax.Array], number: int, scale: jax.Array) -> RoundedMatrix:
    def codes(name: str) -> Fp8Codes:
        return Fp8Codes(jax.lax.bitcast_convert_type(found[f'{name}{number}'], jnp.uint8), scale)

    largest = jax.ad_checkpoint.checkpoint_name(jnp.max(found[f'largest{number}']), SCALE)
    sums = found.get(f'sums{number}')
    return RoundedMatrix(codes('codes'), codes('transposed'), largest, None if sums is None else sums.sum(0))


def _run(
    arrays: dict[str, jax.Array],
    *,
    function: Callable[..., tuple[jax.Array, ...]],
    roundings: tuple[Fp8Rounding, ...],
    names: tuple[str, ...],
    platform: str,
) -> dict[str, jax.Array]:
    # Imported here, because the import takes half a second.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    R, C = arrays['input0'].shape
    P, Q = (-(-size // tile) for size, tile in zip((R, C), TILE, strict=True))
    types = {}
    for number, rounding in enumerate(roundings):
        types[f'codes{number}'] = jax.ShapeDtypeStruct((R, C), rounding.kind)
        types[f'transposed{number}'] = jax.ShapeDtypeStruct((C, R), rounding.kind)
        types[f'largest{number}'] = jax.ShapeDtypeStruct((P, Q), jnp.float32)
        types[f'sums{number}'] = jax.ShapeDtypeStruct((P, C), jnp.float32)
    call = pl.pallas_call(
        partial(_kernel, function=function, roundings=roundings, dtype=arrays['input0'].dtype),
        out_shape={name: types[name] for name in names},
        grid=(P, Q),
        compiler_params=triton.CompilerParams(num_warps=WARPS),
        interpret=platform == 'cpu',
        name='round_matrices',
    )
    with jax.named_scope('fp8'):
        found: dict[str, jax.Array] = call(arrays)
    return found


def _kernel(
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    *,
    function: Callable[..., tuple[jax.Array, ...]],
    roundings: tuple[Fp8Rounding, ...],
    dtype: Any,
) -> None:
    """Computes and rounds one tile of each result."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (N, W), (R, C) = TILE, inputs['input0'].shape
    p, q = pl.program_id(0), pl.program_id(1)
    row_N, column_W = p * N + jnp.arange(N), q * W + jnp.arange(W)
    is_column_W = column_W < C if C % W else None
    is_valid_NW = None
    if R % N or C % W:
        is_valid_NW = (row_N < R)[:, None] & (column_W < C)[None]

    def load(ref: Any) -> jax.Array:
        tile = ref.at[row_N[:, None], column_W[None]]
        return triton.load(tile, mask=is_valid_NW, other=None if is_valid_NW is None else 0).astype(jnp.float32)

    tiles = [load(ref) for name, ref in inputs.items() if name.startswith('input')]
    for number, (x_NW, rounding) in enumerate(zip(function(*tiles), roundings, strict=True)):
        x_NW = x_NW.astype(dtype).astype(jnp.float32)
        if is_valid_NW is not None:
            x_NW = jnp.where(is_valid_NW, x_NW, 0.0)
        # Bits of floats without sign have the order of the floats, with NaN last. Triton's maximum ignores NaN.
        bits_NW = jax.lax.bitcast_convert_type(jnp.abs(x_NW), jnp.int32)
        largest = jax.lax.bitcast_convert_type(jnp.max(bits_NW), jnp.float32)
        outputs[f'largest{number}'][p, q] = largest
        if rounding.has_sums:
            triton.store(outputs[f'sums{number}'].at[p, column_W], x_NW.sum(0), mask=is_column_W)
        top = float(jnp.finfo(rounding.kind).max)
        scaled_NW = x_NW * (1 / inputs[f'scale{number}'][0])
        scaled_NW = jnp.where(scaled_NW == scaled_NW, jnp.clip(scaled_NW, -top, top), scaled_NW)
        codes_NW = scaled_NW.astype(rounding.kind)
        triton.store(outputs[f'codes{number}'].at[row_N[:, None], column_W[None]], codes_NW, mask=is_valid_NW)
        triton.store(outputs[f'transposed{number}'].at[column_W[None], row_N[:, None]], codes_NW, mask=is_valid_NW)
