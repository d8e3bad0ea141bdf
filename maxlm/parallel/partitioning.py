"""What the model knows of the devices: names of axes, and how many parts they are in. `Layout` knows the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

Axes = tuple[str, ...]

# What a parameter that was brought together for its use is called, for rules on what the backward pass keeps.
GATHERED = 'gathered'


class Partitioning(Protocol):
    """Places values by the logical names of their axes (`maxlm.parallel.layout.TABLE`). Hashable.

    `repeats` is how often the layers go round the stages of a pipeline.
    """

    @property
    def repeats(self) -> int: ...

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Fixes where an intermediate value lies."""

    def gathered(self, x: jax.Array, axes: Axes, *, is_table: bool = False) -> jax.Array:
        """A parameter as its use needs it: whole along the axes that only save memory. Its gradient is cut again.

        `is_table` tells that rows of it are looked up.
        """

    def constrain_gradient(self, gradient: jax.Array, axes: Axes) -> jax.Array:
        """Places a parameter's gradient as its sum is kept."""

    def pad_vocabulary(self, table: jax.Array, axes: Axes) -> jax.Array:
        """Pads a table of the vocabulary with zeros where the vocabulary does not divide over its devices.

        Returns the table itself where it does, or where it is padded already. The gradient is cut to the table's size.
        """

    def cut_vocabulary(self, gradient: jax.Array, axes: Axes, size: int) -> jax.Array:
        """Returns the gradient of a padded table as that of its parameter, which has `size` token ids."""

    def num_shards(self, axis: str) -> int:
        """Devices that an axis is split over."""

    def per_shard(
        self, function: Callable[..., Any], in_axes: Sequence[Axes], out_axes: Axes, axis: str
    ) -> Callable[..., Any]:
        """`function(*shards, mesh_axis)`, run by every device on its own parts; `mesh_axis` is what splits `axis`."""


class SingleDevice:
    """The placement of a model that runs without a mesh."""

    repeats = 1

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        del axes
        return x

    def gathered(self, x: jax.Array, axes: Axes, *, is_table: bool = False) -> jax.Array:
        del axes, is_table
        return x

    def constrain_gradient(self, gradient: jax.Array, axes: Axes) -> jax.Array:
        del axes
        return gradient

    def pad_vocabulary(self, table: jax.Array, axes: Axes) -> jax.Array:
        del axes
        return table

    def cut_vocabulary(self, gradient: jax.Array, axes: Axes, size: int) -> jax.Array:
        del axes, size
        return gradient

    def num_shards(self, axis: str) -> int:
        del axis
        return 1

    def per_shard(
        self, function: Callable[..., Any], in_axes: Sequence[Axes], out_axes: Axes, axis: str
    ) -> Callable[..., Any]:
        raise AssertionError(f'{axis!r} is not split, so {function} with {in_axes} → {out_axes} is not needed')


SINGLE_DEVICE = SingleDevice()
