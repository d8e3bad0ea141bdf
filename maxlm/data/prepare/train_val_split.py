"""Assigns documents to training or validation, and chooses the partitions that the tokenizer is trained on.

Both depend only on names and sizes. They are the same on every machine and for any number of workers.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterable, Sequence

from maxlm.errors import InputError

# Upper bound of the hashes of names, which are uniformly distributed.
HASH_RANGE = 2**64
# Size of the tokenizer's training text. More text hardly changes its merges.
SAMPLE_BYTES = 32 * 2**20
# Number of positions in a larger corpus from which the training text is taken.
SAMPLE_PLACES = 256
# Maximum number of names that are read to check that neither split is empty.
MAX_NAMES = 2**17


def name_hash(name: str, *, salt: str = '') -> int:
    """Returns a hash of the name below HASH_RANGE. Different values of `salt` give independent hashes."""
    digest = hashlib.sha256(f'{salt}{name}'.encode(errors='surrogateescape')).digest()
    return int.from_bytes(digest[:8])


def validation_threshold(names: Iterable[str], fraction: float) -> int:
    """Returns the threshold for `name_hash` below which a document is validation data.

    The threshold is `fraction` of HASH_RANGE. It is moved if a few documents would leave one split empty: with two or
    more documents, the smallest hash goes to validation and the largest to training. A single document goes to
    training. Reads `names` until both splits have a document, and at most MAX_NAMES.

    Raises:
        InputError: there are no documents.
    """
    threshold = int(fraction * HASH_RANGE)
    smallest, largest = HASH_RANGE, -1
    for name in itertools.islice(names, MAX_NAMES):
        smallest, largest = min(smallest, name_hash(name)), max(largest, name_hash(name))
        if threshold == 0 or smallest < threshold <= largest:
            return threshold
    if largest < 0:
        raise InputError('--input contains no text: every document is empty or was skipped; provide other files')
    if smallest == largest:
        return 0
    return smallest + 1 if threshold <= smallest else largest


def sample_places(sizes: Sequence[int]) -> list[int]:
    """Returns the ascending indices of the partitions that the tokenizer is trained on.

    A corpus of at most SAMPLE_BYTES is used completely. In a larger corpus, the partitions at SAMPLE_PLACES
    equidistant positions are chosen. An equal part is read from the beginning of each, so no unused text is read.

    Args:
        sizes: sizes of all partitions in bytes.
    """
    ends = list(itertools.accumulate(sizes))
    if not ends or ends[-1] <= SAMPLE_BYTES:
        return list(range(len(sizes)))
    return sorted({bisect.bisect_right(ends, ends[-1] * place // SAMPLE_PLACES) for place in range(SAMPLE_PLACES)})
