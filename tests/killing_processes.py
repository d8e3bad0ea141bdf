"""Repeatedly interrupts one of two training processes until the run is done (the command is one line):

    python -m tests.killing_processes DIR SEED SIGNAL,… ARGUMENTS…

SIGKILL kills a process. SIGSTOP suspends it until the other one has exited. SIGTERM stops it; a second SIGTERM to any
process follows while they save. Writes the uninterrupted run to DIR/whole, and interrupted runs to DIR/0, 1, ….
ARGUMENTS are those of `maxlm.train` without --workdir. Processes are forked, as in `killing_training`.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from maxlm import train
from maxlm.checkpoint.manager import saved_steps
from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED
from maxlm.telemetry.metrics import read_metrics
from tests.forking import free_port
from tests.killing_training import written

COUNT = 2
# Timeouts in seconds, so that a failing test ends.
LONGEST_LIFE, LONGEST_END = 300.0, 90.0
# Maximum delay of the second SIGTERM in seconds, about the duration of a save.
SAVE_SECONDS = 0.5


class Run:
    """The processes of one attempt."""

    def __init__(self, workdir: Path, arguments: list[str]):
        coordinator = f'127.0.0.1:{free_port()}'
        self.workdir = workdir
        self._written = written(workdir)
        self.logs = [workdir.parent / f'{workdir.name}-{number}.log' for number in range(COUNT)]
        self.codes: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        self.pids = []
        for number in range(COUNT):
            pid = os.fork()
            if pid == 0:
                file = os.open(self.logs[number], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, 1)
                os.dup2(file, 2)
                os.environ |= {
                    'MAXLM_COORDINATOR': coordinator,
                    'MAXLM_NUM_PROCESSES': str(COUNT),
                    'MAXLM_PROCESS_ID': str(number),
                }
                sys.argv = ['maxlm.train', *arguments, f'--workdir={workdir}']
                # Raises SystemExit, so the process exits as with `python -m maxlm.train`.
                train.run()
            self.pids.append(pid)

    def send(self, number: int, what: signal.Signals) -> None:
        if number not in self.codes:
            os.kill(self.pids[number], what)

    def wait(self, until: Callable[[], object], seconds: float) -> None:
        """Waits until `until()` is true, and records the processes that exit meanwhile."""
        deadline = time.monotonic() + seconds
        while not until():
            for number, pid in enumerate(self.pids):
                if number not in self.codes:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        self.codes[number], self.ended[number] = os.waitstatus_to_exitcode(status), time.monotonic()
            if time.monotonic() > deadline:
                told = ''.join(log.read_text() for log in self.logs)
                for number in range(COUNT):
                    self.send(number, signal.SIGKILL)
                raise AssertionError(f'after {seconds:g} s: exit codes {self.codes}; {told}')
            time.sleep(0.01)

    def wait_for_end(self, *numbers: int) -> None:
        self.wait(lambda: all(number in self.codes for number in numbers), LONGEST_END)

    def has_saved(self) -> bool:
        """Returns True if this attempt has saved a checkpoint."""
        return written(self.workdir) != self._written

    def is_done(self) -> bool:
        """Returns True if all processes have finished the run."""
        return self.codes == {0: EXIT_DONE, 1: EXIT_DONE}

    def told(self, number: int) -> str:
        return self.logs[number].read_text()


def whole(workdir: Path, arguments: list[str]) -> float:
    """Runs without a fault and returns the seconds from the first save to the end."""
    run = Run(workdir, arguments)
    run.wait(run.has_saved, LONGEST_LIFE)
    began = time.monotonic()
    run.wait_for_end(0, 1)
    assert run.is_done(), run.told(0) + run.told(1)
    return max(run.ended.values()) - began


def meet(run: Run, victim: int, number: signal.Signals, rng: random.Random) -> dict[str, float]:
    """Injects one fault and returns the seconds until the other processes, or all, exit. Exit codes must be 75."""
    other = 1 - victim
    began = time.monotonic()
    run.send(victim, number)
    if number == signal.SIGTERM:
        delay = rng.uniform(0, SAVE_SECONDS)
        run.wait(lambda: time.monotonic() > began + delay, LONGEST_END)
        run.send(rng.randrange(COUNT), signal.SIGTERM)
        run.wait_for_end(victim, other)
        if run.is_done():
            return {}
        assert run.codes == {0: EXIT_PREEMPTED, 1: EXIT_PREEMPTED}, run.told(0) + run.told(1)
        (step,) = re.findall(r': step (\d+) of \d+ is saved', run.told(0))
        assert int(step) == max(saved_steps(run.workdir)) == read_metrics(run.workdir)[-1]['step']
        return {'all': max(run.ended.values()) - began}
    run.wait_for_end(other)
    if run.codes[other] == EXIT_DONE:
        run.send(victim, signal.SIGKILL)
        run.wait_for_end(victim)
        return {}
    assert run.codes[other] == EXIT_PREEMPTED, run.told(other)
    assert number == signal.SIGSTOP or f'lost contact with process {victim}; restart the run' in run.told(other)
    seconds = {'others': run.ended[other] - began}
    began = time.monotonic()
    if number == signal.SIGSTOP:
        run.send(victim, signal.SIGCONT)
    run.wait_for_end(victim)
    if number == signal.SIGSTOP:
        assert run.codes[victim] == EXIT_PREEMPTED, (run.codes, run.told(victim))
        seconds['itself'] = run.ended[victim] - began
    return seconds


def main(directory: Path, seed: int, numbers: list[signal.Signals], arguments: list[str]) -> None:
    """Prints the longest times and the lost steps as JSON on the last line."""
    rng = random.Random(seed)
    duration = whole(directory / 'whole', arguments)
    longest: dict[str, dict[str, float]] = {number.name: {} for number in numbers}
    met = finished = 0
    lost = []
    while met < len(numbers) or (directory / str(finished)).exists():
        workdir = directory / str(finished)
        before = max(saved_steps(workdir), default=0)
        run = Run(workdir, arguments)
        # Before its first save, an attempt is still starting.
        run.wait(lambda run=run: run.has_saved() or run.codes, LONGEST_LIFE)
        if met == len(numbers) or run.codes:
            run.wait_for_end(0, 1)
            assert run.is_done(), run.told(0) + run.told(1)
            finished += 1
            continue
        deadline = time.monotonic() + rng.uniform(0, 0.4 * duration)
        run.wait(lambda end=deadline: time.monotonic() > end, LONGEST_LIFE)
        seconds = meet(run, met % COUNT, numbers[met], rng)
        before_now = longest[numbers[met].name]
        before_now |= {what: max(taken, before_now.get(what, 0)) for what, taken in seconds.items()}
        met += bool(seconds)
        if max(saved_steps(workdir), default=0) < before:
            lost.append(before)
    print(json.dumps({'met': met, 'finished': finished, 'lost': lost, 'longest': longest}))


if __name__ == '__main__':
    main(Path(sys.argv[1]), int(sys.argv[2]), [signal.Signals[name] for name in sys.argv[3].split(',')], sys.argv[4:])
