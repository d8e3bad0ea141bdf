"""How a config is read: `FILE[:variant]` and `--config.section.key=value` → a validated Config."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict

from maxlm.config.keys import SECTIONS, Config
from maxlm.config.rules import EXCLUSIVE, check_choice, nearest, validate
from maxlm.errors import InputError, os_message
from maxlm.model.families import FAMILIES


def default() -> ConfigDict:
    """All keys at their defaults; locked, so that a mistyped key is an error. What config files start from."""
    sections = {}
    for section, cls in SECTIONS.items():
        sections[section] = {
            name: config_dict.placeholder(kind) if value is None else value
            for (name, kind), value in zip(_fields(cls).items(), dataclasses.asdict(cls()).values(), strict=True)
        }
    return ConfigDict(sections).lock()


def load(spec: str, overrides: Sequence[str] = ()) -> Config:
    """Reads `FILE[:variant]`, applies `section.key=value` overrides and validates.

    Raises:
        InputError: the file, a key or a value is not usable.
    """
    path, _, variant = spec.partition(':')
    values = _run_config_file(Path(path), variant)
    for override in overrides:
        _apply(values, override)
    _let_overrides_win(values, {override.partition('=')[0] for override in overrides})
    return build(values)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Parts a command line into `section.key=value` overrides (without `--config.`) and the rest."""
    overrides, rest = [], []
    words = iter(argv)
    for word in words:
        if word.startswith('--config.'):
            if '=' not in word:
                word = f'{word}={next(words, "")}'
            overrides.append(word.removeprefix('--config.'))
        else:
            rest.append(word)
    return overrides, rest


def build(values: ConfigDict) -> Config:
    """Turns a ConfigDict into a validated, frozen Config with the family's settings filled in."""
    sections = {}
    for section in values:
        if section not in SECTIONS:
            raise InputError(f'config section {section!r} does not exist; {nearest(section, SECTIONS)}')
        unknown = [key for key in values[section] if key not in _fields(SECTIONS[section])]
        if unknown:
            raise InputError(_unknown_key(section, unknown[0]))
        sections[section] = SECTIONS[section](**values[section].to_dict())
    config = _fill_family(Config(**sections))
    validate(config)
    return config


def from_json(text: str) -> Config:
    """The config that `to_json` wrote, e.g. from a workdir's config.json."""
    sections = json.loads(text)
    return Config(**{name: SECTIONS[name](**values) for name, values in sections.items()})


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + '\n'


def _fields(cls: type) -> dict[str, type]:
    """Name → type of a section's keys."""
    return typing.get_type_hints(cls)


def _run_config_file(path: Path, variant: str) -> ConfigDict:
    if not path.is_file():
        others = [str(p) for p in sorted(path.parent.glob('*.py'))] if path.parent.is_dir() else []
        raise InputError(f'--config: no file {path}; {nearest(str(path), others)}')
    module_spec = importlib.util.spec_from_file_location(f'maxlm_config_{path.stem}', path)
    assert module_spec is not None, path
    assert module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
        if not hasattr(module, 'get_config'):
            raise InputError(f'{path} has no function get_config(variant)')
        takes_variant = len(inspect.signature(module.get_config).parameters) > 0
        if variant and not takes_variant:
            raise InputError(f'{path} has no variants, but {variant!r} was asked for')
        values = module.get_config(variant) if takes_variant else module.get_config()
    except InputError:
        raise
    except OSError as error:
        raise InputError(f'{path}: {os_message(error)}') from error
    except Exception as error:
        # A config file is the user's input: its own mistakes are named with their line, without our stack.
        lines = [f.lineno for f in inspect.getinnerframes(error.__traceback__) if f.filename == str(path)]  # type: ignore[arg-type]
        where = f'{path}:{lines[-1]}' if lines else str(path)
        raise InputError(f'{where}: {type(error).__name__}: {error}') from error
    if not isinstance(values, ConfigDict):
        raise InputError(f'{path}: get_config returned {type(values).__name__}, not a ConfigDict')
    return values


def _apply(values: ConfigDict, override: str) -> None:
    key, _, text = override.partition('=')
    section, _, name = key.partition('.')
    if section not in SECTIONS:
        raise InputError(f'--config.{key}: no section {section!r}; {nearest(section, SECTIONS)}')
    kinds = _fields(SECTIONS[section])
    if name not in kinds:
        raise InputError(_unknown_key(section, name))
    values[section][name] = _parse(f'{section}.{name}', text, kinds[name])


def _let_overrides_win(values: ConfigDict, overridden: set[str]) -> None:
    # Someone who overrides num_tokens means it instead of the file's num_steps, not beside it.
    for group in EXCLUSIVE:
        if overridden & set(group):
            for key in set(group) - overridden:
                section, _, name = key.partition('.')
                values[section][name] = type(values[section][name])(0)


def _parse(key: str, text: str, kind: type) -> Any:
    words = {'true': True, '1': True, 'yes': True, 'false': False, '0': False, 'no': False}
    try:
        if kind is bool:
            return words[text.lower()]
        if kind is int:
            number = float(text) if set(text) & set('eE.') else int(text)
            if number != int(number):
                raise ValueError
            return int(number)
        return kind(text)
    except (ValueError, KeyError, OverflowError):
        example = {bool: 'true or false', int: 'a whole number', float: 'a number'}[kind]
        raise InputError(f'{key}={text!r}: needs {example}') from None


def _unknown_key(section: str, name: str) -> str:
    elsewhere = [f'{other}.{name}' for other, cls in SECTIONS.items() if name in _fields(cls)]
    hint = f'did you mean {elsewhere[0]!r}?' if elsewhere else nearest(name, _fields(SECTIONS[section]))
    return f'config key {section}.{name} does not exist; {hint}'


def _fill_family(config: Config) -> Config:
    check_choice(config, 'model.family')
    model = config.model
    settings = {key: value for key, value in FAMILIES[model.family].items() if getattr(model, key) is None}
    model = dataclasses.replace(model, **settings)  # type: ignore[arg-type]
    return dataclasses.replace(config, model=model)
