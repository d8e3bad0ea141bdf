"""Where arrays lie: the device mesh, and the one table from logical axes to mesh axes.

The layout of a run follows from `mesh.*` and this table; the model names its axes and knows no mesh.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxlm.config.keys import MeshConfig
from maxlm.errors import InputError

MESH_AXES = ('replica', 'data', 'fsdp', 'tensor')

# Logical axis → mesh axes that it is split over. A mesh axis may serve only one axis of an array.
TABLE: dict[str, tuple[str, ...]] = {
    # Activations.
    'batch': ('replica', 'data', 'fsdp'),
    'length': (),
    'micro_batch': (),
    'activation': (),
    # Parameters: the width is what ZeRO-3 cuts, since every matrix has it and it divides well.
    'embed': ('fsdp',),
    'vocab': ('tensor',),
    'heads': ('tensor',),
    'kv_heads': ('tensor',),
    'ffn': ('tensor',),
    'head_dim': (),
    'layers': (),
    'position': (),
    'norm': (),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with the rules by which arrays are placed on it. Hashable, so that it can be part of a model's graph."""

    mesh: Mesh

    def spec(self, axes: Sequence[str]) -> PartitionSpec:
        """The mesh axes of an array whose axes have these names."""
        spec = [TABLE[axis] for axis in axes]
        used = [mesh_axis for mesh_axes in spec for mesh_axis in mesh_axes]
        assert len(used) == len(set(used)), f'{tuple(axes)} would split two axes over one mesh axis: {spec}'
        # A tuple of one and its element mean the same to JAX but do not compare equal; the compiler writes the latter.
        return PartitionSpec(*(names[0] if len(names) == 1 else (names or None) for names in spec))

    def constrain(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Fixes the placement of an intermediate value."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(axes)))

    def named(self, *axes: str) -> NamedSharding:
        """The sharding of an array whose axes have these names; without names: replicated."""
        return NamedSharding(self.mesh, self.spec(axes))

    def parameter(self, name: str, shape: tuple[int, ...], axes: Sequence[str]) -> NamedSharding:
        """The sharding of a parameter.

        Raises:
            InputError: an axis does not divide over its devices.
        """
        for axis, size in zip(axes, shape, strict=True):
            parts = math.prod(self.mesh.shape[mesh_axis] for mesh_axis in TABLE[axis])
            if size % parts:
                mesh_names = '·'.join(f'mesh.{mesh_axis}' for mesh_axis in TABLE[axis])
                raise InputError(
                    f'{mesh_names}={parts} does not divide the {axis!r} axis of {name}, which has {size}; '
                    f'next sizes that it divides: {size // parts * parts or parts}, {(size // parts + 1) * parts}'
                )
        return NamedSharding(self.mesh, self.spec(axes))

    def spread_layers(self, axes: Sequence[str]) -> tuple[list[NamedSharding], int]:
        """Placements that lead from a stack's own to one with whole layers on each device, and the devices it is over.

        `axes` begin with the one of layers, whose size must divide over the devices. The devices are those that hold
        pieces of a layer, and those with copies (`data`; links between replicas are too slow for it). On the way one
        mesh axis moves at a time, which is an all-to-all within it; where two move at once, XLA gathers the whole stack
        on every device.
        """
        spec = [TABLE[axis] for axis in axes]
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
        """The rows of a global batch that this process's devices hold."""
        indices = self.batch.addressable_devices_indices_map((global_batch, 1)).values()
        rows = [range(global_batch)[index[0]] for index in indices if index is not None]
        return slice(min(r.start for r in rows), max(r.stop for r in rows))

    def put_batch(self, batch: dict[str, np.ndarray], global_batch: int) -> dict[str, jax.Array]:
        """This process's rows [b, T] (or [b]) → global arrays [B, T] ([B])."""

        def put(rows: np.ndarray) -> jax.Array:
            sharding = self.named(*('batch', 'length')[: rows.ndim])
            return jax.make_array_from_process_local_data(sharding, rows, (global_batch, *rows.shape[1:]))

        return {name: put(rows) for name, rows in batch.items()}


def make_layout(config: MeshConfig, devices: Sequence[Any] | None = None) -> Layout:
    """A mesh of the resolved sizes; `devices` default to all of the run."""
    sizes = tuple(getattr(config, axis) for axis in MESH_AXES)
    devices = jax.devices() if devices is None else devices
    mesh = jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices)
    return Layout(mesh)
