"""Who goes where: validation or training, the tokenizer's sample, the groups that are written one by one.

All of it follows from names and sizes, so that it is the same on every machine and for any number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from maxlm.data.sources import Document, InputFile
from maxlm.errors import InputError

# Hashes of names are uniform below this.
HASH_RANGE = 2**64
# Text that a tokenizer is trained on, in bytes; more does not change its merges by much.
SAMPLE_BYTES = 32 * 2**20
# A group is one shard per split: at most so much input, and for small data still enough groups for all cores.
MAX_GROUP_BYTES = 32 * 2**20
MIN_GROUP_BYTES = 2 * 2**20
GROUPS_OF_SMALL_DATA = 16


def name_hash(name: str, *, salt: str = '') -> int:
    """A number below HASH_RANGE that depends on the name alone; another `salt` gives an independent one."""
    digest = hashlib.sha256(f'{salt}{name}'.encode(errors='surrogateescape')).digest()
    return int.from_bytes(digest[:8])


def validation_threshold(names: Iterable[str], share: float) -> int:
    """The number below which the hash of a document's name puts it into validation.

    It is `share` of the range, moved where a handful of documents would leave one side empty: of two or more, the one
    with the smallest hash is validated on and the one with the largest is trained on; a single one is trained on.
    Reads no more `names` than it takes to see both sides.

    Raises:
        InputError: there is no document at all.
    """
    threshold = int(share * HASH_RANGE)
    smallest, largest = HASH_RANGE, -1
    for name in names:
        smallest, largest = min(smallest, name_hash(name)), max(largest, name_hash(name))
        if threshold == 0 or smallest < threshold <= largest:
            return threshold
    if largest < 0:
        raise InputError('--input holds no text: every document is empty or was left out')
    if smallest == largest:
        return 0
    return smallest + 1 if threshold <= smallest else largest


def sample_texts(documents: Iterable[Document], share: float) -> Iterator[str]:
    """Texts of about `share` of the documents, chosen by the hash of their name, SAMPLE_BYTES characters at most.

    Where that chooses none, the first document; `share` is sample size over input size.
    """
    threshold = int(share * HASH_RANGE)
    first = None
    left = SAMPLE_BYTES
    for document in documents:
        first = first or document
        if name_hash(document.name, salt='tokenizer:') < threshold:
            yield document.text[:left]
            left -= len(document.text)
            if left <= 0:
                return
    if left == SAMPLE_BYTES and first is not None:
        yield first.text[:left]


def group_files(files: Sequence[InputFile]) -> list[tuple[InputFile, ...]]:
    """Cuts the files, in order, into groups that are written independently of each other."""
    total = sum(file.size for file in files)
    target = min(MAX_GROUP_BYTES, max(MIN_GROUP_BYTES, total // GROUPS_OF_SMALL_DATA))
    groups: list[list[InputFile]] = []
    size = target
    for file in files:
        if size >= target:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [tuple(group) for group in groups]
