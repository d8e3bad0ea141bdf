"""Steps of a run in a bucket: `URL/checkpoints/<step>/…`, complete when the last object is written.

An upload first writes the files of a step, then `mirror.json` with their sizes and checksums, then
`commit_success.txt`, which is also Orbax's commit marker. A deletion deletes the commit marker first.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from maxlm.errors import InputError
from maxlm.storage.bucket import Bucket, BucketError, Listed, LocalFile
from maxlm.storage.download import RemoteFile, fetch_file
from maxlm.storage.errors import redact
from maxlm.storage.json_text import parse_json
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, COMMIT_MARKER

MANIFEST = 'mirror.json'
FORMAT_VERSION = 1
THREADS = 4
# Content of Orbax's markers.
MARKER_CONTENT = b'Checkpoint commit was successful'


def complete_steps(bucket: Bucket) -> list[int]:
    """Returns the complete steps of a run, oldest first. Raises BucketError if the bucket cannot be listed."""
    return sorted(step for step, names in listed_steps(bucket).items() if COMMIT_MARKER in names)


def listed_steps(bucket: Bucket) -> dict[int, set[str]]:
    """Returns the object names of all steps, including incomplete ones. Raises BucketError."""
    steps: dict[int, set[str]] = {}
    for name in bucket.list(CHECKPOINTS_DIR):
        _, step, rest = (*name.split('/', 2), '', '')[:3]
        if step.isdigit() and rest:
            steps.setdefault(int(step), set()).add(rest)
    return steps


def upload_step(bucket: Bucket, step: int, files: dict[str, LocalFile], on_bytes: Callable[[int], None]) -> None:
    """Uploads a step. Skips files that the bucket contains with the same content.

    Args:
        bucket: bucket of the run.
        step: number of the step. Another step of this number in the bucket is replaced.
        files: name within the step → file.
        on_bytes: called with the progress.

    Raises:
        BucketError: the upload failed. Another call resumes it.
        OSError: a file cannot be read.
    """
    folder = f'{CHECKPOINTS_DIR}/{step}'
    existing = _list_files(bucket, folder)
    manifest = json.dumps(
        {'format_version': FORMAT_VERSION, 'files': {name: [f.size, f.sha256] for name, f in sorted(files.items())}}
    ).encode()
    if COMMIT_MARKER in existing:
        if MANIFEST in existing and bucket.read(f'{folder}/{MANIFEST}') == manifest:
            return
        # The step is incomplete from here on. Files with the same content need not be uploaded again.
        bucket.delete([f'{folder}/{COMMIT_MARKER}'])
        del existing[COMMIT_MARKER]
    markers = {f'{name.partition("/")[0]}/{COMMIT_MARKER}' for name in files if '/' in name} - files.keys()
    bucket.delete(f'{folder}/{name}' for name in sorted(existing.keys() - files.keys() - markers))
    upload_files(bucket, folder, files, on_bytes)
    for name in sorted(markers):
        bucket.put(f'{folder}/{name}', MARKER_CONTENT)
    bucket.put(f'{folder}/{MANIFEST}', manifest)
    bucket.put(f'{folder}/{COMMIT_MARKER}', MARKER_CONTENT)


def upload_files(
    bucket: Bucket,
    folder: str,
    files: dict[str, LocalFile],
    on_bytes: Callable[[int], None],
    *,
    read_back: bool = False,
) -> None:
    """Uploads files to a directory of a bucket and verifies them. Skips files that exist with the same content.

    Args:
        bucket: bucket of the directory.
        folder: name of the directory; '' = the bucket's own URL.
        files: name within the directory → file.
        on_bytes: called with the progress.
        read_back: read a file again if the bucket reports no comparable checksum.

    Raises:
        BucketError: a file is missing or has another content. Another call resumes the upload.
        OSError: a file cannot be read.
    """
    prefix = f'{folder}/' if folder else ''
    existing = _list_files(bucket, folder)
    missing = {name: file for name, file in files.items() if existing.get(name) != Listed(file.size, file.digest)}
    _run_all('upload', [partial(bucket.put_file, prefix + name, f.path, on_bytes) for name, f in missing.items()])
    existing = _list_files(bucket, folder)
    for name, file in files.items():
        _check_uploaded(bucket, prefix + name, file, existing.get(name), read_back=read_back)


def upload_file(bucket: Bucket, name: str, path: Path) -> None:
    """Uploads one file and verifies it, without listing a directory. Skips a file that exists with the same content.

    Raises:
        BucketError: the uploaded content differs, or the upload failed.
        OSError: the file cannot be read.
    """
    file = bucket.describe(path)
    if bucket.list_one(name) == Listed(file.size, file.digest):
        return
    bucket.put_file(name, path, lambda num_bytes: None)
    _check_uploaded(bucket, name, file, bucket.list_one(name), read_back=True)


def _check_uploaded(bucket: Bucket, name: str, file: LocalFile, found: Listed | None, *, read_back: bool) -> None:
    """Raises BucketError unless the object `found` has the content of a local file."""
    is_same = found is not None and found.size == file.size
    if is_same and found != Listed(file.size, file.digest):
        is_same = not bucket.has_md5_digests and (not read_back or bucket.sha256(name, file.size) == file.sha256)
    if not is_same:
        raise BucketError(f'{redact(bucket.url)}/{name}: the uploaded content differs from the local file')


def delete_step(bucket: Bucket, step: int, names: Iterable[str] | None = None) -> None:
    """Deletes a step. It is incomplete from the first request on. Raises BucketError."""
    folder = f'{CHECKPOINTS_DIR}/{step}'
    names = _list_files(bucket, folder) if names is None else names
    bucket.delete(f'{folder}/{name}' for name in sorted(names, key=lambda name: (name != COMMIT_MARKER, name)))


def download_step(bucket: Bucket, step: int, folder: Path) -> None:
    """Downloads a complete step to a local directory, resumes partial files and verifies each file.

    Args:
        bucket: bucket of the run.
        step: number of the step.
        folder: destination directory. The caller renames it when this function returns.

    Raises:
        InputError: a file is corrupt or cannot be written.
        TransientStorageError: the bucket does not respond.
    """
    files = list(_remote_files(bucket, step, folder))
    for file in files:
        # An earlier attempt left this file, possibly from another step of this number.
        if file.is_complete and bucket.describe(file.path).sha256 != file.sha256:
            file.path.unlink()
    _run_all('fetch', [partial(fetch_file, file) for file in files])
    expected = {file.path for file in files}
    for path in [path for path in folder.rglob('*') if path.is_file()]:
        if path not in expected:
            path.unlink()


def _run_all(name: str, calls: Iterable[Callable[[], None]]) -> None:
    """Runs calls in threads with a name. After an error, no further call starts."""
    with concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix=name) as pool:
        running = [pool.submit(call) for call in calls]
        try:
            for each in concurrent.futures.as_completed(running):
                each.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _remote_files(bucket: Bucket, step: int, folder: Path) -> Iterator[RemoteFile]:
    step_path = f'{CHECKPOINTS_DIR}/{step}'
    existing = _list_files(bucket, step_path)
    if MANIFEST not in existing:
        # Orbax wrote this step into the bucket, so only the bucket's own checksums exist.
        files = {name: (listed.size, '') for name, listed in existing.items() if not _is_marker(name)}
    else:
        files = _read_manifest(bucket, f'{step_path}/{MANIFEST}')
    for name, (size, sha256) in files.items():
        yield RemoteFile(f'{bucket.url}/{step_path}/{name}', folder / name, size, sha256)


def _read_manifest(bucket: Bucket, name: str) -> dict[str, tuple[int, str]]:
    content = bucket.read(name)
    try:
        manifest = parse_json(content)
        files = {str(file): (int(size), str(sha256)) for file, (size, sha256) in manifest['files'].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f'{redact(bucket.url)}/{name}: not a valid file list ({error}); choose another step'
        ) from error
    outside = [file for file in files if os.path.isabs(file) or '..' in file.split('/')]
    if outside:
        raise InputError(
            f'{redact(bucket.url)}/{name}: {outside[0]!r} is outside the step directory; choose another step'
        )
    return files


def _is_marker(name: str) -> bool:
    return name.rpartition('/')[2] == COMMIT_MARKER


def _list_files(bucket: Bucket, folder: str) -> dict[str, Listed]:
    prefix = f'{folder}/' if folder else ''
    return {name.removeprefix(prefix): listed for name, listed in bucket.list(folder).items()}
