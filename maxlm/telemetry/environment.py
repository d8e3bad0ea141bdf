"""Environment of a run: command, versions, git checkout and devices."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from maxlm.config.serialization import public_command

# Name → distribution. Missing packages are omitted.
_PACKAGES = {
    'jax': 'jax',
    'jaxlib': 'jaxlib',
    'flax': 'flax',
    'optax': 'optax',
    'orbax': 'orbax-checkpoint',
    'grain': 'grain',
    'maxlm': 'maxlm',
    'libtpu': 'libtpu',
}
# Fields of the event `started` on which the bits of a step depend.
_RESULT_FIELDS = {
    'versions': ('jax', 'jaxlib', 'flax', 'optax', 'maxlm', 'libtpu', 'cuda_driver'),
    'devices': ('kind', 'count'),
}
NVIDIA_DRIVER = Path('/proc/driver/nvidia/version')
# Timeout for git, because a checkout on an unresponsive disk must not delay a run.
_GIT_SECONDS = 5.0


def command(name: str, argv: Sequence[str] | None = None) -> list[str]:
    """Returns the command `maxlm NAME` that restarts this run, without secrets. `argv` defaults to `sys.argv[1:]`."""
    return ['maxlm', name, *public_command(sys.argv[1:] if argv is None else argv)]


def versions(driver: Path = NVIDIA_DRIVER) -> dict[str, str]:
    """Returns the versions of Python, of the main packages and of the NVIDIA driver, if present."""
    found = {'python': platform.python_version()}
    for name, distribution in _PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    with contextlib.suppress(OSError):
        if match := re.search(r'\b(\d{3}\.\d{2,3}(\.\d+)?)\b', driver.read_text()):
            found['cuda_driver'] = match[1]
    return found


def checkout(directory: Path = Path(__file__).parents[2]) -> dict[str, Any] | None:
    """Returns the git `commit` and whether tracked files differ from it (`dirty`), or None outside a checkout."""
    # A parent directory may be another project's checkout.
    if not (directory / '.git').exists():
        return None
    try:
        head = _git(directory, 'rev-parse', 'HEAD').strip()
        changes = _git(directory, 'status', '--porcelain', '--untracked-files=no')
    except (OSError, subprocess.SubprocessError):
        return None
    return {'commit': head, 'dirty': bool(changes.strip())}


def devices() -> dict[str, Any]:
    """Describes the devices of all processes of the run."""
    device = jax.local_devices()[0]
    return {
        'kind': device.device_kind,
        'count': jax.device_count(),
        'processes': jax.process_count(),
        'platform': device.platform,
    }


def result_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the versions and devices that differ between two events `started` and can change the bits of a step.

    Values that one of the events lacks are ignored.

    Examples:
        >>> result_changes({'versions': {'jaxlib': '0.10.2'}}, {'versions': {'jaxlib': '0.12.0'}})
        ['jaxlib 0.10.2 → 0.12.0']
    """
    changes = []
    for group, names in _RESULT_FIELDS.items():
        old, new = (each.get(group) for each in (before, now))
        if isinstance(old, dict) and isinstance(new, dict):
            pairs = {name: (old[name], new[name]) for name in names if name in old and name in new}
            changes += [f'{name} {a} → {b}' for name, (a, b) in pairs.items() if a != b]
    return changes


def _git(directory: Path, *args: str) -> str:
    return subprocess.run(
        ['git', '-C', str(directory), *args],
        # Read-only: `git status` would otherwise update the index.
        env={**os.environ, 'GIT_OPTIONAL_LOCKS': '0'},
        check=True,
        capture_output=True,
        text=True,
        timeout=_GIT_SECONDS,
    ).stdout
