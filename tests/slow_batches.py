"""Slow training batches for tests that interrupt a run."""

import time
from collections.abc import Iterator
from typing import Any

from maxlm.trainer import batch_source

BATCH_SECONDS = 0.2


def slow_down_batches() -> None:
    """Makes this process wait before each training batch, so that a run lasts as long as a test needs."""
    iterate = batch_source.iterate

    def slow(*args: Any) -> Iterator[Any]:
        for batch in iterate(*args):
            time.sleep(BATCH_SECONDS)
            yield batch

    batch_source.iterate = slow
