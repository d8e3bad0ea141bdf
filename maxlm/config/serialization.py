"""Text forms of a config. Values that may contain secrets are hidden except in the workdir's own config.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.config.keys import check_values, current_config, declared_keys, find_keys, section_keys
from maxlm.config.schema import SECTIONS, Config
from maxlm.config.sections.declaration import Form
from maxlm.config.sections.families import FAMILIES
from maxlm.errors import InputError
from maxlm.storage.errors import redact
from maxlm.storage.json_text import parse_json

HIDDEN = '(hidden)'


def is_secret(key: str) -> bool:
    """Returns True if a value of the key may contain secrets anywhere. In other values, only URLs can contain them."""
    return key in declared_keys() and Form.SECRET in declared_keys()[key].forms


def as_dict(config: Config, *, with_secrets: bool = False) -> dict[str, dict[str, Any]]:
    """Returns the keys of each section."""
    values = {section: dataclasses.asdict(getattr(config, section)) for section in SECTIONS}
    return values if with_secrets else _hide(values)


def to_json(config: Config, *, with_secrets: bool = False) -> str:
    """Returns the content of a config.json."""
    return _dump(as_dict(config, with_secrets=with_secrets))


def read_json(text: str) -> dict[str, dict[str, Any]]:
    """Returns the keys of each section in the JSON of a config, with current names.

    Raises:
        InputError: the text has another structure, an unknown section or key, or a value of a wrong type.
    """
    sections = parse_json(text)
    if isinstance(sections, dict):
        sections = current_config(sections)
    if not isinstance(sections, dict) or not all(isinstance(keys, dict) for keys in sections.values()):
        raise InputError('a config must be a JSON object of sections, each of which is an object of keys')
    return {
        section: {name: key.from_json(values[name]) for name, key in find_keys(section, values).items()}
        for section, values in sections.items()
    }


def from_json(text: str) -> Config:
    """Returns the config that `to_json` wrote, e.g. from a workdir's config.json.

    A resolved config stays resolved.

    Raises:
        ValueError: the text is not JSON, or it contains an unknown section or key, a wrong type, or a value out of
            range.
    """
    try:
        config = make_config(read_json(text))
        check_values(config)
        return config
    except InputError as error:
        raise ValueError(str(error)) from error


def make_config(sections: Mapping[str, Mapping[str, Any]]) -> Config:
    """Returns the config with the given keys of each section; the family sets the architecture keys that are None."""
    config = Config(**{section: SECTIONS[section](**keys) for section, keys in sections.items()})
    model = config.model
    section_keys('model')['family'].check(model.family)
    settings: dict[str, Any] = {
        key: value for key, value in FAMILIES[model.family].items() if getattr(model, key) is None
    }
    model = dataclasses.replace(model, **settings)
    return dataclasses.replace(config, model=model)


def flatten(config: Config) -> dict[str, Any]:
    """Returns the config as a flat dict from `section.key` to value, without secrets."""
    return {f'{section}.{key}': value for section, keys in as_dict(config).items() for key, value in keys.items()}


def public_json(text: str) -> str:
    """Returns the text of a config.json without secrets. A text that is not JSON is returned unchanged."""
    try:
        values = parse_json(text)
    except ValueError:
        return text
    is_config = isinstance(values, dict) and all(isinstance(keys, dict) for keys in values.values())
    return _dump(_hide(values)) if is_config else text


def public_command(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a command line without the values of secret keys and without secrets in URLs."""
    shown, key = [], ''
    for argument in arguments:
        name, equals, _ = argument.removeprefix('--config.').partition('=')
        hides = argument.startswith('--config.') and is_secret(name)
        if key or (hides and equals):
            shown.append(HIDDEN if key else f'--config.{name}={HIDDEN}')
        else:
            shown.append(_public(argument) if argument.startswith('--config.') else redact(argument))
        key = name if hides and not equals else ''
    return shown


def _dump(values: dict[str, dict[str, Any]]) -> str:
    return json.dumps(values, indent=2) + '\n'


def _hide(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        section: {
            key: HIDDEN if value and is_secret(f'{section}.{key}') else _public(value) for key, value in keys.items()
        }
        for section, keys in values.items()
    }


def _public(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value) if '://' in value else value
    return type(value)(map(_public, value)) if isinstance(value, tuple | list) else value
