"""Who goes where: validation or training, and what the tokenizer learns from.

All of it follows from names and sizes, so that it is the same on every machine and for any number of workers.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterable, Sequence

from maxlm.errors import InputError

# Hashes of names are uniform below this.
HASH_RANGE = 2**64
# Text that a tokenizer is trained on, in bytes; more does not change its merges by much.
SAMPLE_BYTES = 32 * 2**20
# Places of a larger corpus that the text is from.
SAMPLE_PLACES = 256
# Names that are looked at, to see that a share leaves neither side empty.
MAX_NAMES = 2**17


def name_hash(name: str, *, salt: str = '') -> int:
    """A number below HASH_RANGE that depends on the name alone; another `salt` gives an independent one."""
    digest = hashlib.sha256(f'{salt}{name}'.encode(errors='surrogateescape')).digest()
    return int.from_bytes(digest[:8])


def validation_threshold(names: Iterable[str], share: float) -> int:
    """The number below which the hash of a document's name puts it into validation.

    It is `share` of the range, moved where a handful of documents would leave one side empty: of two or more, the one
    with the smallest hash is validated on and the one with the largest is trained on; a single one is trained on.
    Reads no more `names` than it takes to see both sides, and at most MAX_NAMES.

    Raises:
        InputError: there is no document at all.
    """
    threshold = int(share * HASH_RANGE)
    smallest, largest = HASH_RANGE, -1
    for name in itertools.islice(names, MAX_NAMES):
        smallest, largest = min(smallest, name_hash(name)), max(largest, name_hash(name))
        if threshold == 0 or smallest < threshold <= largest:
            return threshold
    if largest < 0:
        raise InputError('--input holds no text: every document is empty or was left out')
    if smallest == largest:
        return 0
    return smallest + 1 if threshold <= smallest else largest


def sample_places(sizes: Sequence[int]) -> list[int]:
    """Which groups, given their sizes in bytes, the tokenizer's sample is from, ascending.

    All of them where all of the text is the sample, otherwise those at SAMPLE_PLACES places at equal distances. From
    the beginning of each comes an equal part, so that no more is read of a large corpus than is used.
    """
    ends = list(itertools.accumulate(sizes))
    if not ends or ends[-1] <= SAMPLE_BYTES:
        return list(range(len(sizes)))
    return sorted({bisect.bisect_right(ends, ends[-1] * place // SAMPLE_PLACES) for place in range(SAMPLE_PLACES)})
