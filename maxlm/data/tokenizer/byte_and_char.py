"""Tokenizers without training: byte-level, character-level and decimal token ids.

Each is a regular `tokenizer.json`. Bytes and characters are also encoded with NumPy, which is much faster and gives the
same ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from maxlm.data.tokenizer.special_tokens import END_OF_DOCUMENT

UNKNOWN = '<|unk|>'
NUM_BYTES = 256
# Byte of a SentencePiece vocabulary with byte fallback.
_FALLBACK = re.compile(r'<0x([0-9A-F]{2})>')


def byte_spelling() -> dict[int, str]:
    """Returns a dict from each byte to the printable character with which `ByteLevel` represents it."""
    # These bytes keep their code point. The remaining bytes are numbered from 256.
    kept = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
    spelling = {byte: chr(byte) for byte in kept}
    for byte in range(NUM_BYTES):
        spelling.setdefault(byte, chr(256 + len(spelling) - len(kept)))
    return spelling


def spelled_bytes(token: str) -> Iterator[bytes]:
    """Yields the bytes that the notation of a token in `tokenizer.json` can stand for.

    Args:
        token: token of byte-level BPE, or of a SentencePiece vocabulary with byte fallback, such as `<0xE2>`.

    Examples:
        >>> list(spelled_bytes('Ã')), list(spelled_bytes('<0xE2>'))
        ([b'\\xc3'], [b'<0xE2>', b'\\xe2'])
    """
    byte_of = {character: byte for byte, character in byte_spelling().items()}
    if all(character in byte_of for character in token):
        yield bytes(byte_of[character] for character in token)
    if match := _FALLBACK.fullmatch(token):
        yield bytes.fromhex(match[1])


def bytes_library() -> tokenizers.Tokenizer:
    """Returns a byte-level tokenizer: the id of a UTF-8 byte is its value, and the end of document is 256."""
    spelling = byte_spelling()
    library = tokenizers.Tokenizer(models.BPE(vocab={spelling[byte]: byte for byte in range(NUM_BYTES)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END_OF_DOCUMENT])
    return library


def chars_library(characters: Sequence[str]) -> tokenizers.Tokenizer:
    """Returns a character-level tokenizer.

    The id of a character is its index in `characters`. The ids of the end of document and of unknown characters follow.
    """
    vocab = {token: i for i, token in enumerate([*characters, END_OF_DOCUMENT, UNKNOWN])}
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated')
    library.decoder = decoders.Fuse()
    library.add_special_tokens([END_OF_DOCUMENT, UNKNOWN])
    return library


def numbers_library(vocab_size: int, end_of_document: int) -> tokenizers.Tokenizer:
    """Returns a tokenizer for decimal token ids separated by spaces. Other words become the end of document."""
    vocab = {END_OF_DOCUMENT if i == end_of_document else str(i): i for i in range(vocab_size)}
    # A separate unknown token would add an id that the data does not have.
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=END_OF_DOCUMENT))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Start with a space, so that the text of a continuation can be appended to its prompt.
    library.decoder = decoders.Replace(Regex('^'), ' ')
    library.add_special_tokens([END_OF_DOCUMENT])
    return library


def recognize(library: tokenizers.Tokenizer, end_of_document: int) -> tuple[str, Callable[[str], np.ndarray] | None]:
    """Returns the kind of `library` (`bytes`, `chars`, `ids` or `library`) and its NumPy encoder.

    The encoder maps text to uint32 ids. It is None if NumPy is not faster.
    """
    vocab = library.get_vocab(with_added_tokens=True)
    tokens = set(vocab) - {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    if len(tokens) == NUM_BYTES and _same(library, bytes_library()):
        return 'bytes', _encode_bytes
    if all(len(word) == 1 for word in tokens):
        characters = sorted(tokens)
        if _same(library, chars_library(characters)):
            codepoints = np.array([ord(character) for character in characters], np.uint32)
            return 'chars', lambda text: _encode_chars(text, codepoints)
    if all(map(str.isdigit, tokens)) and _same(library, numbers_library(len(vocab), end_of_document)):
        return 'ids', None
    return 'library', None


def _same(library: tokenizers.Tokenizer, made: tokenizers.Tokenizer) -> bool:
    # Special tokens that were added later come after the original tokens.
    added = sorted(library.get_added_tokens_decoder().items())
    made.add_special_tokens([token.content for _, token in added])
    return library.to_str() == made.to_str()


def _encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)


def _encode_chars(text: str, codepoints: np.ndarray) -> np.ndarray:
    text_codepoints = np.frombuffer(text.encode('utf-32-le'), '<u4')
    ids = np.searchsorted(codepoints, text_codepoints).astype(np.uint32)
    known = np.append(codepoints, 0)[ids] == text_codepoints
    known &= ids < len(codepoints)
    return np.where(known, ids, np.uint32(len(codepoints) + 1))
