"""Where a run keeps what it has: a directory, a directory with a copy in a bucket, or a bucket that Orbax writes to.

--workdir=/disk/run                                   only there
--workdir=/disk/run  checkpoint.remote_dir=gs://… | s3://…    there first, and uploaded in the background
--workdir=s3://bucket/run                             the same, with a directory of the cache
--workdir=gs://bucket/run                             checkpoints go into the bucket by Orbax; the small files are
                                                      in a directory of the cache and are uploaded
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
from maxlm.storage.bucket import Bucket, PermissionDeniedError
from maxlm.storage.errors import TransientStorageError, redact
from maxlm.storage.filesystem import is_url
from maxlm.storage.retry import RetryPolicy
from maxlm.workdir.bucket_steps import complete_steps, download_step
from maxlm.workdir.file_uploads import FileMirror, fetch_files
from maxlm.workdir.files import goodput_name
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, COMMIT_MARKER, to_path
from maxlm.workdir.upload_state import UploadState
from maxlm.workdir.uploader import POLL_SECONDS, STALL_SECONDS, StepMirror, UploadProgress, UploadWorker

DIRECT = 'gs'
MIRRORED = 's3'
FILES_SECONDS = 30.0
# What the start waits for a bucket that does not answer: without it nobody knows where the run stands.
START_SECONDS = 300.0
# What the end waits without anything arriving.
END_SECONDS = 300.0
# By bucket: https://cloud.google.com/storage/docs/buckets#naming, and alike for S3.
_URL = re.compile(r'(gs|s3)://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[^?#\s]*)?')


class RunStorage:
    """A run's directory and its copy. Entered, it uploads in the background; leaving it waits for the last upload.

    Attributes:
        workdir: the local directory: config, metrics, log, and the checkpoints unless they go into a bucket directly.
        checkpoint_directory: where checkpoints are written and read.
        url: of the bucket's copy; '' = there is none.
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
            workdir: the local directory.
            url: of the bucket's copy.
            direct: checkpoints go there directly, by Orbax.
            process: the first uploads; of the others each only what it writes about itself.
            surplus: see `StepMirror`.
            poll_seconds: between two looks for new steps.
            files_seconds: between two uploads of files that grow.
            stall_seconds: without anything arriving, until it is said.
            warn: is told, from threads, of what goes wrong with uploads.
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
        """Fetches what the run wrote on other machines: its files, and its newest step unless it is complete here.

        Call it in one process, before anything reads the directory.

        Args:
            timeout_seconds: time for which requests are repeated when the bucket does not answer.

        Raises:
            TransientStorageError: the bucket did not answer. The local state may be older than that in the bucket.
            InputError: the bucket denies access, a file there is damaged, or a file cannot be written.
        """
        if self._bucket is None:
            return
        try:
            RetryPolicy(logger.warning, time.sleep).call(self.url, self._fetch, patience_seconds=timeout_seconds)
        except TransientStorageError as error:
            raise TransientStorageError(
                f'{error}; what the run has there must be known before it goes on: start again when it answers'
            ) from error

    def fetch_step(self, step: int) -> Path:
        """Fetches one step from the copy, in place of a local one that is damaged; returns its directory.

        Raises:
            TransientStorageError, InputError: it is not there or cannot be read.
        """
        if self._bucket is None or self._direct:
            raise InputError(f'step {step}: there is no copy of it to fetch')
        unfinished = self._upload_state.folder / 'fetching' / str(step)
        place = self.workdir / CHECKPOINTS_DIR / str(step)
        download_step(self._bucket, step, unfinished)
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished.rename(place)
        self._upload_state.set_step(step, self._upload_state.local_steps()[step])
        return place

    def remote_steps(self) -> list[int]:
        """The complete steps of the copy, oldest first. Raises TransientStorageError when it does not answer."""
        return complete_steps(self._bucket) if self._bucket else []

    def is_uploaded(self, step: int) -> bool:
        """Returns True if this process knows that a step is complete in the bucket."""
        if self._direct:
            return bool((self.checkpoint_directory / str(step) / COMMIT_MARKER).exists())
        return self._steps is not None and step in self._upload_state.steps and step not in self._steps.pending()

    def start(self) -> None:
        """Begins to upload."""
        if self._workers:
            self._progress.start()
        for worker in self._workers:
            worker.start()

    def close(self, *, timeout_seconds: float = END_SECONDS) -> None:
        """Waits until all is uploaded.

        Args:
            timeout_seconds: without anything arriving, after which it says what is missing and returns.
        """
        if self._files:
            self._files.skip_interval = True
        # Steps first: what is said of them belongs to the log, which is a file.
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
        """After `close`, once: what has been written since, about the end itself. What fails is said."""
        if self._files is None or self._abandoned:
            return
        try:
            self._files.work()
        except Exception as error:
            logger.warning(f'{redact(self.url)}: the last lines of the run are only in {self.workdir}: {error}')

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
            # First, because this request fails if the bucket does not exist.
            remote_steps = complete_steps(self._bucket)
            fetched = fetch_files(self._bucket, self._upload_state)
        except PermissionDeniedError as error:
            raise InputError(f'{error}; look at the name of the bucket and at the credentials') from error
        if fetched:
            logger.info(f'fetched from {redact(self.url)}: {", ".join(fetched)}')
        if self._direct:
            return
        for step in self._upload_state.steps.keys() - set(remote_steps):
            # Somebody else deleted it: it is uploaded again if it is still on the disk.
            self._upload_state.set_step(step, None)
        local_steps = self._upload_state.local_steps()
        if remote_steps and remote_steps[-1] > max(local_steps, default=-1):
            logger.info(f'fetching step {remote_steps[-1]} from {redact(self.url)}')
            self.fetch_step(remote_steps[-1])

    def _warn_missing_uploads(self) -> None:
        missing = self._steps.pending() if self._steps and not self._direct else []
        steps = f'steps {", ".join(map(str, missing))} are' if missing else 'the newest lines of log and metrics are'
        self._warn(
            f'{redact(self.url)} does not take anything any more: {steps} only in {self.workdir}; '
            f'started again there, the run uploads what is missing'
        )


def open_run_storage(
    workdir: str, *, mirror: str = '', cache: str = '~/.cache/maxlm', process: int = 0, **options: Any
) -> RunStorage:
    """The storage of a run, of which nothing is read or written yet.

    Args:
        workdir: as `--workdir` has it: a directory, or a URL of gs:// or s3://.
        mirror: as `checkpoint.remote_dir` has it: '' or such a URL, for a workdir that is a directory.
        cache: directory for runs whose workdir is a URL.
        process: of the run.
        options: of `RunStorage`.

    Raises:
        InputError: a URL that cannot be used, or two of them.
    """
    if mirror:
        check_url('checkpoint.remote_dir', mirror)
        if is_url(workdir):
            raise InputError(
                f'checkpoint.remote_dir={redact(mirror)}: --workdir={redact(workdir)} is in a bucket already; '
                f'give a directory, or no mirror'
            )
        return RunStorage(Path(workdir), mirror, process=process, **options)
    if not is_url(workdir):
        return RunStorage(Path(workdir))
    check_url('--workdir', workdir)
    direct = workdir.startswith(f'{DIRECT}://')
    return RunStorage(cache_directory(workdir, cache), workdir, direct=direct, process=process, **options)


def check_url(key: str, url: str) -> None:
    """Refuses a URL that a run cannot be kept at; the message names `key`, and nothing of it that may be secret."""
    if _URL.fullmatch(url):
        return
    shown = redact(url).partition('?')[0]
    raise InputError(
        f'{key}={shown}: needs the form gs://bucket/run or s3://bucket/run; credentials are not part of it, they come '
        f'from the environment'
    )


def cache_directory(url: str, cache: str, *, kind: str = 'runs') -> Path:
    """The local directory of a run in a bucket: the same for the same URL, and no other's; one for each `kind`."""
    url = url.rstrip('/')
    name = re.sub(r'[^A-Za-z0-9._-]+', '-', url.partition('://')[2]).strip('-.')[-80:]
    return Path(cache).expanduser() / kind / f'{name}-{hashlib.sha256(url.encode()).hexdigest()[:8]}'
