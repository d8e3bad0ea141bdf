"""Input files, and the formats of files by suffix and content."""

from __future__ import annotations

import codecs
import concurrent.futures
import dataclasses
import zlib
from collections.abc import Sequence
from pathlib import PurePosixPath

from maxlm.data.formats.compression import COMPRESSED_SUFFIXES, decompressed
from maxlm.storage import filesystem
from maxlm.storage.errors import StorageError, TransientStorageError
from maxlm.storage.filesystem import Entry

# Suffixes of text files. The content decides for files with other suffixes.
# fmt: off
TEXT_SUFFIXES = frozenset({
    '.txt', '.md', '.rst', '.tex', '.html', '.css', '.toml', '.yaml', '.yml', '.sql', '.sh',
    '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp', '.cu', '.rs', '.go', '.java', '.kt', '.scala', '.swift',
    '.js', '.jsx', '.ts', '.tsx', '.rb', '.php', '.pl', '.lua', '.jl', '.r', '.hs', '.ml',
})
# fmt: on
KIND_SUFFIXES = {
    'jsonl': tuple(
        name + compression for name in ('.jsonl', '.ndjson', '.jsonlines') for compression in ('', *COMPRESSED_SUFFIXES)
    ),
    'parquet': ('.parquet',),
    'tokens': ('.bin', '.npy', '.npz'),
}


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One file to read, or one split of a named dataset.

    Attributes:
        path: a local path, a URL, or the spec of a dataset (`hf:…`, `tfds:…`).
        name: path relative to the input that contains the file, with `/` as separator. It is the same on every machine.
        source: last component of that input; shares are reported per source.
        kind: format, a key of `record_formats.READERS`.
        size: number of bytes; an estimate for datasets without a known size.
        version: changes when the content changes: modification time, generation, ETag, fingerprint or revision.
    """

    path: str
    name: str
    source: str
    kind: str
    size: int
    version: str


def kind_of(name: str) -> str:
    """Returns the format of a file by its suffix, ignoring a compression suffix, or '' if the content must decide."""
    kinds = (kind for kind, suffixes in KIND_SUFFIXES.items() if name.lower().endswith(suffixes))
    return next(kinds, 'text' if suffix_of(name) in TEXT_SUFFIXES else '')


# Number of bytes at the start of a file that decide whether it is text.
BLOCK_BYTES = 8192
# Number of files opened concurrently, because opening a file in a bucket is slow.
THREADS = 16
# Suffixes of files that contain neither prose nor code. Directories can contain many of them, so they are not opened.
# fmt: off
OTHER_SUFFIXES = frozenset({
    # Data formats: text, but rarely prose or code.
    '.json', '.csv', '.tsv', '.xml', '.svg',
    # Pictures, sound, video and fonts.
    '.png', '.jpg', '.jpeg', '.gif', '.bmp', '.ico', '.tif', '.tiff', '.webp', '.pdf', '.mp3', '.mp4', '.ogg', '.wav',
    '.flac', '.avi', '.mov', '.mkv', '.webm', '.ttf', '.otf', '.woff', '.woff2',
    # Archives, programs and weights.
    '.zip', '.tar', '.tgz', '.bz2', '.xz', '.7z', '.rar', '.whl', '.jar', '.so', '.o', '.a', '.dll', '.exe', '.pyc',
    '.pkl', '.pickle', '.pt', '.pth', '.safetensors', '.ckpt', '.h5', '.hdf5', '.arrow', '.tfrecord', '.arrayrecord',
})
# fmt: on


def suffix_of(name: str) -> str:
    """Returns the suffix of a file name in lower case, ignoring a compression suffix."""
    path = PurePosixPath(name.lower())
    return path.with_suffix('').suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix


def text_files(entries: Sequence[Entry]) -> list[Entry]:
    """Returns the files whose first block is text. Files with a suffix in OTHER_SUFFIXES are not opened."""
    opened = [entry for entry in entries if suffix_of(entry.name) not in OTHER_SUFFIXES]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return [entry for entry, found in zip(opened, pool.map(_holds_text, opened), strict=True) if found]


def _holds_text(entry: Entry) -> bool:
    """Returns True if the first block of a file, decompressed, is UTF-8 without NUL.

    It also returns True if the file cannot be opened, because reading it reports the reason.

    Raises:
        TransientStorageError: the storage does not respond.
    """
    try:
        with filesystem.open_file(entry.path) as file:
            block = decompressed(file, entry.name).read(BLOCK_BYTES)
    except TransientStorageError:
        raise
    except StorageError:
        return True
    except (EOFError, zlib.error, OSError):
        return False
    try:
        # The block may end inside a character.
        codecs.getincrementaldecoder('utf-8')().decode(block)
    except UnicodeDecodeError:
        return False
    return b'\0' not in block
