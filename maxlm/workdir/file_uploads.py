"""Uploads the small files of a run (log, metrics, config) when they change."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence

from maxlm.config.serialization import public_json
from maxlm.log import RUN_LOG
from maxlm.storage.atomic import replace_file
from maxlm.storage.bucket import Bucket
from maxlm.storage.check_directory import is_inside
from maxlm.storage.download import RemoteFile, fetch_file
from maxlm.storage.regular_files import read_text
from maxlm.workdir.files import ATTENTION_FILE, CONFIG, EXPERT_LOADS_FILE, MODEL_FILES, SAMPLES_FILE, goodput_name
from maxlm.workdir.files import EVENTS_FILE as EVENTS
from maxlm.workdir.files import METRICS_FILE as METRICS
from maxlm.workdir.files import WANDB_ID_FILE as WANDB_ID
from maxlm.workdir.upload_state import UploadState

# A run that resumes on another machine downloads these files.
NAMES = (
    *(CONFIG, *MODEL_FILES),
    *(METRICS, RUN_LOG, EVENTS, goodput_name(0), 'devices.jsonl', SAMPLES_FILE, EXPERT_LOADS_FILE, ATTENTION_FILE),
    WANDB_ID,
)
# Upload-only files: every attempt of a run writes new ones.
UPLOAD_ONLY_PATTERNS = ('report.html', 'tensorboard/**/*', 'profile/**/*', 'wandb/**/*')
# Suffix of a local file that was replaced by the bucket's version.
REPLACED_SUFFIX = '.replaced'


class FileMirror:
    """Uploads the files that changed since their last upload."""

    def __init__(
        self,
        bucket: Bucket,
        upload_state: UploadState,
        *,
        on_bytes: Callable[..., None],
        interval_seconds: float,
        names: Sequence[str] = NAMES,
        patterns: Sequence[str] = UPLOAD_ONLY_PATTERNS,
    ):
        """
        Args:
            bucket: bucket of the run.
            upload_state: upload state of the run's workdir.
            on_bytes: called with the progress.
            interval_seconds: minimum time between two uploads. If an upload takes longer than a tenth of it, the next
                one waits ten times as long as the upload took.
            names: files that are compared with the bucket's when the run starts.
            patterns: glob patterns of upload-only files.
        """
        self._bucket = bucket
        self._upload_state = upload_state
        self._on_bytes = on_bytes
        self._interval_seconds = interval_seconds
        self._names, self._patterns = names, patterns
        self._next_upload_time = 0.0
        self._uploaded: dict[str, tuple[int, int]] = {}
        self.skip_interval = False

    def work(self) -> bool:
        """Uploads changed files if an upload is due. Always returns False, because no work is left afterwards.

        Raises:
            BucketError: an upload failed.
        """
        started = time.monotonic()
        if started < self._next_upload_time and not self.skip_interval:
            return False
        for name in self._existing_files():
            status = (self._upload_state.workdir / name).stat()
            version = status.st_size, status.st_mtime_ns
            if self._uploaded.get(name) != version:
                self._upload(name)
                self._uploaded[name] = version
        self._next_upload_time = time.monotonic() + max(self._interval_seconds, 10 * (time.monotonic() - started))
        return False

    def _existing_files(self) -> list[str]:
        workdir = self._upload_state.workdir
        # The targets of links match the patterns themselves.
        found = {path for pattern in self._patterns for path in workdir.glob(pattern) if not path.is_symlink()}
        names = [*self._names, *(path.relative_to(workdir).as_posix() for path in sorted(found))]
        # A link must not upload a file outside the workdir.
        return [name for name in names if (workdir / name).is_file() and is_inside(workdir / name, workdir)]

    def _upload(self, name: str) -> None:
        # Upload a copy, because the file may change during the upload.
        copy = self._upload_state.folder / 'outgoing' / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._upload_state.workdir / name, copy)
        if name == CONFIG:
            replace_file(copy, public_json(read_text(copy)))
        digest = self._bucket.describe(copy).digest
        digests = self._upload_state.files.get(name, [])
        if digests[-1:] != [digest]:
            if name in self._names:
                # Record both digests: after a kill during the upload, the bucket has either version.
                self._upload_state.set_file(name, [*digests[-1:], digest])
            self._bucket.put_file(name, copy, self._on_bytes)
            if name in self._names:
                self._upload_state.set_file(name, [digest])
        copy.unlink()


def fetch_files(bucket: Bucket, upload_state: UploadState) -> list[str]:
    """Fetches files that another machine wrote last. Renames local files that differ.

    Args:
        bucket: bucket of the run.
        upload_state: upload state of the run's workdir.

    Returns:
        Names of the fetched files.

    Raises:
        TransientStorageError: the bucket does not respond. Another call resumes.
        InputError: a file is corrupt or cannot be written.
    """
    fetched = []
    for name in NAMES:
        listed = bucket.list_one(name)
        path = upload_state.workdir / name
        if listed is None:
            # The file was deleted in the bucket, so forget its earlier upload.
            if name in upload_state.files:
                upload_state.set_file(name, [])
            continue
        if path.is_file():
            if listed.digest in (*upload_state.files.get(name, []), bucket.describe(path).digest):
                continue
            os.replace(path, path.with_name(name + REPLACED_SUFFIX))
        fetch_file(RemoteFile(f'{bucket.url}/{name}', path, listed.size))
        upload_state.set_file(name, [listed.digest])
        fetched.append(name)
    return fetched
