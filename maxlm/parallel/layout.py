"""Placement of arrays: the device mesh and the table from logical axes to mesh axes.

The layout of a run follows from `mesh.*` and this table: data parallelism, fully sharded data parallelism (FSDP),
tensor parallelism, expert parallelism and pipeline parallelism. The model names logical axes and does not depend on the
mesh.
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
from maxlm.parallel.collectives import gather, scatter_gradient
from maxlm.parallel.partitioning import GATHERED, Axes

# Maps each logical axis to the mesh axes that shard it. An array may use each mesh axis for only one of its axes.
TABLE: dict[str, tuple[str, ...]] = {
    # Activations.
    'batch': ('replica', 'data', 'fsdp', 'expert'),
    # Rows of the loss, which is also split over the stages of a pipeline.
    'rows': ('replica', 'data', 'fsdp', 'expert', 'stage'),
    'length': ('context',),
    'micro_batch': (),
    'activation': (),
    # Parameters. ZeRO shards the model width, because every matrix has this axis and it divides well.
    'embed': ('fsdp', 'expert', 'context'),
    'vocab': ('tensor',),
    'heads': ('tensor',),
    'kv_heads': ('tensor',),
    'ffn': ('tensor',),
    'head_dim': (),
    # Widths of the latents of latent attention. Their up-projections shard them as the model width.
    'latent': (),
    # Parameters of experts. Each device has all parameters of its experts except those sharded to save memory.
    'experts': ('expert',),
    'expert_embed': ('fsdp', 'context'),
    'expert_ffn': ('tensor',),
    # Outputs of the router, one per expert. Every device routes its own tokens to all experts.
    'routes': (),
    'layers': ('stage',),
    # The first dense layers of a model with experts, which every stage of a pipeline computes.
    'dense_layers': (),
    'position': (),
    'norm': (),
    # Channels of the residual stream that the gates of value embeddings read.
    'gate_channels': (),
    # The rank of LoRA adapters is small, and every device needs all of it.
    'adapter': (),
    # Layers in pipeline order: see `maxlm.model.pipeline`.
    'repeats': (),
    'stage': ('stage',),
    'layers_of_stage': (),
}
# Parameter axes that are sharded only to save memory. They are gathered before use.
SAVING = frozenset({'embed', 'expert_embed'})


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh with the rules that place arrays on it. Hashable, so that it can be part of a model's graph.

    Attributes:
        mesh: mesh with the axes MESH_AXES.
        zero: ZeRO stage, the arrays of a step sharded over the memory-saving axes: 1 = optimizer state and float32
            parameters, 2 = also gradients, 3 = also the parameters that the micro-batches use.
        repeats: number of times that the layers pass through the stages of a pipeline.
    """

    mesh: Mesh
    zero: int = 3
    repeats: int = 1

    @property
    def of_gradients(self) -> Layout:
        """Returns the layout of gradient sums."""
        return dataclasses.replace(self, zero=3 if self.zero >= 2 else self.zero)

    @property
    def of_state(self) -> Layout:
        """Returns the layout of optimizer state and of the float32 parameters that it updates."""
        return dataclasses.replace(self, zero=3)

    @property
    def platform(self) -> str:
        """Returns the platform of the devices."""
        platform: str = self.mesh.devices.flat[0].platform
        return platform

    def num_shards(self, axis: str) -> int:
        """Returns the number of devices over which a logical axis is sharded."""
        return math.prod(self.mesh.shape[mesh_axis] for mesh_axis in self.mesh_axes(axis))

    def spec(self, axes: Sequence[str]) -> PartitionSpec:
        """Returns the PartitionSpec of an array with these logical axes."""
        return self._spec([(axis,) for axis in axes])

    def named(self, *axes: str) -> NamedSharding:
        """Returns the sharding of an array with these logical axes. Without axes, the array is replicated."""
        return NamedSharding(self.mesh, self.spec(axes))

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Constrains the sharding of an intermediate value."""
        constrained: jax.Array = jax.lax.with_sharding_constraint(x, self.named(*axes))
        return constrained

    def constrain_gradient(self, gradient: jax.Array, axes: Axes) -> jax.Array:
        """See `Partitioning`."""
        return self.of_gradients.constrain(gradient, axes)

    def gathered(self, x: jax.Array, axes: Axes) -> jax.Array:
        """See `Partitioning`. The gradient is reduce-scattered over the devices."""
        if not any(axis in SAVING and self.of_state.num_shards(axis) > 1 for axis in axes):
            return x
        whole = tuple('activation' if axis in SAVING else axis for axis in axes)

        @jax.custom_vjp
        def gather(x: jax.Array) -> jax.Array:
            named: jax.Array = checkpoint_name(self.constrain(x, whole), GATHERED)
            return named

        def forward(x: jax.Array) -> tuple[jax.Array, None]:
            return gather(x), None

        def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            return (self.constrain_gradient(gradient, axes),)

        gather.defvjp(forward, backward)
        return gather(x)

    def pad_vocabulary(self, table: jax.Array, axes: Axes) -> jax.Array:
        """See `Partitioning`. Parameters are never padded, so no state or checkpoint depends on the mesh."""
        dim = axes.index('vocab')
        size = table.shape[dim]
        more = padded_vocabulary(size, self.num_shards('vocab')) - size
        if not more:
            return table
        stored = self._parameter_sharding(table.shape, axes)

        @jax.custom_vjp
        def pad(table: jax.Array) -> jax.Array:
            padded = jnp.pad(table, [(0, more if place == dim else 0) for place in range(table.ndim)])
            # Use the parameter's sharding first: one all-to-all then shards the vocabulary instead of the width.
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

    def mesh_axes(self, axis: str) -> Axes:
        """See `Partitioning`."""
        return () if axis in SAVING and self.zero < 3 else TABLE[axis]

    def per_shard(self, function: Callable[..., Any], in_axes: Sequence[Any], out_axes: Any) -> Callable[..., Any]:
        """See `Partitioning`."""
        axes, tree = jax.tree.flatten(tuple(in_axes), is_leaf=_is_axes)
        # At ZeRO stage 2, devices have complete parameters and shards of the gradients. The shard is a second argument,
        # because the gradient of an argument of `shard_map` has the shape of the argument.
        specs, of_gradients = ([layout.spec(each) for each in axes] for layout in (self, self.of_gradients))
        of_shards = [None if spec == shard else shard for spec, shard in zip(specs, of_gradients, strict=True)]

        def on_device(arrays: list[jax.Array], shards: list[jax.Array | None]) -> Any:
            gathered = map(self._gathered_on_device, arrays, shards, axes)
            return function(*jax.tree.unflatten(tree, gathered))

        # The function may communicate between devices, so JAX cannot check replication.
        out_specs = jax.tree.map(self.spec, out_axes, is_leaf=_is_axes)
        mapped = jax.shard_map(
            on_device, mesh=self.mesh, in_specs=(specs, of_shards), out_specs=out_specs, check_vma=False
        )

        def run(*arguments: Any) -> Any:
            arrays = jax.tree.leaves(arguments)
            shards: list[jax.Array | None] = []
            for i, spec in enumerate(of_shards):
                shards.append(None if spec is None else self.of_gradients.constrain(arrays[i], axes[i]))
                arrays[i] = arrays[i] if spec is None else jax.lax.stop_gradient(arrays[i])
            return mapped(arrays, shards)

        return run

    def _gathered_on_device(self, x: jax.Array, shard: jax.Array | None, axes: Axes) -> jax.Array:
        """Returns the argument of `per_shard` that `function` receives.

        Args:
            x: shard of the argument, or the complete argument if `shard` is given.
            shard: array whose gradient is the shard of the gradient.
            axes: logical axes of the argument.
        """
        parts = self.of_gradients.num_shards
        dims = tuple((dim, TABLE[axis]) for dim, axis in enumerate(axes) if axis in SAVING and parts(axis) > 1)
        if not dims:
            return x
        return checkpoint_name(gather(x, dims), GATHERED) if shard is None else scatter_gradient(x, shard, dims)

    def parameter(self, name: str, shape: tuple[int, ...], axes: Sequence[str]) -> NamedSharding:
        """Returns the sharding of a parameter.

        Raises:
            InputError: the size of an axis other than the vocabulary is not divisible by its number of devices.
        """
        for axis, size in zip(axes, shape, strict=True):
            parts = self.of_state.num_shards(axis)
            if size % parts and axis != 'vocab':
                mesh_names = '·'.join(f'mesh.{mesh_axis}' for mesh_axis in TABLE[axis])
                raise InputError(
                    f'{mesh_names}={parts} does not divide the {axis!r} axis of {name}, which has size {size}; nearest '
                    f'sizes that it divides: {size // parts * parts or parts}, {(size // parts + 1) * parts}'
                )
        return self._parameter_sharding(shape, axes)

    def spread_matrices(
        self, axes: Sequence[str], num_stack_axes: int, moved: Sequence[str] = ()
    ) -> tuple[list[NamedSharding], int]:
        """Returns the shardings that lead from a stack of matrices to complete matrices per device.

        The shardings start with that of the stack. The first `num_stack_axes` of `axes` number the matrices. The last
        of them is sharded over more devices: those with shards of a matrix or copies of it (axis `data`; links between
        replicas are too slow). Consecutive shardings differ in one mesh axis, which needs one all-to-all over that
        axis. If two axes change at once, XLA gathers the complete stack on every device.

        Args:
            axes: logical axes of the stack.
            num_stack_axes: number of its axes that number matrices.
            moved: mesh axes to shard the last of them over, in addition to its own; by default those of the other axes
                and `data`.

        Returns:
            The shardings, and the number of devices over which that axis is sharded in the end; it must divide the size
            of the axis.
        """
        last = num_stack_axes - 1
        spec = [self.mesh_axes(axis) for axis in axes]
        placements = [self.named(*axes)]
        of_matrix = (mesh_axis for mesh_axes in spec[num_stack_axes:] for mesh_axis in mesh_axes)
        for mesh_axis in moved or (*of_matrix, 'data'):
            spec = [tuple(name for name in mesh_axes if name != mesh_axis) for mesh_axes in spec]
            spec[last] = (*spec[last], mesh_axis)
            placements.append(NamedSharding(self.mesh, PartitionSpec(*(names or None for names in spec))))
        return placements, math.prod(self.mesh.shape[mesh_axis] for mesh_axis in spec[last])

    @property
    def batch(self) -> NamedSharding:
        """Returns the sharding of [B, T] arrays of a batch."""
        return self.named('batch', 'length')

    def local_rows(self, global_batch: int) -> slice:
        """Returns the range of global batch rows that are at least partly on devices of this process."""
        indices = self.named('batch').addressable_devices_indices_map((global_batch,)).values()
        rows = [range(global_batch)[index[0]] for index in indices if index is not None]
        return slice(min(r.start for r in rows), max(r.stop for r in rows))

    def put_batch(self, batch: dict[str, np.ndarray], global_batch: int) -> dict[str, jax.Array]:
        """Returns global arrays [B, T] (or [B]) from this process's rows [b, T] (or [b]), those of `local_rows`."""
        first = self.local_rows(global_batch).start

        def put(rows: np.ndarray) -> jax.Array:
            shape, sharding = (global_batch, *rows.shape[1:]), self.named(*('batch', 'length')[: rows.ndim])
            parts = []
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                assert index is not None
                of_rows, *rest = index
                start, stop, _ = of_rows.indices(global_batch)
                # Transfer explicitly, because the training loop disallows implicit transfers.
                parts.append(jax.device_put(rows[(slice(start - first, stop - first), *rest)], device))
            return jax.make_array_from_single_device_arrays(shape, sharding, parts)

        return {name: put(rows) for name, rows in batch.items()}

    def _parameter_sharding(self, shape: tuple[int, ...], axes: Sequence[str]) -> NamedSharding:
        return NamedSharding(self.mesh, self._spec(splitting_axes(shape, axes, self.of_state.num_shards)))

    def _spec(self, axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
        """Returns the spec of an array. `axes` are the logical axes that shard each dimension."""
        spec = [tuple(mesh_axis for axis in each for mesh_axis in self.mesh_axes(axis)) for each in axes]
        used = [mesh_axis for mesh_axes in spec for mesh_axis in mesh_axes]
        assert len(used) == len(set(used)), f'{tuple(axes)} would split two axes over one mesh axis: {spec}'
        # JAX treats a tuple of one name like the name, but they do not compare equal. The compiler returns the name.
        return PartitionSpec(*(names[0] if len(names) == 1 else (names or None) for names in spec))


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(name, str) for name in node)


def splitting_axes(
    shape: Sequence[int], axes: Sequence[str], parts: Callable[[str], int]
) -> tuple[tuple[str, ...], ...]:
    """Returns, for each dimension of a parameter, the logical axes over which it is sharded.

    A vocabulary that is not divisible by its number of devices is not sharded. Its devices shard the model width
    instead, or hold copies if the width is not divisible either.

    Args:
        shape: shape of the parameter.
        axes: logical axes of the parameter.
        parts: maps a logical axis to its number of devices under ZeRO 3.
    """
    sizes = dict(zip(axes, shape, strict=True))
    if sizes.get('vocab', 0) % parts('vocab') == 0:
        return tuple((axis,) for axis in axes)
    divides = sizes['embed'] % (parts('embed') * parts('vocab')) == 0
    moved = {'vocab': (), 'embed': ('embed', 'vocab') if divides else ('embed',)}
    return tuple(moved.get(axis, (axis,)) for axis in axes)


def make_layout(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Layout:
    """Returns the layout of a mesh config with resolved sizes.

    Args:
        config: the mesh config.
        devices: devices of the mesh; None = all devices of the run.

    Raises:
        InputError: links between slices or nodes would be part of an axis that needs fast links.
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
    """Returns the factor of each mesh axis that uses slow links, with outer axes first.

    Islands are slices of a TPU pod or GPU nodes. Links between islands are much slower than links within them. The
    `tensor` axis never crosses islands.

    Raises:
        InputError: the product of the axes other than `tensor` is not a multiple of the number of islands.
    """
    left, across = num_islands, []
    for axis, size in sizes.items():
        factor = 1 if axis == 'tensor' else math.gcd(size, left)
        left //= factor
        across.append(factor)
    if left > 1:
        axes = ' '.join(f'{axis}={size}' for axis, size in sizes.items() if size > 1)
        raise InputError(
            f'mesh {axes}: the product of the axes other than mesh.tensor must be a multiple of the {num_islands} '
            f'nodes or slices; set e.g. mesh.replica={num_islands} or mesh.data={num_islands}'
        )
    return tuple(across)


def island_of(device: jax.Device) -> int:
    """Returns the number of a device's island, a group of devices connected by fast links."""
    # For GPUs, the slice is the node, with one process per node or per GPU.
    island = getattr(device, 'slice_index', None)
    if island is None:
        # All hosts of a TPU slice are connected by fast links.
        island = 0 if device.platform == 'tpu' else device.process_index
    return island
