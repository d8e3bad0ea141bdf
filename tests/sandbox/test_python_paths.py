"""Tests the paths that a program may read."""

import os
from pathlib import Path

from maxlm.sandbox import python_paths


def test_files_of_python_are_found():
    paths = python_paths.readable_paths()
    assert any(Path(os.__file__).resolve().is_relative_to(path) for path in paths)
    assert not {'/', '/usr', '/etc', '/home', '/root', '/tmp'} & set(paths)
    assert python_paths.without_nested({'/a/b', '/a', '/ab', '/a/b/c'}) == ['/a', '/ab']
