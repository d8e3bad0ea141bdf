"""Interface through which the model places values: logical axes and numbers of shards. `Layout` implements it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

Axes = tuple[str, ...]

# Checkpoint name of gathered parameters, for rematerialization policies.
GATHERED = 'gathered'


class Partitioning(Protocol):
    """Places values by the logical names of their axes (`maxlm.parallel.layout.TABLE`). Hashable.

    Attributes:
        repeats: number of times that the layers pass through the stages of a pipeline.
        platform: platform of the devices: cpu, gpu or tpu.
    """

    def __hash__(self) -> int: ...

    @property
    def repeats(self) -> int: ...

    @property
    def platform(self) -> str: ...

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Constrains the sharding of an intermediate value."""

    def gathered(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Returns a parameter for use: unsharded along the axes that only save memory.

        Its gradient is sharded again.
        """

    def constrain_gradient(self, gradient: jax.Array, axes: Axes) -> jax.Array:
        """Places the gradient of a parameter like its gradient sum."""

    def pad_vocabulary(self, table: jax.Array, axes: Axes) -> jax.Array:
        """Pads a vocabulary table with zeros if the vocabulary is not divisible by its number of devices.

        Returns the table itself if it is divisible or already padded. The gradient is cut to the size of the table.
        """

    def cut_vocabulary(self, gradient: jax.Array, axes: Axes, size: int) -> jax.Array:
        """Returns the gradient of a padded table cut to the `size` token ids of its parameter."""

    def num_shards(self, axis: str) -> int:
        """Returns the number of devices over which an axis is sharded."""

    def mesh_axes(self, axis: str) -> Axes:
        """Returns the names of the mesh axes over which an axis is sharded, for collectives within `per_shard`."""

    def per_shard(self, function: Callable[..., Any], in_axes: Sequence[Any], out_axes: Any) -> Callable[..., Any]:
        """Returns `function(*shards)`, which each device runs on its shards.

        Along the axes that only save memory, each device gathers its arguments first, and the gradients of the
        arguments are sharded again; see `gathered`. XLA for TPUs would all-reduce the gradients of arguments that are
        gathered before.

        Args:
            function: function of arrays; it may contain collectives over `mesh_axes`.
            in_axes: logical axes of each argument, or a tree of them with the structure of the argument.
            out_axes: the same of the result.
        """


@dataclasses.dataclass(frozen=True)
class SingleDevice:
    """Partitioning of a model that runs without a mesh, or on each device of a mesh separately (`jax.shard_map`).

    Attributes:
        device_platform: platform of the device; None means JAX's default backend.
    """

    device_platform: str | None = None
    repeats = 1

    @property
    def platform(self) -> str:
        return self.device_platform or jax.default_backend()

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        del axes
        return x

    def gathered(self, x: jax.Array, axes: Axes) -> jax.Array:
        del axes
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

    def mesh_axes(self, axis: str) -> Axes:
        del axis
        return ()

    def per_shard(self, function: Callable[..., Any], in_axes: Sequence[Any], out_axes: Any) -> Callable[..., Any]:
        del in_axes, out_axes
        return function


SINGLE_DEVICE = SingleDevice()
