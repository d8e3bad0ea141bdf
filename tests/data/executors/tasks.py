"""Tasks with prescribed failures, for tests of executors."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
from pathlib import Path

from maxlm.data.executors.executor import OnProgress, TransientError
from maxlm.errors import InputError


@dataclasses.dataclass(frozen=True)
class Told:
    """Task that records its attempts in a file; the first `times` attempts do what `how` prescribes, others succeed."""

    directory: Path
    label: str
    how: str = ''
    times: int = 99
    size: int = 10

    @property
    def name(self) -> str:
        return self.label

    @property
    def result(self) -> Path:
        return self.directory / f'{self.label}.done'

    @property
    def tries(self) -> list[int]:
        """Returns the process id of each attempt."""
        path = self.directory / f'{self.label}.tries'
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def is_done(self) -> bool:
        return self.result.exists()

    def run(self, report: OnProgress) -> None:
        with (self.directory / f'{self.label}.tries').open('a') as file:
            file.write(f'{os.getpid()}\n')
        report(4, 1, 100)
        if len(self.tries) <= self.times:
            self._misbehave()
        report(6, 2, 200)
        self.result.write_text(os.environ.get('TOKENIZERS_PARALLELISM', ''))

    def _misbehave(self) -> None:
        match self.how:
            case 'bad':
                raise InputError(f'{self.label}: not UTF-8')
            case 'full':
                raise OSError(errno.ENOSPC, 'No space left on device', f'/disk/{self.label}')
            case 'unreachable':
                raise TransientError(f'{self.label}: no answer')
            case 'wrong':
                raise ZeroDivisionError('wrong')
            case 'interrupt':
                raise KeyboardInterrupt
            case 'exit':
                os._exit(3)
            case 'killed':
                os.kill(os.getpid(), signal.SIGKILL)
            case 'ctrl-c':
                os.kill(os.getpid(), signal.SIGINT)
            case 'hang':
                signal.pause()
