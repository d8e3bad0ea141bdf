"""Data transfers between devices in one step, shared by estimates and compiled programs."""

from __future__ import annotations

from typing import NamedTuple

# XLA's names of collectives.
KINDS = ('all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'collective-permute')


class Transfer(NamedTuple):
    """A collective operation and its number of executions in a step.

    Attributes:
        kind: one of KINDS.
        axes: mesh axes along which the devices of a group differ; empty if the groups follow no axes.
        group: number of devices in a group.
        size: bytes of the complete array over a group in one execution: the result of a gather, the input of a
            reduce-scatter or an all-reduce. For all-to-all and collective-permute, the buffer of one device.
        count: executions in a step. Shadows `tuple.count`, which is not used.
        is_async: whether it starts before its result is needed, so that the device can compute at the same time.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    size: float
    count: float = 1  # type: ignore[assignment]
    is_async: bool = True

    @property
    def sent(self) -> float:
        """Returns the bytes that each device sends in a step, with the optimal algorithm (a ring)."""
        fraction = (self.group - 1) / self.group
        factor = {'all-reduce': 2 * fraction, 'collective-permute': 1}.get(self.kind, fraction)
        return self.count * self.size * factor
