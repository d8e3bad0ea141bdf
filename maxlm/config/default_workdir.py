"""Names the workdir of a run that is started without --workdir."""

from __future__ import annotations

import re
from pathlib import Path


def default_workdir(spec: str) -> str:
    """Returns the workdir of a config: `runs/NAME`, or `runs/NAME-VARIANT`.

    The config.json of a workdir gives a new directory, so that the run it belongs to stays as it is.

    Args:
        spec: value of --config, as `maxlm.config.loading.load` takes it.
    """
    path, _, variant = spec.partition(':')
    if Path(path).name == 'config.json':
        name, variant = Path(path).absolute().parent.name, '2'
    else:
        name = Path(path).stem
    joined = '-'.join(part for part in (name, variant) if part)
    return f'runs/{re.sub(r"[^A-Za-z0-9._-]", "_", joined)}'
