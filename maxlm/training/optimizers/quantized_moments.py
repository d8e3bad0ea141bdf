"""Storage of optimizer moments: float32, bfloat16, or 8 bits with one scale per block of the last axis.

The 8-bit format follows Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization". Codes are formulas
instead of a table, so they fuse into the update. With y = |x| / (largest |x| of the block):

    signed    sign · (q / 127)²     q = 0 … 127    steps of 1.6 % at the top, 5 % at y = 0.1
    positive  ((q + 4) / 259)⁴      q = 0 … 255    same steps for its root; never 0, because Adam divides by the root

Rounding is stochastic. With rounding to nearest, a moment whose change is below half a step would never change; with
beta2 = 0.999 the second moment could only grow. With stochastic rounding its mean is correct for every beta.

Stored values depend on the values, shapes and number of the update, but not on the mesh. A checkpoint therefore fits
every layout. A layer-by-layer update (`mesh.host_offload`) makes the same random choices in each layer; the means are
still correct.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxlm.parallel.layout import Layout

# Smaller arrays remain in float32, because their memory is negligible.
MIN_SIZE = 4096
# Largest number of elements in a block. Smaller blocks need more scales; in larger blocks an outlier affects more
# elements.
BLOCK = 256
# Smallest block size that is accepted to make the number of blocks divide over the mesh.
MIN_BLOCK = 96
# Number of devices over which the number of blocks preferably divides: the devices of one node.
PARTS = 8
# Blocks whose largest element is smaller are stored as zeros, because 1 / scale would exceed the float32 range. The
# root of such a second moment is 2⁻⁵⁰, which is negligible beside epsilon.
TINY = 2.0**-100
# Number of elements from which a stack is updated layer by layer.
STREAMED = 2**22
SIGNED_LEVELS = 127
POSITIVE_LEVELS = 255
# Offset of the positive code, which gives the value of q = 0. Its root, 2⁻¹² of the largest, is above the smallest step
# of the signed code, 2⁻¹⁴. The rounding error of a first moment is thus never divided by a much smaller root.
FIRST = 4


class Blocks(NamedTuple):
    """An array in 8 bits.

    Attributes:
        codes: int8 (signed) or uint8 (positive) array of the parameter's shape.
        scales: float32 scales of the blocks of the last axis, [..., num_blocks].
    """

    codes: jax.Array
    scales: jax.Array


Moment = jax.Array | Blocks  # the array is float32 or bfloat16


def init_moment(param: jax.Array, stored: str, *, signed: bool) -> Moment:
    """Returns a zero moment of a parameter.

    Args:
        param: the parameter, or its shape and dtype.
        stored: `optimizer.moment_dtype`.
        signed: True if the moment can be negative.
    """
    if stored == 'float32' or param.size < MIN_SIZE:
        return jnp.zeros(param.shape, jnp.float32)
    if stored == 'bfloat16':
        return jnp.zeros(param.shape, jnp.bfloat16)
    assert stored == 'int8', stored
    codes = jnp.zeros(param.shape, jnp.int8 if signed else jnp.uint8)
    return Blocks(codes, jnp.zeros((*param.shape[:-1], num_blocks(param.shape[-1])), jnp.float32))


def load_moment(moment: Moment) -> jax.Array:
    """Returns the values of a moment in float32."""
    if not isinstance(moment, Blocks):
        return moment.astype(jnp.float32)
    codes = _in_blocks(moment.codes, moment.scales.shape[-1])
    values = _decode(codes) * moment.scales[..., None]
    return values.reshape(*codes.shape[:-2], -1)[..., : moment.codes.shape[-1]]


def store_moment(values: jax.Array, like: Moment, noise: jax.Array) -> Moment:
    """Returns values in the storage format of `like`, stochastically rounded to one of their two neighbors.

    The mean of the rounded values is the value itself. In 8 bits the error is at most one step. With scale s, that is
    (2 √(|x| / s) / 127 + 127⁻²) s for a signed value. For a positive value it is ((1 + 1/k)⁴ - 1) x with
    k = ⌊259 (x / s)^¼⌋. A positive value below 5.7e-8 s is raised to that minimum. If s < 2⁻¹⁰⁰, zeros are stored.

    Args:
        values: float32 values.
        like: the previous moment, which determines the format.
        noise: uint32 array whose lower 16 bits are random.
    """
    noise = noise & 0xFFFF
    if isinstance(like, Blocks):
        number = like.scales.shape[-1]
        blocks = _in_blocks(values, number)
        scales = jnp.abs(blocks).max(axis=-1)
        scales = jnp.where(scales < TINY, 0, scales)
        ratios = blocks / jnp.where(scales == 0, jnp.inf, scales)[..., None]
        encode = _encode_signed if like.codes.dtype == jnp.int8 else _encode_positive
        codes = encode(ratios, _in_blocks(noise, number).astype(jnp.float32) * 2.0**-16)
        return Blocks(codes.reshape(*codes.shape[:-2], -1)[..., : like.codes.shape[-1]], scales)
    if like.dtype == jnp.float32:
        return values
    # A bfloat16 is the upper half of a float32. The probability of a carry is proportional to the lower half.
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + noise
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def update_moments(
    function: Callable[..., tuple[jax.Array, ...]],
    grad: jax.Array,
    moments: Sequence[Moment],
    *,
    seed: jax.Array,
    axes: tuple[str, ...],
    layout: Layout,
) -> tuple[Any, ...]:
    """Returns the direction of one parameter and its new moments in their storage format.

    Large stacks of 8-bit moments are updated layer by layer. A scale needs all elements of a block before the first
    code. XLA would otherwise hold float32 moments of the entire stack, often of all stacks at the same time.

    Args:
        function: (gradient, moments in float32) → (direction, moments in float32), elementwise.
        grad: gradient of the parameter or of one of its layers.
        moments: at most two moments.
        seed: seed of the stochastic rounding, see `rounding_seed`.
        axes: logical axes of the parameter.
        layout: layout of the parameter.
    """

    def update(rows: jax.Array, grad: jax.Array, *moments: Moment) -> tuple[Any, ...]:
        # Both moments share 32 random bits; each uses 16.
        noise = rounding_noise(seed, rows, grad.shape[1:])
        direction, *values = function(grad, *map(load_moment, moments))
        pairs = enumerate(zip(values, moments, strict=True))
        return direction, *(store_moment(x, moment, noise >> 16 * n) for n, (x, moment) in pairs)

    num, stages = grad.shape[0], layout.num_shards('layers')
    is_stack = axes[0] == 'layers' and len(axes) == grad.ndim and num % stages == 0
    if not is_stack or grad.size < STREAMED or not any(isinstance(moment, Blocks) for moment in moments):
        return update(jnp.arange(num), grad, *moments)
    # Each iteration updates one layer of every pipeline stage, so no layer moves to another device.
    layers = num // stages
    before = jax.tree.map(lambda x: x.reshape(stages, layers, *x.shape[1:]), (grad, *moments))

    def update_layer(layer: jax.Array, after: Any) -> Any:
        now = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, axis=1, keepdims=False), before)
        new = update(jnp.arange(stages) * layers + layer, *now)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, layer, axis=1), after, new)

    # The results go to separate arrays. With in-place updates, XLA on a CPU would copy all layers in every iteration.
    after = jax.lax.fori_loop(0, layers, update_layer, jax.tree.map(jnp.zeros_like, before))
    results: tuple[Any, ...] = jax.tree.map(lambda x: x.reshape(num, *x.shape[2:]), after)
    return results


def rounding_seed(num_updates: jax.Array, index: int) -> jax.Array:
    """Returns 32 random bits, the rounding seed of array number `index` in an update."""
    # Threefry is named explicitly, because the default implementation is configurable.
    key = jax.random.fold_in(jax.random.key(0, impl='threefry2x32'), num_updates)
    return jax.random.bits(jax.random.fold_in(key, index), (), jnp.uint32)


def rounding_noise(seed: jax.Array, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns 32 random bits for each element of rows [number] of an array [all, *shape], equal on every mesh.

    The bits are a hash of the element's index ("lowbias32", https://github.com/skeeto/hash-prospector), which fuses
    into the update. Bits of `jax.random` would be stored in memory, 12 bytes per element on a CPU.
    """
    position = jnp.broadcast_to(rows.astype(jnp.uint32).reshape(-1, *[1] * len(shape)), (len(rows), *shape))
    for axis, size in enumerate(shape, start=1):
        # Positions beyond 2³² wrap around, which only repeats noise.
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, position.shape, axis)
    x: jax.Array = position ^ seed
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def place_moment(moment: Moment, sharding: NamedSharding) -> Moment:
    """Returns the shapes, dtypes and shardings of a moment.

    Codes are sharded like the parameter's moments. Scales are too, if their number divides over the mesh axes of the
    last axis. Otherwise these mesh axes shard the first unsharded axis of the scales that divides over them, or none.

    Args:
        moment: the moment, or its shapes and dtypes.
        sharding: sharding of the parameter's moments.
    """

    def place(x: Any, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    if not isinstance(moment, Blocks):
        placed: Moment = place(moment, sharding)
        return placed
    shape = moment.scales.shape
    return Blocks(place(moment.codes, sharding), place(moment.scales, _scale_sharding(shape, sharding)))


def num_blocks(size: int) -> int:
    """Returns the number of blocks of an axis, which depends only on its size.

    If possible, blocks are equal, have 96 to 256 elements, and their number is a multiple of 8, 4, 2 or 1, in this
    order. Otherwise the number is the smallest possible, and the last block may be shorter.
    """
    for parts in (PARTS, PARTS // 2, PARTS // 4, 1):
        fewest = parts * math.ceil(size / (BLOCK * parts))
        for number in range(fewest, size // MIN_BLOCK + 1, parts):
            if size % number == 0:
                return number
    return math.ceil(size / BLOCK)


def _in_blocks(x: jax.Array, number: int) -> jax.Array:
    """Reshapes [..., size] to [..., number, block], padded with zeros."""
    size = x.shape[-1]
    block = math.ceil(size / number)
    if number * block != size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, number * block - size)])
    return x.reshape(*x.shape[:-1], number, block)


def _decode(codes: jax.Array) -> jax.Array:
    q = codes.astype(jnp.float32)
    if codes.dtype == jnp.int8:
        return jnp.abs(q) * q * (1 / SIGNED_LEVELS**2)
    return (q + FIRST) ** 4 * (1 / (POSITIVE_LEVELS + FIRST) ** 4)


def _encode_signed(ratios: jax.Array, noise: jax.Array) -> jax.Array:
    y = jnp.abs(ratios)
    low = jnp.floor(jnp.sqrt(y) * SIGNED_LEVELS)
    # Relative position between low² and (low + 1)². If rounding has made `low` one too large, `fraction` is negative
    # and the result is `low`, which is correct.
    fraction = (y * SIGNED_LEVELS**2 - low**2) / (2 * low + 1)
    q = jnp.minimum(low + (noise < fraction), SIGNED_LEVELS)
    return (jnp.sign(ratios) * q).astype(jnp.int8)


def _encode_positive(ratios: jax.Array, noise: jax.Array) -> jax.Array:
    top = POSITIVE_LEVELS + FIRST
    low = jnp.floor(jnp.sqrt(jnp.sqrt(ratios)) * top)
    fraction = (ratios * float(top**4) - low**4) / ((low + 1) ** 4 - low**4)
    return jnp.clip(low + (noise < fraction) - FIRST, 0, POSITIVE_LEVELS).astype(jnp.uint8)


def _scale_sharding(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    spec: list[Any] = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]

    def parts(names: Any) -> int:
        each = () if names is None else (names,) if isinstance(names, str) else names
        return math.prod(sharding.mesh.shape[name] for name in each)

    last = spec[-1]
    if shape[-1] % parts(last):
        spec[-1] = None
        whole = [axis for axis, size in enumerate(shape) if parts(spec[axis]) == 1 and size % parts(last) == 0]
        if whole:
            spec[whole[0]] = last
    return sharding.update(spec=PartitionSpec(*spec))
