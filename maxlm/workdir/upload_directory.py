"""Uploads a local directory. It is complete in the bucket when its last file is written and all files are verified.

Running the command again resumes an interrupted upload.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from maxlm.errors import InputError, explain_os_errors, os_message
from maxlm.log import BYTES, logger, progress_bar
from maxlm.storage.bucket import ACCESS_REMEDY, Bucket, PermissionDeniedError
from maxlm.storage.check_directory import check_links
from maxlm.storage.errors import TransientStorageError, redact
from maxlm.storage.retry import RetryPolicy
from maxlm.workdir.bucket_steps import upload_files
from maxlm.workdir.run_storage import cache_directory, check_url

# Timeout for a bucket that does not respond.
TIMEOUT_SECONDS = 300.0
RETRY_ADVICE = 'run the same command again to resume the upload'

T = TypeVar('T')


class Upload:
    """Upload of a directory of the cache to a bucket.

    Attributes:
        url: URL of the directory in the bucket.
        folder: local directory; the caller writes its files.
    """

    def __init__(self, option: str, url: str, *, cache: str, last: str, folder: Path | None = None):
        """
        Args:
            option: option with the URL, for messages.
            url: gs://… or s3://….
            cache: directory of the cache.
            last: name of the file that completes the directory; it is uploaded last.
            folder: local directory, which remains after the upload; None = one in the cache.

        Raises:
            InputError: the URL is not valid.
        """
        check_url(option, url)
        self.url = url.rstrip('/')
        self._option = option
        self._last = last
        self._bucket = Bucket(self.url)
        self._cache_path = cache_directory(self.url, cache, kind='uploads')
        self.folder = folder or self._cache_path / self.url.rpartition('/')[2]
        # Shows that this machine started the upload, so that existing files in the bucket belong to it.
        self._started_marker = self._cache_path / '.begun'

    def is_complete(self) -> bool:
        """Returns True if the bucket contains the last file. Raises InputError if the bucket does not respond."""
        return self._retry(lambda: self._bucket.list_one(self._last)) is not None

    def check_new(self) -> None:
        """Raises InputError unless the bucket's directory is empty or is an interrupted upload of this machine."""
        remote_files = self._retry(self._bucket.list)
        if remote_files and (self._last in remote_files or not self._started_marker.exists()):
            raise InputError(f'{self._option}={redact(self.url)}: already exists; choose a new URL')

    def begin(self) -> None:
        """Creates the parent of the local directory. Raises InputError if it cannot be written."""
        with explain_os_errors(self._cache_path, 'choose another cache directory'):
            self._cache_path.mkdir(parents=True, exist_ok=True)

    def reopen(self) -> None:
        """Deletes the last file from the bucket, so that the directory can be uploaded again."""
        self._retry(partial(self._bucket.delete, [self._last]))

    def discard(self) -> None:
        """Removes the local directory."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, *, show: bool) -> None:
        """Uploads the files of the local directory, verifies them, and removes a local directory of the cache.

        Skips hidden files, which belong to unfinished writes.

        Raises:
            InputError: the bucket refuses an upload or does not respond. The local directory remains.
        """
        check_links(self.folder)
        paths = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob('[!.]*')}
        try:
            files = {name: self._bucket.describe(path) for name, path in paths.items() if path.is_file()}
        except OSError as error:
            raise InputError(f'{error.filename}: {os_message(error)}; check its permissions') from error
        self._started_marker.touch()
        lock = threading.Lock()
        with progress_bar('upload', total=sum(file.size for file in files.values()), unit=BYTES, show=show) as bar:

            def on_bytes(num_bytes: int) -> None:
                with lock:
                    bar.update(num_bytes)

            final = {self._last: files.pop(self._last)}
            self._retry(partial(upload_files, self._bucket, '', files, on_bytes, read_back=True))
            if self.is_complete():
                raise InputError(
                    f'{redact(self.url)}/{self._last}: was written by another process in the meantime; choose a new URL'
                )
            self._retry(partial(upload_files, self._bucket, '', final, on_bytes, read_back=True))
        shutil.rmtree(self._cache_path, ignore_errors=True)

    def _retry(self, request: Callable[[], T]) -> T:
        return retry_requests(self.url, request, advice=RETRY_ADVICE)


def retry_requests(url: str, request: Callable[[], T], *, advice: str) -> T:
    """Returns the result of requests to a bucket. Repeats them for TIMEOUT_SECONDS if the bucket does not respond.

    Raises:
        InputError: the bucket refuses a request or does not respond. `advice` is the remedy in the second case.
    """

    def send() -> T:
        try:
            return request()
        except PermissionDeniedError as error:
            raise InputError(f'{error}; {ACCESS_REMEDY}') from error

    try:
        return RetryPolicy(logger.warning, time.sleep).call(url, send, patience_seconds=TIMEOUT_SECONDS)
    except TransientStorageError as error:
        raise InputError(f'{error}; {advice}') from error
