"""Files that a Python program needs: the standard library, shared libraries and a few devices."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable

# Installation prefixes that contain more than Python.
SHARED_PREFIXES = ('/', '/usr', '/usr/local')
DEVICES = ('/dev/null', '/dev/zero', '/dev/random', '/dev/urandom')
LIBRARY_FOLDERS = ('/lib', '/lib64', '/usr/lib', '/usr/lib64')
LINKER_FILES = ('/etc/ld.so.cache', '/etc/localtime')


def loaded_library_folders() -> set[str]:
    """Returns the directories of the shared libraries that this process has loaded."""
    try:
        with open('/proc/self/maps', encoding='utf-8', errors='replace') as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count('/') and '.so' in line}
    except OSError:
        return set()
    return {os.path.dirname(path) for path in paths if path.startswith('/')}


def python_folders() -> set[str]:
    """Returns the directories of the standard library, or the complete prefix of a separate Python installation."""
    paths = sysconfig.get_paths(vars={'base': sys.base_prefix, 'platbase': sys.base_exec_prefix})
    folders = {paths['stdlib'], paths['platstdlib']}
    folders |= {prefix for prefix in (sys.base_prefix, sys.base_exec_prefix) if prefix not in SHARED_PREFIXES}
    return {os.path.realpath(folder) for folder in folders if os.path.isdir(folder)}


def system_folders() -> set[str]:
    """Returns the directories of the system's shared libraries for this architecture."""
    multiarch = sysconfig.get_config_var('MULTIARCH') or ''
    folders = loaded_library_folders() | {f'{folder}/{multiarch}' for folder in ('/usr/lib', '/lib') if multiarch}
    folders.add('/usr/lib64')
    return {os.path.realpath(folder) for folder in folders if os.path.isdir(folder)}


def without_nested(paths: set[str]) -> list[str]:
    """Returns the sorted paths that are not below another path of the set."""
    outermost: list[str] = []
    for path in sorted(paths):
        if not any(path == other or path.startswith(other.rstrip('/') + '/') for other in outermost):
            outermost.append(path)
    return outermost


def readable_paths(more: Iterable[str] = ()) -> list[str]:
    """Returns real paths of the directories and files that a program may read, with `more`. None is below another."""
    files = {path for path in LINKER_FILES if os.path.exists(path)}
    return without_nested(python_folders() | system_folders() | files | set(more))


def package_folders() -> list[str]:
    """Returns the directories of the installed packages of this process."""
    paths = sysconfig.get_paths()
    folders = dict.fromkeys(os.path.realpath(paths[name]) for name in ('purelib', 'platlib'))
    return [folder for folder in folders if os.path.isdir(folder)]


def devices() -> list[str]:
    """Returns the devices that a program may use."""
    return [path for path in DEVICES if os.path.exists(path)]


def links() -> dict[str, str]:
    """Returns {path: target} of top-level library directories that are symbolic links, such as /lib to usr/lib."""
    return {path: os.readlink(path) for path in LIBRARY_FOLDERS if os.path.islink(path)}
