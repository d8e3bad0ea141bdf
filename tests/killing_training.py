"""Repeatedly kills a run until it is done: `python -m tests.killing_training DIR SEED KILLS VERB ARGUMENTS…`.

After the kills, one more attempt gets SIGTERM twice and must save. Writes the uninterrupted run to
DIR/uninterrupted and killed runs to DIR/0, 1, …. VERB is train or grpo, with its ARGUMENTS except --workdir. Runs are
forked from a process that has imported all modules without initializing JAX, because a new process spends most of its
time on imports.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from maxlm.checkpoint.manager import saved_steps
from maxlm.cli.runs import grpo, train
from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED, exit_code
from maxlm.telemetry.events import read_events

# A command imports its implementation only after it has parsed its arguments.
for name in ('maxlm.cli.execution.train', 'maxlm.rl.rollouts'):
    importlib.import_module(name)

VERBS = {'train': train.main, 'grpo': grpo.main}


def start(workdir: Path, command: list[str]) -> int:
    """Forks a run and returns its process id."""
    verb, *arguments = command
    pid = os.fork()
    if pid == 0:
        code = exit_code(VERBS[verb], [*arguments, f'--workdir={workdir}'])
        sys.stdout.flush()
        os._exit(code)
    return pid


def run_attempt(workdir: Path, arguments: list[str], seconds: float, number: int = signal.SIGKILL) -> float | None:
    """Runs one attempt, which gets a signal `seconds` after its first save.

    Returns:
        The seconds from the first save to the end if the run finished; None if the signal ended it.
    """
    before = written(workdir)
    pid = start(workdir, arguments)
    began = None
    while began is None or time.monotonic() < began + seconds:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            assert code == EXIT_DONE, f'exit code {code}'
            return time.monotonic() - (began or time.monotonic())
        if began is None and written(workdir) != before:
            began = time.monotonic()
        time.sleep(0.002)
    os.kill(pid, number)
    if number == signal.SIGKILL:
        os.waitpid(pid, 0)
        return None
    os.kill(pid, number)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == EXIT_DONE:
        return time.monotonic() - began
    assert code == EXIT_PREEMPTED, f'exit code {code}'
    message = [line for line in read_events(workdir).lines if line['kind'] == 'preempted'][-1]['message']
    (step,) = re.findall(r'^SIGTERM: step (\d+) of \d+ is saved', message)
    assert int(step) == max(saved_steps(workdir)), message
    return None


def written(workdir: Path) -> list[str]:
    """Returns the checkpoint state of the workdir, which changes with the first save of an attempt."""
    return sorted(path.name for path in (workdir / 'checkpoints').glob('[0-9]*'))


def interrupted_operation(workdir: Path) -> str:
    """Returns the operation that a kill interrupted."""
    names = [path.name for path in (workdir / 'checkpoints').glob('*')]
    if any('tmp' in name for name in names):
        return 'save'
    return 'training' if saved_steps(workdir) else 'start'


def main(directory: Path, seed: int, kills: int, arguments: list[str]) -> None:
    """Kills runs and prints the interrupted operations as JSON on the last line."""
    rng = random.Random(seed)
    duration = run_attempt(directory / 'uninterrupted', arguments, 600)
    assert duration
    numbers = [*[signal.SIGKILL] * kills, signal.SIGTERM]
    interrupted: Counter[str] = Counter()
    finished = 0
    lost = []
    while interrupted.total() < len(numbers) or (directory / str(finished)).exists():
        workdir = directory / str(finished)
        before = max(saved_steps(workdir), default=0)
        # The last run finishes.
        is_last = interrupted.total() == len(numbers)
        number = signal.SIGKILL if is_last else numbers[interrupted.total()]
        if run_attempt(workdir, arguments, 600 if is_last else rng.uniform(0, 0.8 * duration), number) is not None:
            finished += 1
            continue
        interrupted['preempted' if number == signal.SIGTERM else interrupted_operation(workdir)] += 1
        if max(saved_steps(workdir), default=0) < before:
            lost.append(before)
    print(json.dumps({'interrupted': interrupted, 'finished': finished, 'lost': lost}))


if __name__ == '__main__':
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
