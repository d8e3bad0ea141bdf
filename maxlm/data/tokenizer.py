"""Text ↔ token ids, always through a `tokenizer.json`, so that an export needs nothing else."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from maxlm.errors import InputError, os_message

TOKENIZER_FILE = 'tokenizer.json'
END_OF_DOCUMENT = '<|endoftext|>'
UNKNOWN = '<|unk|>'
# In order of preference, for a tokenizer.json from elsewhere.
END_OF_DOCUMENT_NAMES = (END_OF_DOCUMENT, '</s>', '<|end_of_text|>', '<eos>', '<|eos|>')
# 256 bytes and the end of a document.
MIN_BPE_VOCAB_SIZE = 257


class Tokenizer:
    """Text ↔ token ids.

    Text that spells a special token is encoded as text, never as that token's id.

    Attributes:
        kind: `bytes`, `chars` (both encoded by NumPy, with the ids that the library gives) or `library`.
        vocab_size: ids are 0 … vocab_size - 1.
        end_of_document: the id that ends each document.
    """

    def __init__(self, library: tokenizers.Tokenizer):
        """Raises InputError when `library` has no special token that ends a document."""
        library.encode_special_tokens = True
        # Ids need not be dense in a file from elsewhere: the table of embeddings must hold the largest.
        self.vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.end_of_document = _find_end_of_document(library)
        self._library = library
        self._codepoints = _codepoints_of(library)
        if library.to_str() == _bytes_library().to_str():
            self.kind = 'bytes'
        elif self._codepoints is not None:
            self.kind = 'chars'
        else:
            self.kind = 'library'

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Reads a `tokenizer.json`.

        Raises:
            InputError: the file is missing, is not a tokenizer, or has no end-of-document token.
        """
        try:
            text = Path(path).read_text(encoding='utf-8')
        except OSError as error:
            raise InputError(f'{path}: {os_message(error)}; a tokenizer.json is needed') from error
        except UnicodeDecodeError as error:
            raise InputError(f'{path} is not a tokenizer.json: byte {error.start} is not UTF-8') from error
        try:
            library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise InputError(f'{path} is not a tokenizer.json: {error}') from error
        try:
            return cls(library)
        except InputError as error:
            raise InputError(f'{path}: {error}') from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the `tokenizer.json`; the same tokenizer always gives the same bytes."""
        Path(path).write_text(self.to_json(), encoding='utf-8')

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        return self._library.to_str(pretty=True) + '\n'

    @property
    def sha256(self) -> str:
        """Checksum of `tokenizer.json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without the end of document: uint32 arrays [number of tokens]."""
        if self.kind == 'bytes':
            return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]
        if self._codepoints is not None:
            return [_encode_chars(text, self._codepoints) for text in texts]
        return self.encode_batch_by_library(texts)

    def encode_batch_by_library(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode_batch` without the fast paths: what they must equal."""
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of token ids; special tokens are spelled out, bytes that are not UTF-8 become U+FFFD."""
        return self._library.decode([int(i) for i in ids], skip_special_tokens=False)


def make_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that `bytes`, `chars`, `bpe:N` or the path of a `tokenizer.json` asks for.

    `texts` is what `chars` and `bpe:N` learn from; it is not read otherwise.
    """
    check_spec(spec)
    if spec == 'bytes':
        return bytes_tokenizer()
    if spec == 'chars':
        return chars_tokenizer(texts)
    if spec.startswith('bpe:'):
        return train_bpe(texts, int(spec.removeprefix('bpe:')))
    return Tokenizer.load(spec)


def check_spec(spec: str) -> None:
    """Raises InputError when `make_tokenizer` could not follow `spec`, before any text is read."""
    if spec in ('bytes', 'chars'):
        return
    if spec.startswith('bpe:'):
        size = spec.removeprefix('bpe:')
        if not (size.isascii() and size.isdigit()) or int(size) < MIN_BPE_VOCAB_SIZE:
            raise InputError(
                f'--tokenizer={spec}: needs bpe:N, N ≥ {MIN_BPE_VOCAB_SIZE} (256 bytes and {END_OF_DOCUMENT})'
            )
        return
    if not Path(spec).is_file():
        raise InputError(f'--tokenizer={spec}: needs bytes, chars, bpe:N or the path of a tokenizer.json; no such file')
    Tokenizer.load(spec)


def bytes_tokenizer() -> Tokenizer:
    """257 ids: the id of a byte of UTF-8 is its value, the end of document is 256."""
    return Tokenizer(_bytes_library())


def chars_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """One id per character of `texts`, sorted by code point, then the end of document and unknown characters."""
    return Tokenizer(_chars_library(sorted(set().union(*texts))))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with GPT-2's split of text into words; the same texts give the same tokenizer.

    The end of document is id 0 and the 256 bytes follow, so that any text can be encoded. Text with too few different
    words gives fewer than `vocab_size` ids.
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # A list: what goes wrong while reading must not be raised inside the library.
    library.train_from_iterator(list(texts), trainer)
    return Tokenizer(library)


def _find_end_of_document(library: tokenizers.Tokenizer) -> int:
    # Only a token marked special is never made from text.
    special = {token.content: i for i, token in library.get_added_tokens_decoder().items() if token.special}
    for name in END_OF_DOCUMENT_NAMES:
        if name in special:
            return special[name]
    raise InputError(
        f'the tokenizer has no special token that ends a document: one of {" ".join(END_OF_DOCUMENT_NAMES)}'
    )


def _bytes_library() -> tokenizers.Tokenizer:
    # ByteLevel spells bytes as printable characters: those below keep their code, the others follow from 256 on.
    kept = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
    spelling = {byte: chr(byte) for byte in kept}
    for byte in range(256):
        spelling.setdefault(byte, chr(256 + len(spelling) - len(kept)))
    library = tokenizers.Tokenizer(models.BPE(vocab={spelling[byte]: byte for byte in range(256)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END_OF_DOCUMENT])
    library.encode_special_tokens = True
    return library


def _chars_library(characters: Sequence[str]) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate([*characters, END_OF_DOCUMENT, UNKNOWN])}
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated')
    library.decoder = decoders.Fuse()
    library.add_special_tokens([END_OF_DOCUMENT, UNKNOWN])
    library.encode_special_tokens = True
    return library


def _codepoints_of(library: tokenizers.Tokenizer) -> np.ndarray | None:
    """Sorted code points of a tokenizer that `chars_tokenizer` made, otherwise None."""
    characters = sorted(set(library.get_vocab(with_added_tokens=True)) - {END_OF_DOCUMENT, UNKNOWN})
    if any(len(character) != 1 for character in characters):
        return None
    if library.to_str() != _chars_library(characters).to_str():
        return None
    return np.array([ord(character) for character in characters], np.uint32)


def _encode_chars(text: str, codepoints: np.ndarray) -> np.ndarray:
    wanted = np.frombuffer(text.encode('utf-32-le'), '<u4')
    ids = np.searchsorted(codepoints, wanted).astype(np.uint32)
    known = np.append(codepoints, 0)[ids] == wanted
    known &= ids < len(codepoints)
    return np.where(known, ids, np.uint32(len(codepoints) + 1))
