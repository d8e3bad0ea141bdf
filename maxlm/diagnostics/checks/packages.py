"""Checks `python` and `packages`: installed versions meet the requirements of pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import maxlm
from maxlm.config.resolve import needs_tokamax
from maxlm.diagnostics.checks.drivers import CUDA_PLUGINS, recommended_extra
from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, combine, failure, ok, warning
from maxlm.errors import InputError
from maxlm.hardware.identity import installed_version
from maxlm.installation import pip_install
from maxlm.storage.errors import redact
from maxlm.storage.object_store import EXTRAS

PROJECT = Path(maxlm.__file__).parent.parent / 'pyproject.toml'


class Requirements(NamedTuple):
    """Requirements of maxlm.

    Attributes:
        python: version specifier, e.g. `>=3.11`.
        tested_versions: versions of Python that maxlm is tested with.
        packages: requirements, as in pyproject.toml.
        extras: requirements of each extra.
    """

    python: str
    tested_versions: tuple[str, ...]
    packages: tuple[str, ...]
    extras: dict[str, tuple[str, ...]]


def read_requirements(project: Path = PROJECT) -> Requirements:
    """Reads the pyproject.toml next to the package, or the metadata of the installed package.

    Raises:
        InputError: there is neither.
    """
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding='utf-8'))['project']
        extras = {name: tuple(lines) for name, lines in table['optional-dependencies'].items()}
        return Requirements(
            table['requires-python'], _tested_versions(table['classifiers']), tuple(table['dependencies']), extras
        )
    try:
        metadata = importlib.metadata.metadata('maxlm')
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"{project}: not found, and maxlm is not installed; pip install 'maxlm'") from None
    lines = metadata.get_all('Requires-Dist') or []
    names = metadata.get_all('Provides-Extra') or []
    of_extra = {
        name: tuple(line for line in lines if re.search(rf"""extra == ["']{re.escape(name)}["']""", line))
        for name in names
    }
    plain = tuple(line for line in lines if 'extra ==' not in line)
    return Requirements(
        metadata['Requires-Python'], _tested_versions(metadata.get_all('Classifier') or []), plain, of_extra
    )


def check_python(context: CheckContext) -> CheckResult:
    """Checks that maxlm is tested with this Python."""
    return evaluate_python(read_requirements(), sys.version_info[:3])


def evaluate_python(requirements: Requirements, version: Sequence[int]) -> CheckResult:
    """Evaluates a version of Python."""
    from packaging.specifiers import SpecifierSet

    text = '.'.join(map(str, version))
    tested = ' and '.join(requirements.tested_versions)
    if text not in SpecifierSet(requirements.python):
        return failure(
            f'{text}, but maxlm requires {requirements.python}', f'create an environment with Python {tested}'
        )
    if '.'.join(map(str, version[:2])) not in requirements.tested_versions:
        return warning(f'{text}, which maxlm is not tested with', f'use Python {tested}')
    return ok(text)


def check_packages(context: CheckContext) -> CheckResult:
    """Checks that all required packages are installed and new enough."""
    return evaluate_packages(read_requirements(), needed_extras(context), installed_version)


def needed_extras(context: CheckContext) -> dict[str, str]:
    """Returns extra → the property that requires it."""
    extras: dict[str, str] = {}
    for place in (*context.buckets, *context.data_paths):
        _, extra = EXTRAS.get(place.partition('://')[0] if '://' in place else '', ('', ''))
        if extra:
            extras.setdefault(extra, redact(place))
    if hub := [path for path in context.data_paths if path.startswith('hf:')]:
        extras['hub'] = hub[0]
    if getattr(context.config and context.config.metrics, 'wandb', ''):
        extras['wandb'] = 'metrics.wandb'
    if context.config and needs_tokamax(context.config.model, context.hardware.platform):
        extras['experts'] = 'model.num_experts'
    if context.hardware.platform == 'tpu':
        extras['tpu'] = context.hardware.description
    if context.hardware.platform == 'gpu':
        installed = [extra for extra, plugin in CUDA_PLUGINS.items() if installed_version(plugin)]
        extras[(installed or [recommended_extra(context.hardware.nvidia)])[0]] = context.hardware.description
    return extras


def evaluate_packages(
    requirements: Requirements, extras: dict[str, str], version_of: Callable[[str], str | None]
) -> CheckResult:
    """Evaluates the installed packages.

    Args:
        requirements: requirements of maxlm.
        extras: required extras → the property that requires each.
        version_of: function that returns a package's version, or None if it is not installed.
    """
    findings = []
    problems = list(_problems(requirements.packages, '', version_of))
    if problems:
        findings.append(failure('; '.join(problems), pip_install(upgrade=True)))
    for extra, what in extras.items():
        problems = list(_problems(requirements.extras.get(extra, ()), extra, version_of))
        if problems:
            findings.append(failure(f'{"; ".join(problems)} (for {what})', pip_install(extra)))
    # JAX ignores a plugin of another version, and only logs a line that is easily missed.
    jaxlib = version_of('jaxlib')
    for name in CUDA_PLUGINS.values():
        plugin = version_of(name)
        if plugin and jaxlib and plugin != jaxlib:
            extra = next(extra for extra, known in CUDA_PLUGINS.items() if known == name)
            findings.append(
                failure(f'{name} {plugin} does not match jaxlib {jaxlib}', pip_install(extra, upgrade=True))
            )
    if not findings:
        named = ', '.join(f'{name} {version_of(name)}' for name in ('jax', 'jaxlib', 'flax', 'orbax-checkpoint'))
        also = f'; extras {", ".join(extras)}' if extras else ''
        findings.append(ok(f'{len(requirements.packages)} required, all installed: {named}{also}'))
    return combine(findings)


def _problems(lines: Sequence[str], extra: str, version_of: Callable[[str], str | None]) -> Iterator[str]:
    from packaging.requirements import Requirement

    for line in lines:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({'extra': extra}):
            continue
        version = version_of(requirement.name)
        if version is None:
            yield f'{requirement.name} is missing'
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f'{requirement.name} {version}, but {requirement.specifier} is needed'
        # `jax[cuda12]` is an extra and has no version; its plugin shows whether it is installed.
        for name in requirement.extras:
            brought = {**CUDA_PLUGINS, 'tpu': 'libtpu'}.get(name)
            if brought and version_of(brought) is None:
                yield f'{brought} is missing'


def _tested_versions(classifiers: Sequence[str]) -> tuple[str, ...]:
    found = (re.fullmatch(r'Programming Language :: Python :: (3\.\d+)', line) for line in classifiers)
    return tuple(match[1] for match in found if match)
