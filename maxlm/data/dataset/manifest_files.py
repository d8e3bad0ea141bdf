"""Files of a prepared data set: their names, sizes and checksums."""

from __future__ import annotations

import errno
import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from maxlm.data.chat.template import CHAT_TEMPLATE_FILE
from maxlm.data.tokenizer.model_files import GENERATION_CONFIG, MODEL_CONFIG, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from maxlm.data.tokenizer.text_boundaries import TEXT_BOUNDARIES_FILE
from maxlm.errors import InputError, explain_os_errors, os_message
from maxlm.storage.regular_files import open_regular

MANIFEST_NAME = 'dataset.json'
# Files that readers of tokenizers also open.
TOKENIZER_SIBLINGS = (
    TEXT_BOUNDARIES_FILE,
    CHAT_TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    GENERATION_CONFIG,
    MODEL_CONFIG,
)
# Limit of most file systems, less the suffixes of temporary files.
MAX_NAME_BYTES = 200


def is_file_name(name: str) -> bool:
    """Returns True if `name` is a printable file name without directories, which is not hidden."""
    return (
        name == os.path.basename(name)
        and name.isprintable()
        and not name.startswith('.')
        and 0 < len(name.encode('utf-8', 'replace')) <= MAX_NAME_BYTES
    )


def check_names(names: Iterable[str]) -> None:
    """Checks the names of the files that a manifest lists. They become paths, which must stay in its directory.

    Raises:
        TypeError: a name is not a file name, is listed twice, or is that of another file of a data set.
    """
    for name, count in Counter([MANIFEST_NAME, TEXT_BOUNDARIES_FILE, CHAT_TEMPLATE_FILE, *names]).items():
        if not is_file_name(name):
            raise TypeError(f'a file named {name[:50]!r}')
        if count > 1:
            raise TypeError(f'the file {name} is listed twice')


def check_sizes(path: Path, sizes: dict[str, int], found: dict[str, int]) -> None:
    """Checks that all files exist in full size.

    Args:
        path: directory of the data set.
        sizes: sizes in bytes by name.
        found: sizes of the files in the directory.

    Raises:
        InputError: a file is missing or has another size.
    """
    missing = [name for name in sizes if name not in found]
    if missing:
        more = f' (and {len(missing) - 1:,} more of {len(sizes):,} shards)' if len(missing) > 1 else ''
        raise InputError(f'{path / missing[0]}: {os.strerror(errno.ENOENT)}{more}; {remedy(path)}')
    for name, size in sizes.items():
        if found[name] != size:
            change = 'is truncated' if found[name] < size else 'is too large'
            raise InputError(f'{path / name} {change}: {found[name]} bytes instead of {size}; {remedy(path)}')


def verify_checksums(path: Path, checksums: dict[str, str]) -> None:
    """Compares files with their SHA-256 by name. Raises InputError for the first file that differs."""
    for name, checksum in checksums.items():
        with explain_os_errors(path / name, remedy(path)), open_regular(path / name) as file:
            actual = hashlib.file_digest(file, 'sha256').hexdigest()
        if actual != checksum:
            raise InputError(
                f'{path / name} is damaged: its SHA-256 is {actual[:12]}…, not {checksum[:12]}… as in its manifest; '
                f'{remedy(path)}'
            )


def reason_of(error: Exception) -> str:
    """Returns the message of an error in one line."""
    return os_message(error) if isinstance(error, OSError) else str(error)


def remedy(path: Path) -> str:
    """Returns the remedy for a data set in directory `path` that is damaged or incomplete."""
    return f'copy {path} again, or run maxlm prepare again with another --output'
