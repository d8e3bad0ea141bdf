"""Uploads the steps of a run in the background, newest first, and deletes steps that the run deleted."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from maxlm.errors import InputError
from maxlm.formatting import format_bytes, format_duration
from maxlm.log import logger
from maxlm.storage.bucket import Bucket, LocalFile
from maxlm.storage.download import ClosedError
from maxlm.storage.errors import TransientStorageError, redact
from maxlm.storage.retry import RetryPolicy
from maxlm.workdir.bucket_steps import MANIFEST, complete_steps, delete_step, listed_steps, upload_step
from maxlm.workdir.step_dirs import COMMIT_MARKER
from maxlm.workdir.upload_state import StagingDir, UploadState

# Time between two checks for new steps.
POLL_SECONDS = 1.0
# Time without progress during an upload until a warning.
STALL_SECONDS = 45.0
# Maximum retry delay while the run waits only for the bucket.
MAX_WAIT_AT_END = 5.0


class UploadProgress:
    """Progress of a run's uploads, shared by its threads. Warns when an upload stalls."""

    def __init__(self, url: str, stall_seconds: float = STALL_SECONDS, warn: Callable[[str], None] = logger.warning):
        self._warn = warn
        self._url = redact(url)
        self._stall_seconds = stall_seconds
        self._lock = threading.Lock()
        self._busy = 0
        self._last = self._last_arrival = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name='upload-stall')

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def record_arrival(self, *_: object) -> None:
        """Records that data arrived in the bucket."""
        with self._lock:
            self._last = self._last_arrival = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Returns the seconds since the bucket last received data. Failed attempts do not count."""
        with self._lock:
            return time.monotonic() - self._last_arrival

    def __enter__(self) -> UploadProgress:
        with self._lock:
            self._last = self._last if self._busy else time.monotonic()
            self._busy += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._busy -= 1

    def _watch(self) -> None:
        bound = self._stall_seconds
        while not self._stop.wait(min(self._stall_seconds / 4, 1.0)):
            with self._lock:
                silent = time.monotonic() - self._last if self._busy else 0.0
            if silent < self._stall_seconds:
                bound = self._stall_seconds
            elif silent >= bound:
                bound *= 4
                self._warn(f'{self._url}: no upload progress for {silent:.0f} s; training continues')


class UploadWorker:
    """Thread that repeats `work`, even after errors, until it is closed and no work is left."""

    def __init__(
        self,
        name: str,
        url: str,
        work: Callable[[], bool],
        *,
        progress: UploadProgress,
        poll_seconds: float,
        warn: Callable[[str], None] = logger.warning,
    ):
        """
        Args:
            name: name of the thread.
            url: URL in warnings.
            work: does one unit of work and returns True if there was any. It is repeated after an error.
            progress: measures the time of each unit.
            poll_seconds: time between two checks for work.
            warn: called with errors.
        """
        self._url = url
        self._work = work
        self._progress = progress
        self._poll_seconds = poll_seconds
        self.closing = threading.Event()
        self._abandoned = threading.Event()
        self._retries = RetryPolicy(warn, self._wait)
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def abandon(self) -> None:
        """Ends the thread before its next attempt."""
        self._abandoned.set()

    def _run(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                # `closing` is read before the attempt, because all remaining work exists before it is set.
                closing = self.closing.is_set()
                if self._retries.call(self._url, self._attempt):
                    continue
                if closing:
                    return
                self.closing.wait(self._poll_seconds)

    def _attempt(self) -> bool:
        if self._abandoned.is_set():
            raise ClosedError
        try:
            with self._progress:
                return self._work()
        except TransientStorageError:
            raise
        except Exception as error:
            # No upload error may end the run, such as a full disk or a changed file.
            line = str(error) if isinstance(error, InputError) else f'{type(error).__name__}: {error}'
            raise TransientStorageError(redact(f'{self._url}: upload failed: {line}')) from error

    def _wait(self, seconds: float) -> None:
        if not self.closing.is_set():
            self.closing.wait(seconds)
        else:
            self._abandoned.wait(min(seconds, MAX_WAIT_AT_END))


class StepMirror:
    """Uploads and deletes steps so that the bucket matches a directory."""

    def __init__(
        self,
        bucket: Bucket,
        upload_state: UploadState,
        *,
        progress: UploadProgress,
        surplus: Callable[[list[int]], Collection[int]] | None = None,
    ):
        """
        Args:
            bucket: bucket of the run.
            upload_state: upload state of the run's workdir.
            progress: notified when data arrives.
            surplus: selects the steps of the bucket that are not needed. It applies only to steps that were never in
                this workdir. Other steps are deleted when the run deletes them. Without it, steps of other machines are
                kept.
        """
        self._bucket = bucket
        self._upload_state = upload_state
        self._progress = progress
        self._surplus = surplus
        self._staging = StagingDir(upload_state)
        # Cached digests of the step that is being uploaded, because computing them is slow.
        self._described: tuple[Path, dict[str, LocalFile]] | None = None

    def work(self) -> bool:
        """Uploads one step, or deletes remote steps that the run has deleted locally. Returns True if it did either.

        Raises:
            BucketError: a request failed.
        """
        local = self._upload_state.local_steps()
        if pending := self._upload_state.pending(local):
            self._upload(pending[-1], local[pending[-1]])
            return True
        self._staging.clear()
        gone = [
            step for step in self._upload_state.steps.keys() - local.keys() if not self._upload_state.is_set_aside(step)
        ]
        # Without local steps nothing is deleted, so at least one complete step remains in the bucket.
        if not gone or not local:
            return False
        for step in gone:
            delete_step(self._bucket, step)
            self._upload_state.set_step(step, None)
            self._progress.record_arrival()
        return True

    def _upload(self, step: int, fingerprint: str) -> None:
        started = time.monotonic()
        try:
            folder = self._staging.stage(step, fingerprint)
            files = self._describe(folder)
            upload_step(self._bucket, step, files, self._progress.record_arrival)
        except FileNotFoundError:
            # The run deleted the step, and the step could not be linked.
            self._described = None
            return
        self._described = None
        self._staging.clear()
        self._upload_state.set_step(step, fingerprint)
        self._progress.record_arrival()
        size = sum(file.size for file in files.values())
        logger.info(
            f'uploaded checkpoint of step {step} to {redact(self._bucket.url)} ({format_bytes(size)}, '
            f'{format_duration(time.monotonic() - started)})'
        )
        self._delete_orphans(step)

    def _describe(self, folder: Path) -> dict[str, LocalFile]:
        if self._described is None or self._described[0] != folder:
            paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob('*') if path.is_file()}
            files = {}
            for name, path in sorted(paths.items()):
                if name not in (COMMIT_MARKER, MANIFEST):
                    files[name] = self._bucket.describe(path)
                    # Reading counts as progress, because it takes long for a large step.
                    self._progress.record_arrival()
            self._described = folder, files
        return self._described[1]

    def _delete_orphans(self, newest: int) -> None:
        """Deletes steps left by other machines: steps that are not needed, and incomplete steps older than `newest`."""
        local = self._upload_state.local_steps()
        others = {
            step: names
            for step, names in listed_steps(self._bucket).items()
            if step not in local and step not in self._upload_state.steps
        }
        unwanted = {step for step, names in others.items() if COMMIT_MARKER not in names and step < newest}
        if self._surplus:
            unwanted |= set(self._surplus(complete_steps(self._bucket))) & others.keys() - {newest}
        for step in sorted(unwanted):
            delete_step(self._bucket, step, others[step])
            self._progress.record_arrival()
