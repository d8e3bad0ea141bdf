"""Console output of a command: log lines, WORKDIR/run.log, and progress as a bar or lines."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from maxlm.errors import escape_controls, explain_os_errors, one_line, os_message
from maxlm.formatting import format_bytes, format_duration, format_int, format_number, format_rate

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger('maxlm')

RUN_LOG = 'run.log'
# Unit of progress that is measured in bytes.
BYTES = 'B'
# Time between two progress lines.
LINE_SECONDS = 10.0


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning once per process."""
    logger.warning(message)


class _Formatter(logging.Formatter):
    """Escapes control characters. Warnings, which may contain names from files, are one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the name is that of logging
        if record.levelno >= logging.WARNING:
            record.message = one_line(record.message)
        return escape_controls(super().formatMessage(record))


class _ConsoleHandler(logging.Handler):
    """Prints log lines above a progress bar."""

    def __init__(self, *, stderr: bool):
        super().__init__()
        self._stderr = stderr

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        file = sys.stderr if self._stderr else sys.stdout
        tqdm.write(self.format(record), file=file)
        file.flush()


class _LogFile(logging.FileHandler):
    """Appends to run.log. If the file cannot be written, this is reported once and the run continues."""

    _failing = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, the name is that of logging
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failing:
            self._failing = True
            print(f'{self.baseFilename}: {os_message(error)}; lines are missing in it', file=sys.stderr)

    def close(self) -> None:
        # Data that could not be written remains in the buffer, and close retries the write.
        with contextlib.suppress(OSError):
            super().close()


class Console:
    """Sends `logger` to stdout and, if a workdir is given, to its run.log.

    If there are several processes, the first logs for all. The others only print warnings, to stderr. With `stderr`,
    all lines go there, for commands whose stdout contains only results.
    """

    def __init__(self, workdir: Path | None = None, *, process: int = 0, stderr: bool = False):
        self._handlers: list[logging.Handler] = [_ConsoleHandler(stderr=stderr)]
        self._handlers[0].setFormatter(_Formatter())
        if process:
            warnings = logging.StreamHandler(sys.stderr)
            warnings.setLevel(logging.WARNING)
            warnings.setFormatter(_Formatter(f'[process {process}] %(message)s'))
            self._handlers = [warnings]
        if workdir is not None and not process:
            with explain_os_errors(workdir / RUN_LOG, 'choose another --workdir'):
                file = _LogFile(workdir / RUN_LOG, encoding='utf-8')
            file.setFormatter(_Formatter('%(asctime)s %(levelname)s %(message)s'))
            self._handlers.append(file)

    def __enter__(self) -> Console:
        logger.setLevel(logging.INFO)
        logger.propagate = False
        for handler in self._handlers:
            logger.addHandler(handler)
        # These libraries log every save; `logger` reports the relevant events.
        logging.getLogger('absl').setLevel(logging.ERROR)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()


class ProgressLines:
    """Progress on stderr as a line every `LINE_SECONDS`. It has the methods of tqdm that maxlm uses.

    Work that takes less time prints nothing.
    """

    disable = False

    def __init__(
        self, name: str, *, total: int | None, initial: int = 0, unit: str, clock: Callable[[], float] = time.monotonic
    ):
        self.total, self.n = total, initial
        self._name, self._initial, self._clock = name, initial, clock
        self._unit, self._units = unit, f'{unit}es' if unit.endswith('ch') else f'{unit}s'
        self._start = self._last = clock()
        self._postfix = ''

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, amount: int = 1) -> None:
        """Adds completed work, and prints a line if the last one is old enough."""
        self.n += amount
        now = self._clock()
        if now - self._last >= LINE_SECONDS:
            self._last = now
            print(self.line(now - self._start), file=sys.stderr, flush=True)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Sets a text that is part of each line."""
        self._postfix = text

    def close(self) -> None:
        """Prints the duration if there was a line before."""
        if self._last > self._start:
            duration = format_duration(self._clock() - self._start)
            print(f'{self._name}: {self._amount(self.n)} in {duration}', file=sys.stderr, flush=True)

    def line(self, elapsed: float) -> str:
        """Returns the progress after `elapsed` seconds: name, completed and total work, rate and remaining time."""
        rate = (self.n - self._initial) / elapsed
        of = f' of {self._amount(self.total)} ({100 * self.n // self.total}%)' if self.total else ''
        done = self._amount(self.n) if not of or self._unit == BYTES else format_int(self.n)
        parts = [f'{self._name}: {done}{of}', self._rate(rate), self._postfix]
        if self.total and rate:
            parts.append(f'{format_duration(max(0.0, (self.total - self.n) / rate))} left')
        return ', '.join(part for part in parts if part)

    def _amount(self, number: int) -> str:
        if self._unit == BYTES:
            return format_bytes(number)
        return f'{format_int(number)} {self._unit if number == 1 else self._units}'

    def _rate(self, rate: float) -> str:
        if self._unit == BYTES:
            return format_rate(rate)
        if 0 < rate < 1:
            return f'{format_duration(1 / rate)} per {self._unit}'
        return f'{format_number(rate)} {self._units}/s'


def progress_bar(
    name: str, *, total: int, initial: int = 0, unit: str, show: bool, lines: bool = True
) -> tqdm | ProgressLines:
    """Returns the progress of an operation on stderr: a bar on a terminal, otherwise a line every `LINE_SECONDS`.

    Args:
        name: name of the operation.
        total: total amount of work.
        initial: amount that an earlier run completed.
        unit: unit of the amounts, singular; `BYTES` for sizes.
        show: if False, the progress is hidden.
        lines: if False, it is hidden without a terminal, for operations that write log lines.
    """
    is_terminal = sys.stderr.isatty()
    if show and lines and not is_terminal:
        return ProgressLines(name, total=total, initial=initial, unit=unit)

    from tqdm import tqdm

    return tqdm(
        desc=name,
        total=total,
        initial=initial,
        unit=unit,
        unit_scale=unit == BYTES,
        disable=not (show and is_terminal),
        dynamic_ncols=True,
    )
