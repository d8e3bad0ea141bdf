"""`maxlm prepare --stream` in a thread that writes one partition at a time, when the test allows it."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxlm.cli.setup import prepare
from maxlm.data.dataset.preparation import is_preparing, manifest_version
from maxlm.data.executors.executor import OnProgress
from maxlm.data.prepare import partitions
from maxlm.data.prepare.write_shards import WriteShards
from maxlm.errors import exit_code
from tests.waiting import until

NUM_PARTITIONS = 6
SECONDS = 20.0
_RUN = WriteShards.run


def write_lines(path: Path, seed: int = 0) -> Path:
    """Writes a text for each partition of a data set, in a directory."""
    rng = random.Random(seed)
    path.mkdir()
    for number in range(NUM_PARTITIONS):
        lines = [' '.join(str(rng.randrange(1000)) for _ in range(rng.randrange(20, 60))) for _ in range(8)]
        for place, line in enumerate(lines):
            (path / f'{number}-{place}.txt').write_text(line)
    return path


class SteppedPreparation:
    """A preparation in a thread. Each call of `step` lets it write one partition."""

    def __init__(self, texts: Path, output: Path, *options: str):
        words = ['--input', str(texts), '--output', str(output), '--tokenizer', 'bytes', '--workers', '1', '--quiet']
        self.output, self.code = output, -1
        self._words = [*words, '--stream', *options]
        self._permits = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def step(self, count: int = 1) -> None:
        """Lets it write `count` partitions, and waits until their shards are announced."""
        for _ in range(count):
            before = manifest_version(self.output)
            self.release()
            until(lambda before=before: manifest_version(self.output) != before)

    def release(self) -> None:
        """Lets it write one more partition."""
        self._permits.release()

    def finish(self) -> int:
        """Lets it write all partitions; returns the exit code of the command."""
        self._permits.release(10**6)
        self._thread.join(SECONDS)
        return self.code

    def stop(self, error: BaseException) -> None:
        """Ends it with an exception."""
        self._error = error
        self.finish()

    def take(self) -> None:
        """Waits for the permission to write the next partition."""
        self._permits.acquire()
        if self._error is not None:
            raise self._error

    def start(self) -> None:
        """Starts it, and waits until it is announced."""
        self._thread.start()
        until(lambda: is_preparing(self.output))

    def _run(self) -> None:
        self.code = exit_code(prepare.main, self._words)


@contextlib.contextmanager
def stepped(monkeypatch: pytest.MonkeyPatch, texts: Path, output: Path, *options: str) -> Iterator[SteppedPreparation]:
    """Starts a preparation of about NUM_PARTITIONS partitions, which ends with the context."""
    monkeypatch.setattr(partitions, 'GROUPS', NUM_PARTITIONS)
    monkeypatch.setattr(partitions, 'MIN_GROUP_BYTES', 1)
    preparation = SteppedPreparation(texts, output, *options)

    def run(task: WriteShards, report: OnProgress) -> None:
        if task.output == output:
            preparation.take()
        _RUN(task, report)

    with monkeypatch.context() as patch:
        patch.setattr(WriteShards, 'run', run)
        preparation.start()
        try:
            yield preparation
        finally:
            preparation.stop(KeyboardInterrupt())
