"""Repeatedly kills `maxlm prepare` and compares the results: `python -m tests.killing DIR SEED [KILLS]`.

Without KILLS, each stage is killed once; otherwise kills occur at random times. Runs are forked from a process that has
imported all modules, because a new process spends most of its time on imports, which are not tested here.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from maxlm.cli.setup import prepare
from maxlm.data.parts.part_store import WORK_DIRECTORY
from maxlm.data.prepare import partitions
from maxlm.errors import exit_code
from tests.preparing import contents

# A command imports its implementation only after it has parsed its arguments.
importlib.import_module('maxlm.data.prepare.prepare_dataset')

WORDS = 4000


def write_corpus(directory: Path, seed: int) -> None:
    """Writes JSONL of 240 documents with exact and near duplicates, and documents that filters remove or trim."""
    rng = random.Random(seed)
    words = [''.join(rng.choices('abcdefghijklmnop', k=rng.randrange(3, 9))) for _ in range(WORDS)]
    documents: list[str] = []
    for number in range(240):
        sentences = [' '.join(rng.choices(words, k=rng.randrange(8, 20))).capitalize() + '.' for _ in range(12)]
        if number % 9 == 5:
            # The C4 filter removes lines without terminal punctuation.
            sentences.insert(3, 'menu home about')
        if number % 11 == 7:
            sentences = ['lorem ipsum dolor sit amet.', *sentences]
        if number % 10 == 8:
            documents.append(documents[rng.randrange(len(documents))])
        elif number % 10 == 9:
            documents.append(documents[rng.randrange(len(documents))] + ' One more.')
        else:
            documents.append('\n'.join(sentences))
    directory.mkdir()
    for part in range(3):
        lines = [json.dumps({'text': text}) for text in documents[part::3]]
        (directory / f'{part}.jsonl').write_text('\n'.join(lines) + '\n')


def start(texts: Path, output: Path, workers: int, *more: str) -> int:
    """Forks a run into a new process group and returns its id."""
    arguments = ['--input', texts, '--output', output, '--tokenizer', 'bpe:400', '--filter', 'c4', '--deduplicate']
    arguments += ['near', '--fim-rate', '0.5', '--validation-fraction', '0.1', '--quiet', '--workers', workers, *more]
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os._exit(exit_code(prepare.main, [str(argument) for argument in arguments]))
    return pid


def finish(pid: int) -> None:
    """Waits for a run, which must succeed."""
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f'status {status}'


def has_exited(pid: int) -> bool:
    """Returns True if a run has exited, and asserts that it succeeded."""
    found, status = os.waitpid(pid, os.WNOHANG)
    assert not found or os.waitstatus_to_exitcode(status) == 0, f'status {status}'
    return found == pid


# Files in the work directory from each stage on, latest stage first.
STAGES = {'shards': 'group-*', 'tokenizer': 'begin.json', 'decisions': 'decisions-*', 'survey': 'survey-*'}


def stage(output: Path) -> str:
    """Returns the stage that a run has reached."""
    if (output / 'dataset.json').exists():
        return 'finished'
    work = output / WORK_DIRECTORY
    return next((name for name, pattern in STAGES.items() if any(work.glob(pattern))), 'start')


def kill_at(pid: int, output: Path, *, at_stage: str | None, seconds: float) -> bool:
    """Kills a run when it reaches a stage, or after `seconds`; returns False if it exited earlier."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline if at_stage is None else stage(output) != at_stage:
        if has_exited(pid):
            return False
        time.sleep(0.002)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def main(directory: Path, seed: int, kills: int) -> None:
    """Kills runs and prints the results as JSON."""
    # A small minimum creates many partitions from little text.
    partitions.MIN_GROUP_BYTES = 20_000
    rng = random.Random(seed)
    texts, output = directory / 'texts', directory / 'data'
    write_corpus(texts, seed)
    began = time.monotonic()
    finish(start(texts, directory / 'uninterrupted', 2))
    duration = time.monotonic() - began
    finish(start(texts, directory / 'other', 1, '--fim-spm-rate', '0.4'))
    expected = contents(directory / 'uninterrupted')
    stages: Counter[str] = Counter()
    same = []
    for name in [None] * kills or reversed(STAGES):
        while not kill_at(
            start(texts, output, rng.choice((1, 2, 3))), output, at_stage=name, seconds=rng.uniform(0, duration)
        ):
            same.append(contents(output) == expected)
            shutil.rmtree(output)
        stages[stage(output)] += 1
    finish(start(texts, output, 2))
    same.append(contents(output) == expected)
    report = {
        'groups': len(list((directory / 'uninterrupted').glob('train-*'))),
        'seconds': duration,
        'stages': stages,
        'same': same,
        'other_is_same': contents(directory / 'other') == expected,
    }
    print(json.dumps(report))


if __name__ == '__main__':
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
