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


class Life(NamedTuple):
    """A process and the read end of its pipe of progress messages."""

    pid: int
    told: Any


def start(workdir: str) -> Life:
    """Forks a process that saves checkpoints until it is killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        with os.fdopen(writing, 'w') as pipe:
            live(workdir, lambda **facts: print(json.dumps(facts), file=pipe, flush=True))
        os._exit(0)
    os.close(writing)
    return Life(pid, os.fdopen(reading))


def live(workdir: str, tell: Any) -> None:
    """Restores the existing checkpoints and saves the next steps."""
    abstract = abstract_on(1)

    def state(step: int) -> Any:
        return random_state(abstract, step=step, skipped=0, seed=step)

    tell(opens=True)
    with Checkpoints(workdir, max_to_keep=KEPT) as checkpoints:
        steps, bad = checkpoints.steps(), []
        for step in steps:
            try:
                restored = checkpoints.restore(step, abstract).state
                # Negative control: the state of another step differs.
                whole = same(restored, state(step)) and not same(restored, state(step + 1))
            except CorruptCheckpointError:
                whole = False
            if not whole:
                bad.append(step)
        tell(steps=steps, bad=bad)
        for step in itertools.count(max(steps, default=0) + 1):
            checkpoints.save(step, state(step), FACTS)
            tell(begun=step)
            tell(committed=checkpoints.wait(), wanted=step)


def hear(life: Life) -> dict[str, Any]:
    line = life.told.readline()
    assert line, 'a life has ended by itself'
    facts: dict[str, Any] = json.loads(line)
    return facts


def kill(life: Life) -> list[dict[str, Any]]:
    """Kills an attempt and returns its unread messages."""
    os.kill(life.pid, signal.SIGKILL)
    os.waitpid(life.pid, 0)
    rest = [json.loads(line) for line in life.told if line.endswith('\n')]
    life.told.close()
    return rest


def met(workdir: str) -> str:
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
    """Prints the results as JSON on the last line."""
    workdir, kills = sys.argv[1], int(sys.argv[3])
    rng = random.Random(int(sys.argv[2]))
    life = start(workdir)
    began = None
    for _ in range(2 + 2 * SAVES_TO_MEASURE):
        facts = hear(life)
        # The first attempt compiles.
        if facts.get('begun') == 2:
            began = time.monotonic()
    assert began
    duration = (time.monotonic() - began) / (SAVES_TO_MEASURE - 1)
    committed = max(fact.get('committed') or 0 for fact in [facts, *kill(life)])
    found: Counter[str] = Counter()
    lost, bad = [], []
    while True:
        life = start(workdir)
        hear(life)
        if found.total() < kills and rng.random() < SHARE_WHILE_STARTING:
            # During its start, an attempt removes partial files of the previous one.
            time.sleep(rng.uniform(0, duration))
            heard = kill(life)
        else:
            heard = [hear(life)]
            if found.total() < kills:
                hear(life)
                time.sleep(rng.uniform(0, 2 * duration))
            else:
                # Partial files of killed attempts must not disturb saves.
                heard += [hear(life), hear(life)]
            heard += kill(life)
        for facts in heard:
            if 'steps' in facts:
                bad += facts['bad']
                if max(facts['steps'], default=0) < committed:
                    lost.append(committed)
            committed = max(committed, facts.get('committed') or 0)
            assert facts.get('committed') == facts.get('wanted'), facts
        # The attempt after the last kill is not killed.
        if found.total() == kills:
            break
        found[met(workdir)] += 1
    print(json.dumps({'met': found, 'lost': lost, 'bad': bad, 'committed': committed, 'seconds': duration}))
