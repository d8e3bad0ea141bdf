"""Barriers, broadcasts and save transactions among the processes of a run.

They use the key-value store of JAX's coordination service instead of collectives. A background thread can use them
while the devices compute, and a process whose save failed can notify processes that wait in a barrier.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed

# `Heartbeats` detects a lost process much earlier.
TIMEOUT_SECONDS = 6 * 3600
VOTE_SECONDS = 600
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 1.0

ROOT, SAVES = 'maxlm/checkpoints', 'maxlm/saves'


class PeerError(Exception):
    """Another process could not write its shards of a step."""


class ProcessGroup:
    """Group of all processes of a run. All processes call its methods in the same order. One process never waits."""

    # Shared by all instances in a process, because each key of the store may be used only once.
    _num_barriers = 0
    # Number of the newest save. Barriers are counted separately, because they may run during a save.
    _num_saves = 0

    def __init__(self) -> None:
        self.process_index, self.num_processes = jax.process_index(), jax.process_count()

    def barrier(self) -> None:
        """Waits until all processes arrive."""
        if self.num_processes > 1:
            self._arrive()

    def broadcast_from_host0(self, text: str) -> str:
        """Returns the `text` of process 0 in all processes."""
        if self.num_processes == 1:
            return text
        key = f'{self._arrive()}/broadcast'
        if self.process_index == 0:
            _client().key_value_set(key, text)
            return text
        return str(_client().blocking_key_value_get(key, TIMEOUT_SECONDS * 1000))

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all processes, in their order, in all processes."""
        if self.num_processes == 1:
            return [text]
        folder = f'{self._arrive()}/gather'
        _client().key_value_set(f'{folder}/{self.process_index}', text)
        return [
            str(_client().blocking_key_value_get(f'{folder}/{process}', TIMEOUT_SECONDS * 1000))
            for process in range(self.num_processes)
        ]

    def begin_save(self) -> SaveTransaction:
        """Starts a save transaction. The previous save must have ended in all processes."""
        if self.num_processes == 1:
            return SaveTransaction('', self.process_index, self.num_processes)
        self._arrive()
        if self.process_index == 0:
            _client().key_value_delete(f'{SAVES}/{ProcessGroup._num_saves}/')
        ProcessGroup._num_saves += 1
        return SaveTransaction(f'{SAVES}/{ProcessGroup._num_saves}', self.process_index, self.num_processes)

    def _arrive(self) -> str:
        ProcessGroup._num_barriers += 1
        folder = f'{ROOT}/{ProcessGroup._num_barriers}'
        _client().wait_at_barrier(f'{folder}/barrier', TIMEOUT_SECONDS * 1000)
        if self.process_index == 0 and ProcessGroup._num_barriers > 1:
            # All processes have left the previous barrier.
            _client().key_value_delete(f'{ROOT}/{ProcessGroup._num_barriers - 1}/')
        return folder


class SaveTransaction:
    """Save transaction: either all processes commit a save, or none."""

    def __init__(self, prefix: str, process: int, num_processes: int):
        self._prefix, self._process, self._num_processes = prefix, process, num_processes
        self._phase = 0

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes. Orbax calls it in a background thread after writing and after committing.

        Raises:
            PeerError: a process failed or did not arrive in time.
        """
        del key
        self._phase += 1
        phase_prefix = f'{self._prefix}/{self._phase}'
        deadline = time.monotonic() + timeout_ms / 1000
        if self._process == 0:
            self._wait(f'{phase_prefix}/written/', self._num_processes - 1, deadline)
            _client().key_value_set(f'{phase_prefix}/all/go', '')
        else:
            _client().key_value_set(f'{phase_prefix}/written/{self._process}', '')
            self._wait(f'{phase_prefix}/all/', 1, deadline)

    def fail(self, reason: str) -> None:
        """Reports to all processes that this process could not write its shards."""
        if self._num_processes > 1:
            _client().key_value_set(f'{self._prefix}/failed/{self._process}', f'process {self._process}: {reason}')

    def _wait(self, folder: str, num_keys: int, deadline: float) -> None:
        poll = MIN_POLL_SECONDS
        while len(_client().key_value_dir_get(folder)) < num_keys:
            failed = _client().key_value_dir_get(f'{self._prefix}/failed/')
            if failed:
                raise PeerError(min(failed)[1])
            if time.monotonic() > deadline:
                raise PeerError('the other processes did not finish in time')
            time.sleep(poll)
            poll = min(poll * 1.5, MAX_POLL_SECONDS)


def is_shared(directory: Path | None) -> bool:
    """Returns True if all processes see the same existing directory. All processes call it together.

    Args:
        directory: directory of this process, or None if it has none.
    """
    group = ProcessGroup()
    if group.num_processes == 1:
        return directory is not None
    vote = group.begin_save()
    with contextlib.ExitStack() as stack:
        probe_name = ''
        if group.process_index == 0 and directory is not None:
            with contextlib.suppress(OSError):
                probe_name = Path(stack.enter_context(tempfile.NamedTemporaryFile(dir=directory)).name).name
        probe_name = group.broadcast_from_host0(probe_name)
        is_visible = directory is not None and probe_name != '' and (directory / probe_name).exists()
        try:
            if is_visible:
                vote.barrier(key='', timeout_ms=VOTE_SECONDS * 1000)
            else:
                vote.fail('cannot see the directory')
        except PeerError:
            is_visible = False
    return is_visible


def _client() -> Any:
    return distributed.global_state.client
