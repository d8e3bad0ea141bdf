"""Compiled programs that outlive their process: a run that starts again does not compile again.

JAX keeps them, and this is where. Its own files have no checksum: with one bit of them changed XLA ends the process, or
computes something else. Here what is not whole is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache

from maxlm.errors import InputError, os_message
from maxlm.log import logger
from maxlm.runtime.barrier import ProcessGroup, is_shared
from maxlm.storage.filesystem import is_url
from maxlm.storage.regular_files import read_bytes

# Of all programs together; those of one run are some hundred kilobytes to a few megabytes.
CAPACITY = 4 * 2**30
SUFFIX = '.program'
DIGEST_BYTES = hashlib.sha256().digest_size
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def enable_compilation_cache(cache_dir: str) -> None:
    """Has JAX keep what it compiles in a directory, and read from there what has been compiled before.

    To be called before anything is compiled, by all processes of a run. Where the directory cannot be used, one line
    says so and nothing is kept. A place that JAX was told (JAX_COMPILATION_CACHE_DIR; empty = none) is left as it is.

    Args:
        given: train.compilation_cache_dir; '' = keep nothing.

    Raises:
        InputError: it is a URL.
    """
    if is_url(cache_dir):
        raise InputError(
            f"train.compilation_cache_dir={cache_dir}: must be a directory of this machine, or '' to keep no programs"
        )
    settings: Any = jax.config
    is_enabled = cache_dir and settings.jax_enable_compilation_cache and settings.jax_compilation_cache_dir is None
    directory = _open(cache_dir) if is_enabled else None
    if _is_shared_by_all(directory):
        assert directory is not None
        _install(directory)


class CompilationCache:
    """Files of programs, each with its checksum, as JAX asks for them; the ones used longest ago make room.

    Processes may share a directory: files come whole, by a rename, and go at any time.
    """

    def __init__(self, directory: Path, *, capacity: int = CAPACITY, host: str = ''):
        """`host` tells machines apart that cannot run each other's programs."""
        # The name is JAX's.
        self._path = directory
        self._capacity = capacity
        self._host = host
        self._is_disabled = False

    def get(self, key: str) -> bytes | None:
        """The program that was kept under a key; None if there is none that is whole."""
        path = self._file(key)
        try:
            stored = read_bytes(path)
            digest, program = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
            if digest != self._digest(key, program):
                path.unlink(missing_ok=True)
                return None
            # By which the ones used longest ago are told.
            os.utime(path)
        except OSError:
            return None
        return program

    def put(self, key: str, program: bytes) -> None:
        """Keeps a program. The first that cannot be kept, e.g. since the disk is full, is the last that is tried."""
        if self._is_disabled or len(program) > self._capacity:
            return
        try:
            self._write(self._file(key), self._digest(key, program) + program)
            self._evict()
        except OSError as error:
            self._is_disabled = True
            logger.warning(f'no more compiled programs are kept in {self._path}: {os_message(error)}')

    def _write(self, path: Path, content: bytes) -> None:
        # Whoever may write to the file could have their code run: it is made for its owner alone.
        with tempfile.NamedTemporaryFile(dir=self._path, suffix=f'{SUFFIX}.part', delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(content)
                file.close()
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise

    def _file(self, key: str) -> Path:
        return self._path / f'{key}{self._host}{SUFFIX}'

    def _digest(self, key: str, program: bytes) -> bytes:
        digest = hashlib.sha256(key.encode())
        digest.update(program)
        return digest.digest()

    def _evict(self) -> None:
        files = []
        # What a killed process left half-written goes as it ages; what is not ours stays.
        for path in self._path.glob(f'*{SUFFIX}*'):
            # Another process may be faster.
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        surplus = sum(size for _, size, _ in files) - self._capacity
        for _, size, path in sorted(files):
            if surplus <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            surplus -= size


def _open(cache_dir: str) -> Path | None:
    """The directory, made if need be; None, with a line that says why, if it should not or cannot be used."""
    try:
        directory = Path(cache_dir).expanduser()
        for path in (*reversed(directory.parents), directory):
            # Not by parents=True, which makes parents that a group can write to where the umask is 002.
            path.mkdir(mode=0o700, exist_ok=True)
        reason = _security_problem(directory)
        if not reason:
            # Whether a directory is writable shows by writing.
            with tempfile.TemporaryFile(dir=directory):
                return directory
    except OSError as error:
        reason = f'{cache_dir}: {os_message(error)}'
    except RuntimeError:
        # Of a user who is only a number, as in containers.
        reason = f'{cache_dir}: there is no home directory'
    _warn_disabled(reason)
    return None


def _security_problem(directory: Path) -> str:
    """Why someone else could have their code run by a program from there; empty if nobody could."""
    status = directory.stat()
    if status.st_uid != os.geteuid():
        return f'{directory} belongs to another user, whose code would be run'
    if status.st_mode & WRITABLE_BY_OTHERS:
        return f'{directory} can be written to by others, whose code would be run; chmod 700 it'
    # A user who can write to a parent can replace the directory, unless the parent is sticky, as /tmp is.
    for parent in directory.resolve().parents:
        status = parent.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f'{parent}, in which {directory} is, belongs to another user, who could exchange it'
        if status.st_mode & WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX:
            return (
                f'{parent}, in which {directory} is, can be written to by others, who could exchange it; '
                f'chmod go-w {parent}'
            )
    return ''


def _warn_disabled(reason: str) -> None:
    # The first speaks for all.
    if jax.process_index() == 0:
        logger.warning(f'compiled programs are not kept: {reason}; train.compilation_cache_dir sets another directory')


def _is_shared_by_all(directory: Path | None) -> bool:
    """Whether all processes of the run have this directory, and not each one of the same name on its own disk.

    JAX writes in the first process only. When that finds its program and the others compile theirs, these wait for it
    without an end: of GPUs XLA shares out the trials of kernels among the processes.
    """
    if ProcessGroup().num_processes == 1:
        return directory is not None
    shared = is_shared(directory)
    if not shared and directory is not None:
        _warn_disabled(f'{directory} is not the same directory for all processes')
    return shared


def _install(directory: Path) -> None:
    # A JAX that asks elsewhere would write files of its own, without checksums.
    if not hasattr(compilation_cache, 'get_file_cache'):
        _warn_disabled(f'jax {jax.__version__} has no place to put them')
        return
    programs = CompilationCache(directory, host=_host())
    # JAX has no public place for a cache of one's own: this is what it asks where programs are. Of the answer it uses
    # `get`, `put` and `_path`; its type is an abstract class of JAX's that is not public either.
    compilation_cache.get_file_cache = lambda path: (programs, path)  # type: ignore[assignment, return-value]
    compilation_cache.reset_cache()
    jax.config.update('jax_compilation_cache_dir', str(directory))
    # All of a step's programs, the small ones too.
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
    # XLA's files of kernels, beside, have no checksums either.
    jax.config.update('jax_persistent_cache_enable_xla_caches', '')


def _host() -> str:
    """What a CPU's programs depend on besides JAX's key: a home directory may be shared by machines of several ages."""
    if jax.default_backend() != 'cpu':
        return ''
    features = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
        features += next((line for line in lines if line.startswith(('flags', 'Features'))), '')
    return f'-{hashlib.sha256(features.encode()).hexdigest()[:8]}'
