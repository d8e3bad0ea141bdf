"""What a person sees of a run: log lines, WORKDIR/run.log, and a progress bar on a terminal."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

logger = logging.getLogger('maxlm')

RUN_LOG = 'run.log'


class _ConsoleHandler(logging.Handler):
    """Prints above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


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
            file = logging.FileHandler(workdir / RUN_LOG, encoding='utf-8')
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
