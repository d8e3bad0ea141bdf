"""Callbacks of the user: functions of metrics, and functions of the training state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from maxlm.config.user_function import check_arguments
from maxlm.errors import InputError
from maxlm.telemetry.metrics import MetricsCallback
from maxlm.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class StateCallback:
    """Function of the user that may read the training state.

    All processes call it after the same steps, so it may run compiled functions of the state. The arrays are those of
    the run: the next step overwrites them, so copies must be made of what is kept. The time of the function is not part
    of the time of a step. Its exceptions end the run.

    Attributes:
        function: called with (step, metrics, state). `step` is the number of completed steps, `metrics` contains the
            `train/…` metrics of this step, and `eval/loss` if it was evaluated, and `state` is a `TrainState`. If it
            returns True, the run saves a checkpoint and stops.
        every: number of steps between two calls. The function is also called after the last step.
    """

    function: Callable[[int, dict[str, float], TrainState], bool | None]
    every: int


Callback = MetricsCallback | StateCallback


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raises an InputError if a callback is not a function of the arguments with which it is called."""
    for callback in callbacks:
        arguments: tuple[str, ...] = ('step', 'metrics')
        function: Any = callback
        if isinstance(callback, StateCallback):
            function, arguments = callback.function, (*arguments, 'state')
            if type(callback.every) is not int or callback.every < 1:
                raise InputError(f'StateCallback: every={callback.every!r} must be a number of steps of at least 1')
        if not callable(function) or isinstance(function, type):
            raise InputError(f'callbacks: {function!r} must be a function of ({", ".join(arguments)})')
        check_arguments(function, arguments, where='callbacks', name=name_of(function))


def call_back(function: Callable[..., Any], step: int, *arguments: Any) -> bool:
    """Returns True if a callback stops the run.

    Raises:
        InputError: the callback returned something other than a boolean or None, or deleted arrays of the state.
    """
    where = f'callback {name_of(function)} after step {step}'
    try:
        result = function(step, *arguments)
    except Exception as error:
        error.add_note(f'{where}: this exception ended the run')
        raise
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)):
        raise InputError(
            f'{where}: arrays of the state were deleted; remove donate_argnums from the compiled functions'
        )
    if result is None or isinstance(result, (bool, np.bool_)):
        return bool(result)
    if isinstance(result, (jax.Array, np.ndarray)) and result.shape == () and result.dtype == bool:
        return bool(result)
    raise InputError(f'{where}: returned {type(result).__name__}; it must return True, to stop the run, or None')


def name_of(function: Any) -> str:
    """Returns the name of a function for messages."""
    return getattr(function, '__qualname__', None) or type(function).__name__
