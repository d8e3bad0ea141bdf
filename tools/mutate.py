"""Mutation check of the test suite: `python -m tools.mutate [--count 20] [--seed 0] [--output FILE]`.

Breaks one random line of `maxlm/` at a time in a copy of the checkout and runs the fast tier of the tests. If the fast
tier passes, the tool runs the slow tests that depend on the changed file. It mutates the packages in rotation, prints
each mutant with its outcome and a summary, and writes the outcomes to FILE as JSON.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.affected_tests import ROOT, affected, dependencies
from tools.test_map import TestMap

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
# Larger constants are mostly arbitrary limits; increasing one of them by 1 breaks nothing.
MAX_CONSTANT = 8
# Removing these calls changes only the messages of a run.
LOGGING = ('logger', 'print', 'warn', 'progress')


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One changed line of a file."""

    file: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f'{self.file}:{self.line}\n      - {self.before.strip()}\n      + {self.after.strip()}'

    def applied_to(self, source: str) -> str:
        """Returns the source with the line changed."""
        lines = source.splitlines()
        assert lines[self.line - 1] == self.before
        return '\n'.join([*lines[: self.line - 1], self.after, *lines[self.line :]]) + '\n'


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """Yields every mutant of a file."""
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in _mutable(tree):
        if node.lineno != node.end_lineno:
            continue
        for changed in _changes(node):
            before = lines[node.lineno - 1]
            # Column offsets of `ast` count UTF-8 bytes.
            encoded = before.encode()
            after = (encoded[: node.col_offset] + changed.encode() + encoded[node.end_col_offset :]).decode()
            yield Mutant(file, node.lineno, before, after)


def _mutable(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yields expressions and statements, except annotations, docstrings and code that only builds a message."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.Raise, ast.JoinedStr, ast.arguments, ast.Import, ast.ImportFrom)):
            continue
        if isinstance(child, ast.AnnAssign):
            if child.value is not None:
                yield from _mutable(ast.Expression(child.value))
            continue
        if isinstance(child, ast.Expr) and any(word in ast.unparse(child) for word in LOGGING):
            continue
        if isinstance(child, (ast.expr, ast.stmt)):
            yield child
        yield from _mutable(child)


def _changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    """Yields replacements of a node's text."""
    node = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
        yield ast.unparse(node)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node):
        node.op = OPERATORS[type(node.op)]()
        yield f'({ast.unparse(node)})'
    elif isinstance(node, ast.BoolOp):
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield f'({ast.unparse(node)})'
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f'({ast.unparse(node.operand)})'
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value <= MAX_CONSTANT:
        yield str(node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield 'return None'
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield 'pass'


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr | ast.Constant) and not _is_number(side) for side in sides)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """Returns `count` random mutants, taken from the packages of `maxlm/` in rotation."""
    rng = random.Random(seed)
    files: dict[str, list[str]] = {}
    for path in sorted((root / 'maxlm').rglob('*.py')):
        parts = path.relative_to(root).parts
        files.setdefault(parts[1] if len(parts) > 2 else 'maxlm', []).append('/'.join(parts))
    packages = sorted(files)
    rng.shuffle(packages)
    chosen: list[Mutant] = []
    while len(chosen) < count:
        package = files[packages[len(chosen) % len(packages)]]
        sources = {file: (root / file).read_text(encoding='utf-8') for file in package}
        # Weighting files by length gives each line about the same probability.
        (file,) = rng.choices(package, [len(source) for source in sources.values()])
        if candidates := list(mutants(file, sources[file])):
            chosen.append(rng.choice(candidates))
    return chosen


def check(
    copy_of: Path, mutant: Mutant, graph: dict[str, set[str]], processes: str, recorded: TestMap | None = None
) -> str:
    """Runs the tests on a mutant in a copy of the checkout.

    Tests that execute the mutated function according to `recorded`, or without it the package's own tests, run first,
    since one failure decides.

    Returns:
        `fast` if the fast tier fails, `changed` if the slow tests fail, `survived` if all tests pass.
    """
    path = copy_of / mutant.file
    original = path.read_text(encoding='utf-8')
    dependents = affected(graph, [mutant.file])
    package = Path(mutant.file).parts[1].removesuffix('.py')
    path.write_text(mutant.applied_to(original), encoding='utf-8')
    try:
        executing = recorded.selected(copy_of, [mutant.file]) if recorded else set()
        own = sorted(executing) or [file for file in dependents if package in file]
        groups = [group for group in (own, sorted({*dependents} - {*own})) if group]
        if any(_fails(copy_of, ['-m', 'not slow and not nightly', *group], processes) for group in groups):
            return 'fast'
        if any(_fails(copy_of, ['-m', 'slow and not nightly', *group], processes) for group in groups):
            return 'changed'
        return 'survived'
    finally:
        path.write_text(original, encoding='utf-8')


def _fails(directory: Path, arguments: list[str], processes: str) -> bool:
    command = [sys.executable, '-m', 'pytest', '-x', '-q', f'--numprocesses={processes}', '--dist=loadfile', *arguments]
    # Writing no bytecode prevents compiled mutants from remaining in the copy.
    environment = {**os.environ, 'PYTHONDONTWRITEBYTECODE': '1'}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1, 2, 5):
        raise RuntimeError(f'pytest exited with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}')
    # 5: no test was selected.
    return done.returncode in (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--count', type=int, default=20, help='number of mutants')
    parser.add_argument('--seed', type=int, default=0, help='seed of the random choice')
    parser.add_argument('--processes', default='auto', help='number of pytest workers')
    parser.add_argument('--output', type=Path, metavar='FILE', help='write the results to FILE as JSON')
    parser.add_argument('--list', action='store_true', help='print the mutants without running a test')
    options = parser.parse_args()
    chosen = sample(ROOT, options.count, options.seed)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / 'checkout'
        shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns('.git', '.venv', '*_cache'))
        graph, recorded = dependencies(ROOT), TestMap.load()
        for number, mutant in enumerate(chosen, start=1):
            line = f'{number:3} {mutant}'
            if options.list:
                print(line)
                continue
            began = time.monotonic()
            outcome = check(copied, mutant, graph, options.processes, recorded)
            print(f'{line}\n      {outcome} ({time.monotonic() - began:.0f} s)', flush=True)
            results.append({**dataclasses.asdict(mutant), 'outcome': outcome})
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + '\n')
    counts = Counter(result['outcome'] for result in results)
    if results:
        caught = counts['fast'] + counts['changed']
        print(f'{len(results)} mutants: {counts["fast"]} caught by the fast tier, {caught} in total')


if __name__ == '__main__':
    main()
