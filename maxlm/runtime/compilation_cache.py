"""Persistent compilation cache with checksums, so that a restarted run does not compile again.

It replaces the file cache of JAX, whose files have no checksums. A single flipped bit can crash XLA or
change results. This cache ignores corrupt files.
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

# Size limit of all programs together. The programs of one run have a few hundred kilobytes to a few megabytes.
CAPACITY = 4 * 2**30
SUFFIX = '.program'
DIGEST_BYTES = hashlib.sha256().digest_size
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def enable_compilation_cache(cache_dir: str) -> CompilationCache | None:
    """Enables JAX's persistent compilation cache in a directory.

    Call it in all processes of a run, before anything is compiled. If the directory cannot be used, a warning is logged
    and the cache is disabled. A cache set by JAX_COMPILATION_CACHE_DIR (empty = none) is not changed.

    Args:
        cache_dir: train.compilation_cache_dir; '' = no cache.

    Returns:
        The cache, or None if it is disabled or was not changed.

    Raises:
        InputError: `cache_dir` is a URL.
    """
    if is_url(cache_dir):
        raise InputError(
            f"train.compilation_cache_dir={cache_dir}: must be a local directory, or '' to disable the cache"
        )
    settings: Any = jax.config
    is_enabled = cache_dir and settings.jax_enable_compilation_cache and settings.jax_compilation_cache_dir is None
    directory = _open(cache_dir) if is_enabled else None
    if not _is_shared_by_all(directory):
        return None
    assert directory is not None
    return _install(directory)


def enabled_cache() -> CompilationCache | None:
    """Returns the cache that `enable_compilation_cache` enabled in this process, or None."""
    settings: Any = jax.config
    directory = settings.jax_compilation_cache_dir
    # See `_install`.
    find: Any = getattr(compilation_cache, 'get_file_cache', None)
    found = find(directory) if find and directory else None
    return found[0] if found and isinstance(found[0], CompilationCache) else None


class CompilationCache:
    """File cache of compiled programs with checksums, in the interface that JAX expects. Evicts the least recently
    used.

    Processes may share a directory: files appear atomically by a rename, and may disappear at any time.
    """

    def __init__(self, directory: Path, *, capacity: int = CAPACITY, host: str = ''):
        """
        Args:
            directory: directory of the files.
            capacity: size limit in bytes.
            host: suffix of file names that separates machines which cannot run each other's programs.
        """
        # JAX requires this name.
        self._path = directory
        self._capacity = capacity
        self._host = host
        self._is_disabled = False

    def get(self, key: str) -> bytes | None:
        """Returns the program of a key, or None if it is missing or corrupt."""
        path = self._file(key)
        try:
            stored = read_bytes(path)
            digest, program = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
            if digest != self._digest(key, program):
                path.unlink(missing_ok=True)
                return None
            # The modification time is the time of last use, for `_evict`.
            os.utime(path)
        except OSError:
            return None
        return program

    def put(self, key: str, program: bytes) -> None:
        """Stores a program. After the first failure, for example on a full disk, programs are no longer stored."""
        if self._is_disabled or len(program) > self._capacity:
            return
        try:
            self._write(self._file(key), self._digest(key, program) + program)
            self._evict()
        except OSError as error:
            self._is_disabled = True
            logger.warning(f'compilation cache {self._path}: writes disabled: {os_message(error)}')

    def _write(self, path: Path, content: bytes) -> None:
        # NamedTemporaryFile creates a private file. A user who can write it could run code in this process.
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
        # The pattern includes partial files of killed processes, which are evicted by age, and excludes foreign files.
        for path in self._path.glob(f'*{SUFFIX}*'):
            # Another process may delete the file first.
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
    """Creates and returns the directory. Logs a warning and returns None if it is unsafe or cannot be used."""
    try:
        directory = Path(cache_dir).expanduser()
        for path in (*reversed(directory.parents), directory):
            # mkdir(parents=True) would create group-writable parents with umask 002.
            path.mkdir(mode=0o700, exist_ok=True)
        reason = _security_problem(directory)
        if not reason:
            # Test by writing, because permission bits do not suffice.
            with tempfile.TemporaryFile(dir=directory):
                return directory
    except OSError as error:
        reason = f'{cache_dir}: {os_message(error)}'
    except RuntimeError:
        # The user has only a numeric ID, for example in a container.
        reason = f'{cache_dir}: the user has no home directory'
    _warn_disabled(reason)
    return None


def _security_problem(directory: Path) -> str:
    """Returns the reason why another user could inject a program into the directory, or ''."""
    status = directory.stat()
    if status.st_uid != os.geteuid():
        return f'{directory} belongs to another user, who could inject code'
    if status.st_mode & WRITABLE_BY_OTHERS:
        return f'{directory} is writable by other users, who could inject code; run chmod 700 {directory}'
    # A user who can write to a parent can replace the directory, unless the parent is sticky like /tmp.
    for parent in directory.resolve().parents:
        status = parent.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f'{parent}, a parent of {directory}, belongs to another user, who could replace it'
        if status.st_mode & WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX:
            return (
                f'{parent}, a parent of {directory}, is writable by other users, who could replace it; run chmod go-w '
                f'{parent}'
            )
    return ''


def _warn_disabled(reason: str) -> None:
    # Process 0 reports for all processes.
    if jax.process_index() == 0:
        logger.warning(f'compilation cache disabled: {reason}; set another directory with train.compilation_cache_dir')


def _is_shared_by_all(directory: Path | None) -> bool:
    """Returns True if all processes use the same directory, as opposed to local directories of the same name.

    JAX writes the cache in process 0 only, and XLA distributes the autotuning of GPU kernels among the processes. If
    process 0 finds its program and the other processes must compile, they wait for it forever.
    """
    if ProcessGroup().num_processes == 1:
        return directory is not None
    shared = is_shared(directory)
    if not shared and directory is not None:
        _warn_disabled(f'{directory} is not the same directory for all processes')
    return shared


def _install(directory: Path) -> CompilationCache | None:
    # Another version of JAX might bypass this cache and write its own files without checksums.
    if not hasattr(compilation_cache, 'get_file_cache'):
        _warn_disabled(f'jax {jax.__version__} does not support a custom cache')
        return None
    programs = CompilationCache(directory, host=_host())
    # JAX has no public API for a custom cache, so this replaces its internal lookup. JAX uses only `get`, `put` and
    # `_path` of the result. The abstract base class is not public either.
    compilation_cache.get_file_cache = lambda path: (programs, path)  # type: ignore[assignment, return-value]
    compilation_cache.reset_cache()
    jax.config.update('jax_compilation_cache_dir', str(directory))
    # Also cache the small programs of a step.
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
    # XLA's kernel cache has no checksums either.
    jax.config.update('jax_persistent_cache_enable_xla_caches', '')
    return programs


def _host() -> str:
    """Returns a suffix for CPU features, which JAX's key lacks. Different machines may share a home directory."""
    if jax.default_backend() != 'cpu':
        return ''
    features = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
        features += next((line for line in lines if line.startswith(('flags', 'Features'))), '')
    return f'-{hashlib.sha256(features.encode()).hexdigest()[:8]}'
