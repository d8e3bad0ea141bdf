"""Groups written by several processes; the bytes do not depend on how many."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from maxlm.data.groups import Group, OnProgress, write_group
from maxlm.errors import InputError

# Seconds between two looks at the workers' progress.
POLL_SECONDS = 0.2

# In a worker: bytes, documents and tokens that all workers have done, and whether they must stop.
_shared: Any = None


def write_groups(groups: Sequence[Group], *, workers: int, on_progress: OnProgress) -> None:
    """Writes all groups; with one worker in this process, otherwise in at most `workers` others.

    Raises:
        InputError: as `write_group`, or a worker was killed. Groups that were finished stay finished.
    """
    workers = min(workers, len(groups))
    if workers <= 1:
        for group in groups:
            write_group(group, on_progress)
        return
    # Not fork: the encoder's threads do not survive it.
    context = multiprocessing.get_context('spawn')
    shared = context.Array('q', 4)
    with concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (shared,)) as pool:
        pending = {pool.submit(_write_group_in_worker, group) for group in groups}
        reported = [0, 0, 0]
        try:
            while pending:
                done, pending = concurrent.futures.wait(
                    pending, POLL_SECONDS, return_when=concurrent.futures.FIRST_EXCEPTION
                )
                totals = shared[:3]
                on_progress(*(total - old for total, old in zip(totals, reported, strict=True)))
                reported = totals
                for future in done:
                    future.result()
        except BrokenProcessPool as error:
            raise InputError(
                'a worker process was killed, perhaps for want of memory; run the same again with fewer --workers, '
                'what is finished is kept'
            ) from error
        finally:
            # After an error or Ctrl-C the others end at their next report, not at the end of their group.
            shared[3] = 1
            pool.shutdown(cancel_futures=True)


class _StoppedError(Exception):
    """Ends a worker's group because another failed."""


def _start_worker(shared: Any) -> None:
    global _shared  # noqa: PLW0603  # the only way for an initializer to hand something to the tasks
    _shared = shared
    # Ctrl-C is the parent's: it tells the workers through `shared`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One thread per worker; the processes are what uses the cores.
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write_group_in_worker(group: Group) -> None:
    write_group(group, _report)


def _report(*new: int) -> None:
    with _shared.get_lock():
        for i, count in enumerate(new):
            _shared[i] += count
        if _shared[3]:
            raise _StoppedError
