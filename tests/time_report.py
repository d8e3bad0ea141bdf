"""Pytest plugin that measures the durations of the test suite: `pytest --time-report=FILE`.

FILE receives a JSON object with the wall time of each test and the peak memory of each worker. For each test file, it
contains the seconds of imports, XLA compilation, tracing, waiting for child processes, and everything else.
`python -m benchmarks.test_time FILE` prints it as a table.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

# Names of JAX events with a duration. JAX reports tracing of nested functions once per level.
COMPILE = '/jax/core/compile/backend_compile_duration'
TRACE = ('/jax/core/compile/jaxpr_trace_duration', '/jax/core/compile/jaxpr_to_mlir_module_duration')
SAVED = '/jax/compilation_cache/compile_time_saved_sec'
CATEGORIES = ('import', 'compile', 'trace', 'process', 'run')


class Counters:
    """Cumulative seconds of this process by category."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._waiting = False
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        for name in ('wait', 'communicate'):
            self._measure_waiting(name)

    def now(self) -> dict[str, float]:
        """Returns a copy that includes the CPU seconds of this process and its finished children."""
        usage = os.times()
        return {**self.seconds, 'cpu': usage.user + usage.system + usage.children_user + usage.children_system}

    def _on_event(self, event: str, seconds: float, **_: Any) -> None:
        if event == COMPILE:
            self.seconds['compile'] += seconds
            self.seconds['programs'] += 1
        elif event in TRACE:
            self.seconds['trace'] += seconds
        elif event == SAVED:
            self.seconds['saved'] += seconds

    def _measure_waiting(self, name: str) -> None:
        original = getattr(subprocess.Popen, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            # `communicate` calls `wait`; only the outer call counts.
            if self._waiting:
                return original(*args, **kwargs)
            self._waiting, began = True, time.monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                self._waiting = False
                self.seconds['process'] += time.monotonic() - began

        setattr(subprocess.Popen, name, measured)


class WorkerTimes:
    """Measures the tests of one process and attaches the times to their reports."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._before: dict[str, float] = self._counters.now()
        self._shared_seconds = 0.0
        self.imports: dict[str, float] = {}
        self.fixtures: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        began = time.monotonic()
        report = yield
        if isinstance(collector, pytest.Module):
            self.imports[collector.nodeid] = time.monotonic() - began
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._before = self._counters.now()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        began = time.monotonic()
        try:
            return (yield)
        finally:
            seconds = time.monotonic() - began
            if fixturedef.scope != 'function':
                # The first test to use a shared fixture depends on the order, so its time is not part of that test's.
                self._shared_seconds += seconds
            if fixturedef.scope in ('module', 'class'):
                self.fixtures[_fixture_id(request.node, fixturedef.argname)] += seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        now = self._counters.now()
        report.costs = {key: now[key] - self._before.get(key, 0.0) for key in now}
        report.costs['shared'] = self._shared_seconds
        report.peak_gib = peak_gib()
        if call.when == 'setup':
            definitions = item._fixtureinfo.name2fixturedefs.items()  # type: ignore[attr-defined]
            names = [name for name, found in definitions if found[-1].scope in ('module', 'class')]
            report.fixtures = [_fixture_id(item, name) for name in names]
        self._before, self._shared_seconds = now, 0.0
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, 'workeroutput', None)
        if output is not None:
            output['times'] = self.summary()

    def summary(self) -> dict[str, Any]:
        return {'imports': self.imports, 'fixtures': dict(self.fixtures), 'peak_gib': peak_gib()}


class TimeReport:
    """Collects the times of all workers and writes them at the end of the session."""

    def __init__(self, path: Path, local: WorkerTimes | None) -> None:
        self._path = path
        self._local = local
        self._began = time.monotonic()
        self.tests: dict[str, dict[str, float]] = {}
        self.workers: list[dict[str, Any]] = []
        # Peak memory of the worker by the end of each file.
        self.peaks: dict[str, float] = {}
        # Module fixtures of each test.
        self.fixtures_of: dict[str, list[str]] = {}
        self.users: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        costs = self.tests.setdefault(report.nodeid, defaultdict(float))
        costs['seconds'] += report.duration
        self.users.update(fixtures := getattr(report, 'fixtures', []))
        self.fixtures_of.setdefault(report.nodeid, []).extend(fixtures)
        for key, value in getattr(report, 'costs', {}).items():
            costs[key] += value
        file = report.nodeid.partition('::')[0]
        self.peaks[file] = max(self.peaks.get(file, 0.0), getattr(report, 'peak_gib', 0.0))

    def pytest_testnodedown(self, node: Any) -> None:
        self.workers.append(getattr(node, 'workeroutput', {}).get('times', {}))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._local is not None:
            self.workers.append(self._local.summary())
        files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for name, costs in self.tests.items():
            file = files[name.partition('::')[0]]
            file['tests'] += 1
            for key, value in costs.items():
                file[key] += value
        for name, file in files.items():
            file['import'] = max((worker.get('imports', {}).get(name, 0.0) for worker in self.workers), default=0.0)
            file['peak_gib'] = self.peaks[name]
            file['run'] = max(0.0, file['seconds'] - sum(file[key] for key in ('compile', 'trace', 'process')))
        report = {
            'seconds': round(time.monotonic() - self._began, 1),
            'cores': len(os.sched_getaffinity(0)),
            'jax': jax.__version__,
            'peak_gib': [round(worker.get('peak_gib', 0.0), 2) for worker in self.workers],
            'files': {name: _rounded(files[name]) for name in sorted(files)},
            'tests': {name: round(self._seconds(name), 3) for name in sorted(self.tests)},
        }
        self._path.write_text(json.dumps(report, indent=1) + '\n')

    def _seconds(self, name: str) -> float:
        """Returns a test's own seconds plus an equal share of each module fixture that it uses."""
        own = self.tests[name]['seconds'] - self.tests[name]['shared']
        for fixture in self.fixtures_of.get(name, []):
            own += sum(worker.get('fixtures', {}).get(fixture, 0.0) for worker in self.workers) / self.users[fixture]
        return own


def peak_gib() -> float:
    """Returns the peak resident memory of this process in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _fixture_id(node: Any, name: str) -> str:
    return f'{node.nodeid.partition("::")[0]}::{name}'


def _rounded(costs: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 2) for key, value in sorted(costs.items())}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--time-report', type=Path, metavar='FILE', help='write the durations of the tests to FILE')


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption('--time-report')
    if path is None:
        return
    is_worker = hasattr(config, 'workerinput')
    is_distributed = not is_worker and bool(config.getoption('numprocesses', None))
    local = None if is_distributed else WorkerTimes()
    if local is not None:
        config.pluginmanager.register(local, 'worker-times')
    if not is_worker:
        config.pluginmanager.register(TimeReport(path.absolute(), local), 'time-report')
