"""Supervises one host of an elastic run, which continues with the remaining hosts after one is lost.

The hosts find each other in the workdir; see `elastic_hosts`. `membership` decides which of them train together. The
command gets its rank, the number of hosts and the address of rank 0 in environment variables.
"""

from __future__ import annotations

import os
import random
import socket
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from maxlm.errors import EXIT_BAD_INPUT, EXIT_DEVICE, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, os_message
from maxlm.runtime.rendezvous import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from maxlm.supervision.elastic_hosts import ElasticHosts
from maxlm.supervision.membership import (
    DONE,
    LEFT,
    LOST_TICKS,
    NO_GENERATION,
    PAUSED,
    QUARANTINED,
    READY,
    RUNNING,
    Generation,
    Hosts,
    HostState,
    next_generation,
    reason_to_stop,
)
from maxlm.supervision.restarts import Policy, RestartHistory, newest_step, next_action
from maxlm.supervision.supervisor import TICK_SECONDS, Supervisor, report

# Ports of coordinators. The kernel does not assign them to outgoing connections, unlike those from 32768.
PORTS = range(20_000, 30_000)
# Address of a documentation network (RFC 5737). No packet is sent to it.
_OUTSIDE = ('192.0.2.1', 9)


class ElasticSettings(NamedTuple):
    """Settings of an elastic run.

    Attributes:
        counts: allowed numbers of hosts, ascending.
        address: name or address of this host that the other hosts can reach; '' = that of its default route.
        timeout: seconds without a heartbeat after which a host is lost.
    """

    counts: Sequence[int]
    address: str
    timeout: float


class ElasticSupervisor(Supervisor):
    """Runs the command of this host in one generation after another, until the run ends or this host leaves it."""

    def __init__(self, command: Sequence[str], policy: Policy, settings: ElasticSettings):
        super().__init__(command, policy)
        self._settings = settings
        self._registry = ElasticHosts(Path(policy.workdir))
        self._host = HostState(uuid.uuid4().hex, socket.gethostname(), '', LEFT, 0)
        self._hosts = Hosts(self._host.token)
        self._history = RestartHistory(newest_step(policy.workdir), 0, policy.backoff)
        # Generation of the last attempt, and whether a host of the one before is missing in it.
        self._generation = NO_GENERATION
        self._has_lost = False
        self._is_stopping = False
        # Ticks in the current state, and the time at which a pause ends.
        self._ticks = 0
        self._pause_end = 0.0
        self._last_wait = ''

    def _supervise(self) -> int:
        self._registry.open()
        if file := self._registry.quarantine_file(self._host.name):
            report(f'this host is quarantined, because it computed wrong results; delete {file} after its repair')
            return EXIT_DEVICE
        code = EXIT_FAILED
        try:
            self._set_state(READY)
            code = self._run_generations()
        finally:
            if code == EXIT_DEVICE:
                self._quarantine()
            self._set_state({EXIT_DONE: DONE, EXIT_DEVICE: QUARANTINED}.get(code, LEFT))
        return code

    def _quarantine(self) -> None:
        reason = f'A device of {self._host.name} computed wrong results in generation {self._generation.number}.'
        try:
            self._registry.quarantine(self._host.name, reason)
        except OSError as error:
            report(f'{self._policy.workdir} is unavailable, so this host is not quarantined: {os_message(error)}')

    def _run_generations(self) -> int:
        next_tick = 0.0
        while True:
            if self._pid and (code := self._reap(os.WNOHANG)) is not None:
                final = self._finish_attempt(code)
                if final is not None:
                    return final
            if self._signal and not self._pid:
                return EXIT_PREEMPTED
            if self._host.state == PAUSED and time.monotonic() >= self._pause_end:
                self._set_state(READY)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + self._settings.timeout / LOST_TICKS
                if self._tick():
                    return EXIT_DONE
            time.sleep(TICK_SECONDS)

    def _tick(self) -> bool:
        """Sends a heartbeat, reads those of the other hosts, and acts on them. Returns True if the run is done."""
        try:
            self._beat()
            hosts = self._registry.hosts()
            newest = self._registry.newest()
            self._hosts.update(hosts)
            self._ticks += 1
            return self._act(newest)
        except OSError as error:
            report(f'{self._policy.workdir} is unavailable: {os_message(error)}')
            return False

    def _act(self, newest: Generation) -> bool:
        """Starts or stops the command. Returns True if another host has completed the run."""
        known, own, counts = self._hosts, self._host.token, self._settings.counts
        if self._pid:
            reason = reason_to_stop(known, self._generation, newest, counts, self._ticks)
            if reason and not self._is_stopping and not self._signal:
                report(f'stopping generation {self._generation.number}: {reason}')
                self._is_stopping = True
                self._terminate()
        elif known.is_done(newest):
            report('another host has completed the run')
            return True
        elif self._host.state == READY:
            if own in newest.hosts and newest.number > self._generation.number:
                self._start_generation(newest)
            elif proposal := next_generation(known, own, newest, counts, self._ticks):
                if self._registry.propose(proposal):
                    self._start_generation(proposal)
            else:
                self._report_wait()
        return False

    def _start_generation(self, generation: Generation) -> None:
        rank, count = generation.hosts.index(self._host.token), len(generation.hosts)
        names = ', '.join(map(self._hosts.name, generation.hosts))
        losses = [self._hosts.loss(token) for token in self._generation.hosts if token not in generation.hosts]
        changes = ''.join(f'; {loss}' for loss in losses if loss)
        report(
            f'generation {generation.number}: rank {rank} of {count} hosts ({names}), {generation.coordinator}{changes}'
        )
        self._has_lost = not set(self._generation.hosts) <= set(generation.hosts)
        self._generation = generation
        self._is_stopping = False
        self._last_wait = ''
        # The state is written first, because the command must not run while other hosts regard this one as ready.
        self._set_state(RUNNING)
        self._start({COORDINATOR: generation.coordinator, NUM_PROCESSES: str(count), PROCESS_ID: str(rank)})

    def _finish_attempt(self, code: int) -> int | None:
        """Returns the exit code of the loop after an attempt, or None if this host continues."""
        if self._was_stopped(code):
            return code
        if code == EXIT_BAD_INPUT and self._has_lost:
            # The process of a lost host may still hold the lock of the workdir until it detects the loss of its peers.
            code = EXIT_FAILED
        policy = self._policy
        if code == EXIT_PREEMPTED:
            # A host that fails repeatedly leaves before the other hosts, which end with 75, give up.
            policy = policy._replace(max_failures=2 * policy.max_failures)
        decision, self._history = next_action(policy, self._history, code, newest_step(policy.workdir))
        if decision.text:
            report(decision.text)
        if decision.code is not None:
            return decision.code
        self._pause_end = time.monotonic() + decision.pause
        self._set_state(PAUSED if decision.pause else READY)
        return None

    def _set_state(self, state: str) -> None:
        address = self._new_address() if state == READY else self._host.address
        self._host = self._host._replace(state=state, address=address)
        self._ticks = 0
        try:
            self._beat()
        except OSError as error:
            # The next tick repeats it.
            report(f'{self._policy.workdir} is unavailable: {os_message(error)}')

    def _beat(self) -> None:
        self._host = self._host._replace(beat=self._host.beat + 1)
        self._registry.write(self._host)

    def _new_address(self) -> str:
        host = self._settings.address or default_address()
        return f'[{host}]:{free_port()}' if ':' in host else f'{host}:{free_port()}'

    def _report_wait(self) -> None:
        ready = sorted(host.name for host in self._hosts.alive().values() if host.state == READY)
        counts = ', '.join(map(str, self._settings.counts))
        text = f'waiting for hosts; ready: {", ".join(ready) or "none"}; allowed numbers of hosts: {counts}'
        if text != self._last_wait:
            report(text)
        self._last_wait = text


def default_address() -> str:
    """Returns the address of the network interface with the default route, or the host name without such a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_OUTSIDE)
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def free_port() -> int:
    """Returns a random free port for a coordinator."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as listener:
            try:
                listener.bind(('', port))
            except OSError:
                continue
            return port
