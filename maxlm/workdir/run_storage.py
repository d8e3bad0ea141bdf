"""Storage of a run: a directory, a directory mirrored to a bucket, or a bucket that Orbax writes to.

--workdir=/disk/run                                   local only
--workdir=/disk/run  checkpoint.remote_dir=gs://… | s3://…    local first, then uploaded in the background
--workdir=s3://bucket/run                             the same, with a directory of the cache that all processes share
--workdir=gs://… | s3://…                             Orbax writes checkpoints into the bucket; small files are in a
                                                      directory of the cache and are uploaded. s3:// only if the
                                                      processes do not share the cache.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.storage.bucket import ACCESS_REMEDY, Bucket, PermissionDeniedError
from maxlm.storage.errors import TransientStorageError, redact
from maxlm.storage.filesystem import is_url
from maxlm.storage.retry import RetryPolicy
from maxlm.workdir.bucket_steps import complete_steps, download_step
from maxlm.workdir.file_uploads import FileMirror, fetch_files
from maxlm.workdir.files import goodput_name
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, COMMIT_MARKER, to_path
from maxlm.workdir.upload_state import UploadState
from maxlm.workdir.uploader import POLL_SECONDS, STALL_SECONDS, StepMirror, UploadProgress, UploadWorker

MIRRORED = 's3'
FILES_SECONDS = 30.0
# Time that the start waits for a bucket that does not respond. Only the bucket shows the latest state of the run.
START_SECONDS = 300.0
# Time that `close` waits without progress.
END_SECONDS = 300.0
# Bucket names: https://cloud.google.com/storage/docs/buckets#naming, and similar for S3.
_URL = re.compile(r'(gs|s3)://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[^?#\s]*)?')


class RunStorage:
    """Workdir of a run and its copy in a bucket. The context uploads in the background and waits for the last upload.

    Attributes:
        workdir: local directory with config, metrics and log. It contains the checkpoints unless Orbax writes them into
            the bucket.
        checkpoint_directory: directory in which checkpoints are written and read.
        url: URL of the copy; '' = no copy.
    """

    def __init__(
        self,
        workdir: Path,
        url: str = '',
        *,
        direct: bool = False,
        process: int = 0,
        surplus: Callable[[list[int]], Collection[int]] | None = None,
        poll_seconds: float = POLL_SECONDS,
        files_seconds: float = FILES_SECONDS,
        stall_seconds: float = STALL_SECONDS,
        warn: Callable[[str], None] = logger.warning,
    ):
        """
        Args:
            workdir: local directory.
            url: URL of the copy.
            direct: Orbax writes checkpoints to `url`.
            process: process index. Process 0 uploads all files. Other processes upload only their own logs.
            surplus: see `StepMirror`.
            poll_seconds: time between two checks for new steps.
            files_seconds: time between two uploads of growing files.
            stall_seconds: time without progress until a warning.
            warn: called from threads with upload problems.
        """
        self.workdir = workdir
        self.url = url.rstrip('/')
        self._direct = direct
        self.checkpoint_directory = to_path(self.url if direct else workdir) / CHECKPOINTS_DIR
        self._warn = warn
        self._workers: list[UploadWorker] = []
        self._bucket: Bucket | None = None
        self._files: FileMirror | None = None
        self._steps: StepMirror | None = None
        self._abandoned = False
        if not url:
            return
        bucket = Bucket(self.url)
        self._upload_state = UploadState(workdir, self.url)
        self._progress = UploadProgress(self.url, stall_seconds, warn)
        files = partial(
            FileMirror,
            bucket,
            self._upload_state,
            on_bytes=self._progress.record_arrival,
            interval_seconds=files_seconds,
        )
        if process:
            own = (goodput_name(process), f'devices-{process}.jsonl')
            self._files = files(names=(), patterns=own)
            self._add_worker('upload-files', own[0], self._files.work, poll_seconds)
            return
        self._bucket = bucket
        self._files = files()
        self._steps = StepMirror(self._bucket, self._upload_state, progress=self._progress, surplus=surplus)
        if not direct:
            self._add_worker('upload-steps', CHECKPOINTS_DIR, self._steps.work, poll_seconds)
        self._add_worker('upload-files', 'metrics.jsonl', self._files.work, poll_seconds)

    def fetch(self, *, timeout_seconds: float = START_SECONDS) -> None:
        """Fetches the files that the run wrote on other machines, and its newest step unless it is complete locally.

        Call it in one process, before the workdir is read.

        Args:
            timeout_seconds: time for which requests are retried if the bucket does not respond.

        Raises:
            TransientStorageError: the bucket did not respond. The local state may be older than the bucket's.
            InputError: the bucket denies access, a file in it is corrupt, or a file cannot be written.
        """
        if self._bucket is None:
            return
        try:
            RetryPolicy(logger.warning, time.sleep).call(self.url, self._fetch, patience_seconds=timeout_seconds)
        except TransientStorageError as error:
            raise TransientStorageError(
                f'{error}; the run cannot start without its state in the bucket; run the command again when the bucket '
                'responds'
            ) from error

    def fetch_step(self, step: int) -> Path:
        """Fetches one step from the copy, replaces a corrupt local one, and returns its directory.

        Raises:
            TransientStorageError: the bucket does not respond.
            InputError: there is no copy, or the step cannot be read.
        """
        if self._bucket is None or self._direct:
            raise InputError(f'step {step}: no remote copy exists; choose another step')
        unfinished = self._upload_state.folder / 'fetching' / str(step)
        place = self.workdir / CHECKPOINTS_DIR / str(step)
        download_step(self._bucket, step, unfinished)
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished.rename(place)
        self._upload_state.set_step(step, self._upload_state.local_steps()[step])
        return place

    def remote_steps(self) -> list[int]:
        """Returns the complete steps of the copy, oldest first. Raises TransientStorageError if it does not respond."""
        return complete_steps(self._bucket) if self._bucket else []

    def is_uploaded(self, step: int) -> bool:
        """Returns True if this process knows that a step is complete in the bucket."""
        if self._direct:
            return bool((self.checkpoint_directory / str(step) / COMMIT_MARKER).exists())
        return self._steps is not None and step in self._upload_state.steps and step not in self._upload_state.pending()

    def start(self) -> None:
        """Starts the uploads."""
        if self._workers:
            self._progress.start()
        for worker in self._workers:
            worker.start()

    def close(self, *, timeout_seconds: float = END_SECONDS) -> None:
        """Waits until all files are uploaded.

        Args:
            timeout_seconds: time without progress after which it warns about missing uploads and returns.
        """
        if self._files:
            self._files.skip_interval = True
        # Steps first, because the messages about them belong to the log file.
        for worker in self._workers:
            self._progress.record_arrival()
            worker.closing.set()
            while worker.is_alive and self._progress.idle_seconds <= timeout_seconds:
                time.sleep(0.02)
            if worker.is_alive:
                worker.abandon()
                self._abandoned = True
                self._warn_missing_uploads()
        if self._workers:
            self._progress.stop()

    def upload_last_files(self) -> None:
        """Uploads the files written since `close`, such as the final events. Errors are logged. Call it once."""
        if self._files is None or self._abandoned:
            return
        try:
            self._files.work()
        except Exception as error:
            logger.warning(
                f'{redact(self.url)}: the last log lines are not uploaded and only in {self.workdir}: {error}'
            )

    def __enter__(self) -> RunStorage:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_worker(self, name: str, below: str, work: Callable[[], bool], poll_seconds: float) -> None:
        url = f'{self.url}/{below}'
        self._workers.append(
            UploadWorker(name, url, work, progress=self._progress, poll_seconds=poll_seconds, warn=self._warn)
        )

    def _fetch(self) -> None:
        """Fetches files and the newest step. Another call resumes after a TransientStorageError."""
        assert self._bucket
        try:
            # Send this request first, because it fails if the bucket does not exist.
            remote_steps = complete_steps(self._bucket)
            fetched = fetch_files(self._bucket, self._upload_state)
        except PermissionDeniedError as error:
            raise InputError(f'{error}; {ACCESS_REMEDY}') from error
        if fetched:
            logger.info(f'fetched from {redact(self.url)}: {", ".join(fetched)}')
        if self._direct:
            return
        for step in self._upload_state.steps.keys() - set(remote_steps):
            # Another process deleted the step in the bucket. It is uploaded again if it exists locally.
            self._upload_state.set_step(step, None)
        local_steps = self._upload_state.local_steps()
        if remote_steps and remote_steps[-1] > max(local_steps, default=-1):
            logger.info(f'fetching checkpoint of step {remote_steps[-1]} from {redact(self.url)}')
            self.fetch_step(remote_steps[-1])

    def _warn_missing_uploads(self) -> None:
        missing = self._upload_state.pending() if self._steps and not self._direct else []
        steps = f'steps {", ".join(map(str, missing))} are' if missing else 'the newest lines of log and metrics are'
        self._warn(
            f'{redact(self.url)}: uploads have stalled: {steps} only in {self.workdir}; restart the run on this '
            'machine to upload the rest'
        )


def open_run_storage(
    workdir: str,
    *,
    mirror: str = '',
    cache: str = '~/.cache/maxlm',
    process: int = 0,
    is_shared: bool = True,
    **options: Any,
) -> RunStorage:
    """Creates the storage of a run, without reading or writing anything.

    Args:
        workdir: value of `--workdir`: a directory, or a gs:// or s3:// URL.
        mirror: value of `checkpoint.remote_dir`: '', or a gs:// or s3:// URL if the workdir is a directory.
        cache: cache directory for runs whose workdir is a URL.
        process: index of this process in the run.
        is_shared: the processes of the run share the cache, so they can write one checkpoint into it.
        options: options of `RunStorage`.

    Raises:
        InputError: a URL is not valid, or both arguments are URLs.
    """
    if mirror:
        check_url('checkpoint.remote_dir', mirror)
        if is_url(workdir):
            raise InputError(
                f'checkpoint.remote_dir={redact(mirror)}: --workdir={redact(workdir)} is already in a bucket; use a '
                'local --workdir, or set checkpoint.remote_dir to ""'
            )
        return RunStorage(Path(workdir), mirror, process=process, **options)
    if not is_url(workdir):
        return RunStorage(Path(workdir))
    check_url('--workdir', workdir)
    direct = not (workdir.startswith(f'{MIRRORED}://') and is_shared)
    return RunStorage(cache_directory(workdir, cache), workdir, direct=direct, process=process, **options)


def check_url(key: str, url: str) -> None:
    """Raises InputError if a run cannot be stored at a URL. The message names `key` and contains no secrets."""
    if _URL.fullmatch(url):
        return
    shown = redact(url).partition('?')[0]
    raise InputError(
        f'{key}={shown}: must have the form gs://bucket/run or s3://bucket/run, without credentials; these are read '
        'from the environment'
    )


def cache_directory(url: str, cache: str, *, kind: str = 'runs') -> Path:
    """Returns the local directory of a run in a bucket. It is unique for each URL and `kind`."""
    url = url.rstrip('/')
    name = re.sub(r'[^A-Za-z0-9._-]+', '-', url.partition('://')[2]).strip('-.')[-80:]
    return Path(cache).expanduser() / kind / f'{name}-{hashlib.sha256(url.encode()).hexdigest()[:8]}'
