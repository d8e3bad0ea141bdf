"""Decides which hosts form the next generation of an elastic run: pure functions of the hosts that a host sees.

A generation is a set of hosts that train together, with their ranks. Each host counts the ticks since the heartbeat of
every other host changed. Ticks are successful reads of the shared directory. An outage of the disk and a suspended
supervisor thus do not count as silence, and the clocks of the hosts need not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

# A host counts as lost after this many ticks without a heartbeat. A generation is this old before it can grow.
LOST_TICKS = 10
# A new run waits this many ticks for all of its hosts.
START_TICKS = 10 * LOST_TICKS

# States of a host. Only a ready host can be a member of the next generation.
READY, RUNNING, PAUSED, LEFT, DONE = 'ready', 'running', 'paused', 'left', 'done'
# A device of the host computes wrong results. The host does not join the run again; see `ElasticHosts.quarantine`.
QUARANTINED = 'quarantined'
GONE = (LEFT, DONE, QUARANTINED)


class HostState(NamedTuple):
    """State of a host, which its supervisor writes.

    Attributes:
        token: unique to this start of the supervisor. A supervisor that restarts is another host.
        name: host name, for messages and the order of new hosts.
        address: HOST:PORT that other hosts can reach, used if the host has rank 0 in the next generation.
        state: READY (waits for a generation), RUNNING, PAUSED (after a failure), LEFT, QUARANTINED or DONE (the
            run is complete).
        beat: changes with every heartbeat.
    """

    token: str
    name: str
    address: str
    state: str
    beat: int


class Generation(NamedTuple):
    """Hosts that train together.

    Attributes:
        number: increases by 1 with each generation.
        hosts: tokens of the hosts in the order of their ranks.
        coordinator: HOST:PORT of rank 0.
    """

    number: int
    hosts: tuple[str, ...]
    coordinator: str


NO_GENERATION = Generation(0, (), '')


class Hosts:
    """Hosts of a run and the ticks since their last heartbeats, from the point of view of one host."""

    def __init__(self, own: str):
        """
        Args:
            own: token of this host.
        """
        self._own = own
        self._known: dict[str, HostState] = {}
        # Ticks since the last heartbeat, and tokens of hosts that sent a heartbeat since this object exists.
        self._silent: dict[str, int] = {}
        self._seen: set[str] = set()
        self._ticks = 0

    def update(self, hosts: Iterable[HostState]) -> None:
        """Counts one tick and reads the states of all hosts."""
        self._ticks += 1
        for token in self._silent:
            self._silent[token] += 1
        for host in hosts:
            before = self._known.get(host.token)
            if host.token == self._own or (before and before.beat != host.beat):
                self._seen.add(host.token)
            if before is None or before.beat != host.beat:
                self._silent[host.token] = 0
            self._known[host.token] = host

    def alive(self) -> dict[str, HostState]:
        """Returns the hosts that send heartbeats, by token. A host of an earlier start of the run sends none."""
        return {
            token: self._known[token]
            for token in self._seen
            if self._silent[token] <= LOST_TICKS and self._known[token].state not in GONE
        }

    def loss(self, token: str) -> str:
        """Returns a message if a host has left or is lost, and '' if it is alive or that is not known yet."""
        host = self._known.get(token)
        name = host.name if host else token
        if host and host.state in GONE:
            return f'{name} is quarantined' if host.state == QUARANTINED else f'{name} left'
        silent = self._silent.get(token, self._ticks)
        return f'{name} sent no heartbeat' if silent > LOST_TICKS else ''

    def is_done(self, generation: Generation) -> bool:
        """Returns True if a host of the generation has completed the run since this object exists."""
        return any(token in self._seen and self._known[token].state == DONE for token in generation.hosts)

    def name(self, token: str) -> str:
        """Returns the name of a host."""
        return self._known[token].name if token in self._known else token


def next_generation(
    hosts: Hosts, own: str, newest: Generation, counts: Sequence[int], waited: int
) -> Generation | None:
    """Returns the generation that this host starts, or None if it has to wait or another host starts it.

    Args:
        hosts: hosts of the run.
        own: token of this host.
        newest: newest generation.
        counts: allowed numbers of hosts, ascending.
        waited: ticks for which this host has been ready.
    """
    alive = hosts.alive()
    if any(token not in alive and not hosts.loss(token) for token in newest.hosts):
        return None
    members = [alive[token] for token in newest.hosts if token in alive]
    if any(host.state != READY for host in members):
        return None
    candidates = members + _newcomers(alive, newest)
    count = _largest(counts, len(candidates))
    if not count or candidates[0].token != own:
        return None
    if not members and count < counts[-1] and waited < START_TICKS:
        return None
    ranks = tuple(host.token for host in candidates[:count])
    return Generation(newest.number + 1, ranks, candidates[0].address)


def reason_to_stop(hosts: Hosts, running: Generation, newest: Generation, counts: Sequence[int], age: int) -> str:
    """Returns the reason why this host stops its running command for another generation, or '' if it continues.

    Args:
        hosts: hosts of the run.
        running: generation of the command.
        newest: newest generation.
        counts: allowed numbers of hosts, ascending.
        age: ticks for which the command has been running.
    """
    if newest.number > running.number:
        return f'generation {newest.number} has started without this host'
    if not hosts.is_done(running) and (losses := list(filter(None, map(hosts.loss, running.hosts)))):
        return ', '.join(losses)
    new = _newcomers(hosts.alive(), running)
    if age >= LOST_TICKS and _largest(counts, len(running.hosts) + len(new)) > len(running.hosts):
        return f'{", ".join(host.name for host in new)} joined'
    return ''


def _largest(counts: Sequence[int], available: int) -> int:
    """Returns the largest allowed number of hosts that are available, or 0."""
    return max((count for count in counts if count <= available), default=0)


def _newcomers(alive: dict[str, HostState], generation: Generation) -> list[HostState]:
    """Returns the ready hosts that are not in a generation, in a stable order."""
    new = [host for host in alive.values() if host.state == READY and host.token not in generation.hosts]
    return sorted(new, key=lambda host: (host.name, host.token))
