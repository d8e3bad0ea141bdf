"""Repeatedly interrupts one of two training processes until the run is done (the command is one line):

    python -m tests.killing_processes DIR SEED SIGNAL,… ARGUMENTS…

SIGKILL kills a process. SIGSTOP suspends it until the other process has exited. SIGTERM stops both processes; a second
SIGTERM to a random process follows while they save. Writes the uninterrupted run to DIR/uninterrupted, and interrupted
runs to DIR/0, 1, …. ARGUMENTS are those of `maxlm train` without --workdir. Processes are forked, as in
`killing_training`.
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

from maxlm.checkpoint.manager import saved_steps
from maxlm.cli.runs import train
from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED
from maxlm.telemetry.metrics import read_metrics
from tests.forking import free_port
from tests.killing_training import written

COUNT = 2
# Timeouts in seconds, so that a failing test does not hang.
MAX_ATTEMPT_SECONDS, MAX_EXIT_SECONDS = 300.0, 90.0
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
                # Raises SystemExit, so the process exits as with `maxlm train`.
                train.run('train')
            self.pids.append(pid)

    def send(self, number: int, signal_number: signal.Signals) -> None:
        if number not in self.codes:
            os.kill(self.pids[number], signal_number)

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
                output = ''.join(log.read_text() for log in self.logs)
                for number in range(COUNT):
                    self.send(number, signal.SIGKILL)
                raise AssertionError(f'after {seconds:g} s: exit codes {self.codes}; {output}')
            time.sleep(0.01)

    def wait_for_end(self, *numbers: int) -> None:
        self.wait(lambda: all(number in self.codes for number in numbers), MAX_EXIT_SECONDS)

    def has_saved(self) -> bool:
        """Returns True if this attempt has saved a checkpoint."""
        return written(self.workdir) != self._written

    def is_done(self) -> bool:
        """Returns True if all processes have finished the run."""
        return self.codes == {0: EXIT_DONE, 1: EXIT_DONE}

    def output(self, number: int) -> str:
        return self.logs[number].read_text()


def run_uninterrupted(workdir: Path, arguments: list[str]) -> float:
    """Runs without a fault and returns the seconds from the first save to the end."""
    run = Run(workdir, arguments)
    run.wait(run.has_saved, MAX_ATTEMPT_SECONDS)
    began = time.monotonic()
    run.wait_for_end(0, 1)
    assert run.is_done(), run.output(0) + run.output(1)
    return max(run.ended.values()) - began


def inject(run: Run, victim: int, number: signal.Signals, rng: random.Random) -> dict[str, float]:
    """Injects one fault and returns the seconds until the other processes, or all, exit. Exit codes must be 75."""
    other = 1 - victim
    began = time.monotonic()
    run.send(victim, number)
    if number == signal.SIGTERM:
        delay = rng.uniform(0, SAVE_SECONDS)
        run.wait(lambda: time.monotonic() > began + delay, MAX_EXIT_SECONDS)
        run.send(rng.randrange(COUNT), signal.SIGTERM)
        run.wait_for_end(victim, other)
        if run.is_done():
            return {}
        assert run.codes == {0: EXIT_PREEMPTED, 1: EXIT_PREEMPTED}, run.output(0) + run.output(1)
        (step,) = re.findall(r': step (\d+) of \d+ is saved', run.output(0))
        assert int(step) == max(saved_steps(run.workdir)) == read_metrics(run.workdir)[-1]['step']
        return {'all': max(run.ended.values()) - began}
    run.wait_for_end(other)
    if run.codes[other] == EXIT_DONE:
        run.send(victim, signal.SIGKILL)
        run.wait_for_end(victim)
        return {}
    assert run.codes[other] == EXIT_PREEMPTED, run.output(other)
    assert number == signal.SIGSTOP or f'lost contact with process {victim}; restart the run' in run.output(other)
    seconds = {'others': run.ended[other] - began}
    began = time.monotonic()
    if number == signal.SIGSTOP:
        run.send(victim, signal.SIGCONT)
    run.wait_for_end(victim)
    if number == signal.SIGSTOP:
        assert run.codes[victim] == EXIT_PREEMPTED, (run.codes, run.output(victim))
        seconds['itself'] = run.ended[victim] - began
    return seconds


def main(directory: Path, seed: int, numbers: list[signal.Signals], arguments: list[str]) -> None:
    """Injects faults, and prints the longest times and the lost steps as JSON on the last line."""
    rng = random.Random(seed)
    duration = run_uninterrupted(directory / 'uninterrupted', arguments)
    longest: dict[str, dict[str, float]] = {number.name: {} for number in numbers}
    injected = finished = 0
    lost = []
    while injected < len(numbers) or (directory / str(finished)).exists():
        workdir = directory / str(finished)
        before = max(saved_steps(workdir), default=0)
        run = Run(workdir, arguments)
        # An attempt is still starting before its first save.
        run.wait(lambda run=run: run.has_saved() or run.codes, MAX_ATTEMPT_SECONDS)
        if injected == len(numbers) or run.codes:
            run.wait_for_end(0, 1)
            assert run.is_done(), run.output(0) + run.output(1)
            finished += 1
            continue
        deadline = time.monotonic() + rng.uniform(0, 0.4 * duration)
        run.wait(lambda end=deadline: time.monotonic() > end, MAX_ATTEMPT_SECONDS)
        seconds = inject(run, injected % COUNT, numbers[injected], rng)
        longest_of_signal = longest[numbers[injected].name]
        longest_of_signal |= {name: max(value, longest_of_signal.get(name, 0)) for name, value in seconds.items()}
        injected += bool(seconds)
        if max(saved_steps(workdir), default=0) < before:
            lost.append(before)
    print(json.dumps({'injected': injected, 'finished': finished, 'lost': lost, 'longest': longest}))


if __name__ == '__main__':
    main(Path(sys.argv[1]), int(sys.argv[2]), [signal.Signals[name] for name in sys.argv[3].split(',')], sys.argv[4:])
