"""How far a stage of the preparation is, as a bar on the terminal."""

from __future__ import annotations

from tqdm import tqdm


def rates(documents: int, tokens: int, seconds: float) -> str:
    """Documents and tokens in a second, as the bar shows them."""
    parts = {'documents/s': documents, 'tokens/s': tokens}
    return ', '.join(f'{tqdm.format_sizeof(count / seconds)} {unit}' for unit, count in parts.items() if count)


class StageBar:
    """Shows bytes, time left, documents/s and tokens/s of a stage; nothing where standard error is no terminal."""

    def __init__(self, name: str, *, total: int, initial: int = 0, show: bool = True):
        """Of `total` bytes `initial` were done by an earlier run."""
        self._documents = self._tokens = 0
        self._bar = tqdm(
            total=total,
            initial=initial,
            unit='B',
            unit_scale=True,
            desc=name,
            # None: only where standard error is a terminal.
            disable=None if show else True,
        )

    def __enter__(self) -> StageBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, num_bytes: int, documents: int = 0, tokens: int = 0) -> None:
        """Counts what is newly done. See `engine.OnProgress`."""
        self._documents += documents
        self._tokens += tokens
        if not self._bar.disable:
            elapsed = max(self._bar.format_dict['elapsed'], 1e-9)
            self._bar.set_postfix_str(rates(self._documents, self._tokens, elapsed), refresh=False)
        self._bar.update(num_bytes)

    def step(self, done: int, total: int) -> None:
        """Sets the bar to step `done` of `total`, for what has no bytes."""
        self._bar.total, self._bar.unit, self._bar.unit_scale = total, ' steps', False
        self._bar.update(done - self._bar.n)
