"""Prints the tests that depend on what changed since a revision: `python -m tools.affected_tests [REVISION]`.

A test depends on the functions of maxlm/ that it executed when `launch/test.sh --map` recorded them; see
`tools.test_map`. For all other files, and without a recorded map, the imports decide: a test file depends on every
project file that it imports or names in a string, directly or through other files. REVISION is `main` by default.
Uncommitted and untracked files count as changed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tools.test_map import TestMap

ROOT = Path(__file__).parent.parent
PACKAGES = ('maxlm', 'tests', 'benchmarks', 'tools', 'configs')
# Directories that a test names when it reads all of their files.
FOLDERS = ('.github/workflows', 'configs', 'docs', 'launch', 'benchmarks/results')
# Ends of the names of files that are in no directory.
OF_ROOT = ('.md', '.toml', '.lock', '.yaml', 'Dockerfile', '.dockerignore')
# Files that every test depends on.
EVERYTHING = ('pyproject.toml', 'tests/conftest.py', 'tests/cpu.py', 'tests/programs.py')
# Tests that read the source of all modules.
OF_SOURCES = ('tests/test_architecture.py',)


def dependencies(root: Path) -> dict[str, set[str]]:
    """Returns the files that each Python file of the project imports or names, as paths relative to `root`."""
    files = {str(path.relative_to(root)) for name in PACKAGES for path in (root / name).rglob('*.py')}
    return {file: _references(root, file, files) for file in files}


def affected(graph: dict[str, set[str]], changed: Iterable[str]) -> list[str]:
    """Returns the sorted test files that depend on a changed file."""
    tests = [file for file in graph if file.startswith('tests/') and Path(file).name.startswith('test_')]
    reached = set(changed)
    if reached & set(EVERYTHING):
        return sorted(tests)
    # A test that names a directory depends on each of its files.
    reached |= {folder for folder in FOLDERS if any(file.startswith(f'{folder}/') for file in reached)}
    dependents: dict[str, set[str]] = {}
    for file, references in graph.items():
        for reference in references:
            dependents.setdefault(reference, set()).add(file)
    waiting = list(reached)
    while waiting:
        new = dependents.get(waiting.pop(), set()) - reached
        reached |= new
        waiting.extend(new)
    return sorted(reached.intersection(tests))


def selected(root: Path, changed: Iterable[str], recorded: TestMap | None) -> list[str]:
    """Returns the sorted test files and node ids that depend on a changed file.

    Args:
        root: directory of the checkout.
        changed: changed files, relative to `root`.
        recorded: functions that each test executes; None = unknown.
    """
    changed = set(changed)
    known = recorded.hashes.keys() & changed if recorded else set()
    files = set(affected(dependencies(root), changed - known)) if changed - known else set()
    tests = recorded.selected(root, known) if recorded else set()
    if any(file.startswith('maxlm/') for file in changed):
        files |= {file for file in OF_SOURCES if (root / file).exists()}
    return sorted(files | {test for test in tests if test.partition('::')[0] not in files})


def changed_files(revision: str) -> list[str]:
    """Returns the files that differ from the merge base with `revision`, and untracked files."""
    base = _git('merge-base', revision, 'HEAD').strip()
    return [*_git('diff', '--name-only', base).splitlines(), *_git('ls-files', '-o', '--exclude-standard').splitlines()]


def _references(root: Path, file: str, files: set[str]) -> set[str]:
    found = set()
    for name in _names((root / file).read_text(encoding='utf-8')):
        path = name.replace('.', '/')
        found |= {f'{path}.py', f'{path}/__init__.py'} & files
        # `python -m maxlm.COMMAND` runs a module of the command line.
        found |= {path.replace('maxlm', f'maxlm/cli/{group}') + '.py' for group in ('setup', 'runs', 'models')} & files
        found |= {name} if _exists(root, name) else set()
    for parent in Path(file).parents:
        # tests/conftest.py applies to every test; EVERYTHING covers it.
        if str(parent) not in ('.', 'tests'):
            found |= {f'{parent}/conftest.py'} & files
    return found - {file, 'tests/conftest.py'}


def _names(source: str) -> Iterable[str]:
    """Yields dotted names of imported modules, and strings that may be a module or a path."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f'{node.module}.{alias.name}' for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            # Only complete strings count, because messages and docstrings mention modules without using them.
            yield node.value.strip('/')


@cache
def _exists(root: Path, name: str) -> bool:
    if name in FOLDERS:
        return True
    return ('/' in name or name.endswith(OF_ROOT)) and '..' not in name and (root / name).is_file()


def _git(*arguments: str) -> str:
    return subprocess.run(['git', *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    changed = changed_files(sys.argv[1] if len(sys.argv) > 1 else 'main')
    print('\n'.join(selected(ROOT, changed, TestMap.load())))


if __name__ == '__main__':
    main()
