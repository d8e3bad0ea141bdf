"""Signatures: what is kept of a document to find its duplicates, 16 bytes for equal and 512 for similar ones.

Similar are documents whose sets of shingles are: every five words in a row, in small letters and without punctuation,
as it is usual for prose and for code (Kocetkov et al., The Stack, 2022; Penedo et al., FineWeb, 2024). Characters of
scripts without blanks count as words. A document of fewer words has them all as its only shingle: it is similar to
what says the same. For documents of tokens the words are the tokens.
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
from maxlm.errors import InputError, os_message
from maxlm.storage.atomic import new_file
from maxlm.storage.json_text import parse_json

# To be raised whenever the same document would get another signature.
SIGNATURE_VERSION = 1
SHINGLE_WORDS = 5
# Slots of a MinHash signature: a similarity of 0.8 is told with a standard error of 0.025 (`similarity_error`).
NUM_SLOTS = 256
SEED = 0x6D61786C6D
# Of each slot the lower half is stored: different minima agree in it once in 65 536 (Li and König, b-Bit Minwise
# Hashing, 2010), which is nothing beside the error of the estimate.
SLOT_DTYPE = np.dtype('<u2')
# Characters, or tokens, that are hashed together.
BATCH_SIZE = 2**20

# Scripts that are written without blanks: Thai and Lao, Myanmar, Khmer, kana, ideographs.
_NO_BLANKS = re.compile(
    '[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]'
)
_FOREIGN_MARKS = re.compile(r'[^\w\x00-\x7f]+')
# Small letters for capital ones and blanks for all that is no part of a word; what is not ASCII stays.
_ASCII_WORDS = bytes(
    byte if byte >= 0x80 or chr(byte).isalnum() or byte == ord('_') else ord(' ') for byte in bytes(range(256)).lower()
)


@dataclasses.dataclass(frozen=True)
class Signatures:
    """Signatures of documents in a row.

    Attributes:
        exact: uint64 [number of documents, 2]: 128 bits of a hash of the text, its line ends and outer blanks aside.
        slots: uint16 [NUM_SLOTS, number of documents], None when only equal documents are looked for. Slots lie
            outside so that a band of them is one piece of the file.
        name_bytes, name_ends: the documents' names in UTF-8, one after the other: uint8 [bytes of all], and where each
            ends: int64 [number of documents].
        identity: whatever they were made from, as the maker tells it.
    """

    exact: np.ndarray
    slots: np.ndarray | None
    name_bytes: np.ndarray
    name_ends: np.ndarray
    identity: str = ''

    def name(self, number: int) -> str:
        """The name of one document."""
        start = int(self.name_ends[number - 1]) if number else 0
        return self.name_bytes[start : int(self.name_ends[number])].tobytes().decode(errors='surrogatepass')

    def save(self, path: Path) -> None:
        """Writes them to `path` atomically: arrays in NumPy's format, of which the first is the head.

        Raises:
            InputError: the file cannot be written.
        """
        head = json.dumps({'format': _format(), 'near': self.slots is not None, 'identity': self.identity})
        slots = np.empty((0, len(self.exact)), SLOT_DTYPE) if self.slots is None else self.slots
        try:
            with new_file(path) as partial, partial.open('wb') as file:
                head_bytes = np.frombuffer(head.encode(), np.uint8)
                for array in (head_bytes, self.exact, slots, self.name_bytes, self.name_ends):
                    np.lib.format.write_array(file, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
        except OSError as error:
            raise InputError(f'{path}: cannot be written: {os_message(error)}') from error

    @classmethod
    def load(cls, path: Path) -> Signatures:
        """Opens the file at `path`; what is not looked at is not read.

        Raises:
            InputError: the file is missing, damaged, or was made by another version.
        """
        try:
            with path.open('rb') as file:
                head = parse_json(_map_array(file).tobytes())
                exact, slots, name_bytes, name_ends = (_map_array(file) for _ in range(4))
            if head['format'] != _format():
                raise ValueError(f'made as {head["format"]}, not {_format()}')
            return cls(exact, slots if head['near'] else None, name_bytes, name_ends, head['identity'])
        except OSError as error:
            raise InputError(f'{path}: {os_message(error)}') from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f'{path} holds no signatures ({error}); delete it and run maxlm.prepare again') from error


def is_current(path: Path, identity: str) -> bool:
    """Whether `path` holds signatures, in full length, that this version made with the same `identity`."""
    try:
        return Signatures.load(path).identity == identity
    except InputError:
        return False


def minhash_signature(documents: Iterable[Document], *, near: bool, identity: str = '') -> Signatures:
    """The signatures of `documents` in their order; with `near` those that find similar documents too.

    They depend on the content alone: not on the process, the machine, or what else is signed.
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
    """16 bytes that documents of the same content share; a text and tokens never do."""
    if document.tokens is not None:
        content, kind = np.ascontiguousarray(document.tokens, '<u4').tobytes(), b'tokens'
    else:
        content, kind = document.text.replace('\r\n', '\n').strip().encode(errors='surrogatepass'), b'text'
    return hashlib.blake2b(content, digest_size=16, person=kind).digest()


def similarity_error(similarity: float) -> float:
    """Standard error of the similarity that two signatures tell: sqrt(J (1 - J) / slots), Broder (1997)."""
    return float(np.sqrt(similarity * (1 - similarity) / NUM_SLOTS))


def _minhash(documents: Sequence[Document]) -> np.ndarray:
    """uint16 [NUM_SLOTS, number of documents]."""
    import rensa

    words = _word_hashes(documents)
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    flat = np.concatenate([*words, np.zeros(SHINGLE_WORDS, np.uint64)])
    # Every window of the whole batch at once; those that reach into the next document are cut off below.
    shingles = np.zeros(len(flat) - SHINGLE_WORDS + 1, np.uint64)
    for place in range(SHINGLE_WORDS):
        shingles = hash64(shingles, flat[place : place + len(shingles)])
    counts = np.maximum(lengths - SHINGLE_WORDS + 1, 1)
    starts = np.cumsum(lengths) - lengths
    offsets = np.append(0, np.cumsum(counts))
    # The place of each shingle: that of its document, and how many of the same document come before it.
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
    # Three times as fast as one regular expression that finds the words.
    if not text.isascii():
        text = _NO_BLANKS.sub(r' \g<0> ', _FOREIGN_MARKS.sub(' ', text.lower()))
    return text.encode(errors='surrogatepass').translate(_ASCII_WORDS).split()


def _hash_of_few(words: np.ndarray, document: Document) -> np.uint64:
    """The only shingle of a document with fewer words than a shingle has."""
    if not len(words):
        # Only marks: it is similar to the same marks alone.
        return np.frombuffer(exact_hash(document), '<u8')[0]
    shingle = np.full(1, len(words), np.uint64)
    for word in words:
        shingle = hash64(shingle, word)
    return shingle[0]


def hash64(hashes: np.ndarray, values: np.ndarray | np.uint64) -> np.ndarray:
    """Takes `values` into uint64 `hashes`: a multiplication spreads them upwards, the shifts bring them down again."""
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
    """The array at the file's position, as a part of the file that is read when it is looked at; moves behind it."""
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    start, size = file.tell(), int(np.prod(shape)) * dtype.itemsize
    if os.fstat(file.fileno()).st_size < start + size:
        raise ValueError('cut short')
    # No empty piece of a file can be mapped.
    array = np.asarray(np.memmap(file, dtype, 'r', start, shape)) if size else np.empty(shape, dtype)
    file.seek(start + size)
    return array
