"""Tasks with scripted failures, for tests of executors."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
from pathlib import Path

from maxlm.data.executors.executor import OnProgress, TransientError
from maxlm.errors import InputError


@dataclasses.dataclass(frozen=True)
class ScriptedTask:
    """Task that records its attempts in a file; the first `num_failures` attempts fail as `failure` specifies."""

    directory: Path
    task_name: str
    failure: str = ''
    num_failures: int = 99
    size: int = 10

    @property
    def name(self) -> str:
        return self.task_name

    @property
    def result(self) -> Path:
        return self.directory / f'{self.task_name}.done'

    @property
    def attempts(self) -> list[int]:
        """Returns the process id of each attempt."""
        path = self.directory / f'{self.task_name}.attempts'
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def is_done(self) -> bool:
        return self.result.exists()

    def run(self, report: OnProgress) -> None:
        with (self.directory / f'{self.task_name}.attempts').open('a') as file:
            file.write(f'{os.getpid()}\n')
        report(4, 1, 100)
        if len(self.attempts) <= self.num_failures:
            self._fail()
        report(6, 2, 200)
        self.result.write_text(os.environ.get('TOKENIZERS_PARALLELISM', ''))

    def _fail(self) -> None:
        match self.failure:
            case 'bad':
                raise InputError(f'{self.task_name}: not UTF-8')
            case 'full':
                raise OSError(errno.ENOSPC, 'No space left on device', f'/disk/{self.task_name}')
            case 'unreachable':
                raise TransientError(f'{self.task_name}: no answer')
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
