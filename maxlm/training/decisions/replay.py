"""Replayed steps: selects the steps that are computed twice, and finds the cause of a difference between the results.

A device that computes wrong results without an error ("silent data corruption") is found by computing a step again from
the same state and batch; see Hochschild et al. 2021, "Cores that don't count", and Gemini Team 2023, section 3.
"""

from __future__ import annotations

import hashlib
import math
from enum import StrEnum
from typing import NamedTuple

import numpy as np


class Cause(StrEnum):
    """Cause of a suspicious step, or of a difference between two executions of a step.

    Attributes:
        DATA: both executions agree bit for bit, so the data or the optimizer caused the value.
        NONDETERMINISM: the executions differ by rounding, which depends on the order of additions.
        DEVICE: the executions differ by more, so a device computed one of them wrongly.
    """

    DATA = 'data'
    NONDETERMINISM = 'nondeterminism'
    DEVICE = 'device'


class StepResult(NamedTuple):
    """Result of one execution of a step.

    Attributes:
        loss: loss of the step.
        grad_norm: global norm of the gradient before clipping.
        param_norm: global norm of the parameters after the step.
        checksums: uint32, one or more for each array of the state after the step; empty if they are not compared.
    """

    loss: float
    grad_norm: float
    param_norm: float
    checksums: np.ndarray


class Rounding(NamedTuple):
    """Largest relative differences between two executions whose sums have another order."""

    loss: float
    grad_norm: float
    param_norm: float


# Limits by dtype of the activations, at least 20 times the largest differences between layouts of devices, which
# benchmarks/replay_faults.py measures. A layout changes the order of all sums, and atomic additions that of a few. The
# loss differs least, because it is the mean of many tokens, whose rounding errors are independent.
ROUNDING = {
    'float32': Rounding(loss=1e-5, grad_norm=1e-5, param_norm=1e-5),
    'bfloat16': Rounding(loss=3e-4, grad_norm=1e-2, param_norm=2e-4),
    'float16': Rounding(loss=3e-4, grad_norm=1e-2, param_norm=2e-4),
}


def is_replayed(step: int, *, fraction: float, seed: int) -> bool:
    """Returns True if a step is among the fraction of the steps that are replayed.

    The choice depends on nothing else, so all processes and all attempts of a run make the same. A larger fraction
    contains the steps of a smaller one.
    """
    digest = hashlib.blake2b(f'replay {seed} {step}'.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def find_cause(first: StepResult, second: StepResult, *, dtype: str, is_deterministic: bool) -> Cause:
    """Returns the cause of the difference between two executions of a step; DATA if there is none.

    Args:
        first: result of the first execution.
        second: result of the second execution.
        dtype: dtype of the activations.
        is_deterministic: True if the devices execute a program bit for bit the same each time.
    """
    pairs = [(getattr(first, name), getattr(second, name)) for name in Rounding._fields]
    if all(_is_equal(*pair) for pair in pairs) and np.array_equal(first.checksums, second.checksums):
        return Cause.DATA
    if is_deterministic:
        return Cause.DEVICE
    # Checksums do not measure the size of a difference.
    is_rounding = all(
        _is_equal(one, other) or abs(one - other) <= limit * min(abs(one), abs(other))
        for (one, other), limit in zip(pairs, ROUNDING[dtype], strict=True)
    )
    return Cause.NONDETERMINISM if is_rounding else Cause.DEVICE


def _is_equal(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
