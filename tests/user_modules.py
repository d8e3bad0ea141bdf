"""Modules of a user in the working directory."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

_numbers = itertools.count()


def write_module(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str, name: str = '') -> str:
    """Writes a module, makes `directory` the working directory, and returns the name, by default a new one."""
    name = name or f'user_module_{next(_numbers)}'
    (directory / f'{name}.py').write_text(body)
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name
