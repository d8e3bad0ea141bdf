"""Map from the functions of maxlm/ to the tests that execute them.

`launch/test.sh --map` runs the tests with `tests/executed_functions.py`, which records the map with coverage.py, and
writes it to ~/.cache/maxlm-tests. `tools.affected_tests` reads it. A function is a top-level function or a method,
including the functions in it. The other statements of a module, such as constants, affect all tests that execute one of
its functions. A test that reuses the result of another test, such as a compiled step, does not execute its code.
"""

from __future__ import annotations

import ast
import dataclasses
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.cache import CACHE

FILE = CACHE / 'test-map.json.gz'
# Stands for the statements outside of functions.
MODULE = ''


@dataclasses.dataclass(frozen=True)
class TestMap:
    """Tests by file and function of the package.

    Attributes:
        tests: node ids.
        executed: indices of `tests` by file and function.
        hashes: hashes by file and function at the time of the recording.
        test_files: hashes of the test files at that time.
    """

    # Pytest must not collect this class.
    __test__ = False

    tests: list[str]
    executed: dict[str, dict[str, list[int]]]
    hashes: dict[str, dict[str, str]]
    test_files: dict[str, str]

    @classmethod
    def load(cls, path: Path = FILE) -> TestMap | None:
        """Reads a map; returns None if none was recorded."""
        return cls(**json.loads(gzip.decompress(path.read_bytes()))) if path.exists() else None

    def save(self, path: Path = FILE) -> None:
        """Writes the map."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(dataclasses.asdict(self)).encode()))

    def selected(self, root: Path, changed: Iterable[str]) -> set[str]:
        """Returns the tests that execute functions which have changed since the recording.

        Args:
            root: directory of the checkout.
            changed: files to compare with the map, relative to `root`.

        Returns:
            Node ids. If a test file has changed since the recording, its path stands for its tests.
        """
        found: set[int] = set()
        for file in self.hashes.keys() & set(changed):
            path, before = root / file, self.hashes[file]
            after = function_hashes(path.read_text(encoding='utf-8')) if path.exists() else {}
            # A new function may override another one, so it counts as a change of the module.
            is_module_changed = before.keys() != after.keys() or before[MODULE] != after[MODULE]
            for name, tests in self.executed[file].items():
                if is_module_changed or before[name] != after[name]:
                    found.update(tests)
        return {self._current(root, self.tests[index]) for index in found}

    def _current(self, root: Path, test: str) -> str:
        file = test.partition('::')[0]
        path = root / file
        return test if path.exists() and content_hash(path) == self.test_files[file] else file


def function_hashes(source: str) -> dict[str, str]:
    """Returns hashes of the functions of a module and of its other statements, without comments and formatting."""
    tree = ast.parse(source)
    hashes = {}
    for name, function in functions(tree):
        hashes[name] = _hash(ast.dump(function).encode())
        # Only the position of the function belongs to the module.
        for field in ('args', 'body', 'decorator_list', 'returns'):
            delattr(function, field)
    return {**hashes, MODULE: _hash(ast.dump(tree).encode())}


def functions(
    tree: ast.Module | ast.ClassDef, prefix: str = ''
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yields the top-level functions and methods of a module with their qualified names."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f'{prefix}{node.name}.')
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f'{prefix}{node.name}', node


def content_hash(path: Path) -> str:
    """Returns a hash of a file."""
    return _hash(path.read_bytes())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
