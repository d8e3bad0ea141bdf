"""Interface between fault-injection tests and `benchmarks.soak`."""

from __future__ import annotations

import os
from collections.abc import Callable

from benchmarks.soak import FULL


def how_many(sample: int, full: int) -> int:
    """Returns the number of injections: `sample`, or the `full` count of docs/faults.md."""
    return full if os.environ.get(FULL) else sample


def measured(record_property: Callable[[str, object], None], fault: str, figure: str) -> None:
    """Records a measured value for a fault of `benchmarks.soak.FAULTS`; to be called after all assertions."""
    record_property(f'fault:{fault}', figure)
