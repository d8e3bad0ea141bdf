"""Repeatedly kills a process that saves checkpoints; started by `tests.forking` with WORKDIR SEED KILLS.

WORKDIR may be gs://bucket/run in the emulator that the environment selects. Each attempt first restores all visible
checkpoints and compares them with the saved states. Attempts are forked, as in `killing_training`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

# Imported once instead of by each attempt.
import gcsfs  # noqa: F401

from maxlm.checkpoint.item_metadata import CorruptCheckpointError
from maxlm.checkpoint.manager import Checkpoints
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, COMMIT_MARKER, TRASH, UNFINISHED, to_path
from tests.checkpoint.test_manager import FACTS, abstract_on, random_state, same
from tests.gcs_emulator import Emulator

KEPT = 2
SAVES_TO_MEASURE = 4
# Fraction of kills during the start; other kills occur while a checkpoint is saved.
SHARE_WHILE_STARTING = 0.2


class Attempt(NamedTuple):
    """A process and the read end of its pipe of progress messages."""

    pid: int
    messages: Any


def start(workdir: str) -> Attempt:
    """Forks a process that saves checkpoints until it is killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        with os.fdopen(writing, 'w') as pipe:
            run_attempt(workdir, lambda **facts: print(json.dumps(facts), file=pipe, flush=True))
        os._exit(0)
    os.close(writing)
    return Attempt(pid, os.fdopen(reading))


def run_attempt(workdir: str, send: Any) -> None:
    """Restores the existing checkpoints and saves the next steps."""
    abstract = abstract_on(1)

    def state(step: int) -> Any:
        return random_state(abstract, step=step, skipped=0, seed=step)

    send(opens=True)
    with Checkpoints(workdir, max_to_keep=KEPT) as checkpoints:
        steps, bad = checkpoints.steps(), []
        for step in steps:
            try:
                restored = checkpoints.restore(step, abstract).state
                # Negative control: the state of another step differs.
                is_intact = same(restored, state(step)) and not same(restored, state(step + 1))
            except CorruptCheckpointError:
                is_intact = False
            if not is_intact:
                bad.append(step)
        send(steps=steps, bad=bad)
        for step in itertools.count(max(steps, default=0) + 1):
            checkpoints.save(step, state(step), FACTS)
            send(begun=step)
            send(committed=checkpoints.wait(), wanted=step)


def receive(attempt: Attempt) -> dict[str, Any]:
    """Waits for the next message of an attempt."""
    line = attempt.messages.readline()
    assert line, 'the attempt exited without a kill'
    facts: dict[str, Any] = json.loads(line)
    return facts


def kill(attempt: Attempt) -> list[dict[str, Any]]:
    """Kills an attempt and returns its unread messages."""
    os.kill(attempt.pid, signal.SIGKILL)
    os.waitpid(attempt.pid, 0)
    rest = [json.loads(line) for line in attempt.messages if line.endswith('\n')]
    attempt.messages.close()
    return rest


def interrupted_operation(workdir: str) -> str:
    """Returns the operation that a kill interrupted."""
    if not workdir.startswith('gs://'):
        folder = to_path(workdir) / CHECKPOINTS_DIR
        names = [entry.name for entry in folder.iterdir()] if folder.exists() else []
        if any(UNFINISHED in name for name in names):
            return 'writing'
        return 'deleting' if list((folder / TRASH).glob('*')) else 'between'
    emulator = Emulator.__new__(Emulator)
    emulator.url = os.environ['STORAGE_EMULATOR_HOST']
    prefix = f'{workdir.removeprefix("gs://")}/{CHECKPOINTS_DIR}/'
    names = [name.removeprefix(prefix) for name in emulator.objects if name.startswith(prefix)]
    steps = {int(name.partition('/')[0]) for name in names if name[0].isdigit()}
    complete = {step for step in steps if f'{step}/{COMMIT_MARKER}' in names}
    partial = steps - complete
    if not partial:
        return 'between'
    return 'writing' if max(partial) > max(complete, default=0) else 'deleting'


def main() -> None:
    """Kills attempts and prints the results as JSON on the last line."""
    workdir, kills = sys.argv[1], int(sys.argv[3])
    rng = random.Random(int(sys.argv[2]))
    attempt = start(workdir)
    began = None
    for _ in range(2 + 2 * SAVES_TO_MEASURE):
        facts = receive(attempt)
        # The first attempt compiles.
        if facts.get('begun') == 2:
            began = time.monotonic()
    assert began
    duration = (time.monotonic() - began) / (SAVES_TO_MEASURE - 1)
    committed = max(fact.get('committed') or 0 for fact in [facts, *kill(attempt)])
    interrupted: Counter[str] = Counter()
    lost, bad = [], []
    while True:
        attempt = start(workdir)
        receive(attempt)
        if interrupted.total() < kills and rng.random() < SHARE_WHILE_STARTING:
            # During its start, an attempt removes partial files of the previous one.
            time.sleep(rng.uniform(0, duration))
            messages = kill(attempt)
        else:
            messages = [receive(attempt)]
            if interrupted.total() < kills:
                receive(attempt)
                time.sleep(rng.uniform(0, 2 * duration))
            else:
                # Partial files of killed attempts must not disturb saves.
                messages += [receive(attempt), receive(attempt)]
            messages += kill(attempt)
        for facts in messages:
            if 'steps' in facts:
                bad += facts['bad']
                if max(facts['steps'], default=0) < committed:
                    lost.append(committed)
            committed = max(committed, facts.get('committed') or 0)
            assert facts.get('committed') == facts.get('wanted'), facts
        # The attempt after the last kill is not killed.
        if interrupted.total() == kills:
            break
        interrupted[interrupted_operation(workdir)] += 1
    print(
        json.dumps({'interrupted': interrupted, 'lost': lost, 'bad': bad, 'committed': committed, 'seconds': duration})
    )
