"""Options for the config of a command, and the config files and the default workdir that they name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def shipped_configs() -> dict[str, Path]:
    """Returns the config files that are part of maxlm, by name."""
    package = Path(__file__).parents[1]
    # A wheel contains the files in the package, a checkout next to it.
    folder = package / 'shipped_configs'
    files = (folder if folder.is_dir() else package.parent / 'configs').glob('*.py')
    return {path.stem: path for path in sorted(files)}


def find_config(spec: str) -> Path:
    """Returns the path of a config file: `spec` itself, or the shipped config of this name."""
    path = Path(spec).expanduser()
    return path if path.suffix or len(path.parts) != 1 or path.exists() else shipped_configs().get(spec, path)


def default_workdir(spec: str) -> str:
    """Returns the default workdir of a config: `runs/NAME` or `runs/NAME-VARIANT`.

    The config.json of an existing workdir gives a new directory, so that the existing run stays unchanged.

    Args:
        spec: value of --config, as accepted by `maxlm.config.loading.load`.
    """
    path, _, variant = spec.partition(':')
    if Path(path).name == 'config.json':
        name, variant = Path(path).absolute().parent.name, '2'
    else:
        name = Path(path).stem
    joined = '-'.join(part for part in (name, variant) if part)
    return f'runs/{re.sub(r"[^A-Za-z0-9._-]", "_", joined)}'


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into `section.key=value` overrides (without `--config.`) and the remaining arguments."""
    overrides, rest = [], []
    arguments = iter(argv)
    for argument in arguments:
        if argument.startswith('--config.'):
            if '=' not in argument:
                argument = f'{argument}={next(arguments, "")}'
            overrides.append(argument.removeprefix('--config.'))
        else:
            rest.append(argument)
    return overrides, rest
