"""Progress bar of the tasks of a stage."""

from __future__ import annotations

import time

from maxlm.formatting import format_si
from maxlm.log import BYTES, progress_bar


def rates(documents: int, tokens: int, seconds: float) -> str:
    """Returns documents and tokens per second as text for the progress bar."""
    parts = {'documents/s': documents, 'tokens/s': tokens}
    return ', '.join(f'{format_si(count / seconds)} {unit}' for unit, count in parts.items() if count)


class StageBar:
    """Progress bar of a stage: bytes, remaining time, documents/s and tokens/s. See `progress_bar`."""

    def __init__(self, name: str, *, total: int, initial: int = 0, unit: str = BYTES, show: bool = True):
        """Creates the bar.

        Args:
            name: label of the bar.
            total: total amount of work.
            initial: amount that an earlier run processed.
            unit: unit of the amounts.
            show: if False, the bar is hidden.
        """
        self._documents = self._tokens = 0
        self._start = time.monotonic()
        self._bar = progress_bar(name, total=total, initial=initial, unit=unit, show=show)

    def __enter__(self) -> StageBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, num_bytes: int, documents: int = 0, tokens: int = 0) -> None:
        """Adds newly completed work. See `OnProgress`."""
        self._documents += documents
        self._tokens += tokens
        if not self._bar.disable:
            elapsed = max(time.monotonic() - self._start, 1e-9)
            self._bar.set_postfix_str(rates(self._documents, self._tokens, elapsed), refresh=False)
        self._bar.update(num_bytes)

    def step(self, done: int, total: int) -> None:
        """Sets the bar to step `done` of `total`, for stages that do not count bytes."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)
