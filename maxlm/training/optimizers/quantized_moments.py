"""How an optimizer's moments are stored: float32, bfloat16, or 8 bits with a scale per block of the last axis.

8 bits: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", with codes that are formulas instead of a
table, so that they fuse into the update. For y = |x| / (the largest |x| of the block):

    signed    sign · (q / 127)²     q = 0 … 127    steps of 1.6 % at the top, 5 % at y = 0.1
    positive  ((q + 4) / 259)⁴      q = 0 … 255    the same for its root; never 0, since one divides by that

Rounding is stochastic. To the nearest, a moment whose change is below half a step never changes: with beta2 = 0.999 the
second moment could only grow. With a random choice between the two neighbours its mean is right at any beta.

What is stored depends on values, shapes and the update's number, not on the mesh: a checkpoint fits every layout. An
update of one layer after the other (`mesh.host_offload`) makes the same random choices in each; their means are right
too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxlm.parallel.layout import Layout

# Smaller arrays stay in float32: they take no memory.
MIN_SIZE = 4096
# Elements of the largest block. Smaller ones cost more scales, larger ones share an outlier among more elements.
BLOCK = 256
# A smaller block than this is not worth being cut along the mesh.
MIN_BLOCK = 96
# Devices that the number of blocks divides over where it can: those of a node.
PARTS = 8
# Blocks whose largest element is smaller are stored as zeros: 1 / scale would leave float32. The root of a second
# moment of that size is 2⁻⁵⁰, nothing beside any epsilon.
TINY = 2.0**-100
# Elements from which on a stack is updated layer by layer.
STREAMED = 2**22
SIGNED_LEVELS = 127
POSITIVE_LEVELS = 255
# Of the positive code: what q = 0 stands for. Its root, 2⁻¹² of the largest, is above the last step of the signed code,
# 2⁻¹⁴: what rounding adds to a first moment is never divided by a much smaller root.
FIRST = 4


class Blocks(NamedTuple):
    """An array in 8 bits."""

    # int8 (signed) or uint8 (positive), of the parameter's shape.
    codes: jax.Array
    # float32, with the last axis divided into blocks: [..., num_blocks].
    scales: jax.Array


Moment = Any  # a float32 or bfloat16 array, or Blocks


def init_moment(param: jax.Array, stored: str, *, signed: bool) -> Moment:
    """Zeros for a parameter.

    Args:
        param: the parameter, or its shape and type.
        stored: `optimizer.moment_dtype`.
        signed: whether the moment has negative values.
    """
    if stored == 'float32' or param.size < MIN_SIZE:
        return jnp.zeros(param.shape, jnp.float32)
    if stored == 'bfloat16':
        return jnp.zeros(param.shape, jnp.bfloat16)
    assert stored == 'int8', stored
    codes = jnp.zeros(param.shape, jnp.int8 if signed else jnp.uint8)
    return Blocks(codes, jnp.zeros((*param.shape[:-1], num_blocks(param.shape[-1])), jnp.float32))


def load_moment(moment: Moment) -> jax.Array:
    """The values in float32."""
    if not isinstance(moment, Blocks):
        return moment.astype(jnp.float32)
    codes = _in_blocks(moment.codes, moment.scales.shape[-1])
    values = _decode(codes) * moment.scales[..., None]
    return values.reshape(*codes.shape[:-2], -1)[..., : moment.codes.shape[-1]]


def store_moment(values: jax.Array, like: Moment, noise: jax.Array) -> Moment:
    """Values as `like` is stored, rounded to one of their two neighbours, in the mean to themselves.

    Of 8 bits the error is at most one step: with scale s, (2 √(|x| / s) / 127 + 127⁻²) s of a signed value, and of a
    positive one ((1 + 1/k)⁴ - 1) x with k = ⌊259 (x / s)^¼⌋. A positive one below its floor of 5.7e-8 s is raised to
    that. Where s < 2⁻¹⁰⁰ zeros are stored.

    Args:
        values: float32.
        like: the moment before.
        noise: uint32, of which the lower 16 bits are random.
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
    # A bfloat16 is the upper half of a float32. Adding to the lower half carries over as often as it is large.
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
    """The direction of one parameter, and its moments as they were stored.

    A large stack of 8-bit moments is gone through layer by layer: the scales need all of a block before any of its
    codes, and XLA keeps float32 moments of the whole stack, often of all stacks at once, in between.

    Args:
        function: (gradient, moments in float32) → (direction, moments in float32), element by element.
        grad: the gradient of the parameter, or of one layer of it.
        moments: at most two.
        seed: of the rounding, see `rounding_seed`.
        axes: logical axes of the parameter.
        layout: where it lies.
    """

    def update(rows: jax.Array, grad: jax.Array, *moments: Moment) -> tuple[Any, ...]:
        # One draw for both: each takes 16 bits.
        noise = rounding_noise(seed, rows, grad.shape[1:])
        direction, *values = function(grad, *map(load_moment, moments))
        pairs = enumerate(zip(values, moments, strict=True))
        return direction, *(store_moment(x, moment, noise >> 16 * n) for n, (x, moment) in pairs)

    num, stages = grad.shape[0], layout.num_shards('layers')
    is_stack = axes[0] == 'layers' and len(axes) == grad.ndim and num % stages == 0
    if not is_stack or grad.size < STREAMED or not any(isinstance(moment, Blocks) for moment in moments):
        return update(jnp.arange(num), grad, *moments)
    # Of each stage. A round takes a layer of every stage, so that none is moved.
    layers = num // stages
    before = jax.tree.map(lambda x: x.reshape(stages, layers, *x.shape[1:]), (grad, *moments))

    def update_layer(layer: jax.Array, after: Any) -> Any:
        now = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, axis=1, keepdims=False), before)
        new = update(jnp.arange(stages) * layers + layer, *now)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, layer, axis=1), after, new)

    # Into other arrays: of the same ones the CPU's compiler would copy all layers in every round.
    after = jax.lax.fori_loop(0, layers, update_layer, jax.tree.map(jnp.zeros_like, before))
    return jax.tree.map(lambda x: x.reshape(num, *x.shape[2:]), after)


def rounding_seed(num_updates: jax.Array, index: int) -> jax.Array:
    """Of an array in an update: 32 bits."""
    # Threefry by name: the default may be another.
    key = jax.random.fold_in(jax.random.key(0, impl='threefry2x32'), num_updates)
    return jax.random.bits(jax.random.fold_in(key, index), (), jnp.uint32)


def rounding_noise(seed: jax.Array, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """32 random bits for every element of some rows [number] of an array [all, *shape], on every mesh the same.

    A hash of the element's position ("lowbias32", https://github.com/skeeto/hash-prospector), since that fuses into the
    update. The bits of `jax.random` would stand in memory, 12 bytes per element on a CPU.
    """
    position = jnp.broadcast_to(rows.astype(jnp.uint32).reshape(-1, *[1] * len(shape)), (len(rows), *shape))
    for axis, size in enumerate(shape, start=1):
        # Positions beyond 2³² wrap around, which only repeats noise.
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, position.shape, axis)
    x = position ^ seed
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def place_moment(moment: Moment, sharding: NamedSharding) -> Moment:
    """Shapes, types and shardings of a moment, given the shapes and where its parameter's moments shall lie.

    Codes lie as the parameter does, and scales too where their number divides over the last axis' devices. Otherwise
    those devices split the first axis of the scales that is whole and divides over them, or nothing.
    """

    def place(x: Any, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    if not isinstance(moment, Blocks):
        return place(moment, sharding)
    shape = moment.scales.shape
    return Blocks(place(moment.codes, sharding), place(moment.scales, _scale_sharding(shape, sharding)))


def num_blocks(size: int) -> int:
    """Blocks of an axis: equal ones of 96 to 256, a multiple of 8, 4 or 2 of them, if there are such.

    It follows from the size alone. Otherwise they are as few as go, and the last may be shorter.
    """
    for parts in (PARTS, PARTS // 2, PARTS // 4, 1):
        fewest = parts * math.ceil(size / (BLOCK * parts))
        for number in range(fewest, size // MIN_BLOCK + 1, parts):
            if size % number == 0:
                return number
    return math.ceil(size / BLOCK)


def _in_blocks(x: jax.Array, number: int) -> jax.Array:
    """[..., size] → [..., number, block], filled up with zeros."""
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
    # The share of the way from low² to (low + 1)². Should rounding have made `low` one too large, it is below 0, and
    # `low` is right.
    share = (y * SIGNED_LEVELS**2 - low**2) / (2 * low + 1)
    q = jnp.minimum(low + (noise < share), SIGNED_LEVELS)
    return (jnp.sign(ratios) * q).astype(jnp.int8)


def _encode_positive(ratios: jax.Array, noise: jax.Array) -> jax.Array:
    top = POSITIVE_LEVELS + FIRST
    low = jnp.floor(jnp.sqrt(jnp.sqrt(ratios)) * top)
    share = (ratios * float(top**4) - low**4) / ((low + 1) ** 4 - low**4)
    return jnp.clip(low + (noise < share) - FIRST, 0, POSITIVE_LEVELS).astype(jnp.uint8)


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
