"""Compares a run's config with the shipped file that it was started with, and the configs of several runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import maxlm
from maxlm.config.config_files import split_overrides
from maxlm.config.loading import load
from maxlm.config.schema import Config
from maxlm.config.serialization import flatten
from maxlm.errors import InputError

# The configs of this checkout. A workdir only gives the name of a file. The file of that name in this checkout is
# loaded, never one from the workdir, because loading executes it.
SHIPPED = Path(maxlm.__file__).parent.parent / 'configs'
_CONFIG = re.compile(r'(?:.*/)?configs/(\w+)\.py(?::([\w.-]+))?')


class Difference(NamedTuple):
    """A key whose value differs from the file's. `is_override`: set by the command line, otherwise derived."""

    key: str
    shipped: Any
    value: Any
    is_override: bool


def shipped_config(command: Sequence[str], folder: Path = SHIPPED) -> tuple[str, Config] | None:
    """Returns the shipped file that a command names, as `configs/NAME.py[:variant]`, and its config.

    Returns None if the command names none, or if this checkout does not contain the file or variant.
    """
    arguments = [str(argument) for argument in command]
    values = [argument.partition('=')[2] for argument in arguments if argument.startswith('--config=')]
    values += [after for argument, after in itertools.pairwise(arguments) if argument == '--config']
    match = _CONFIG.fullmatch(values[-1]) if values else None
    if match is None or not (folder / f'{match[1]}.py').is_file():
        return None
    variant = f':{match[2]}' if match[2] else ''
    try:
        return f'configs/{match[1]}.py{variant}', load(f'{folder / match[1]}.py{variant}')
    except InputError:
        return None


def differences(config: Config, shipped: Config, command: Sequence[str]) -> list[Difference]:
    """Returns the keys in which a run's config differs from a shipped one, those of the command line first."""
    overrides, _ = split_overrides([str(argument) for argument in command])
    override_keys = {override.partition('=')[0] for override in overrides}
    shipped_values, values = flatten(shipped), flatten(config)
    changed = [
        Difference(key, shipped_values.get(key), values[key], key in override_keys)
        for key in values
        if values[key] != shipped_values.get(key)
    ]
    return sorted(changed, key=lambda one: not one.is_override)


def varying_keys(configs: Sequence[Config | None]) -> dict[str, list[Any]]:
    """Returns key → its value in each config, for keys that differ between the configs."""
    all_values: list[Mapping[str, Any]] = [flatten(config) if config else {} for config in configs]
    keys = list(dict.fromkeys(key for values in all_values for key in values))
    rows = {key: [values.get(key) for values in all_values] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}
