"""Tokens at the beginning and the end of a text, from the files of a model directory.

End of text, in this order; the first token that the tokenizer has ends documents:

1. `eos_token` of tokenizer_config.json, then of special_tokens_map.json
2. `eos_token_id` of generation_config.json, then of config.json
3. a special token with one of the END_OF_DOCUMENT_NAMES

All ids of `eos_token_id` end a generation, in addition to the first token. As in Transformers, config.json counts only
if generation_config.json has none.

Beginning of text:

1. `add_bos_token` of tokenizer_config.json, with its `bos_token` or the `bos_token_id` of the other files
2. the tokens that the post-processor of tokenizer.json puts before a text
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from maxlm.data.tokenizer.model_files import (
    GENERATION_CONFIG,
    MAX_IDS,
    MODEL_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    check_tokens,
    read_json_object,
    read_model_config,
    token_id_list,
    token_text,
)
from maxlm.data.tokenizer.special_tokens import END_OF_DOCUMENT_NAMES, find_end_of_document
from maxlm.errors import InputError
from maxlm.storage.atomic import atomic_write
from maxlm.storage.errors import catch_panics

# File of maxlm beside a tokenizer.json whose boundaries do not follow from the names of its tokens.
TEXT_BOUNDARIES_FILE = 'text_boundaries.json'
# Files and directories of data sets and runs.
_OWN_FILES = ('dataset.json', 'dataset.partial.json', 'checkpoints')
# Source of tokens that are found by name.
BY_NAME = 'the names in tokenizer.json'
# Texts of which at least one has a token in most vocabularies.
_PROBES = ('a', '0', 'A', '一', ' ')

# Maximum number of tokens before each text. Published tokenizers have at most 2.
_MAX_PREFIX = 64
# Maximum number of ids in TEXT_BOUNDARIES_FILE: those of two files and of the names, and the prefix.
_MAX_IDS = 4 * MAX_IDS


class TextBoundaries(NamedTuple):
    """Tokens at the beginning and the end of a text.

    Attributes:
        end: id of the token that ends each document.
        stops: ids that end a generation; `end` is the first.
        beginning: ids before each text; empty for most tokenizers.
        end_source, beginning_source: file and key of the tokens; '' without such tokens.
    """

    end: int
    stops: tuple[int, ...]
    beginning: tuple[int, ...] = ()
    end_source: str = BY_NAME
    beginning_source: str = ''

    @property
    def is_by_name(self) -> bool:
        """True if the boundaries follow from the names of the tokens, so that no file stores them."""
        return self.end_source == BY_NAME and not self.beginning and len(self.stops) == 1

    @property
    def document_beginning(self) -> tuple[int, ...]:
        """Ids before each text document of a data set.

        They are `beginning`, but () if that is the token that already ends the document before, as in nanochat.
        """
        return () if self.beginning == (self.end,) else self.beginning

    def to_json(self) -> str:
        """Returns the content of TEXT_BOUNDARIES_FILE."""
        return json.dumps(self._asdict(), indent=2) + '\n'


def boundaries_by_name(library: tokenizers.Tokenizer) -> TextBoundaries:
    """Returns the boundaries of a tokenizer without other files: its end of document, and no beginning.

    Raises:
        InputError: the tokenizer has no special token that ends a document.
    """
    end = find_end_of_document(library)
    return TextBoundaries(end, (end,))


def boundaries_in(directory: Path, library: tokenizers.Tokenizer) -> TextBoundaries | None:
    """Returns the boundaries of a tokenizer in a directory, or None if only the names of its tokens count.

    Raises:
        InputError: no token ends a document, or a file is damaged.
    """
    stored = load_boundaries(directory, library)
    if stored is not None:
        return stored
    # Data sets and runs of earlier versions have no beginning of text, and ends that were found by name.
    is_own = any((directory / name).exists() for name in _OWN_FILES)
    if is_own and not (directory / TOKENIZER_CONFIG).exists():
        return None
    return find_boundaries(library, directory)


def load_boundaries(directory: Path, library: tokenizers.Tokenizer) -> TextBoundaries | None:
    """Returns the boundaries in the TEXT_BOUNDARIES_FILE of a directory, or None if there is no such file.

    Raises:
        InputError: the file is damaged or belongs to another tokenizer.
    """
    path = directory / TEXT_BOUNDARIES_FILE
    fields = read_json_object(path)
    if not fields:
        return None
    try:
        boundaries = TextBoundaries(**{**fields, **{key: tuple(fields[key]) for key in ('stops', 'beginning')}})
        ids = [boundaries.end, *boundaries.stops, *boundaries.beginning]
        if len(ids) > _MAX_IDS:
            raise TypeError(f'{len(ids):,} ids')
        if not all(type(index) is int and library.id_to_token(index) is not None for index in ids):
            raise TypeError('an id has no token')
        if boundaries.end not in boundaries.stops:
            raise TypeError('the end is not a stop')
    except (TypeError, KeyError, OverflowError) as error:
        raise InputError(f'{path} is damaged or of another tokenizer ({error}); copy it again') from error
    return boundaries


def save_boundaries(directory: Path, boundaries: TextBoundaries) -> None:
    """Writes TEXT_BOUNDARIES_FILE, or removes it if the names of the tokens determine the boundaries."""
    path = directory / TEXT_BOUNDARIES_FILE
    if boundaries.is_by_name:
        path.unlink(missing_ok=True)
    else:
        atomic_write(path, boundaries.to_json())


def find_boundaries(library: tokenizers.Tokenizer, directory: Path | None) -> TextBoundaries:
    """Returns the boundaries of a tokenizer from the files of a model directory. See the docstring of this module.

    Args:
        library: the tokenizer.
        directory: directory of the other files; None = there are none.

    Raises:
        InputError: no token ends a document, or a file is not a JSON object.
    """
    files = _ModelFiles(library, directory)
    ends = files.ends()
    try:
        by_name = find_end_of_document(library)
    except InputError:
        by_name = None
    # A default of a config class can be the id of any token, such as a letter.
    found = next((end for end in ends if files.is_special(end) or end.is_named), None) or (
        next(iter(ends), None) if by_name is None else None
    )
    end = by_name if found is None else found.token_id
    if end is None:
        raise InputError(
            'the tokenizer has no token that ends a document; name it as eos_token in tokenizer_config.json, or add a '
            f'special token with one of the names {" ".join(END_OF_DOCUMENT_NAMES)}'
        )
    stops = dict.fromkeys([end, *(one.token_id for one in ends if one.is_stop and files.may_stop(one))])
    beginning, beginning_source = files.beginning()
    source = found.source if found else BY_NAME + files.unknown_end()
    return TextBoundaries(end, tuple(stops), beginning, source, beginning_source)


class _End(NamedTuple):
    """A token that a file names as end of text.

    Attributes:
        token_id: its id.
        source: file and key.
        is_named: the file contains the text of the token.
        is_stop: the token ends a generation.
    """

    token_id: int
    source: str
    is_named: bool
    is_stop: bool


class _ModelFiles:
    """The files of a model directory that name special tokens."""

    def __init__(self, library: tokenizers.Tokenizer, directory: Path | None):
        self._library, self._directory = library, directory
        read = (lambda name: read_json_object(directory / name)) if directory else lambda name: {}
        self._tokenizer_config: Mapping[str, Any] = read(TOKENIZER_CONFIG)
        self._map: Mapping[str, Any] = read(SPECIAL_TOKENS_MAP)
        self._generation: Mapping[str, Any] = read(GENERATION_CONFIG)
        self._model: Mapping[str, Any] = read_model_config(directory) if directory else {}
        for file, values in ((TOKENIZER_CONFIG, self._tokenizer_config), (SPECIAL_TOKENS_MAP, self._map)):
            check_tokens(values, self._path(file))
        self._special = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
        listed = self._tokenizer_config.get('added_tokens_decoder')
        entries = listed.values() if isinstance(listed, dict) else ()
        self._special |= {token_text(entry) for entry in entries if isinstance(entry, dict) and entry.get('special')}

    def is_special(self, end: _End) -> bool:
        """Returns True if the tokenizer or its configuration marks a token as special."""
        return self._library.id_to_token(end.token_id) in self._special

    def may_stop(self, end: _End) -> bool:
        """Returns True unless the token is probably the default of a config class."""
        return end.is_named or self.is_special(end) or end.source.startswith(GENERATION_CONFIG)

    def ends(self) -> list[_End]:
        """Returns the tokens that the files name as end of text, in the order of the files."""
        return [*self._named('eos_token'), *self._numbered('eos_token_id')]

    def unknown_end(self) -> str:
        """Returns a remark if the configuration names an end of text that the tokenizer does not have; else ''."""
        name = token_text(self._tokenizer_config.get('eos_token')) or token_text(self._map.get('eos_token'))
        return f', which lacks the eos_token {name}' if name and self._library.token_to_id(name) is None else ''

    def beginning(self) -> tuple[tuple[int, ...], str]:
        """Returns the ids before each text, and their source."""
        added = added_prefix(self._library)
        adds = self._tokenizer_config.get('add_bos_token')
        known = [*self._named('bos_token'), *self._numbered('bos_token_id')]
        bos = known[0].token_id if known else None
        if adds is False and bos in added:
            added = tuple(index for index in added if index != bos)
        if adds is True and bos is not None and bos not in added:
            return (bos,), f'{TOKENIZER_CONFIG}: add_bos_token'
        return added, 'tokenizer.json: post_processor' if added else ''

    def _named(self, key: str) -> Iterator[_End]:
        for file, values in ((TOKENIZER_CONFIG, self._tokenizer_config), (SPECIAL_TOKENS_MAP, self._map)):
            index = self._library.token_to_id(text) if (text := token_text(values.get(key))) else None
            if index is not None:
                yield _End(index, f'{file}: {key}', is_named=True, is_stop=file == TOKENIZER_CONFIG)

    def _numbered(self, key: str) -> Iterator[_End]:
        # Transformers copies the ids of config.json to the generation config that it derives from it.
        derived = bool(self._generation.get('_from_model_config'))
        has_own = self._generation.get(key) is not None
        for file, values in ((GENERATION_CONFIG, self._generation), (MODEL_CONFIG, self._model)):
            ids = [index for index in token_id_list(values, key, self._path(file)) if self._has(index)]
            is_stop = file == GENERATION_CONFIG or not has_own
            name = MODEL_CONFIG if derived else file
            yield from (_End(index, f'{name}: {key}', is_named=False, is_stop=is_stop) for index in ids)

    def _path(self, file: str) -> str:
        return str(self._directory / file) if self._directory else file

    def _has(self, index: int) -> bool:
        return 0 <= index < 2**32 and self._library.id_to_token(index) is not None


def added_prefix(library: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Returns the ids that the post-processor of a tokenizer puts before a text.

    Raises:
        InputError: the tokenizer cannot encode a text.
    """
    for probe in _PROBES:
        try:
            with catch_panics('tokenizers'):
                encoding = library.encode(probe)
        except Exception as error:  # the library raises bare Exception
            raise InputError(f'the tokenizer cannot encode a text: {error}; use another tokenizer') from error
        # The mask is 1 for tokens that the post-processor adds.
        mask = encoding.special_tokens_mask
        if 0 in mask:
            count = mask.index(0)
            if count > _MAX_PREFIX:
                raise InputError(
                    f'the post_processor of the tokenizer puts {count:,} tokens before a text; at most {_MAX_PREFIX} '
                    'are supported; use another tokenizer'
                )
            return tuple(encoding.ids[:count])
    return ()


def describe_boundaries(names: Mapping[str, Any]) -> dict[str, str]:
    """Returns `end of text` and, if there is one, `beginning of text`, with their sources.

    Args:
        names: see `Tokenizer.boundary_names`.
    """
    labels = {'end of text': 'end_of_text', 'beginning of text': 'beginning_of_text'}
    return {
        label: f'{" ".join(f"`{token}`" for token in names[key])} ({names[f"{key}_source"]})'
        for label, key in labels.items()
        if names[key]
    }


def unmarked(library: tokenizers.Tokenizer, ids: Iterable[int]) -> list[str]:
    """Returns the names of the tokens that are not marked as special."""
    special = {index for index, token in library.get_added_tokens_decoder().items() if token.special}
    names = [library.id_to_token(index) for index in dict.fromkeys(ids) if index not in special]
    return [name for name in names if name is not None]


def mark_special(library: tokenizers.Tokenizer, ids: Iterable[int]) -> None:
    """Marks tokens as special, so that no text is encoded to them."""
    library.add_special_tokens(unmarked(library, ids))
