"""Console output of a run: log lines, WORKDIR/run.log, and a progress bar on a terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from maxlm.errors import InputError, os_message

logger = logging.getLogger('maxlm')

RUN_LOG = 'run.log'


class _ConsoleHandler(logging.Handler):
    """Prints log lines above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


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

    If there are several processes, the first logs for all. The others only print warnings, to stderr.
    """

    def __init__(self, workdir: Path | None = None, *, process: int = 0):
        self._handlers: list[logging.Handler] = [_ConsoleHandler()]
        if process:
            warnings = logging.StreamHandler(sys.stderr)
            warnings.setLevel(logging.WARNING)
            warnings.setFormatter(logging.Formatter(f'[process {process}] %(message)s'))
            self._handlers = [warnings]
        if workdir is not None and not process:
            try:
                file = _LogFile(workdir / RUN_LOG, encoding='utf-8')
            except OSError as error:
                raise InputError(f'{workdir / RUN_LOG}: {os_message(error)}; choose another --workdir') from error
            file.setFormatter(logging.Formatter('%(asctime)s %(levelname)s %(message)s'))
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


def progress_bar(*, total: int, initial: int, unit: str, show: bool) -> tqdm:
    """Returns a progress bar on stderr, which is silent unless stderr is a terminal."""
    return tqdm(total=total, initial=initial, unit=unit, disable=not (show and sys.stderr.isatty()), dynamic_ncols=True)
