"""Hides all installed packages in child processes, except given ones and their requirements."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Collection
from pathlib import Path

from packaging.requirements import Requirement

# Python imports this file at the start of each process whose PYTHONPATH contains its directory.
SITECUSTOMIZE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition('.')[0] in HIDDEN else find(name, *rest)
"""


def hide_others(directory: Path, packages: Collection[str]) -> set[str]:
    """Writes sitecustomize.py to a directory and returns the names of the hidden modules."""
    kept = requirements(packages)
    hidden = {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if not kept & set(map(normal, distributions)) and not module.startswith(('_', 'maxlm'))
    }
    # Namespaces of several distributions.
    hidden -= {'google'}
    directory.mkdir()
    (directory / 'sitecustomize.py').write_text(f'HIDDEN = {sorted(hidden)}{SITECUSTOMIZE}')
    return hidden


def requirements(packages: Collection[str]) -> set[str]:
    """Returns the normalized names of distributions and of all that they require."""
    found: set[str] = set()
    queue = [Requirement(name) for name in packages]
    while queue:
        requirement = queue.pop()
        name = normal(requirement.name)
        if name in found:
            continue
        found.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        extras = requirement.extras or {''}
        for needed in map(Requirement, lines):
            if needed.marker is None or any(needed.marker.evaluate({'extra': extra}) for extra in extras):
                queue.append(needed)
    return found


def normal(name: str) -> str:
    """Returns a distribution's name in the form in which names are compared."""
    return re.sub('[-_.]+', '-', name).lower()
