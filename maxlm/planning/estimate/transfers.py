"""What devices send to each other in one step: the common terms of estimates and of compiled programs."""

from __future__ import annotations

from typing import NamedTuple

# As XLA names them.
KINDS = ('all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'collective-permute')


class Transfer(NamedTuple):
    """One collective operation, as often as it runs in a step."""

    # One of KINDS.
    kind: str
    # Mesh axes along which devices take part together; empty where the groups follow no axes.
    axes: tuple[str, ...]
    # Devices in a group.
    group: int
    # Of one execution, bytes of the whole array over a group: what a gather brings to each device, what a
    # reduce-scatter or an all-reduce sums. For all-to-all and collective-permute, of one device's own buffer.
    size: float
    # Executions in a step. The type checker minds that it hides `tuple.count`, which nobody needs here.
    count: float = 1  # type: ignore[assignment]
    # Started before it is needed, so that the device can compute meanwhile.
    is_async: bool = True

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a step, by the best algorithm (a ring)."""
        share = (self.group - 1) / self.group
        factor = {'all-reduce': 2 * share, 'collective-permute': 1}.get(self.kind, share)
        return self.count * self.size * factor
