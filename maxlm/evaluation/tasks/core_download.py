"""Downloads evaluation bundles of the CORE metric into a cache, and extracts them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import zipfile
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from maxlm.errors import InputError
from maxlm.storage.atomic import new_directory
from maxlm.storage.download import RemoteFile, fetch_file
from maxlm.storage.download_tree import list_tree
from maxlm.storage.errors import redact

CACHE = '~/.cache/maxlm/core'
# Data sets of the Hugging Face Hub: hf:OWNER/NAME[@REVISION]/PATH.
HUB = 'hf:'
# Precedes the SHA-256 of a zip file at the end of its URL.
CHECKSUM = '#sha256='
MAX_FILES, MAX_BYTES = 10_000, 2**32


def is_remote(bundle: str) -> bool:
    """Returns True if a bundle is at a URL or on the hub."""
    return '://' in bundle or bundle.startswith(HUB)


def download_bundle(source: str, file_name: str, *, key: str) -> Path:
    """Downloads a bundle that is not in the cache yet. Returns its directory.

    An interrupted download continues where it stopped. Several processes can call this at the same time.

    Args:
        source: URL of a zip file or a directory, or its path in a data set of the hub, as `hf:OWNER/NAME/PATH`. The
            URL of a zip file may end with `#sha256=` and the SHA-256 of the file in hexadecimal.
        file_name: name of a file in the directory of a bundle. A zip file may have this directory at its root.
        key: name of the option in error messages.

    Raises:
        InputError: the source is malformed or has no such directory, or it can be neither downloaded nor extracted.
    """
    url, has_checksum, sha256 = source.partition(CHECKSUM)
    # Some programs print capital letters.
    sha256 = sha256.lower()
    option = f'{key}=core:{redact(url)}'
    is_zip = urlsplit(url).path.endswith('.zip')
    if has_checksum and not (is_zip and re.fullmatch('[0-9a-f]{64}', sha256)):
        raise InputError(
            f'{option}: {CHECKSUM} must follow the URL of a .zip file and precede 64 digits; fix or omit it'
        )
    if '://' not in url:
        url = f'hf://datasets/{url.removeprefix(HUB)}'
    folder = Path(CACHE).expanduser() / hashlib.sha256(source.encode()).hexdigest()[:16]
    bundle = folder / 'bundle'
    if not bundle.is_dir():
        try:
            files = list_tree(url, folder / 'download')
            if is_zip:
                files = [dataclasses.replace(files[0], path=folder / 'bundle.zip', sha256=sha256)]
            for file in files:
                if is_zip and not file.bytes:
                    raise InputError(f'{redact(url)}: the server does not report the size; download the file yourself')
                fetch_file(file)
        except InputError as error:
            raise InputError(f'{option}: {error}; or give the directory of a local copy') from error
        # Another process may be faster.
        with contextlib.suppress(FileExistsError):
            _place(files, folder, bundle, is_zip=is_zip, option=option)
    inner = next((file.parent for file in (*bundle.glob(file_name), *bundle.glob(f'*/{file_name}'))), None)
    if inner is None:
        raise InputError(f'{option}: has no {file_name}; use an evaluation bundle, and remove {folder}')
    return inner


def _place(files: list[RemoteFile], folder: Path, bundle: Path, *, is_zip: bool, option: str) -> None:
    """Moves the complete files to `bundle`, or extracts them. Raises FileExistsError if another process has done so."""
    try:
        if is_zip:
            with new_directory(option, bundle) as partial:
                _extract(files[0].path, partial, option)
        else:
            (folder / 'download').replace(bundle)
    except (InputError, OSError):
        if bundle.is_dir():
            raise FileExistsError(bundle) from None
        raise


def _extract(file: Path, directory: Path, option: str) -> None:
    """Extracts a zip file. Removes it if it is damaged, so that the next run downloads it again."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_FILES or sum(entry.file_size for entry in entries) > MAX_BYTES:
                raise InputError(
                    f'{option}: the zip file has more than {MAX_FILES:,} files or {MAX_BYTES:,} bytes; use another one'
                )
            for entry in entries:
                path = PurePosixPath(entry.filename)
                if path.is_absolute() or '..' in path.parts:
                    raise InputError(f'{option}: the zip file has the path {entry.filename!r}; use another file')
            archive.extractall(directory)
    # RuntimeError: encrypted. ValueError and EOFError: damaged.
    except (zipfile.BadZipFile, zipfile.LargeZipFile, RuntimeError, EOFError, ValueError) as error:
        file.unlink(missing_ok=True)
        raise InputError(f'{option}: damaged zip file ({error}); run the same command again') from error
