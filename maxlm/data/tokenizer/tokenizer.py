"""Tokenizer: converts between text and token ids. Always based on a `tokenizer.json`, the only file for export."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from maxlm.data.tokenizer.byte_and_char import bytes_library, chars_library, numbers_library, recognize
from maxlm.data.tokenizer.hub import download_tokenizer
from maxlm.data.tokenizer.leading_space import without_first_space, without_leading_space
from maxlm.data.tokenizer.library import decode, load_library, only_map
from maxlm.data.tokenizer.limited_encoding import encode_long
from maxlm.data.tokenizer.special_pieces import without_special_pieces
from maxlm.data.tokenizer.special_tokens import (
    END_OF_DOCUMENT,
    INFILL,
    add_infill_tokens,
    add_special_tokens,
    find_infill_ids,
)
from maxlm.data.tokenizer.text_boundaries import (
    TextBoundaries,
    boundaries_by_name,
    boundaries_in,
    mark_special,
    unmarked,
)
from maxlm.data.tokenizer.tiktoken_bpe import byte_pair_encoder
from maxlm.errors import InputError, name_errors, os_message
from maxlm.storage.errors import catch_panics
from maxlm.storage.regular_files import read_text

TOKENIZER_FILE = 'tokenizer.json'
# 256 bytes and the end of document.
MIN_BPE_VOCAB_SIZE = 257
# Each id becomes an entry of tokenizer.json.
MAX_NUMBERED_IDS = 2**20
SPECS = 'bytes, chars, bpe:N, ids:N[:END], hf:NAME[@REVISION] or the path of a tokenizer.json'


class Tokenizer:
    """Converts between text and token ids.

    Text that contains the name of a special token is encoded as text, never as the id of that token.

    Attributes:
        kind: `bytes`, `chars`, `ids` (text is numbers) or `library`. NumPy encodes bytes and chars, and tiktoken
            encodes byte-level BPE, always to the same ids as the library.
        vocab_size: ids are 0 … vocab_size - 1.
        boundaries: tokens at the beginning and the end of a text, and where they are from.
        end_of_document: id of the token that ends each document.
        beginning_of_document: ids before each prompt, and each document unless they also end documents; empty for most
            tokenizers.
        infill_ids: ids of the fill-in-the-middle tokens, or None if the tokenizer has none.
        special_tokens: the special tokens by id; with `lstrip` or `rstrip` a token includes whitespace before or after
            it.
    """

    def __init__(self, library: tokenizers.Tokenizer, boundaries: TextBoundaries | None = None):
        """Initializes the tokenizer, which changes `library`.

        Args:
            library: the mapping from text to ids. Its truncation, padding and dropout are switched off.
            boundaries: boundaries of a text; None = by the names of the tokens.

        Raises:
            InputError: no token ends a document.
        """
        only_map(library)
        library.encode_special_tokens = True
        # The ids of other tokenizers may have gaps; the embedding table must contain the largest id.
        self.vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.boundaries = boundaries_by_name(library) if boundaries is None else boundaries
        self.end_of_document = self.boundaries.end
        self.beginning_of_document = self.boundaries.beginning
        self.infill_ids = find_infill_ids(library)
        # Qwen and DeepSeek do not mark FIM tokens, so that a text with their names would be encoded to their ids.
        special = [*self.boundaries.stops, *self.beginning_of_document, *(self.infill_ids or ())]
        # The file of the author. None = without other marks; serializing a large vocabulary takes long.
        self._json = library.to_str(pretty=True) if unmarked(library, special) else None
        mark_special(library, special)
        self.special_tokens = {i: token for i, token in library.get_added_tokens_decoder().items() if token.special}
        self.kind, self._by_numpy = recognize(library, self.end_of_document)
        self._library = library

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, infill: bool = False) -> Tokenizer:
        """Loads a `tokenizer.json`. With `infill`, adds fill-in-the-middle tokens if it has none.

        The files in its directory determine the boundaries of a text; see `text_boundaries`.

        Raises:
            InputError: the file is missing, is not a tokenizer, has no end-of-document token, or cannot be extended; or
                another file of the directory is damaged.
        """
        try:
            text = read_text(path)
        except OSError as error:
            raise InputError(f'{path}: {os_message(error)}; give the path of a tokenizer.json') from error
        except UnicodeDecodeError as error:
            raise InputError(
                f'{path} is not a tokenizer.json: byte {error.start} is not UTF-8; give another file'
            ) from error
        return cls.from_json(text, name=str(path), directory=Path(path).parent, infill=infill)

    @classmethod
    def from_json(cls, text: str, *, name: str, directory: Path | None = None, infill: bool = False) -> Tokenizer:
        """Loads the content of a `tokenizer.json` like `load`. Error messages call it `name`.

        Without `directory`, the names of the tokens determine the boundaries of a text.
        """
        library = load_library(text, name)
        with name_errors(name):
            boundaries = None if directory is None else boundaries_in(directory, library)
            return _finished(library, infill, boundaries)

    def with_special_tokens(self, names: Sequence[str]) -> Tokenizer:
        """Returns this tokenizer with `names` as special tokens. Names without a token get ids after all existing ids.

        Raises:
            InputError: the new ids cannot be the last, or the kind of this tokenizer is `ids`.
        """
        if self.kind == 'ids':
            raise InputError(
                'an ids tokenizer encodes only numbers, so it cannot have special tokens; use a tokenizer.json'
            )
        library = tokenizers.Tokenizer.from_str(self.to_json())
        add_special_tokens(library, names)
        return Tokenizer(library, self.boundaries)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the `tokenizer.json`, without `boundaries`. Equal tokenizers give identical bytes."""
        Path(path).write_text(self.to_json(), encoding='utf-8')

    def to_json(self) -> str:
        """Returns the content of `tokenizer.json` as its author wrote it, without options that do not affect ids."""
        return self.marked_json() if self._json is None else f'{self._json}\n'

    def marked_json(self) -> str:
        """Returns `to_json` in which all tokens are marked as special that no text is encoded to."""
        return self._library.to_str(pretty=True) + '\n'

    @property
    def sha256(self) -> str:
        """Returns the SHA-256 of `tokenizer.json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def boundary_names(self) -> dict[str, Any]:
        """Texts of the tokens at the beginning and the end of a text, and the files and keys that name them."""
        boundaries = self.boundaries
        return {
            'end_of_text': [self.special_tokens[index].content for index in boundaries.stops],
            'end_of_text_source': boundaries.end_source,
            'beginning_of_text': [self.special_tokens[index].content for index in boundaries.beginning],
            'beginning_of_text_source': boundaries.beginning_source,
        }

    @property
    def context_free_prefix(self) -> list[int]:
        """Ids before a text that is scored from its first token: the beginning of text, or the end of a document."""
        return list(self.beginning_of_document) or [self.end_of_document]

    @property
    def boundary_ids(self) -> list[list[int]]:
        """End and beginning of a document; empty if earlier versions, which knew only names, chose the same."""
        ids = [[self.end_of_document], list(self.boundaries.document_beginning)]
        with contextlib.suppress(InputError):
            if ids == [[boundaries_by_name(self._library).end], []]:
                return []
        return ids

    @property
    def tokens(self) -> dict[int, str]:
        """Returns the text of each id in the notation of `tokenizer.json`. Ids may have gaps."""
        return {index: token for token, index in self._library.get_vocab(with_added_tokens=True).items()}

    def spelling(self, index: int) -> str:
        """Returns a token in the notation of `tokenizer.json`; '' for an id without a token."""
        return self._library.id_to_token(index) or ''

    @functools.cached_property
    def ids_sha256(self) -> str:
        """Returns the SHA-256 of the mapping from text to ids, which includes the tokens that are marked as special."""
        return hashlib.sha256(self.marked_json().encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the token ids of each text without the end of document: uint32 arrays [number of tokens].

        Raises:
            InputError: a text has no ids: it contains a surrogate, the library panics on it, or the kind is `ids` and
                the text is not numbers.
        """
        fast = self._fast
        if fast is None:
            return self.encode_batch_by_library(texts)
        encoded = []
        for text in texts:
            try:
                with catch_panics('tiktoken'):
                    encoded.append(fast(text))
            except ValueError:
                encoded += self.encode_batch_by_library([text])
        return encoded

    def encode_batch_by_library(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns `encode_batch` computed by the library, the reference for the fast encoders."""
        encoded = encode_long(self._text_library, texts)
        if self.kind == 'ids':
            for text, ids in zip(texts, encoded, strict=True):
                self._check_ids(text, ids)
        return encoded

    def encode_batch_inside(self, texts: Sequence[str], *, after_special: bool = False) -> list[np.ndarray]:
        """Returns `encode_batch` of texts inside a document, without the space that SentencePiece puts before a text.

        With `after_special`, texts are encoded as the library encodes them after a special token. The space is then
        omitted only if the library puts it before the first text alone.
        """
        library = self._after_special if after_special else self._inside
        if library is self._text_library:
            return self.encode_batch(texts)
        return encode_long(library, texts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of token ids. Special tokens appear by name; bytes that are not UTF-8 become U+FFFD."""
        return decode(self._library, [int(i) for i in ids])

    @functools.cached_property
    def _fast(self) -> Callable[[str], np.ndarray] | None:
        # Created at first use, because it takes longer than loading the file.
        return byte_pair_encoder(self._library) if self.kind == 'library' else self._by_numpy

    @functools.cached_property
    def _text_library(self) -> tokenizers.Tokenizer:
        # Numbers are the names of special ids.
        return self._library if self.kind == 'ids' else without_special_pieces(self._library)

    @functools.cached_property
    def _inside(self) -> tokenizers.Tokenizer:
        return self._changed(without_leading_space)

    @functools.cached_property
    def _after_special(self) -> tokenizers.Tokenizer:
        return self._changed(without_first_space)

    def _changed(self, change: Callable[[dict[str, Any] | None], dict[str, Any] | None]) -> tokenizers.Tokenizer:
        """Returns the library with a changed normalizer and pre-tokenizer, or itself if `change` changes neither."""
        fields = json.loads(self._text_library.to_str())
        bare = {**fields, **{name: change(fields[name]) for name in ('normalizer', 'pre_tokenizer')}}
        if bare == fields:
            return self._text_library
        library = tokenizers.Tokenizer.from_str(json.dumps(bare))
        library.encode_special_tokens = True
        return library

    def _check_ids(self, text: str, ids: np.ndarray) -> None:
        wrong = np.flatnonzero(ids == self.end_of_document)
        if len(wrong):
            raise InputError(
                f'{text.split()[wrong[0]]!r} is not an id: the text must be ids from 0 to '
                f'{self.vocab_size - 1} separated by spaces, without {self.end_of_document}, which ends documents'
            )


def make_tokenizer(spec: str, texts: Iterable[str], *, infill: bool = False) -> Tokenizer:
    """Returns the tokenizer of `spec`, one of SPECS.

    Args:
        spec: the tokenizer to load or train.
        texts: training texts of `chars` and `bpe:N`; not read otherwise.
        infill: add fill-in-the-middle tokens after all other ids if there are none. The N of `bpe:N` includes them.

    Raises:
        InputError: the tokenizer does not exist, or it cannot have these tokens.
    """
    _check_form(spec, infill=infill)
    name, _, rest = spec.partition(':')
    if spec == 'bytes':
        return bytes_tokenizer(infill=infill)
    if spec == 'chars':
        return chars_tokenizer(texts, infill=infill)
    if name == 'bpe':
        return train_bpe(texts, int(rest), infill=infill)
    if name == 'ids':
        return ids_tokenizer(*_parse_ids(rest))
    if name == 'hf':
        return _from_hub(rest, infill=infill)
    return Tokenizer.load(spec, infill=infill)


def check_spec(spec: str, *, infill: bool = False) -> None:
    """Raises InputError if `make_tokenizer` cannot create `spec`, before any text is read."""
    _check_form(spec, infill=infill)
    if spec not in ('bytes', 'chars') and spec.partition(':')[0] not in ('bpe', 'ids'):
        make_tokenizer(spec, [], infill=infill)


def bytes_tokenizer(*, infill: bool = False) -> Tokenizer:
    """Returns a tokenizer with 257 ids: the id of a UTF-8 byte is its value, and the end of document is 256."""
    return _finished(bytes_library(), infill)


def chars_tokenizer(texts: Iterable[str], *, infill: bool = False) -> Tokenizer:
    """Returns a tokenizer with one id per character of `texts`, sorted, then end of document and unknown characters."""
    return _finished(chars_library(sorted(set().union(*texts))), infill)


def ids_tokenizer(vocab_size: int, end_of_document: int) -> Tokenizer:
    """Returns a tokenizer for tokenized data whose tokenizer is missing. The text of ids is their decimal numbers."""
    return Tokenizer(numbers_library(vocab_size, end_of_document))


def train_bpe(texts: Iterable[str], vocab_size: int, *, infill: bool = False) -> Tokenizer:
    """Trains byte-level BPE with the word splitting of GPT-2. Equal texts give equal tokenizers.

    The end of document is id 0 and the 256 bytes follow, so that any text can be encoded. With `infill`, its three
    tokens come last. Texts with too few different words give fewer than `vocab_size` ids.
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(INFILL) * infill,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Convert to a list first, so that read errors are not raised inside the library.
    sample = list(texts)
    try:
        with catch_panics('tokenizers'):
            library.train_from_iterator(sample, trainer)
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f'--tokenizer=bpe:{vocab_size}: cannot train a tokenizer on this text: {error}; use another tokenizer'
        ) from error
    return _finished(library, infill)


def _finished(library: tokenizers.Tokenizer, infill: bool, boundaries: TextBoundaries | None = None) -> Tokenizer:
    if infill:
        add_infill_tokens(library)
    return Tokenizer(library, boundaries)


def _check_form(spec: str, *, infill: bool) -> None:
    """Checks the syntax of `spec` and the existence of local files, without access to the Hub."""
    name, _, rest = spec.partition(':')
    if name == 'bpe':
        smallest = MIN_BPE_VOCAB_SIZE + len(INFILL) * infill
        if not (rest.isascii() and rest.isdigit()) or int(rest) < smallest:
            tokens = ', '.join([END_OF_DOCUMENT, *INFILL] if infill else [END_OF_DOCUMENT])
            raise InputError(f'--tokenizer={spec}: must be bpe:N with N ≥ {smallest} (256 bytes and {tokens})')
    elif name == 'ids':
        if not re.fullmatch(r'[0-9]{1,9}(:[0-9]{1,9})?', rest):
            raise InputError(f'--tokenizer={spec}: must be ids:N or ids:N:END, with N ids of which END ends documents')
        size, end = _parse_ids(rest)
        if not (2 <= size <= MAX_NUMBERED_IDS and 0 <= end < size):
            raise InputError(f'--tokenizer={spec}: must have 2 to {MAX_NUMBERED_IDS} ids and an END below their number')
        if infill:
            raise InputError(
                f'--tokenizer={spec}: fill-in-the-middle needs text, and this tokenizer is for pretokenized data'
            )
    elif name == 'hf':
        if not re.fullmatch(r'[\w.-]+(/[\w.-]+)?(@[^\s@]+)?', rest):
            raise InputError(f'--tokenizer={spec}: must be hf:NAME or hf:NAME@REVISION, e.g. hf:openai-community/gpt2')
    elif spec not in ('bytes', 'chars') and not Path(spec).is_file():
        found = 'is a directory; give its tokenizer.json' if Path(spec).is_dir() else 'no such file'
        raise InputError(f'--tokenizer={spec}: must be {SPECS}; {found}')


def _parse_ids(rest: str) -> tuple[int, int]:
    """Returns the number of ids and the end of document, by default the last id as in GPT-2."""
    size, _, end = rest.partition(':')
    return int(size), int(end) if end else int(size) - 1


def _from_hub(name: str, *, infill: bool) -> Tokenizer:
    """Loads the tokenizer of a model on the Hugging Face Hub."""
    path = download_tokenizer(name)
    with name_errors(f'--tokenizer=hf:{name}'):
        return Tokenizer.load(path, infill=infill)
