"""Kills a run again and again until it is done: `python -m tests.killing_training DIR SEED KILLS VERB ARGUMENTS…`.

After the kills one more life gets SIGTERM, twice, and must save. Makes DIR/whole, the run without kills, and DIR/0, 1,
…, each the end of a run with kills. ARGUMENTS are those of the verb, train or grpo, without --workdir. Runs are forked
from one process that has imported everything and asked nothing of JAX: most of the time of a fresh one is its imports,
where there is nothing to kill.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from maxlm import grpo, train
from maxlm.checkpoint.manager import saved_steps
from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED, exit_code
from maxlm.telemetry.events import read_events

VERBS = {'train': train.main, 'grpo': grpo.main}


def start(workdir: Path, command: list[str]) -> int:
    """Forks a run; returns its process id."""
    verb, *arguments = command
    pid = os.fork()
    if pid == 0:
        code = exit_code(VERBS[verb], [*arguments, f'--workdir={workdir}'])
        sys.stdout.flush()
        os._exit(code)
    return pid


def live(workdir: Path, arguments: list[str], seconds: float, number: int = signal.SIGKILL) -> float | None:
    """Runs one life, which gets a signal so many seconds after its first save.

    Returns:
        How long it trained if it came to its end; None if the signal ended it.
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
    told = [line for line in read_events(workdir).lines if line['kind'] == 'preempted'][-1]['message']
    (step,) = re.findall(r'^SIGTERM: step (\d+) of \d+ is saved', told)
    assert int(step) == max(saved_steps(workdir)), told
    return None


def written(workdir: Path) -> list[str]:
    """What changes with the first save of a life; most of a life is its start, where there is nothing to lose."""
    return sorted(path.name for path in (workdir / 'checkpoints').glob('[0-9]*'))


def stage(workdir: Path) -> str:
    """What a kill has met."""
    names = [path.name for path in (workdir / 'checkpoints').glob('*')]
    if any('tmp' in name for name in names):
        return 'save'
    return 'training' if saved_steps(workdir) else 'start'


def main(directory: Path, seed: int, kills: int, arguments: list[str]) -> None:
    """Prints what the kills met as JSON, as the last line."""
    rng = random.Random(seed)
    duration = live(directory / 'whole', arguments, 600)
    assert duration
    numbers = [*[signal.SIGKILL] * kills, signal.SIGTERM]
    met: Counter[str] = Counter()
    finished = 0
    lost = []
    while met.total() < len(numbers) or (directory / str(finished)).exists():
        workdir = directory / str(finished)
        before = max(saved_steps(workdir), default=0)
        # The last run comes to its end.
        is_last = met.total() == len(numbers)
        number = signal.SIGKILL if is_last else numbers[met.total()]
        if live(workdir, arguments, 600 if is_last else rng.uniform(0, 0.8 * duration), number) is not None:
            finished += 1
            continue
        met['preempted' if number == signal.SIGTERM else stage(workdir)] += 1
        if max(saved_steps(workdir), default=0) < before:
            lost.append(before)
    print(json.dumps({'met': met, 'finished': finished, 'lost': lost}))


if __name__ == '__main__':
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
