"""Loads a config from `FILE[:variant]` and `--config.section.key=value` overrides and validates it.

FILE is a Python file that defines `get_config(variant)`, the name of a shipped config such as `tiny`, or the
config.json in the workdir of a run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict

from maxlm.config.config_files import find_config, shipped_configs
from maxlm.config.keys import Key, current_key, declared_keys, find_keys, section_hint, section_keys
from maxlm.config.renames import report_renamed
from maxlm.config.schema import SECTIONS, Config, ModelConfig
from maxlm.config.sections.declaration import Form
from maxlm.config.sections.model import FAMILY
from maxlm.config.serialization import HIDDEN, is_secret, make_config, read_json, to_json
from maxlm.config.validation import EXCLUSIVE, check_paths, validate
from maxlm.config.validation_rl import with_grpo_defaults, with_heads
from maxlm.errors import InputError, nearest, os_message
from maxlm.storage.filesystem import is_url, read_bytes
from maxlm.storage.regular_files import MAX_TEXT_BYTES, NotRegularError, check_regular, read_text

# The keys of each group are alternative ways to set one quantity.
ALTERNATIVES = (*EXCLUSIVE, ('optimizer.warmup_steps', 'optimizer.warmup_tokens'))


def default() -> ConfigDict:
    """Returns all keys at their defaults, the starting point of config files. It is locked: unknown keys are errors."""
    values = ConfigDict()
    for section in SECTIONS:
        keys = {name: _initial(key) for name, key in section_keys(section).items()}
        values[section] = _Section(section, values, keys)
    return values.lock()


def _initial(key: Key) -> Any:
    if key.default is None:
        return config_dict.placeholder(key.kind)
    return config_dict.FieldReference(key.default, field_type=object) if Form.OR_AUTO in key.forms else key.default


class _Section(ConfigDict):
    """A section of a config file. Its keys can also be read and set by their former names."""

    # Copies call this without arguments and set the attributes afterwards.
    def __init__(self, name: str = '', config: ConfigDict | None = None, keys: Mapping[str, Any] | None = None):
        object.__setattr__(self, '_name', name)
        object.__setattr__(self, '_config', config)
        super().__init__(keys)

    def __setitem__(self, key: str, value: Any) -> None:
        new, value = _current(f'{self._name}.{key}', value)
        section, _, key = new.partition('.')
        if section == self._name:
            super().__setitem__(key, value)
        else:
            self._config[section][key] = value

    def __getitem__(self, key: str) -> Any:
        new, _ = _current(f'{self._name}.{key}')
        section, _, key = new.partition('.')
        return super().__getitem__(key) if section == self._name else self._config[section][key]


def _current(key: str, value: Any = None) -> tuple[str, Any]:
    """Returns the current name and value of a user-supplied key, and prints the new name if the key was renamed."""
    new, value = current_key(key, value)
    if new != key:
        report_renamed(f'config key {key}', new)
    return new, value


def load(spec: str, overrides: Sequence[str] = ()) -> Config:
    """Reads `FILE[:variant]`, applies `section.key=value` overrides and validates the result.

    A config.json contains all resolved values of its run, including the mesh, and they stay unless overridden. Only
    `model.attention` is resolved again: with the stored kernel, a faster kernel of this machine would be silently
    unused.

    Raises:
        InputError: the file, a key or a value is not usable.
    """
    name, _, variant = spec.partition(':')
    path = find_config(name)
    from_run = path.suffix == '.json'
    values = (_read_json_file if from_run else _run_config_file)(path, variant)
    if from_run:
        _check_family_is_open(values, name, overrides)
    return _build_with(values, overrides)


def override(config: Config, overrides: Sequence[str]) -> Config:
    """Returns a config with `section.key=value` overrides applied and validated.

    Raises:
        InputError: a key or a value is not usable.
    """
    values = _parse_json(to_json(config, with_secrets=True))
    _check_family_is_open(values, 'the config', overrides)
    return _build_with(values, overrides)


def _build_with(values: ConfigDict, overrides: Sequence[str]) -> Config:
    overridden = {_apply(values, override) for override in overrides}
    _let_overrides_win(values, overridden)
    if values.train.init_model_config:
        _take_base_model(values, overridden)
    return build(values)


def _take_base_model(values: ConfigDict, overridden: set[str]) -> None:
    """Replaces the section `model` as described at `train.init_model_config`."""
    base = values.train.init_from
    if not base:
        raise InputError(
            "train.init_model_config=True takes the model of train.init_from, but train.init_from is ''; set "
            '--config.train.init_from=WORKDIR'
        )
    base = declared_keys()['train.init_from'].checked_path(base)
    path = _base_config_path(base)
    try:
        text = read_bytes(path, limit=MAX_TEXT_BYTES).decode() if is_url(path) else read_text(path)
        model = _parse_json(text).model
    except (OSError, ValueError, InputError) as error:
        reason = os_message(error) if isinstance(error, OSError) else error
        is_there = base.startswith('hf:') or Path(base).exists()
        advice = (
            f'import another model with `maxlm hf import --input={base} --output=WORKDIR`, and use that workdir'
            if is_there
            else 'continue a run whose base no longer exists with --config=WORKDIR/config.json'
        )
        raise InputError(
            f'train.init_from={base}: {path}: {reason}; choose the workdir of a run, or {advice}'
        ) from error
    kept = {key for key in values.model if f'model.{key}' in overridden}
    if values.model.lora_rank:
        kept |= {key for key in values.model if key.startswith('lora_')}
    for key in set(model) - kept:
        values.model[key] = model[key]
    if 'model.attention' not in overridden:
        values.model.attention = 'auto'
    values.train.init_model_config = False


def _base_config_path(checkpoint: str) -> str:
    """Returns the config.json of a workdir, given the workdir, `WORKDIR@STEP`, `WORKDIR@best` or a step directory."""
    workdir, _, step = checkpoint.rstrip('/').rpartition('@')
    if not workdir or not (step.isdigit() or step == 'best') or Path(checkpoint).exists():
        workdir = checkpoint.rstrip('/')
    parent, _, step = workdir.rpartition('/checkpoints/')
    return f'{parent if parent and step.isdigit() else workdir}/config.json'


def build(values: ConfigDict) -> Config:
    """Converts a ConfigDict to a validated, frozen Config, with the settings of family and objective filled in."""
    config = _freeze(values)
    validate(config)
    return check_paths(with_heads(with_grpo_defaults(config)))


def _freeze(values: ConfigDict) -> Config:
    sections = {}
    for section in values:
        if not isinstance(values[section], ConfigDict):
            raise InputError(f'config section {section}={values[section]!r}: must be a ConfigDict of keys')
        keys = values[section].to_dict()
        sections[section] = {name: key.without_auto(keys[name]) for name, key in find_keys(section, keys).items()}
    return make_config(sections)


def _check_file(path: Path) -> None:
    try:
        check_regular(path)
    except NotRegularError as error:
        raise InputError(
            f'--config={path}: {os_message(error)}; choose a config file, such as configs/tiny.py'
        ) from error
    except OSError:
        if path.stem in shipped_configs():
            raise InputError(
                f'--config={path}: file not found; use --config={path.stem}, a config of maxlm, or write it to a file '
                f'with `maxlm configs show {path.stem}`'
            ) from None
        others = [str(other) for other in path.parent.glob(f'*{path.suffix}')] if path.suffix else shipped_configs()
        raise InputError(f'--config={path}: file not found; {nearest(str(path), sorted(others))}') from None


def _read_json_file(path: Path, variant: str) -> ConfigDict:
    _check_file(path)
    if variant:
        raise InputError(f'{path} has no variants, but variant {variant!r} was requested; use --config={path}')
    try:
        values = _parse_json(read_text(path))
    except OSError as error:
        raise InputError(f'{path}: {os_message(error)}; choose a readable config file') from error
    except (ValueError, InputError) as error:
        raise InputError(f'{path}: {error}') from error
    values.model.attention = 'auto'
    if hidden := [key for key in declared_keys() if is_secret(key) and _value(values, key) == HIDDEN]:
        print(f'warning: {path} does not contain {hidden[0]}; set --config.{hidden[0]} again', file=sys.stderr)
        section, _, name = hidden[0].partition('.')
        values[section][name] = ''
    for group in ALTERNATIVES:
        # A resolved config can set several keys of a group, which describe the same quantity. Keep only the first.
        for key in [key for key in group if _value(values, key)][1:]:
            _clear(values, key)
    return values


def _check_family_is_open(values: ConfigDict, path: str, overrides: Sequence[str]) -> None:
    """Rejects another `model.family` if every key that a family sets has a value: only the name would change."""
    switches = [key for key, value in dataclasses.asdict(ModelConfig()).items() if value is FAMILY]
    families = [text for key, _, text in (override.partition('=') for override in overrides) if key == 'model.family']
    if set(families) - {values.model.family} and all(values.model[key] is not None for key in switches):
        raise InputError(
            f'--config.model.family={families[-1]}: {path} already sets every key that the family sets; override those '
            'keys instead'
        )


def _parse_json(text: str) -> ConfigDict:
    """Returns the defaults updated with a config's JSON. Keys that are missing in the text keep their defaults."""
    values = default()
    for section, keys in read_json(text).items():
        for name, value in keys.items():
            values[section][name] = value
    return values


def load_phases(spec: str) -> list[str]:
    """Returns the commands of a recipe: the result of `get_phases(variant)` in the file of `FILE[:variant]`.

    Raises:
        InputError: the file is not usable, or it defines no phases for this variant.
    """
    path, _, variant = spec.partition(':')
    phases = _call_config_file(find_config(path), 'get_phases', variant)
    if not (isinstance(phases, list) and phases and all(isinstance(phase, str) for phase in phases)):
        raise InputError(f'{path}: get_phases must return a list of commands, not {phases!r}; fix the config file')
    return phases


def _run_config_file(path: Path, variant: str) -> ConfigDict:
    values = _call_config_file(path, 'get_config', variant)
    if not isinstance(values, ConfigDict):
        raise InputError(f'{path}: get_config must return a ConfigDict, not {type(values).__name__}')
    return values


def _call_config_file(path: Path, name: str, variant: str) -> Any:
    """Runs a config file and returns the result of its function `name`."""
    _check_file(path)
    module_spec = importlib.util.spec_from_file_location(f'maxlm_config_{path.stem}', path)
    if path.suffix != '.py' or module_spec is None or module_spec.loader is None:
        raise InputError(f'--config={path}: not a Python file; choose a config file, such as configs/tiny.py')
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
        if not hasattr(module, name):
            returned = {'get_config': 'a ConfigDict', 'get_phases': 'the commands of a recipe'}[name]
            raise InputError(f'{path} has no function {name}(variant); define one that returns {returned}')
        function = getattr(module, name)
        parameters = inspect.signature(function).parameters.values()
        if variant and not parameters:
            raise InputError(f'{path} has no variants, but variant {variant!r} was requested; use --config={path}')
        if not variant and any(parameter.default is parameter.empty for parameter in parameters):
            raise InputError(f'{path} requires a variant; use --config={path}:NAME')
        return function(variant) if variant else function()
    except (InputError, KeyboardInterrupt):
        raise
    except OSError as error:
        raise InputError(f'{path}: {os_message(error)}; choose a readable config file') from error
    except BaseException as error:
        # BaseException includes SystemExit, which would end the command without a message. A config file is user input,
        # so report the line of its error and no traceback of maxlm.
        lines = [f.lineno for f in inspect.getinnerframes(error.__traceback__) if f.filename == str(path)]  # type: ignore[arg-type]
        where = f'{path}:{lines[-1]}' if lines else str(path)
        raise InputError(f'{where}: {type(error).__name__}: {error}; fix the config file') from error


def _apply(values: ConfigDict, override: str) -> str:
    """Sets `section.key=value` and returns the key."""
    key, _, text = override.partition('=')
    key, text = _current(key, text)
    section, _, name = key.partition('.')
    if section not in SECTIONS:
        raise InputError(f'--config.{key}: config section {section!r} does not exist; {section_hint(section)}')
    values[section][name] = find_keys(section, [name])[name].parse(text)
    return key


def _let_overrides_win(values: ConfigDict, overridden: set[str]) -> None:
    # An override replaces the alternatives that the file sets: num_tokens replaces num_steps.
    for group in ALTERNATIVES:
        if overridden & set(group):
            for key in set(group) - overridden:
                _clear(values, key)


def _value(values: ConfigDict, key: str) -> Any:
    section, _, name = key.partition('.')
    return values[section][name]


def _clear(values: ConfigDict, key: str) -> None:
    section, _, name = key.partition('.')
    values[section][name] = type(values[section][name])(0)
