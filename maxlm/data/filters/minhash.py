"""MinHash signatures for deduplication: 16 bytes per document for exact duplicates, 512 bytes more for near-duplicates.

Documents are similar if their sets of shingles are similar. A shingle is five consecutive words in lowercase without
punctuation, as is usual for prose and code (Kocetkov et al., The Stack, 2022; Penedo et al., FineWeb, 2024). Each
character of scripts without spaces is a word. All words of a shorter document form its only shingle, so it is similar
only to documents with the same words. The words of pretokenized documents are their tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from maxlm.data.documents.document import Document
from maxlm.errors import InputError, explain_os_errors, os_message
from maxlm.storage.atomic import new_file
from maxlm.storage.json_text import parse_json

# Increment this when the same document gets a different signature.
SIGNATURE_VERSION = 1
SHINGLE_WORDS = 5
# Slots of a MinHash signature. The standard error of a similarity of 0.8 is 0.025 (`similarity_error`).
NUM_SLOTS = 256
SEED = 0x6D61786C6D
# Only the lower half of a slot is stored. The lower halves of different minima are equal with probability 1/65,536 (Li
# and König, b-Bit Minwise Hashing, 2010), which is negligible compared with the error of the estimate.
SLOT_DTYPE = np.dtype('<u2')
# Characters or tokens per batch.
BATCH_SIZE = 2**20

# Scripts without spaces between words: Thai and Lao, Myanmar, Khmer, kana, ideographs.
_NO_BLANKS = re.compile(
    '[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]'
)
_FOREIGN_MARKS = re.compile(r'[^\w\x00-\x7f]+')
# Maps uppercase to lowercase and separators to spaces. Bytes outside ASCII are unchanged.
_ASCII_WORDS = bytes(
    byte if byte >= 0x80 or chr(byte).isalnum() or byte == ord('_') else ord(' ') for byte in bytes(range(256)).lower()
)


@dataclasses.dataclass(frozen=True)
class Signatures:
    """Signatures of consecutive documents.

    Attributes:
        exact: uint64 [number of documents, 2]; 128-bit hash of the text with normalized line ends, stripped of outer
            whitespace.
        slots: uint16 [NUM_SLOTS, number of documents]; None for exact duplicates only. The slot axis is first, so that
            a band is contiguous in the file.
        name_bytes: uint8 [total bytes]; concatenated names of the documents in UTF-8.
        name_ends: int64 [number of documents]; end of each name in `name_bytes`.
        identity: checksum of the inputs, given by the caller.
    """

    exact: np.ndarray
    slots: np.ndarray | None
    name_bytes: np.ndarray
    name_ends: np.ndarray
    identity: str = ''

    def name(self, number: int) -> str:
        """Returns the name of a document."""
        start = int(self.name_ends[number - 1]) if number else 0
        return self.name_bytes[start : int(self.name_ends[number])].tobytes().decode(errors='surrogatepass')

    def save(self, path: Path) -> None:
        """Writes the signatures atomically as consecutive arrays in NumPy's format. The first array is a JSON header.

        Raises:
            InputError: the file cannot be written.
        """
        head = json.dumps({'format': _format(), 'near': self.slots is not None, 'identity': self.identity})
        slots = np.empty((0, len(self.exact)), SLOT_DTYPE) if self.slots is None else self.slots
        explained = explain_os_errors(f'{path}: cannot be written', 'check permissions and disk space')
        with explained, new_file(path) as partial, partial.open('wb') as file:
            head_bytes = np.frombuffer(head.encode(), np.uint8)
            for array in (head_bytes, self.exact, slots, self.name_bytes, self.name_ends):
                np.lib.format.write_array(file, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)

    @classmethod
    def load(cls, path: Path) -> Signatures:
        """Opens the file at `path`. The arrays are memory-mapped.

        Raises:
            InputError: the file is missing, damaged, or was made by another version.
        """
        try:
            with path.open('rb') as file:
                head = parse_json(_map_array(file).tobytes())
                exact, slots, name_bytes, name_ends = (_map_array(file) for _ in range(4))
            if head['format'] != _format():
                raise ValueError(f'its format is {head["format"]}, but must be {_format()}')
            return cls(exact, slots if head['near'] else None, name_bytes, name_ends, head['identity'])
        except OSError as error:
            raise InputError(f'{path}: {os_message(error)}; delete it and run maxlm prepare again') from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f'{path} contains no valid signatures ({error}); delete it and run maxlm prepare again'
            ) from error


def is_current(path: Path, identity: str) -> bool:
    """Returns True if `path` contains complete signatures of this version with the same `identity`."""
    try:
        return Signatures.load(path).identity == identity
    except InputError:
        return False


def minhash_signature(documents: Iterable[Document], *, near: bool, identity: str = '') -> Signatures:
    """Computes the signatures of `documents` in order. With `near`, includes the slots for near-duplicates.

    A signature depends only on the content of its document.
    """
    exact: list[bytes] = []
    names: list[bytes] = []
    slots = [np.empty((NUM_SLOTS, 0), SLOT_DTYPE)]
    batch: list[Document] = []
    size = 0
    for document in documents:
        exact.append(exact_hash(document))
        names.append(document.name.encode(errors='surrogatepass'))
        if near:
            batch.append(document)
            size += _size(document)
            if size >= BATCH_SIZE:
                slots.append(_minhash(batch))
                batch, size = [], 0
    if batch:
        slots.append(_minhash(batch))
    hashes = np.frombuffer(b''.join(exact), '<u8').reshape(-1, 2)
    return Signatures(
        exact=hashes,
        slots=np.concatenate(slots, axis=1) if near else None,
        name_bytes=np.frombuffer(b''.join(names), np.uint8),
        name_ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        identity=identity,
    )


def exact_hash(document: Document) -> bytes:
    """Returns a 16-byte hash of the content. The hashes of a text and of tokens always differ."""
    if document.tokens is not None:
        content, kind = np.ascontiguousarray(document.tokens, '<u4').tobytes(), b'tokens'
    else:
        content, kind = document.text.replace('\r\n', '\n').strip().encode(errors='surrogatepass'), b'text'
    return hashlib.blake2b(content, digest_size=16, person=kind).digest()


def similarity_error(similarity: float) -> float:
    """Returns the standard error of an estimated similarity J: sqrt(J (1 - J) / slots), Broder (1997)."""
    return float(np.sqrt(similarity * (1 - similarity) / NUM_SLOTS))


def _minhash(documents: Sequence[Document]) -> np.ndarray:
    """Returns the slots of the documents, uint16 [NUM_SLOTS, number of documents]."""
    import rensa

    words = _word_hashes(documents)
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    flat = np.concatenate([*words, np.zeros(SHINGLE_WORDS, np.uint64)])
    # Shingles of the concatenated batch. Those that cross into the next document are dropped below.
    shingles = np.zeros(len(flat) - SHINGLE_WORDS + 1, np.uint64)
    for place in range(SHINGLE_WORDS):
        shingles = hash64(shingles, flat[place : place + len(shingles)])
    counts = np.maximum(lengths - SHINGLE_WORDS + 1, 1)
    starts = np.cumsum(lengths) - lengths
    offsets = np.append(0, np.cumsum(counts))
    # Start of each shingle in `flat`: the start of its document plus its index in the document.
    places = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
    chosen = shingles[places]
    for number in np.flatnonzero(lengths < SHINGLE_WORDS).tolist():
        chosen[offsets[number]] = _hash_of_few(words[number], documents[number])
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(chosen, offsets.astype(np.uint64), NUM_SLOTS, SEED)
    return np.array(matrix.to_rows(), np.uint32).astype(SLOT_DTYPE).T


def _word_hashes(documents: Sequence[Document]) -> list[np.ndarray]:
    import rensa

    texts = [_words(document.text) for document in documents if document.tokens is None]
    hashes = iter(rensa.RMinHash.hash_token_sets(texts))
    return [
        np.array(next(hashes), np.uint64) if document.tokens is None else document.tokens.astype(np.uint64)
        for document in documents
    ]


def _words(text: str) -> list[bytes]:
    # This is three times as fast as one regular expression for words.
    if not text.isascii():
        text = _NO_BLANKS.sub(r' \g<0> ', _FOREIGN_MARKS.sub(' ', text.lower()))
    return text.encode(errors='surrogatepass').translate(_ASCII_WORDS).split()


def _hash_of_few(words: np.ndarray, document: Document) -> np.uint64:
    """Returns the only shingle of a document that is shorter than a shingle."""
    if not len(words):
        # A document of punctuation only is similar to equal documents.
        return np.frombuffer(exact_hash(document), '<u8')[0]
    shingle = np.full(1, len(words), np.uint64)
    for word in words:
        shingle = hash64(shingle, word)
    return shingle[0]


def hash64(hashes: np.ndarray, values: np.ndarray | np.uint64) -> np.ndarray:
    """Mixes `values` into uint64 `hashes`. Multiplications move bits up, and shifts move them down."""
    hashes = (hashes ^ values) * np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    return hashes ^ (hashes >> np.uint64(32))


def _size(document: Document) -> int:
    return len(document.text) if document.tokens is None else len(document.tokens)


def _format() -> list[int]:
    import rensa

    return [SIGNATURE_VERSION, rensa.RMinHash.ALGORITHM_VERSION, SHINGLE_WORDS, NUM_SLOTS, SEED]


def _map_array(file: BinaryIO) -> np.ndarray:
    """Returns a memory map of the array at the position of the file, and seeks to its end."""
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    start, size = file.tell(), int(np.prod(shape)) * dtype.itemsize
    if os.fstat(file.fileno()).st_size < start + size:
        raise ValueError(f'truncated: it must have at least {start + size} bytes')
    # An empty range cannot be mapped.
    array = np.asarray(np.memmap(file, dtype, 'r', start, shape)) if size else np.empty(shape, dtype)
    file.seek(start + size)
    return array
