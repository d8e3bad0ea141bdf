"""How tests of faults tell `benchmarks.soak` what they found, and are told how often to try."""

from __future__ import annotations

import os
from collections.abc import Callable

from benchmarks.soak import FULL


def how_many(sample: int, full: int) -> int:
    """How often a test tries its fault: a sample, or the full count of docs/faults.md."""
    return full if os.environ.get(FULL) else sample


def measured(record_property: Callable[[str, object], None], fault: str, figure: str) -> None:
    """Records what a test measured for a fault of `benchmarks.soak.FAULTS`; called after its assertions."""
    record_property(f'fault:{fault}', figure)
