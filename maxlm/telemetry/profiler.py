"""Profiles a few steps: writes a trace to WORKDIR/profile and logs the operations with the most device time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from maxlm.config.sections.monitoring import ProfileConfig
from maxlm.log import logger

# Directory in the workdir, for TensorBoard's profiler. Its trace.json.gz can be opened in ui.perfetto.dev.
PROFILE_DIR = 'profile'
TOP = 10
# Line of a TPU that lists operations. Other lines list the same time by program and step.
_TPU_LINE = 'XLA Ops'


class Operation(NamedTuple):
    """Total of the operations of one kind; see `kind_of`.

    Attributes:
        name: kind of the operations.
        seconds: total time without nested operations, on all devices of this process.
        num_runs: number of executions.
    """

    name: str
    seconds: float
    num_runs: int


class Profile:
    """Traces the configured steps, once per process. Errors are logged and not raised."""

    def __init__(self, config: ProfileConfig, workdir: Path):
        self._start, self._num_steps = config.start_step, config.num_steps
        self._directory = workdir / PROFILE_DIR
        self._first_step: int | None = None
        self._was_started = False

    def should_start(self, step: int) -> bool:
        """Returns True if `start` is due before this step (from 1)."""
        return step == self._start and not self._was_started

    def should_stop(self, step: int) -> bool:
        """Returns True if `stop` is due after this step."""
        return self._first_step is not None and step == self._first_step + self._num_steps - 1

    def start(self, step: int) -> None:
        """Starts the trace. The devices should be idle."""
        self._was_started = True
        options = jax.profiler.ProfileOptions()
        # Python events would fill the trace and slow it down.
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(self._directory, profiler_options=options)
            self._first_step = step
        except Exception as error:
            self._warn(error)

    def stop(self, step: int) -> None:
        """Stops the trace after a finished step, writes it, and logs the longest operations."""
        assert self._first_step is not None, 'start comes first'
        first, self._first_step = self._first_step, None
        try:
            jax.profiler.stop_trace()
            log(operations(newest_trace(self._directory)), first, step)
        except Exception as error:
            self._warn(error)

    def close(self) -> None:
        """Stops a trace that is running at the end of the run."""
        if self._first_step is not None:
            self._first_step = None
            try:
                jax.profiler.stop_trace()
            except Exception as error:
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        logger.warning(
            f'profile.start_step={self._start}: profiling failed '
            f'({type(error).__name__}: {" ".join(str(error).split())[:300]})'
        )


def newest_trace(directory: Path) -> Path:
    """Returns the newest trace. Raises FileNotFoundError if there is none."""
    traces = sorted(directory.rglob('*.xplane.pb'), key=lambda path: path.stat().st_mtime_ns)
    if not traces:
        raise FileNotFoundError(f'{directory}: no trace found')
    return traces[-1]


def operations(trace: Path) -> list[Operation]:
    """Returns the device operations of a trace, longest first."""
    seconds: dict[str, float] = defaultdict(float)
    runs: dict[str, int] = defaultdict(int)
    for events in _device_lines(jax.profiler.ProfileData.from_file(str(trace))):
        for name, nanoseconds in self_times(events):
            seconds[kind_of(name)] += nanoseconds * 1e-9
            runs[kind_of(name)] += 1
    found = [Operation(name, seconds[name], runs[name]) for name in seconds]
    return sorted(found, key=lambda operation: -operation.seconds)


def kind_of(name: str) -> str:
    """Returns the name without its numbers: loop_add_fusion.12.clone_3 is a loop_add_fusion."""
    return re.sub(r'(\.clone|[._]\d+)+$', '', name.lstrip('%')) or name


def self_times(events: Iterable[tuple[str, float, float]]) -> Iterator[tuple[str, float]]:
    """Converts events (name, start, duration) to (name, duration without nested events)."""
    # Open events: name, end, remaining time.
    stack: list[list[Any]] = []
    for name, start, duration in sorted(events, key=lambda event: (event[1], -event[2])):
        while stack and stack[-1][1] <= start:
            yield stack[-1][0], stack.pop()[2]
        if stack:
            stack[-1][2] -= duration
        stack.append([name, start + duration, duration])
    yield from ((name, left) for name, _, left in stack)


def log(found: list[Operation], first_step: int, last_step: int) -> None:
    """Logs the operations with the most time, with their fraction of the total."""
    total, steps = sum(operation.seconds for operation in found), last_step - first_step + 1
    logger.info(
        f'profile of steps {first_step} to {last_step}: {total / steps:.4g} s of operations per step, summed over the '
        f'devices of this process; open the trace in {PROFILE_DIR}/ with TensorBoard or ui.perfetto.dev'
    )
    for name, seconds, runs in found[:TOP]:
        logger.info(
            f'  {seconds / total:6.1%}  {1e3 * seconds / steps:9.2f} ms/step  {runs / steps:5.0f} runs/step  {name}'
        )


def _device_lines(data: Any) -> Iterator[list[tuple[str, float, float]]]:
    """Yields the operations of each line of each device. A CPU's operations are on its host threads."""
    for plane in data.planes:
        if plane.name.startswith('/device:'):
            lines = list(plane.lines)
            chosen = [line for line in lines if line.name == _TPU_LINE] or lines
            for line in chosen:
                yield [(event.name, event.start_ns, event.duration_ns) for event in line.events]
        elif plane.name == '/host:CPU':
            for line in plane.lines:
                yield [
                    (event.name, event.start_ns, event.duration_ns)
                    for event in line.events
                    if any(key == 'hlo_op' for key, _ in event.stats)
                ]
