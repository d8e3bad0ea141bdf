"""What a person sees of a run: log lines, WORKDIR/run.log, and a progress bar on a terminal."""

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
    """Prints above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


class _LogFile(logging.FileHandler):
    """Appends to run.log. A file that cannot be written is reported once, and does not end the run."""

    _failing = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, the name is that of logging
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failing:
            self._failing = True
            print(f'{self.baseFilename}: {os_message(error)}; lines are missing in it', file=sys.stderr)

    def close(self) -> None:
        # What could not be written stays in the buffer, and closing tries again.
        with contextlib.suppress(OSError):
            super().close()


class Console:
    """While entered, `logger` goes to stdout and, given a workdir, to its run.log.

    Of several processes the first speaks for all: the others only say, on stderr, what they warn of.
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
        # The libraries below narrate every save; what matters of it is reported here.
        logging.getLogger('absl').setLevel(logging.ERROR)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()


def progress_bar(*, total: int, initial: int, unit: str, show: bool) -> tqdm:
    """A bar on stderr; silent where that is not a terminal."""
    return tqdm(total=total, initial=initial, unit=unit, disable=not (show and sys.stderr.isatty()), dynamic_ncols=True)
