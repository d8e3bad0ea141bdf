"""Pytest plugin that records which functions of maxlm/ each test executes: `pytest --record-map`.

coverage.py records the lines of all processes: the workers of xdist and child processes, with the test as context.
Fixtures of modules and sessions run once, but their lines belong to all tests that use them.
"""

from __future__ import annotations

import ast
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

from tools.test_map import MODULE, TestMap, content_hash, function_hashes, functions

ROOT = Path(__file__).parent.parent
# coverage.py starts in child processes with this variable, and expands the name of the test in their configuration.
VARIABLE = 'COVERAGE_PROCESS_START'
CONFIGURATION = """[run]
source = {root}/maxlm
data_file = {folder}/lines
parallel = true
context = ${{PYTEST_CURRENT_TEST}}
sigterm = true
patch = _exit
disable_warnings = no-data-collected, module-not-imported, module-not-measured, already-imported
"""
CONFIGURATION_FILE = 'coverage.ini'
# Prefix of the contexts of shared fixtures.
SHARED = 'fixture '


class Recorder:
    """Records the lines that the tests of one process execute."""

    def __init__(self, configuration: Path):
        os.environ[VARIABLE] = str(configuration)
        self._coverage = coverage.Coverage(config_file=str(configuration))
        self._coverage.start()
        self._context = ''
        # Names of the contexts of shared fixtures by test.
        self.fixtures: dict[str, list[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        definitions = getattr(item, '_fixtureinfo', None)
        names = definitions.name2fixturedefs.items() if definitions else ()
        self.fixtures[item.nodeid] = [_context_of(found[-1]) for _, found in names if found[-1].scope != 'function']
        self._switch(item.nodeid)
        try:
            return (yield)
        finally:
            self._switch('')

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before = self._context
        if fixturedef.scope != 'function':
            self._switch(_context_of(fixturedef))
        try:
            return (yield)
        finally:
            self._switch(before)

    def _switch(self, context: str) -> None:
        self._context = context
        self._coverage.switch_context(context)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._coverage.stop()
        self._coverage.save()
        output = getattr(session.config, 'workeroutput', None)
        if output is not None:
            output['fixtures'] = self.fixtures


class Collector:
    """Combines the lines of all processes at the end of the session, and writes the map."""

    def __init__(self, folder: Path, local: Recorder | None):
        self._folder = folder
        self._local = local
        self._fixtures: dict[str, list[str]] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput['map_folder'] = str(self._folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._fixtures |= getattr(node, 'workeroutput', {}).get('fixtures', {})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._local is not None:
            self._fixtures |= self._local.fixtures
        recorded = coverage.Coverage(config_file=str(self._folder / CONFIGURATION_FILE))
        recorded.combine([str(self._folder)])
        make_map(recorded.get_data(), self._fixtures).save()
        shutil.rmtree(self._folder)


def make_map(data: coverage.CoverageData, fixtures: dict[str, list[str]]) -> TestMap:
    """Returns the map of recorded lines.

    Args:
        data: lines with contexts.
        fixtures: contexts of the shared fixtures by node id.
    """
    tests = sorted(fixtures)
    users: dict[str, set[int]] = defaultdict(set)
    for index, test in enumerate(tests):
        for context in (test, *fixtures[test]):
            users[context].add(index)
    for test in tests:
        # A child process does not know the fixture that started it.
        own = [users[name] for name in fixtures[test] if name.startswith(f'{SHARED}{test.partition("::")[0]}')]
        users[f'{test} (setup)'] = users[test].union(*own)
        users[f'{test} (call)'] = users[f'{test} (teardown)'] = users[test]
    executed, hashes = {}, {}
    # Compiled templates have lines as well.
    for path in (Path(name) for name in sorted(data.measured_files()) if name.endswith('.py')):
        source, file = path.read_text(encoding='utf-8'), str(path.relative_to(ROOT))
        contexts = data.contexts_by_lineno(str(path))
        executed[file] = {MODULE: []}
        for name, function in functions(ast.parse(source)):
            lines = range(function.body[0].lineno, (function.end_lineno or 0) + 1)
            names = {context for line in lines for context in contexts.get(line, ())}
            executed[file][name] = sorted(set().union(*(users[each] for each in names & users.keys())))
        hashes[file] = function_hashes(source)
    files = {test.partition('::')[0] for test in tests}
    return TestMap(tests, executed, hashes, {file: content_hash(ROOT / file) for file in sorted(files)})


def _context_of(fixturedef: Any) -> str:
    return f'{SHARED}{fixturedef.baseid}::{fixturedef.argname}'


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--record-map', action='store_true', help='record which functions each test executes')


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption('--record-map'):
        return
    if hasattr(config, 'workerinput'):
        folder = Path(config.workerinput['map_folder'])
        config.pluginmanager.register(Recorder(folder / CONFIGURATION_FILE), 'map-recorder')
        return
    folder = Path(tempfile.mkdtemp(prefix='maxlm-map-'))
    configuration = folder / CONFIGURATION_FILE
    configuration.write_text(CONFIGURATION.format(root=ROOT, folder=folder))
    is_distributed = bool(config.getoption('numprocesses', None))
    local = None if is_distributed else Recorder(configuration)
    if local is not None:
        config.pluginmanager.register(local, 'map-recorder')
    config.pluginmanager.register(Collector(folder, local), 'map-collector')
