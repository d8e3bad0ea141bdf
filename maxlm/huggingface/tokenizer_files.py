"""Copies or creates the tokenizer and generation files of a model directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers.processors import TemplateProcessing

from maxlm.config.schema import ModelConfig
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.setup import DEFAULT_TEMPLATE, make_chat_recipe, template_in
from maxlm.data.chat.template import VARIABLES, drop_variables
from maxlm.data.tokenizer.library import load_library
from maxlm.data.tokenizer.model_files import (
    GENERATION_CONFIG,
    MODEL_CONFIG,
    check_tokens,
    read_json_object,
    read_model_config,
    token_id_list,
    token_text,
)
from maxlm.data.tokenizer.text_boundaries import TextBoundaries, added_prefix, describe_boundaries
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.huggingface.config_fields import Fields
from maxlm.log import logger
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import read_text
from maxlm.workdir.files import (
    CHAT_TEMPLATE,
    EXPORT_FILES,
    GENERATION,
    SPECIAL_TOKENS,
    TEXT_BOUNDARIES,
    TOKENIZER,
    TOKENIZER_CONFIG,
)

# Files from which Transformers can create a tokenizer.json.
_SOURCES = ('tokenizer.model', 'vocab.json')


class TextFiles(NamedTuple):
    """Files of an export.

    Attributes:
        files: content by file name.
        ids: ids of the BOS, EOS and padding tokens for config.json.
        boundaries: tokens at the beginning and the end of a text; None = there is no usable tokenizer.
    """

    files: dict[str, bytes]
    ids: dict[str, Any]
    boundaries: TextBoundaries | None

    @property
    def model_files(self) -> dict[str, bytes]:
        """Files of a model directory.

        A template in tokenizer_config.json has no second file: Transformers would ignore other templates beside it.
        """
        template = self.files.get(CHAT_TEMPLATE)
        config = parse_json(self.files.get(TOKENIZER_CONFIG, b'{}'))
        is_twice = template is not None and template_in(config, TOKENIZER_CONFIG) == template.decode()
        return {name: content for name, content in self.files.items() if not (is_twice and name == CHAT_TEMPLATE)}


def files_for_export(workdir: Path, model: ModelConfig) -> TextFiles:
    """Returns the files of an export, except weights, config.json and model card.

    Raises:
        InputError: a file of the workdir is corrupt.
    """
    files = _copied_files(workdir)
    ids: dict[str, Any] = dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id'))
    tokenizer = None
    if (workdir / TOKENIZER).is_file():
        library = _read_tokenizer(workdir / TOKENIZER)
        # A tokenizer without an end-of-document token is exported too.
        with contextlib.suppress(InputError):
            tokenizer = Tokenizer.load(workdir / TOKENIZER)
        made_here = TOKENIZER_CONFIG not in files
        if made_here:
            files |= _make_tokenizer_files(library, tokenizer, model, has_chat=CHAT_TEMPLATE in files)
        elif CHAT_TEMPLATE in files:
            files[CHAT_TEMPLATE] = _original_template(files)
        files[TOKENIZER] = library.to_str(pretty=True).encode()
        ids |= _special_ids(parse_json(files[TOKENIZER_CONFIG]), library)
        if made_here:
            # The model has no padding token. With EOS as the padding token, Transformers would not train its embedding
            # row.
            ids['pad_token_id'] = None
    # Finished rows of a batch are padded with EOS.
    made = {**ids, 'pad_token_id': ids['eos_token_id'] if ids['pad_token_id'] is None else ids['pad_token_id']}
    generation = parse_json(files[GENERATION]) if GENERATION in files else made
    ids |= {name: generation[name] for name in ids if GENERATION in files and generation.get(name) is not None}
    # A generation config of the author is complete except for the end of turn of another template.
    stops = tokenizer.boundaries.stops if tokenizer and GENERATION not in files else ()
    ends = _with_stops(ids['eos_token_id'], stops, workdir)
    if GENERATION not in files or ends != ids['eos_token_id']:
        files[GENERATION] = _json({**generation, 'eos_token_id': ends})
    ids['eos_token_id'] = ends
    return TextFiles(files, ids, None if tokenizer is None else tokenizer.boundaries)


class ImportedFiles(NamedTuple):
    """Files to copy to a workdir.

    Attributes:
        files: content by name.
        remark: a message if the model has no usable tokenizer.
        described: see `describe_boundaries`.
    """

    files: dict[str, bytes]
    remark: str
    described: dict[str, str]


def files_for_import(directory: Path) -> ImportedFiles:
    """Returns the files of a model directory to copy to a workdir.

    Raises:
        InputError: a file is corrupt.
    """
    files = _copied_files(directory)
    path = directory / TOKENIZER
    if not path.is_file():
        found = [name for name in _SOURCES if (directory / name).is_file()]
        has = f'has {found[0]} but no {TOKENIZER}' if found else f'has no {TOKENIZER}'
        how = '; create one with AutoTokenizer.from_pretrained(…).save_pretrained(…) of Transformers' if found else ''
        return ImportedFiles(files, f'{directory} {has}, which generate and evaluate need{how}', {})
    try:
        # Serialized as by maxlm prepare, so that data prepared with this tokenizer is recognized.
        tokenizer = Tokenizer.load(path)
        files[TOKENIZER] = tokenizer.to_json().encode()
        # config.json is not copied, and it can name ends of text.
        files[TEXT_BOUNDARIES] = tokenizer.boundaries.to_json().encode()
    except InputError as error:
        # A damaged file is an error, a tokenizer without an end of document is not.
        _read_tokenizer(path)
        files[TOKENIZER] = path.read_bytes()
        return ImportedFiles(files, f'{error}; generate and evaluate need a tokenizer that maxlm can read', {})
    _warn_of_unknown_ids(directory, tokenizer)
    # A template that cannot be used is copied unchanged.
    with contextlib.suppress(InputError):
        recipe = make_chat_recipe('', tokenizer=str(path), special_tokens=(), window=0)
        if recipe.name != DEFAULT_TEMPLATE:
            # Older versions of Transformers store the template in another file; its variables are always in another.
            files[CHAT_TEMPLATE] = recipe.template_for(tokenizer).encode()
    return ImportedFiles(files, '', describe_boundaries(tokenizer.boundary_names))


def _warn_of_unknown_ids(directory: Path, tokenizer: Tokenizer) -> None:
    """Logs the ids of the beginning and the end of a text that the tokenizer does not have."""
    for name, values in (
        (GENERATION_CONFIG, read_json_object(directory / GENERATION_CONFIG)),
        (MODEL_CONFIG, read_model_config(directory)),
    ):
        for key in ('bos_token_id', 'eos_token_id'):
            ids = token_id_list(values, key, str(directory / name))
            if unknown := [index for index in ids if not 0 <= index < tokenizer.vocab_size]:
                listed = ', '.join(map(str, unknown))
                logger.warning(
                    f'{directory / name}: {key}: {listed} is not the id of a token and is ignored; the ids of '
                    f'{TOKENIZER} are below {tokenizer.vocab_size:,}'
                )


def _original_template(files: Mapping[str, bytes]) -> bytes:
    """Returns the chat template without the variables that Transformers sets from the files of the tokenizer."""
    sources = [parse_json(files[name]) for name in (SPECIAL_TOKENS, TOKENIZER_CONFIG) if name in files]
    named = {key: text for source in sources for key in VARIABLES if (text := token_text(source.get(key)))}
    # Transformers renders other variables as empty texts.
    return drop_variables(files[CHAT_TEMPLATE].decode(), dict.fromkeys(VARIABLES, '') | named).encode()


def _with_stops(ends: Any, stops: Sequence[int], workdir: Path) -> Any:
    """Returns the EOS id or ids, with `stops` and the end of turn of the chat template added."""
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    # A template that is unusable in maxlm has an unknown effect in other programs.
    with contextlib.suppress(InputError):
        if (workdir / CHAT_TEMPLATE).is_file():
            stops = [*stops, ChatEncoder.load(workdir).end_of_turn]
    return ends if all(stop in listed for stop in stops) else list(dict.fromkeys([*listed, *stops]))


def _copied_files(directory: Path) -> dict[str, bytes]:
    """Returns the existing files of EXPORT_FILES by name. JSON files must be objects with valid token ids."""
    paths = [directory / name for name in EXPORT_FILES if (directory / name).is_file()]
    for path in paths:
        if path.suffix == '.json':
            fields = Fields(read_json_object(path), str(path))
            if path.name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
                check_tokens(fields.values, str(path))
            if path.name == GENERATION:
                for key in ('bos_token_id', 'eos_token_id', 'pad_token_id'):
                    fields.check_ids(key, may_be_list=key == 'eos_token_id')
    return {path.name: path.read_bytes() for path in paths}


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        return load_library(read_text(path), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f'{path} is not a tokenizer.json: {error}; download it again') from error


def _make_tokenizer_files(
    library: tokenizers.Tokenizer, tokenizer: Tokenizer | None, model: ModelConfig, *, has_chat: bool
) -> dict[str, bytes]:
    """Returns the files of Transformers for a tokenizer. Changes its post-processor to add the beginning of text."""
    tokens: dict[str, Any] = {}
    if tokenizer is not None:
        end = library.id_to_token(tokenizer.end_of_document)
        beginning = [library.id_to_token(index) for index in tokenizer.beginning_of_document]
        # Transformers cannot pad a batch without a padding token.
        tokens |= {'bos_token': beginning[-1] if beginning else end, 'eos_token': end, 'pad_token': end}
        if added_prefix(library) != tokenizer.beginning_of_document:
            library.post_processor = TemplateProcessing(
                single=[*beginning, '$A'],
                pair=[*beginning, '$A', *beginning, '$B'],
                special_tokens=list(zip(beginning, tokenizer.beginning_of_document, strict=True)),
            )
    unknown = parse_json(library.to_str())['model'].get('unk_token')
    if unknown is not None:
        tokens['unk_token'] = unknown
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        **tokens,
        'clean_up_tokenization_spaces': False,
        # Special tokens in text are treated as text, as in maxlm. With a chat template this is disabled, because
        # Transformers tokenizes rendered conversations as text.
        'split_special_tokens': not has_chat,
        'model_input_names': ['input_ids', 'attention_mask'],
        'model_max_length': model.max_positions,
    }
    return {TOKENIZER_CONFIG: _json(config), SPECIAL_TOKENS: _json(tokens)}


def _special_ids(config: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """Returns the ids of the tokens in tokenizer_config.json."""
    ids = {}
    for name in ('bos_token', 'eos_token', 'pad_token'):
        token = config.get(name)
        # Older versions of Transformers store an object.
        token = token.get('content') if isinstance(token, dict) else token
        index = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if index is not None:
            ids[f'{name}_id'] = index
    return ids


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + '\n').encode()
