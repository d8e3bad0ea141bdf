"""Default workdir of a run that is started without --workdir."""

from __future__ import annotations

import re
from pathlib import Path


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
