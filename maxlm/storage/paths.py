"""Types of options and config keys that take a path. Each type declares the URLs that it supports.

An unsupported path is rejected in one line before any work starts. `file://` URLs are local paths, and `~` is the home
directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import re
import stat
from pathlib import Path
from typing import Any

from maxlm.errors import InputError
from maxlm.storage.filesystem import display_path, is_url
from maxlm.storage.regular_files import kind_of

# All protocols that fsspec supports.
ANY = ('*',)
BUCKETS = ('gs', 's3')
# Only bucket and web schemes, because `x:y` may be a file name.
_ONE_SLASH = re.compile(r'(gs|gcs|s3|s3a|https?|file):/(?!/)')
# Models of llama.cpp and nanochat as single files.
_MODEL_FILE = re.compile(r'\.(gguf|pt)$')
_NO_BUCKET = re.compile(r'(gs|gcs|s3|s3a)://(/|$)')


class Kind(enum.Enum):
    """Required kind of an existing path."""

    FILE = 'file'
    DIRECTORY = 'directory'
    EITHER = 'file or directory'


@dataclasses.dataclass(frozen=True)
class PathOption:
    """Type of an argparse option that takes a path. Calling it with the text returns the path.

    Attributes:
        kind: required kind of a local path. A missing path is accepted.
        urls: supported protocols, or ANY; () = none.
        may_be_empty: accept the empty text as "no path".
        as_path: return local paths as `Path` instead of `str`.
        keep_home: keep `~`, for paths in files that other users read. It is expanded at use.
        advice: remedy in the error message for URLs; '' = give a local file or directory.
    """

    kind: Kind = Kind.EITHER
    urls: tuple[str, ...] = ()
    may_be_empty: bool = False
    as_path: bool = False
    keep_home: bool = False
    advice: str = ''

    def __call__(self, text: str) -> str | Path:
        """
        Raises:
            argparse.ArgumentTypeError: the path is not valid.
        """
        try:
            path = self.checked(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f'={error}') from error
        return Path(path) if self.as_path and not is_url(path) else path

    def checked(self, text: str) -> str:
        """Returns the path. Removes `file://` and expands `~`. Raises ValueError with a one-line message."""
        if not text and self.may_be_empty:
            return text
        if not text.strip():
            raise ValueError(f'{text}: the path is empty; set a path')
        if '\0' in text:
            raise ValueError(f'{text!r}: paths cannot contain NUL characters; remove them')
        if match := _ONE_SLASH.match(text):
            raise ValueError(f'{text}: a slash is missing after the protocol; use {match[1]}://…')
        path = _without_file_protocol(text)
        if is_url(path):
            self._check_url(path)
            return path
        expanded = os.path.expanduser(path)
        self._check_local(expanded)
        return path if self.keep_home else expanded

    @property
    def _instead(self) -> str:
        return self.advice or f'give a local {self.kind.value}'

    def _check_url(self, url: str) -> None:
        protocol = url.partition('://')[0]
        if not _is_known(protocol):
            raise ValueError(f'{display_path(url)}: unknown protocol {protocol}://; use gs:// or s3://')
        if not self.urls:
            raise ValueError(f'{display_path(url)}: URLs are not supported; {self._instead}')
        if self.urls != ANY and protocol not in self.urls:
            known = ' and '.join(f'{name}://' for name in self.urls)
            raise ValueError(f'{display_path(url)}: {protocol}:// is not supported, only {known}; {self._instead}')
        if match := _NO_BUCKET.match(url):
            raise ValueError(f'{display_path(url)}: the URL has no bucket name; use {match[1]}://bucket/…')

    def _check_local(self, path: str) -> None:
        try:
            mode = os.stat(path).st_mode
        except OSError:
            # The path does not exist. The command reports it or creates it.
            return
        if stat.S_ISDIR(mode):
            if self.kind is Kind.FILE:
                raise ValueError(f'{path}: is a directory; give a file')
        elif kind := kind_of(mode):
            expected = 'directory' if self.kind is Kind.DIRECTORY else 'regular file'
            raise ValueError(f'{path}: is {kind}, not a {expected}; give another path')
        elif self.kind is Kind.DIRECTORY:
            if _MODEL_FILE.search(path):
                raise ValueError(
                    f'{path}: is a model of another program; import it with `maxlm hf import --input={path} '
                    '--output=WORKDIR` and use the workdir'
                )
            raise ValueError(f'{path}: is a file; give a directory')


@dataclasses.dataclass(frozen=True)
class PathList:
    """Type of an argparse option that takes comma-separated names and paths. `KIND:` may precede a path.

    Attributes:
        option: type of each path.
        remote: kinds whose paths may also be URLs.
    """

    option: PathOption
    remote: tuple[str, ...] = ()

    def __call__(self, text: str) -> str:
        for part in filter(None, map(str.strip, text.split(','))):
            found = re.match(r'(\w+):(?!/)', part)
            is_remote = found is not None and found[1] in self.remote
            option = dataclasses.replace(self.option, urls=ANY) if is_remote else self.option
            option(part[found.end() :] if found else part)
        return text


def check_key(key: str, value: Any, option: PathOption) -> Any:
    """Returns the validated value of a config key that takes a path; see `PathOption.checked`.

    Raises:
        InputError: the path is not valid. The message names the key.
    """
    if not isinstance(value, str):
        return value
    try:
        return option.checked(value)
    except ValueError as error:
        raise InputError(f'{key}={error}') from error


def given_path(name: str, path: str | os.PathLike[str], kind: Kind = Kind.DIRECTORY) -> str:
    """Returns the validated path or URL of an argument of the Python API; see `PathOption.checked`.

    Raises:
        InputError: the path is not valid. The message names the argument.
    """
    return str(check_key(name, os.fspath(path), PathOption(kind, ANY)))


def _without_file_protocol(path: str) -> str:
    if not path.startswith('file://'):
        return path
    local = path.removeprefix('file://').removeprefix('localhost')
    if not local.startswith('/'):
        raise ValueError(f'{path}: file:// URLs must name a local file; use file:///path or the path itself')
    return local


def _is_known(protocol: str) -> bool:
    import fsspec  # slow to import, and only needed for URLs

    return protocol in fsspec.available_protocols()
