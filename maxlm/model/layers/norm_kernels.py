"""Addition of a branch to the residual stream and normalization in one GPU kernel, and its backward pass in another.

The kernels are written in Pallas and compiled by Triton. Each reads and writes every array once. XLA needs two kernels
for a normalization, both of which read the stream. It also copies the stream before an in-place product adds to it,
because the backward pass needs the old values.

Results are deterministic: every program of the backward kernel sums the gradients of its own rows, and one reduction
adds the sums of all programs.

Shapes: R rows, D normalized axis, W width of a tile (D rounded up to a power of two), N rows of a tile, P programs of
the backward kernel, M parameters (scale, bias, and bias of the branch).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.parallel.partitioning import Axes, Partitioning

# Elements of a tile of narrow rows, and elements per thread. A tile contains at least one row.
TILE, PER_THREAD = 2048, 16
THREADS_PER_WARP = 32
# Programs of the backward kernel: about four per multiprocessor of an H100. Each sums at least this number of tiles, so
# that the sums of all programs are small compared with the rows.
MAX_PROGRAMS, TILES_PER_PROGRAM = 512, 16
STREAM_AXES: Axes = ('batch', 'length', 'activation')
ROW_AXES, VECTOR_AXES = STREAM_AXES[:2], ('norm',)
# Axes of the sums of all devices and programs, [1, 1, P, M, D] on each device.
SUMS_AXES = (*ROW_AXES, 'activation', 'activation', 'activation')


class FusedNorm(NamedTuple):
    """Static properties of a fused addition and normalization.

    Attributes:
        is_centered: True subtracts the mean (LayerNorm).
        epsilon: constant added to the mean square.
        returns_sum: True returns the new stream, whose gradient the backward kernel adds.
        partitioning: partitioning of the model; each device processes its own rows. On a CPU, the kernels are
            interpreted, which is slow.
    """

    is_centered: bool
    epsilon: float
    returns_sum: bool
    partitioning: Partitioning


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def add_and_normalize(
    stream_RD: jax.Array,
    branch_RD: jax.Array | None,
    scale_D: jax.Array | None,
    bias_D: jax.Array | None,
    branch_bias_D: jax.Array | None,
    norm: FusedNorm,
) -> tuple[jax.Array | None, jax.Array]:
    """Returns the stream plus the branch, and the normalized sum, as `maxlm.model.layers.norm.normalize` computes it.

    Args:
        stream_RD: residual stream with any number of leading axes; [B, T, D] if it is sharded.
        branch_RD: output of the branch, in the dtype of the stream; None means 0.
        scale_D: factors, float32; None means 1.
        bias_D: summands, float32; None means 0.
        branch_bias_D: bias that the branch contains already, without a gradient: only receives its gradient, the sum of
            the branch's over the rows. None: there is no such bias.
        norm: properties of the normalization. Without `returns_sum`, the first result is None.
    """
    return _forward(stream_RD, branch_RD, scale_D, bias_D, branch_bias_D, norm)[0]


def _forward(
    stream_RD: jax.Array,
    branch_RD: jax.Array | None,
    scale_D: jax.Array | None,
    bias_D: jax.Array | None,
    branch_bias_D: jax.Array | None,
    norm: FusedNorm,
) -> tuple[tuple[jax.Array | None, jax.Array], Any]:
    inputs = _present(stream=stream_RD, branch=branch_RD, scale=scale_D, bias=bias_D)
    outputs: dict[str, Axes] = {'normed': STREAM_AXES, 'inverse': ROW_AXES}
    if norm.is_centered:
        outputs['mean'] = ROW_AXES
    if branch_RD is not None:
        outputs['sum'] = STREAM_AXES
    found = _per_device(_run_forward, inputs, outputs, norm)
    sum_RD = found.get('sum', stream_RD)
    kept = _present(stream=sum_RD, inverse=found['inverse'], mean=found.get('mean'), scale=scale_D, bias=bias_D)
    # Residuals must be arrays, so an empty tuple stands for the branch and for its bias.
    of_branch = tuple(None if array is None else () for array in (branch_RD, branch_bias_D))
    return (sum_RD if norm.returns_sum else None, found['normed']), (kept, *of_branch)


def _backward(norm: FusedNorm, residuals: Any, gradients: tuple[jax.Array | None, jax.Array]) -> tuple[Any, ...]:
    kept, branch, branch_bias = residuals
    of_sum_RD, of_normed_RD = gradients
    names = [name for name in ('scale', 'bias') if name in kept]
    names += [] if branch_bias is None else ['branch_bias']
    inputs = {name: array for name, array in kept.items() if name != 'bias'}
    inputs |= _present(of_normed=of_normed_RD, of_sum=of_sum_RD)
    outputs: dict[str, Axes] = {'of_stream': STREAM_AXES}
    if names:
        outputs['sums'] = SUMS_AXES
    found = _per_device(partial(_run_backward, names=tuple(names)), inputs, outputs, norm)
    of_parameters = dict(zip(names, found['sums'].sum((0, 1, 2)), strict=True)) if names else {}
    of_stream_RD = found['of_stream']
    of_branch_RD = None if branch is None else of_stream_RD
    return of_stream_RD, of_branch_RD, *(of_parameters.get(name) for name in ('scale', 'bias', 'branch_bias'))


add_and_normalize.defvjp(_forward, _backward)


def _present(**arrays: jax.Array | None) -> dict[str, jax.Array]:
    return {name: array for name, array in arrays.items() if array is not None}


def _per_device(
    run: Any, inputs: dict[str, jax.Array], outputs: dict[str, Axes], norm: FusedNorm
) -> dict[str, jax.Array]:
    """Runs `run(inputs, outputs, norm)` on the rows of each device, because XLA cannot partition a kernel.

    The backward pass does the same. Through `per_shard`, JAX would add the gradients of devices with equal rows.
    """
    on_device = partial(run, outputs=tuple(outputs), norm=norm)
    partitioning = norm.partitioning
    if any(partitioning.num_shards(axis) > 1 for axis in (*ROW_AXES, 'heads')):
        in_axes = {name: _axes_of(name) for name in inputs}
        return partitioning.per_shard(on_device, [in_axes], outputs)(inputs)
    return on_device(inputs)


def _axes_of(name: str) -> Axes:
    return {'scale': VECTOR_AXES, 'bias': VECTOR_AXES, 'mean': ROW_AXES, 'inverse': ROW_AXES}.get(name, STREAM_AXES)


class _Shape(NamedTuple):
    """Sizes of a kernel: rows R, columns D, rows N and columns W of a tile, and threads of a program in warps."""

    R: int
    D: int
    N: int
    W: int
    warps: int

    @property
    def num_tiles(self) -> int:
        return -(-self.R // self.N)


def _shape(x_RD: jax.Array) -> _Shape:
    D = x_RD.shape[-1]
    W = 1 << (D - 1).bit_length()
    N = max(1, TILE // W)
    return _Shape(x_RD.size // D, D, N, W, N * W // PER_THREAD // THREADS_PER_WARP)


def _run_forward(inputs: dict[str, jax.Array], outputs: tuple[str, ...], norm: FusedNorm) -> dict[str, jax.Array]:
    stream_RD = inputs['stream']
    shape = _shape(stream_RD)
    rows = jax.ShapeDtypeStruct((shape.R,), jnp.float32)
    types = {name: rows if name in ('mean', 'inverse') else _rows_of(stream_RD, shape) for name in outputs}
    kernel = partial(_forward_kernel, shape=shape, is_centered=norm.is_centered, epsilon=norm.epsilon)
    found = _call(kernel, 'add_and_normalize', inputs, types, shape, shape.num_tiles, norm)
    return {name: x.reshape(stream_RD.shape[: -1 if x.ndim == 1 else None]) for name, x in found.items()}


def _run_backward(
    inputs: dict[str, jax.Array], outputs: tuple[str, ...], norm: FusedNorm, names: tuple[str, ...]
) -> dict[str, jax.Array]:
    stream_RD = inputs['stream']
    shape = _shape(stream_RD)
    programs = max(1, min(MAX_PROGRAMS, shape.num_tiles // TILES_PER_PROGRAM))
    types = {
        'of_stream': _rows_of(stream_RD, shape),
        'sums': jax.ShapeDtypeStruct((programs, len(names), shape.D), jnp.float32),
    }
    kernel = partial(_backward_kernel, shape=shape, programs=programs, names=names, is_centered=norm.is_centered)
    types = {name: types[name] for name in outputs}
    found = _call(kernel, 'add_and_normalize_backward', inputs, types, shape, programs, norm)
    shapes = {'of_stream': stream_RD.shape, 'sums': (1, 1, *types['sums'].shape) if names else ()}
    return {name: x.reshape(shapes[name]) for name, x in found.items()}


def _rows_of(x_RD: jax.Array, shape: _Shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shape.R, shape.D), x_RD.dtype)


def _call(
    kernel: Any,
    name: str,
    inputs: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    shape: _Shape,
    programs: int,
    norm: FusedNorm,
) -> dict[str, jax.Array]:
    # Imported here, because the import takes half a second.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def flat(name: str, x: jax.Array) -> jax.Array:
        return x.reshape({STREAM_AXES: (shape.R, shape.D), ROW_AXES: (shape.R,)}.get(_axes_of(name), x.shape))

    call = pl.pallas_call(
        kernel,
        out_shape=outputs,
        grid=(programs,),
        compiler_params=triton.CompilerParams(num_warps=shape.warps),
        interpret=norm.partitioning.platform == 'cpu',
        name=name,
    )
    found: dict[str, jax.Array] = call({key: flat(key, x) for key, x in inputs.items()})
    return found


class _Tile:
    """Rows and columns of a tile, and the accesses to it. Rows and columns beyond the array are 0."""

    def __init__(self, index: Any, shape: _Shape, *, is_inside: bool):
        """Creates the tile with this index; `is_inside` is True if all its rows are in the array."""
        self.row_N = index * shape.N + jnp.arange(shape.N)
        self.column_W = jnp.arange(shape.W)
        self.is_row_N = None if is_inside else self.row_N < shape.R
        self.is_column_W = None if shape.W == shape.D else self.column_W < shape.D
        masks = (self.is_row_N, self.is_column_W)
        rows, columns = (mask if mask is None else jnp.expand_dims(mask, 1 - axis) for axis, mask in enumerate(masks))
        is_valid = rows if columns is None else columns if rows is None else rows & columns
        self.is_valid_NW = None if is_valid is None else jnp.broadcast_to(is_valid, (shape.N, shape.W))

    def load(self, ref: Any) -> jax.Array:
        return _load(ref.at[self.row_N[:, None], self.column_W[None, :]], self.is_valid_NW)

    def load_rows(self, ref: Any) -> jax.Array:
        return _load(ref.at[self.row_N], self.is_row_N)[:, None]

    def load_columns(self, ref: Any) -> jax.Array:
        return _load(ref.at[self.column_W], self.is_column_W)[None, :]

    def store(self, ref: Any, x_NW: jax.Array) -> None:
        _store(ref.at[self.row_N[:, None], self.column_W[None, :]], x_NW, self.is_valid_NW)

    def store_rows(self, ref: Any, x_N1: jax.Array) -> None:
        _store(ref.at[self.row_N], x_N1[:, 0], self.is_row_N)


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    from jax.experimental.pallas import triton

    return triton.load(ref, mask=mask, other=None if mask is None else 0).astype(jnp.float32)


def _store(ref: Any, x: jax.Array, mask: jax.Array | None) -> None:
    from jax.experimental.pallas import triton

    triton.store(ref, x.astype(ref.dtype), mask=mask)


def _forward_kernel(
    inputs: dict[str, Any], outputs: dict[str, Any], *, shape: _Shape, is_centered: bool, epsilon: float
) -> None:
    """Adds and normalizes one tile."""
    from jax.experimental import pallas as pl

    tile = _Tile(pl.program_id(0), shape, is_inside=shape.R % shape.N == 0)
    x_NW = tile.load(inputs['stream'])
    if 'branch' in inputs:
        # The statistics are those of the rounded sum, which the backward pass reads.
        x_NW = (x_NW + tile.load(inputs['branch'])).astype(outputs['sum'].dtype).astype(jnp.float32)
        tile.store(outputs['sum'], x_NW)
    if is_centered:
        mean_N1 = _mean(x_NW, shape)
        tile.store_rows(outputs['mean'], mean_N1)
        x_NW = x_NW - mean_N1
        if tile.is_valid_NW is not None:
            x_NW = jnp.where(tile.is_valid_NW, x_NW, 0.0)
    inverse_N1 = jax.lax.rsqrt(_mean(x_NW * x_NW, shape) + epsilon)
    tile.store_rows(outputs['inverse'], inverse_N1)
    y_NW = x_NW * inverse_N1
    if 'scale' in inputs:
        y_NW = y_NW * tile.load_columns(inputs['scale'])
    if 'bias' in inputs:
        y_NW = y_NW + tile.load_columns(inputs['bias'])
    tile.store(outputs['normed'], y_NW)


def _backward_kernel(
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    *,
    shape: _Shape,
    programs: int,
    names: tuple[str, ...],
    is_centered: bool,
) -> None:
    """Computes the gradient of the stream for every P-th tile, and the sums over these tiles for the parameters."""
    from jax.experimental import pallas as pl

    program = pl.program_id(0)
    tiles = -(-shape.num_tiles // programs)
    is_inside = tiles * programs * shape.N == shape.R
    scale_1W = _Tile(0, shape, is_inside=True).load_columns(inputs['scale']) if 'scale' in inputs else None

    def add_tile(number: Any, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        tile = _Tile(program + number * programs, shape, is_inside=is_inside)
        g_NW, normed_NW = tile.load(inputs['of_normed']), tile.load(inputs['stream'])
        inverse_N1 = tile.load_rows(inputs['inverse'])
        if is_centered:
            normed_NW = normed_NW - tile.load_rows(inputs['mean'])
        normed_NW = normed_NW * inverse_N1
        # In columns beyond the array, the gradient is 0.
        of_parameters = {'scale': g_NW * normed_NW, 'bias': g_NW}
        if scale_1W is not None:
            g_NW = g_NW * scale_1W
        of_x_NW = g_NW - normed_NW * _mean(g_NW * normed_NW, shape)
        if is_centered:
            of_x_NW = of_x_NW - _mean(g_NW, shape)
        of_x_NW = of_x_NW * inverse_N1
        if 'of_sum' in inputs:
            of_x_NW = of_x_NW + tile.load(inputs['of_sum'])
        tile.store(outputs['of_stream'], of_x_NW)
        of_parameters['branch_bias'] = of_x_NW
        return {name: total_NW + of_parameters[name] for name, total_NW in sums.items()}

    zeros = {name: jnp.zeros((shape.N, shape.W), jnp.float32) for name in names}
    sums = jax.lax.fori_loop(0, tiles, add_tile, zeros)
    columns = _Tile(0, shape, is_inside=True)
    for index, name in enumerate(names):
        _store(outputs['sums'].at[program, index, columns.column_W], sums[name].sum(0), columns.is_column_W)


def _mean(x_NW: jax.Array, shape: _Shape) -> jax.Array:
    """Returns the mean of each row, whose columns beyond the array are 0."""
    return x_NW.sum(1)[:, None] / shape.D
