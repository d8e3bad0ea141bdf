"""Reads the JSON files beside a `tokenizer.json` in a model directory in the format of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlm.config.sections.ranges import INT32
from maxlm.errors import InputError, os_message
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import MAX_TEXT_BYTES, read_bytes

TOKENIZER_CONFIG = 'tokenizer_config.json'
SPECIAL_TOKENS_MAP = 'special_tokens_map.json'
GENERATION_CONFIG = 'generation_config.json'
MODEL_CONFIG = 'config.json'
# Maximum number of ids that end a generation. Published models have at most 10.
MAX_IDS = 64


def read_json_object(path: Path, *, must_exist: bool = False) -> dict[str, Any]:
    """Returns the JSON object in a file; empty if there is no file, unless it must exist.

    Raises:
        InputError: the file is missing or cannot be read, or does not contain a JSON object.
    """
    try:
        value = parse_json(read_bytes(path, limit=MAX_TEXT_BYTES))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not must_exist:
            return {}
        raise InputError(f'{path}: {os_message(error)}; check the directory of the model') from error
    except ValueError as error:
        raise InputError(f'{path}: not valid JSON ({error}); fix or replace the file') from error
    if not isinstance(value, dict):
        raise InputError(f'{path}: contains a {type(value).__name__}, not a JSON object; fix or replace the file')
    return value


def read_model_config(directory: Path) -> dict[str, Any]:
    """Returns the `config.json` of Transformers; empty if there is none, as in a workdir, whose file is another.

    Raises:
        InputError: the file cannot be read or is not a JSON object.
    """
    config = read_json_object(directory / MODEL_CONFIG)
    if not isinstance(config.get('model_type'), str):
        return {}
    # Models with several modalities have a config for text. As in Transformers, the keys of the model win.
    text = config.get('text_config')
    present = {key: value for key, value in config.items() if value is not None}
    return {**text, **present} if isinstance(text, dict) else config


def token_text(token: Any) -> str:
    """Returns the text of a token, which older versions of Transformers store as an object; '' if there is none."""
    token = token.get('content') if isinstance(token, dict) else token
    return token if isinstance(token, str) else ''


def token_id_list(values: Mapping[str, Any], key: str, source: str) -> list[int]:
    """Returns the ids of `eos_token_id` or `bos_token_id`: a number, a list or null.

    Args:
        values: the JSON object.
        key: key of the ids.
        source: path of the file in error messages.

    Raises:
        InputError: the value is not an id or a list of ids.
    """
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_IDS or not all(type(index) is int and -1 <= index <= INT32 for index in ids):
        raise InputError(
            f'{source}: {key}={value!r:.100}: must be an integer from -1 to {INT32}, a list of at most {MAX_IDS} such '
            'numbers, or null; fix the file'
        )
    return ids


def check_tokens(values: Mapping[str, Any], source: str) -> None:
    """Checks the tokens at the beginning and the end of a text in TOKENIZER_CONFIG or SPECIAL_TOKENS_MAP.

    Args:
        values: the JSON object.
        source: path of the file in error messages.

    Raises:
        InputError: a token is not a string, an object with its content, or null; or add_bos_token is not a boolean.
    """
    for key in ('bos_token', 'eos_token'):
        value = values.get(key)
        text = value.get('content') if isinstance(value, dict) else value
        if not isinstance(text, str) and value is not None:
            raise InputError(f'{source}: {key}={value!r:.100}: must be the text of a token or null; fix the file')
    adds = values.get('add_bos_token')
    if not isinstance(adds, bool | None):
        raise InputError(f'{source}: add_bos_token={adds!r:.100}: must be true, false or null; fix the file')
