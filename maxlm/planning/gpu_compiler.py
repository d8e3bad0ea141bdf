"""Installs and loads JAX's compiler for NVIDIA GPUs in a separate directory, for machines without a GPU.

If it were installed in the environment, JAX would look for a GPU at every start. CUDA libraries that are only needed to
execute programs are not installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxlm.errors import InputError, explain_os_errors
from maxlm.formatting import format_bytes

OPTION = '--install-compiler'
# Environment variable that names the directory.
VARIABLE = 'MAXLM_GPU_COMPILER'
# The parent of the default directories, one for each jaxlib and Python.
CACHE = '~/.cache/maxlm/gpu-compiler'
# File in the directory with the jaxlib version of the compiler. It is written after pip has finished.
MARKER = 'installed'
# The compiler, in the directory.
LIBRARY = 'jax_plugins/xla_cuda12/xla_cuda_plugin.so'
# Operating systems and machines for which the packages exist.
PLATFORMS = (('linux', 'x86_64'), ('linux', 'aarch64'))


def add_compiler() -> bool:
    """Makes the installed compiler importable. Must be called before JAX starts its first backend.

    JAX must be restricted to the CPU (`jax_platforms`). Otherwise its plugin initializes CUDA.

    Returns:
        True if a compiler is installed.

    Raises:
        InputError: MAXLM_GPU_COMPILER names a directory without a compiler for this jaxlib.
    """
    import jax

    folder, version = _folder(), _version()
    found = _installed(folder)
    if found == version:
        settings: Any = jax.config
        assert settings.jax_platforms == 'cpu', 'the plugin would initialize CUDA'
        # Appended at the end, so that the directory cannot hide a package of the environment.
        sys.path.append(str(folder))
        # When JAX loads the library for the first time, it prints that no GPU was found.
        with _without_stderr(), contextlib.suppress(OSError):
            ctypes.CDLL(str(folder / LIBRARY))
        return True
    if os.environ.get(VARIABLE):
        content = f'contains the compiler for jaxlib {found}' if found else 'contains no compiler for GPUs'
        raise InputError(f'{VARIABLE}={folder}: {content}, but jaxlib {version} is installed; run maxlm plan {OPTION}')
    return False


def install_compiler() -> None:
    """Installs the compiler for this jaxlib with pip, unless it is installed already. Prints its progress to stderr.

    Raises:
        InputError: pip cannot install it, or the directory cannot be used; the directory is left as it was.
    """
    folder, version = _folder(), _version()
    machine = sys.platform, platform.machine()
    if machine not in PLATFORMS:
        raise InputError(
            f'{OPTION}: JAX has no compiler for NVIDIA GPUs on {" ".join(machine)}; use Linux on x86_64 or aarch64, or '
            'use --estimate'
        )
    if folder.parts[0] == '~':
        raise InputError(f'{OPTION}: the user has no home directory; set {VARIABLE} to a directory')
    with explain_os_errors(folder, f'set {VARIABLE} to another directory'), _locked(folder.parent) as lock:
        if _installed(folder) == version:
            _report(f'the compiler for GPUs is already installed: {_size(folder)} in {folder}')
            return
        if folder.exists() and not _installed(folder) and any(folder.iterdir()):
            raise InputError(f'{folder}: contains other files; set {VARIABLE} to a new or empty directory')
        _report(f'installing the compiler for GPUs of jaxlib {version} into {folder} …')
        _install(folder, version, lock)
    _report(f'installed the compiler for GPUs: {_size(folder)} in {folder}')


def _install(folder: Path, version: str, lock: int) -> None:
    """Installs into a directory beside `folder` and then renames it."""
    part, old = (folder.with_name(f'.{folder.name}.{name}') for name in ('part', 'old'))
    packages = [f'jax-cuda12-plugin=={version}', f'jax-cuda12-pjrt=={version}', 'nvidia-cuda-nvcc-cu12>=12.6']
    options = ['--disable-pip-version-check', '--no-input', '--no-compile', '--no-deps', '--only-binary=:all:']
    try:
        for left in (part, old):
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir()
        done = subprocess.run(
            [sys.executable, '-m', 'pip', 'install', *options, '--target', str(part), *packages],
            stdin=subprocess.DEVNULL,
            # Standard output of this process may be parsed by a script.
            stdout=2,
            stderr=subprocess.PIPE,
            # pip may outlive this process.
            pass_fds=(lock,),
            text=True,
            errors='replace',
        )
        if done.returncode:
            raise InputError(
                f'{OPTION}: pip cannot install {packages[0]}; check the network and the package index: '
                f'{_reason(done.stderr)}'
            )
        (part / MARKER).write_text(f'{version}\n')
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    finally:
        for left in (part, old):
            shutil.rmtree(left, ignore_errors=True)


def _folder() -> Path:
    name = f'{_version()}-{sys.implementation.cache_tag}'
    folder = Path(os.path.expanduser(os.environ.get(VARIABLE) or f'{CACHE}/{name}'))
    # Resolve symlinks, so that the target directory is replaced instead of the link.
    return folder if folder.parts[0] == '~' else folder.resolve()


def _version() -> str:
    return importlib.metadata.version('jaxlib')


def _installed(folder: Path) -> str:
    """Returns the jaxlib version of the compiler in `folder`; '' if it contains none."""
    try:
        return (folder / MARKER).read_text(encoding='utf-8', errors='replace').strip()
    except OSError:
        return ''


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Creates a directory and yields a descriptor that holds a lock on it."""
    for path in (*reversed(directory.parents), directory):
        # Only the owner may write here, because code is loaded from this directory.
        path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f'{OPTION}: another process is installing into {directory}; wait until it has finished'
            ) from None
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discards what libraries write to descriptor 2."""
    kept = os.dup(2)
    try:
        with open(os.devnull, 'wb') as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _reason(errors: str) -> str:
    """Returns pip's error message as one short line."""
    lines = errors.splitlines()
    # Without a network, pip's last lines only report that no such package was found.
    for marker in ('connection broken by ', 'ERROR: ', ''):
        for line in lines:
            if line.strip() and marker in line:
                return textwrap.shorten(line[line.index(marker) + len(marker) :], 240, placeholder=' …')
    return 'pip printed no error'


def _size(folder: Path) -> str:
    return format_bytes(sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()))


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
