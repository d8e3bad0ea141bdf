"""Tokenizers that need no training: of bytes, of characters, of ids that come as numbers.

Each is a `tokenizer.json` like any other. Bytes and characters are also encoded by NumPy, much faster and to the same
ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from maxlm.data.tokenizer.special_tokens import END_OF_DOCUMENT

UNKNOWN = '<|unk|>'
NUM_BYTES = 256


def byte_spelling() -> dict[int, str]:
    """Byte → the printable character by which `ByteLevel` of the library writes it."""
    # These keep their code, the others follow from 256 on.
    kept = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
    spelling = {byte: chr(byte) for byte in kept}
    for byte in range(NUM_BYTES):
        spelling.setdefault(byte, chr(256 + len(spelling) - len(kept)))
    return spelling


def bytes_library() -> tokenizers.Tokenizer:
    """The id of a byte of UTF-8 is its value, the end of document is 256."""
    spelling = byte_spelling()
    library = tokenizers.Tokenizer(models.BPE(vocab={spelling[byte]: byte for byte in range(NUM_BYTES)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END_OF_DOCUMENT])
    return library


def chars_library(characters: Sequence[str]) -> tokenizers.Tokenizer:
    """The id of a character is its place in `characters`; the end of document and unknown characters follow."""
    vocab = {token: i for i, token in enumerate([*characters, END_OF_DOCUMENT, UNKNOWN])}
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated')
    library.decoder = decoders.Fuse()
    library.add_special_tokens([END_OF_DOCUMENT, UNKNOWN])
    return library


def numbers_library(vocab_size: int, end_of_document: int) -> tokenizers.Tokenizer:
    """The text of ids is their decimal numbers with blanks between; what is no such number becomes the end."""
    vocab = {END_OF_DOCUMENT if i == end_of_document else str(i): i for i in range(vocab_size)}
    # An unknown token of its own would be one id more than the data has.
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=END_OF_DOCUMENT))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # A blank before each number, so that the text of a continuation can be put after that of its beginning.
    library.decoder = decoders.Replace(Regex('^'), ' ')
    library.add_special_tokens([END_OF_DOCUMENT])
    return library


def recognize(library: tokenizers.Tokenizer, end_of_document: int) -> tuple[str, Callable[[str], np.ndarray] | None]:
    """Kind of `library` (`bytes`, `chars`, `ids`; else `library`), and text → uint32 ids where NumPy is faster."""
    vocab = library.get_vocab(with_added_tokens=True)
    words = set(vocab) - {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    if len(words) == NUM_BYTES and _same(library, bytes_library()):
        return 'bytes', _encode_bytes
    if all(len(word) == 1 for word in words):
        characters = sorted(words)
        if _same(library, chars_library(characters)):
            codepoints = np.array([ord(character) for character in characters], np.uint32)
            return 'chars', lambda text: _encode_chars(text, codepoints)
    if all(map(str.isdigit, words)) and _same(library, numbers_library(len(vocab), end_of_document)):
        return 'ids', None
    return 'library', None


def _same(library: tokenizers.Tokenizer, made: tokenizers.Tokenizer) -> bool:
    # What was added later comes after all that it is made with.
    added = sorted(library.get_added_tokens_decoder().items())
    made.add_special_tokens([token.content for _, token in added])
    return library.to_str() == made.to_str()


def _encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)


def _encode_chars(text: str, codepoints: np.ndarray) -> np.ndarray:
    wanted = np.frombuffer(text.encode('utf-32-le'), '<u4')
    ids = np.searchsorted(codepoints, wanted).astype(np.uint32)
    known = np.append(codepoints, 0)[ids] == wanted
    known &= ids < len(codepoints)
    return np.where(known, ids, np.uint32(len(codepoints) + 1))
