"""One step on its way to the disk or the bucket, in the background, and what kept it from there."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from maxlm.checkpoint.item_metadata import dedupe_logs
from maxlm.errors import os_message
from maxlm.runtime.barrier import PeerError, SaveTransaction
from maxlm.storage.errors import http_status, redact

# A save that is not through by then is given up.
TIMEOUT_SECONDS = 3600
# What those who write besides one that failed get to end.
LINGER_SECONDS = 10.0

# How TensorStore words the errors of systems and of buckets.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_MAX_REASON_CHARS = 160


class AsyncSave:
    """The save of one step; made anew for each, since what Orbax has of one that failed fails again."""

    def __init__(self, transaction: SaveTransaction, on_end: Callable[[str], None]):
        """
        Args:
            joint: with the other processes.
            on_end: called from a thread, once, with why the step could not be written, or '' when it is there.
        """
        self._transaction = transaction
        self._on_end = on_end
        # Made in the background, directories that cannot be made leave threads that wait for them for minutes. Of
        # several processes only the first makes them, and the others would wait in a collective.
        options = ocp.options.AsyncOptions(
            timeout_secs=TIMEOUT_SECONDS,
            barrier_sync_fn=transaction.barrier,
            create_directories_asynchronously=jax.process_count() > 1,
        )
        handlers: dict[str, Any] = {name: ocp.StandardCheckpointHandler() for name in ('params', 'ema', 'optimizer')}
        handlers |= {name: ocp.JsonCheckpointHandler() for name in ('progress', 'data', 'checksums')}
        composite = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(async_options=options), **handlers
        )
        self._checkpointer = ocp.AsyncCheckpointer(composite, async_options=options)
        self._thread = threading.Thread(target=self._wait, name='save')

    def begin(self, directory: epath.Path, items: ocp.args.Composite) -> None:
        """Copies the arrays off the device and lets them be written. What fails from here on is told to `on_end`."""
        # For good: threads of a save that failed complain after its end.
        dedupe_logs()
        try:
            # What is left there of another try is deleted.
            self._checkpointer.save(directory, args=items, force=True)
        except Exception as error:
            self._end(error)
        else:
            self._thread.start()

    def finish(self, seconds: float | None = None) -> bool:
        """Waits until it is written or has failed, at most so many seconds; returns whether it is over."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _wait(self) -> None:
        try:
            self._checkpointer.wait_until_finished()
        # Orbax keeps what its threads raise, of whatever kind.
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        reason = failure_reason(error) if error else ''
        try:
            if error and not isinstance(error, PeerError):
                self._transaction.fail(reason)
            self._checkpointer.close()
            if error:
                _join_writers()
        except Exception:
            # Whatever it remembers is the same failure.
            pass
        finally:
            self._on_end(reason)


def _join_writers() -> None:
    """Orbax writes in several threads, of which one fails first: what the others still write cannot be removed."""
    deadline = time.monotonic() + LINGER_SECONDS
    for thread in threading.enumerate():
        if type(thread).__module__.startswith('orbax.'):
            # Their own join raises what they met.
            threading.Thread.join(thread, max(0.0, deadline - time.monotonic()))


def failure_reason(error: BaseException) -> str:
    """Returns the reason of a failure in one short line."""
    text = ' '.join(str(error).split())
    if found := _OS_ERROR.search(text):
        return os.strerror(int(found[1]))
    if isinstance(error, OSError) and error.strerror:
        return os_message(error)
    if isinstance(error, PeerError):
        return text
    if status := http_status(error):
        return f'the bucket answers with status {status}'
    return redact(f'{type(error).__name__}: {text}')[:_MAX_REASON_CHARS]
