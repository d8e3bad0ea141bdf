"""Parts of input files that are read independently of each other, so that workers share even a single file."""

from __future__ import annotations

import bisect
import dataclasses
import itertools

from maxlm.data.inputs import InputFile
from maxlm.data.readers.formats import READERS
from maxlm.data.storage import StorageError, is_passing


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of one input file. Picklable.

    Attributes:
        file: the file.
        start, stop: from unit `start` to before unit `stop`, in the units of its format; [0, 0) is the whole file.
        size: bytes, for progress and for groups of pieces.
    """

    file: InputFile
    start: int
    stop: int
    size: int


def cut(file: InputFile, target_bytes: int) -> list[Piece]:
    """Cuts a file into pieces of about `target_bytes`; each of its documents is in exactly one of them.

    The same for the same file anywhere. A file that cannot be cut, or whose parts cannot be told because it is
    damaged, is one whole piece: reading it reports the damage.

    Raises:
        StorageError: the storage does not answer now: the file is not damaged, and other pieces make other shards.
    """
    assert target_bytes > 0
    try:
        bounds = READERS[file.kind].bounds(file)
    except StorageError as error:
        if is_passing(error):
            raise
        bounds = ()
    if len(bounds) < 2 or bounds[-1] <= target_bytes:
        return [Piece(file, 0, 0, file.size)]
    count = -(-bounds[-1] // target_bytes)
    # At the unit nearest behind each equal share; large units swallow some of them.
    cuts = {bisect.bisect_left(bounds, bounds[-1] * i // count) for i in range(count)} | {len(bounds) - 1}
    return [Piece(file, start, stop, bounds[stop] - bounds[start]) for start, stop in itertools.pairwise(sorted(cuts))]
