"""Async checkpoint: saves one step while training continues."""

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

# Timeout of a save.
TIMEOUT_SECONDS = 3600
# Timeout for the remaining writer threads after one of them failed.
LINGER_SECONDS = 10.0

# Item with the arrays of the batch source. It is missing if the source has none.
SOURCE = 'source'

# Format of operating-system errors in TensorStore's messages.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_MAX_REASON_CHARS = 160


class AsyncSave:
    """Asynchronous save of one step. Use a new instance for each step, because Orbax keeps errors of a failed save."""

    def __init__(self, transaction: SaveTransaction, on_end: Callable[[str], None]):
        """
        Args:
            transaction: coordinates the save with the other processes.
            on_end: called once, in any thread, with the failure reason, or '' after a successful save.
        """
        self._transaction = transaction
        self._on_end = on_end
        # If Orbax fails to create directories in the background, its threads wait for minutes, so a single process
        # creates them in the foreground. With several processes, only process 0 would create them while the others wait
        # in a collective.
        options = ocp.options.AsyncOptions(
            timeout_secs=TIMEOUT_SECONDS,
            barrier_sync_fn=transaction.barrier,
            create_directories_asynchronously=jax.process_count() > 1,
        )
        handlers: dict[str, Any] = {
            name: ocp.StandardCheckpointHandler() for name in ('params', 'ema', 'optimizer', SOURCE)
        }
        handlers |= {name: ocp.JsonCheckpointHandler() for name in ('progress', 'data', 'checksums')}
        composite = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(async_options=options), **handlers
        )
        self._checkpointer = ocp.AsyncCheckpointer(composite, async_options=options)
        self._thread = threading.Thread(target=self._wait, name='save')

    def begin(self, directory: epath.Path, items: ocp.args.Composite) -> None:
        """Copies the arrays off the device and starts writing them. Reports failures to `on_end`."""
        # The filter is permanent, because threads of a failed save still log errors after its end.
        dedupe_logs()
        try:
            # `force` deletes the remains of an earlier attempt.
            self._checkpointer.save(directory, args=items, force=True)
        except Exception as error:
            self._end(error)
        else:
            self._thread.start()

    def finish(self, seconds: float | None = None) -> bool:
        """Waits at most `seconds` for the save to end. Returns True if it has ended, successfully or not."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _wait(self) -> None:
        try:
            self._checkpointer.wait_until_finished()
        # Orbax re-raises any exception of its threads.
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
            # The checkpointer re-raises the failure that is already being reported.
            pass
        finally:
            self._on_end(reason)


def _join_writers() -> None:
    """Waits for Orbax's other writer threads after one failed. Files cannot be removed while they are written."""
    deadline = time.monotonic() + LINGER_SECONDS
    for thread in threading.enumerate():
        if type(thread).__module__.startswith('orbax.'):
            # `join` of Orbax's thread class raises the error of the thread.
            threading.Thread.join(thread, max(0.0, deadline - time.monotonic()))


def failure_reason(error: BaseException) -> str:
    """Returns the failure reason in one short line."""
    text = ' '.join(str(error).split())
    if found := _OS_ERROR.search(text):
        return os.strerror(int(found[1]))
    if isinstance(error, OSError) and error.strerror:
        return os_message(error)
    if isinstance(error, PeerError):
        return text
    if status := http_status(error):
        return f'the bucket returned status {status}'
    return redact(f'{type(error).__name__}: {text}')[:_MAX_REASON_CHARS]
