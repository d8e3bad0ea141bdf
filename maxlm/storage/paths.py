"""Types of options and config keys that take a path: each says which URLs work for it, and refuses the others.

A refusal is one line and comes before any work. `file://` URLs are local paths; `~` is the home directory.
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

# URLs of every protocol that fsspec knows.
ANY = ('*',)
BUCKETS = ('gs', 's3')
# Only schemes of buckets: `x:y` with another name is the name of a file.
_ONE_SLASH = re.compile(r'(gs|gcs|s3|s3a|https?|file):/(?!/)')
_NO_BUCKET = re.compile(r'(gs|gcs|s3|s3a)://(/|$)')


class Kind(enum.Enum):
    """Kind of file that a path names, if it exists."""

    FILE = 'file'
    DIRECTORY = 'directory'
    EITHER = 'file or directory'


@dataclasses.dataclass(frozen=True)
class PathOption:
    """Type of an argparse option that takes a path. Called with the text, it returns the path.

    Attributes:
        kind: what a local path may name. A path that names nothing is accepted.
        urls: protocols whose URLs work, or ANY; () = none.
        may_be_empty: whether the empty text is accepted, and means that no path is given.
        as_path: whether a local path is returned as `Path`, and not as `str`.
        advice: what to do instead of giving a URL; '' = give a local file or directory.
    """

    kind: Kind = Kind.EITHER
    urls: tuple[str, ...] = ()
    may_be_empty: bool = False
    as_path: bool = False
    advice: str = ''

    def __call__(self, text: str) -> str | Path:
        """
        Raises:
            argparse.ArgumentTypeError: the path cannot be used, whatever the other options are.
        """
        try:
            path = self.checked(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f'={error}') from error
        return Path(path) if self.as_path and not is_url(path) else path

    def checked(self, text: str) -> str:
        """Returns the path; local ones without `file://` and `~`. Raises ValueError with one line."""
        if not text and self.may_be_empty:
            return text
        if not text.strip():
            raise ValueError(f'{text}: the path is empty; give one')
        if '\0' in text:
            raise ValueError(f'{text!r}: a path has no NUL character; leave it out')
        if match := _ONE_SLASH.match(text):
            raise ValueError(f'{text}: a URL has two slashes; give {match[1]}://…')
        path = _without_file_protocol(text)
        if is_url(path):
            self._check_url(path)
            return path
        path = os.path.expanduser(path)
        self._check_local(path)
        return path

    @property
    def _instead(self) -> str:
        return self.advice or f'give a local {self.kind.value}'

    def _check_url(self, url: str) -> None:
        protocol = url.partition('://')[0]
        if not _is_known(protocol):
            raise ValueError(f'{display_path(url)}: {protocol}:// is no known protocol; gs:// and s3:// are')
        if not self.urls:
            raise ValueError(f'{display_path(url)}: URLs do not work here; {self._instead}')
        if self.urls != ANY and protocol not in self.urls:
            known = ' and '.join(f'{name}://' for name in self.urls)
            verb = 'does' if len(self.urls) == 1 else 'do'
            raise ValueError(f'{display_path(url)}: {protocol}:// does not work here, {known} {verb}; {self._instead}')
        if match := _NO_BUCKET.match(url):
            raise ValueError(f'{display_path(url)}: the URL names no bucket; give {match[1]}://bucket/…')

    def _check_local(self, path: str) -> None:
        try:
            mode = os.stat(path).st_mode
        except OSError:
            # The command itself says what it misses, or makes it.
            return
        if stat.S_ISDIR(mode):
            if self.kind is Kind.FILE:
                raise ValueError(f'{path}: is a directory; give a file')
        elif kind := kind_of(mode):
            wanted = 'directory' if self.kind is Kind.DIRECTORY else 'regular file'
            raise ValueError(f'{path}: is {kind}, not a {wanted}')
        elif self.kind is Kind.DIRECTORY:
            raise ValueError(f'{path}: is a file; give a directory')


@dataclasses.dataclass(frozen=True)
class PathList:
    """Type of an argparse option that takes names and paths with commas between; a path may follow `KIND:`."""

    option: PathOption

    def __call__(self, text: str) -> str:
        for part in text.split(','):
            if part.strip():
                self.option(re.sub(r'^\w+:(?!/)', '', part.strip()))
        return text


def check_key(key: str, value: Any, option: PathOption) -> Any:
    """Returns the value of a config key that takes a path, as `PathOption.checked` does.

    Raises:
        InputError: it cannot be used; the message names the key.
    """
    if not isinstance(value, str):
        return value
    try:
        return option.checked(value)
    except ValueError as error:
        raise InputError(f'{key}={error}') from error


def _without_file_protocol(path: str) -> str:
    if not path.startswith('file://'):
        return path
    local = path.removeprefix('file://').removeprefix('localhost')
    if not local.startswith('/'):
        raise ValueError(f'{path}: a file:// URL names a file of this machine; give file:///path or the path itself')
    return local


def _is_known(protocol: str) -> bool:
    import fsspec  # takes a while, and only URLs need it

    return protocol in fsspec.available_protocols()
