"""A run of `maxlm train` with known delays: `python -m tests.slow_training DIR ARGUMENTS…`.

Trains in DIR/slow with slow data, steps, saves and evaluations. The run is killed twice, with a pause after each kill.
ARGUMENTS are those of `maxlm train` without --workdir. Attempts are forked from a process that has imported all
modules. Each attempt writes independently measured durations of its parts to DIR/truth.jsonl.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax

from maxlm.checkpoint.async_save import AsyncSave
from maxlm.checkpoint.manager import Checkpoints
from maxlm.cli.runs import train
from maxlm.data.loader.batches import Batches, TrainingRows
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.evaluation.validation import Validation
from maxlm.trainer import batch_source
from maxlm.trainer.metric_logger import MetricLogger
from maxlm.workdir.files import goodput_name

# A command imports its implementation only after it has parsed its arguments.
importlib.import_module('maxlm.cli.execution.train')

EVERY = 10
LAST = 40
# Steps (from 1) with slow batches, and slow steps, during which the kills occur.
SLOW_BATCHES, BATCH_SECONDS = (5, 6, 36), 1.0
SLOW_STEPS, STEP_SECONDS = range(EVERY + 1, 31), 0.15
SAVE_SECONDS = 0.7
EVALUATION_SECONDS = 1.5
# Step at which each attempt is killed. The second attempt is killed before its first checkpoint.
KILLS = (27, 24)
PAUSES = (2.0, 1.0)


class Faults:
    """Patches functions of this process to be slow, and records durations of the training loop's parts."""

    def __init__(self, notes: Path, workdir: Path, attempt: int):
        self._notes, self._workdir, self._attempt = notes, workdir, attempt
        self._kill_at = KILLS[attempt] if attempt < len(KILLS) else None
        # End of the last step, and seconds since then of separately recorded parts and of other compilation.
        self._mark = self._noted = self._compiled = 0.0

    def install(self) -> None:
        """Installs the patches; to be called immediately before the attempt starts."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self._patch(Batches, '__getitem__', self._read)
        self._patch(AsyncSave, 'begin', partial(self._slowly, SAVE_SECONDS))
        self._patch(Validation, '__call__', partial(self._slowly, EVALUATION_SECONDS))
        # The measurements include the delays above.
        self._patch(Checkpoints, 'save', partial(self._measured, 'checkpoint'))
        self._patch(Checkpoints, 'wait', partial(self._measured, 'checkpoint'))
        self._patch(Validation, '__call__', partial(self._measured, 'evaluation'))
        self._patch(batch_source, 'prefetched_batches', self._open)
        self._patch(MetricLogger, 'begin', self._begin)
        self._patch(MetricLogger, 'submit', self._submit)
        self._note('began', time.time())

    def _patch(self, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: wrap(original, *args, **kwargs))

    def _listen(self, event: str, seconds: float, **_: object) -> None:
        if event.endswith(('jaxpr_to_mlir_module_duration', 'backend_compile_duration')):
            self._compiled += seconds

    def _read(self, original: Callable[..., Any], batches: Batches, index: int) -> Any:
        if isinstance(batches.order, TrainingRows) and index + 1 in SLOW_BATCHES:
            time.sleep(BATCH_SECONDS)
        return original(batches, index)

    def _slowly(self, seconds: float, original: Callable[..., Any], *args: Any) -> Any:
        time.sleep(seconds)
        return original(*args)

    def _measured(self, category: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began, compiled = time.monotonic(), self._compiled
        result = original(*args, **kwargs)
        seconds = time.monotonic() - began
        self._noted += seconds
        self._note(category, seconds - (self._compiled - compiled))
        self._compiled = compiled
        return result

    @contextlib.contextmanager
    def _open(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Iterator[Any]]:
        with original(*args, **kwargs) as batches:
            yield iter(partial(self._measured, 'data_wait', next, batches), None)

    def _begin(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self._mark, self._noted, self._compiled = time.monotonic(), 0.0, 0.0

    def _submit(self, original: Callable[..., Any], metric_logger: MetricLogger, step: int, *args: Any) -> None:
        if step in SLOW_STEPS:
            time.sleep(STEP_SECONDS)
        if step == self._kill_at:
            # Otherwise the next attempt would resume from an earlier checkpoint.
            _wait_for((self._workdir / 'checkpoints' / '20').exists)
            # Time that a killed attempt has not reported counts as idle.
            ledger = self._workdir / goodput_name(0)
            reported_bytes = ledger.stat().st_size
            _wait_for(lambda: ledger.stat().st_size > reported_bytes)
            reported_at = ledger.stat().st_mtime
            # Steps before this one are done, but this one is not.
            self._end_step(step, unreported=time.time() - reported_at)
            self._note('killed', reported_at)
            os.kill(os.getpid(), signal.SIGKILL)
        original(metric_logger, step, *args)
        self._end_step(step)

    def _end_step(self, step: int, *, unreported: float = 0.0) -> None:
        now = time.monotonic() - unreported
        self._note('step', now - self._mark - self._noted - self._compiled, step)
        self._mark, self._noted, self._compiled = now, 0.0, 0.0

    def _note(self, category: str, seconds: float, step: int = 0) -> None:
        note = {'attempt': self._attempt + 1, 'category': category, 'seconds': seconds, 'step': step}
        with self._notes.open('a') as file:
            file.write(json.dumps(note) + '\n')


def _wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.002)


def run_attempt(arguments: list[str], workdir: Path, faults: Faults) -> int:
    """Runs one attempt and returns its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        faults.install()
        code = exit_code(train.main, [*arguments, f'--workdir={workdir}'])
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(directory: Path, arguments: list[str]) -> None:
    """Runs all attempts."""
    for attempt in range(len(KILLS) + 1):
        code = run_attempt(
            arguments, directory / 'slow', Faults(directory / 'truth.jsonl', directory / 'slow', attempt)
        )
        assert code == (-signal.SIGKILL if attempt < len(KILLS) else EXIT_DONE), (attempt, code)
        if attempt < len(KILLS):
            time.sleep(PAUSES[attempt])


if __name__ == '__main__':
    main(Path(sys.argv[1]), sys.argv[2:])
