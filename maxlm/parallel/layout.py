"""Where arrays lie: the device mesh, and the one table from logical axes to mesh axes.

The layout of a run follows from `mesh.*` and this table; the model names its axes and knows no mesh.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxlm.config.mesh import padded_vocabulary
from maxlm.config.schema import MESH_AXES, MeshConfig
from maxlm.errors import InputError
from maxlm.parallel.partitioning import GATHERED, Axes

# Logical axis → mesh axes that it is split over. A mesh axis may serve only one axis of an array.
TABLE: dict[str, tuple[str, ...]] = {
    # Activations.
    'batch': ('replica', 'data', 'fsdp'),
    # Of the loss, in which all stages of a pipeline have a part.
    'rows': ('replica', 'data', 'fsdp', 'stage'),
    'length': ('context',),
    'micro_batch': (),
    'activation': (),
    # Parameters: the width is what ZeRO cuts, since every matrix has it and it divides well.
    'embed': ('fsdp', 'context'),
    'vocab': ('tensor',),
    'heads': ('tensor',),
    'kv_heads': ('tensor',),
    'ffn': ('tensor',),
    'head_dim': (),
    'layers': ('stage',),
    'position': (),
    'norm': (),
    # The rank of low-rank adapters: small, and every device needs it whole.
    'adapter': (),
    # Of the layers in a pipeline's order: see `maxlm.model.pipeline`.
    'repeats': (),
    'stage': ('stage',),
    'layers_of_stage': (),
}
# The axes of parameters that are split only to save memory: their uses need them whole.
SAVING = frozenset({'embed'})


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with the rules by which arrays are placed on it. Hashable, so that it can be part of a model's graph.

    Attributes:
        mesh: of the axes MESH_AXES.
        zero: what is split over the axes that save memory: 3 = parameters too, 2 = gradients and optimizer state, 1 =
            optimizer state.
        repeats: how often the layers go round the stages of a pipeline.
    """

    mesh: Mesh
    zero: int = 3
    repeats: int = 1

    @property
    def of_gradients(self) -> Layout:
        """Where sums of gradients lie."""
        return dataclasses.replace(self, zero=3 if self.zero >= 2 else self.zero)

    @property
    def of_moments(self) -> Layout:
        """Where optimizer state lies."""
        return dataclasses.replace(self, zero=3)

    def num_shards(self, axis: str) -> int:
        """Devices that a logical axis is split over."""
        return math.prod(self.mesh.shape[mesh_axis] for mesh_axis in self._mesh_axes(axis))

    def spec(self, axes: Sequence[str]) -> PartitionSpec:
        """The mesh axes of an array whose axes have these names."""
        return self._spec([(axis,) for axis in axes])

    def named(self, *axes: str) -> NamedSharding:
        """The sharding of an array whose axes have these names; without names: replicated."""
        return NamedSharding(self.mesh, self.spec(axes))

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Fixes the placement of an intermediate value."""
        return jax.lax.with_sharding_constraint(x, self.named(*axes))

    def constrain_gradient(self, gradient: jax.Array, axes: Axes) -> jax.Array:
        """See `Partitioning`."""
        return self.of_gradients.constrain(gradient, axes)

    def gathered(self, x: jax.Array, axes: Axes, *, is_table: bool = False) -> jax.Array:
        """See `Partitioning`. The gradient is summed over devices straight into its parts (a reduce-scatter)."""
        if not any(axis in SAVING and self.of_moments.num_shards(axis) > 1 for axis in axes):
            return x
        whole = tuple('activation' if axis in SAVING else axis for axis in axes)

        @jax.custom_vjp
        def gather(x: jax.Array) -> jax.Array:
            return checkpoint_name(self.constrain(x, whole), GATHERED)

        def forward(x: jax.Array) -> tuple[jax.Array, None]:
            return gather(x), None

        def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            if is_table:
                # Each device adds up its own tokens first. To have the sum in parts at once, XLA would bring parts of
                # all tokens to every device, and with a length that is split first all of all tokens.
                gradient = self.constrain(gradient, whole)
            return (self.constrain_gradient(gradient, axes),)

        gather.defvjp(forward, backward)
        return gather(x)

    def pad_vocabulary(self, table: jax.Array, axes: Axes) -> jax.Array:
        """See `Partitioning`. Parameters are never padded, so that no state or checkpoint depends on the mesh."""
        dim = axes.index('vocab')
        size = table.shape[dim]
        more = padded_vocabulary(size, self.num_shards('vocab')) - size
        if not more:
            return table
        stored = self._parameter_sharding(table.shape, axes)

        @jax.custom_vjp
        def pad(table: jax.Array) -> jax.Array:
            padded = jnp.pad(table, [(0, more if place == dim else 0) for place in range(table.ndim)])
            # Placed as the parameter first: one all-to-all then splits the vocabulary in place of the width.
            return self.constrain(jax.lax.with_sharding_constraint(padded, stored), axes)

        def forward(table: jax.Array) -> tuple[jax.Array, None]:
            return pad(table), None

        def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            return (self.cut_vocabulary(gradient, axes, size),)

        pad.defvjp(forward, backward)
        return pad(table)

    def cut_vocabulary(self, gradient: jax.Array, axes: Axes, size: int) -> jax.Array:
        """See `Partitioning`."""
        dim = axes.index('vocab')
        if gradient.shape[dim] == size:
            return gradient
        shape = tuple(size if place == dim else length for place, length in enumerate(gradient.shape))
        stored = self.of_gradients._parameter_sharding(shape, axes)
        gradient = jax.lax.with_sharding_constraint(self.constrain_gradient(gradient, axes), stored)
        return jax.lax.slice_in_dim(gradient, 0, size, axis=dim)

    def per_shard(
        self, function: Callable[..., Any], in_axes: Sequence[Axes], out_axes: Axes, axis: str
    ) -> Callable[..., Any]:
        """See `Partitioning`."""
        (mesh_axis,) = self._mesh_axes(axis)

        def run(*shards: jax.Array) -> Any:
            return function(*shards, mesh_axis)

        specs = tuple(map(self.spec, in_axes))
        # What crosses devices inside is its own matter.
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=self.spec(out_axes), check_vma=False)

    def parameter(self, name: str, shape: tuple[int, ...], axes: Sequence[str]) -> NamedSharding:
        """The sharding of a parameter.

        Raises:
            InputError: an axis, other than that of the vocabulary, does not divide over its devices.
        """
        for axis, size in zip(axes, shape, strict=True):
            parts = self.of_moments.num_shards(axis)
            if size % parts and axis != 'vocab':
                mesh_names = '·'.join(f'mesh.{mesh_axis}' for mesh_axis in TABLE[axis])
                raise InputError(
                    f'{mesh_names}={parts} does not divide the {axis!r} axis of {name}, which has {size}; '
                    f'next sizes that it divides: {size // parts * parts or parts}, {(size // parts + 1) * parts}'
                )
        return self._parameter_sharding(shape, axes)

    def spread_layers(self, axes: Sequence[str]) -> tuple[list[NamedSharding], int]:
        """Placements that lead from a stack's own to one with whole layers on each device, and the devices it is over.

        `axes` begin with the one of layers, whose size must divide over the devices. The devices are those that hold
        pieces of a layer, and those with copies (`data`; links between replicas are too slow for it). On the way one
        mesh axis moves at a time, which is an all-to-all within it; where two move at once, XLA gathers the whole stack
        on every device.
        """
        spec = [self._mesh_axes(axis) for axis in axes]
        placements = [self.named(*axes)]
        for moved in (*(mesh_axis for mesh_axes in spec[1:] for mesh_axis in mesh_axes), 'data'):
            layers, *rest = (tuple(mesh_axis for mesh_axis in mesh_axes if mesh_axis != moved) for mesh_axes in spec)
            spec = [(*layers, moved), *rest]
            placements.append(NamedSharding(self.mesh, PartitionSpec(*(names or None for names in spec))))
        return placements, math.prod(self.mesh.shape[mesh_axis] for mesh_axis in spec[0])

    @property
    def batch(self) -> NamedSharding:
        """Of [B, T] arrays of a batch."""
        return self.named('batch', 'length')

    def local_rows(self, global_batch: int) -> slice:
        """The rows of a global batch from the first to the last that this process's devices hold a part of."""
        indices = self.named('batch').addressable_devices_indices_map((global_batch,)).values()
        rows = [range(global_batch)[index[0]] for index in indices if index is not None]
        return slice(min(r.start for r in rows), max(r.stop for r in rows))

    def put_batch(self, batch: dict[str, np.ndarray], global_batch: int) -> dict[str, jax.Array]:
        """This process's rows [b, T] (or [b]), as `local_rows` tells them → global arrays [B, T] ([B])."""
        first = self.local_rows(global_batch).start

        def put(rows: np.ndarray) -> jax.Array:
            shape, sharding = (global_batch, *rows.shape[1:]), self.named(*('batch', 'length')[: rows.ndim])
            parts = []
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                assert index is not None
                of_rows, *rest = index
                start, stop, _ = of_rows.indices(global_batch)
                # An explicit transfer: the loop forbids all others.
                parts.append(jax.device_put(rows[(slice(start - first, stop - first), *rest)], device))
            return jax.make_array_from_single_device_arrays(shape, sharding, parts)

        return {name: put(rows) for name, rows in batch.items()}

    def _parameter_sharding(self, shape: tuple[int, ...], axes: Sequence[str]) -> NamedSharding:
        return NamedSharding(self.mesh, self._spec(splitting_axes(shape, axes, self.of_moments.num_shards)))

    def _spec(self, axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
        """Returns the spec of an array; `axes` are the logical axes that split each dimension."""
        spec = [tuple(mesh_axis for axis in each for mesh_axis in self._mesh_axes(axis)) for each in axes]
        used = [mesh_axis for mesh_axes in spec for mesh_axis in mesh_axes]
        assert len(used) == len(set(used)), f'{tuple(axes)} would split two axes over one mesh axis: {spec}'
        # A tuple of one and its element mean the same to JAX but do not compare equal; the compiler writes the latter.
        return PartitionSpec(*(names[0] if len(names) == 1 else (names or None) for names in spec))

    def _mesh_axes(self, axis: str) -> tuple[str, ...]:
        return () if axis in SAVING and self.zero < 3 else TABLE[axis]


def splitting_axes(
    shape: Sequence[int], axes: Sequence[str], parts: Callable[[str], int]
) -> tuple[tuple[str, ...], ...]:
    """Returns, by dimension of a parameter, the logical axes over whose devices it is split.

    A vocabulary that does not divide is not split. Its devices split the width instead, or have copies where they do
    not divide that.

    Args:
        shape: of the parameter.
        axes: its logical axes.
        parts: logical axis → devices that it is split over with ZeRO 3.
    """
    sizes = dict(zip(axes, shape, strict=True))
    if sizes.get('vocab', 0) % parts('vocab') == 0:
        return tuple((axis,) for axis in axes)
    divides = sizes['embed'] % (parts('embed') * parts('vocab')) == 0
    moved = {'vocab': (), 'embed': ('embed', 'vocab') if divides else ('embed',)}
    return tuple(moved.get(axis, (axis,)) for axis in axes)


def make_layout(config: MeshConfig, devices: Sequence[Any] | None = None) -> Layout:
    """The layout of resolved sizes; `devices` default to all of the run.

    Raises:
        InputError: links between slices or nodes would lie inside of an axis that needs fast ones.
    """
    sizes = tuple(config.sizes.values())
    devices = jax.devices() if devices is None else devices
    kinds = (AxisType.Auto,) * len(MESH_AXES)
    islands = {island_of(device) for device in devices}
    if len(islands) == 1:
        mesh = jax.make_mesh(sizes, MESH_AXES, axis_types=kinds, devices=devices)
    else:
        across = split_across_islands(config.sizes, len(islands))
        within = tuple(size // factor for size, factor in zip(sizes, across, strict=True))
        by_slice = getattr(devices[0], 'slice_index', None) is not None
        array = mesh_utils.create_hybrid_device_mesh(
            within, across, devices, process_is_granule=not by_slice, allow_split_physical_axes=True
        )
        mesh = Mesh(array, MESH_AXES, axis_types=kinds)
    return Layout(mesh, config.zero_stage, config.num_pipeline_repeats)


def split_across_islands(sizes: dict[str, int], num_islands: int) -> tuple[int, ...]:
    """By mesh axis, its factor that goes over slow links; outer axes come first.

    Islands are slices of a TPU pod or nodes of GPUs: links between them are much slower than within. `tensor` never
    crosses them.

    Raises:
        InputError: the outer axes do not hold a factor of the number of islands.
    """
    left, across = num_islands, []
    for axis, size in sizes.items():
        factor = 1 if axis == 'tensor' else math.gcd(size, left)
        left //= factor
        across.append(factor)
    if left > 1:
        told = ' '.join(f'{axis}={size}' for axis, size in sizes.items() if size > 1)
        raise InputError(
            f'mesh {told}: {num_islands} nodes or slices need axes outside of mesh.tensor whose product is a multiple '
            f'of {num_islands}, e.g. mesh.replica={num_islands} or mesh.data={num_islands}'
        )
    return tuple(across)


def island_of(device: Any) -> int:
    """The number of the group of devices with fast links among them that a device is in."""
    # Of GPUs the slice is the node, with one process on it or one for each GPU.
    island = getattr(device, 'slice_index', None)
    if island is None:
        # The hosts of one slice of TPUs are no border.
        island = 0 if device.platform == 'tpu' else device.process_index
    return island
