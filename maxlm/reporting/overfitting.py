"""Detects overfitting: the validation loss rises while the training loss falls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from maxlm.reporting.curves import Point, finite

# Minimum relevant relative change of a loss. The noise of evaluations on a part of the split is smaller.
THRESHOLD = 0.01


class Overfitting(NamedTuple):
    """An increase of the validation loss while the training loss fell.

    Attributes:
        since: step of the best evaluation.
        until: step of the last evaluation.
        validation: validation loss at both steps.
        training: training loss at both steps.
    """

    since: float
    until: float
    validation: tuple[float, float]
    training: tuple[float, float]

    @property
    def summary(self) -> str:
        return (
            f'Overfitting since step {self.since:,.0f}: the validation loss rose from {self.validation[0]:.3f} to '
            f'{self.validation[1]:.3f} while the training loss fell from {self.training[0]:.3f} to '
            f'{self.training[1]:.3f}. The best checkpoint is step {self.since:,.0f}.'
        )


def find_overfitting(training: Sequence[Point], validation: Sequence[Point]) -> Overfitting | None:
    """Compares the best evaluation with the last one; None if the losses do not diverge.

    The training loss at an evaluation is the mean since the previous evaluation, because single steps are noisy. At
    least two evaluations must follow the best one.
    """
    evaluations = finite(validation)
    if len(evaluations) < 4:
        return None
    best = min(range(len(evaluations)), key=lambda index: evaluations[index][1])
    last = len(evaluations) - 1
    if best == 0 or last - best < 2:
        return None
    losses = finite(training)
    means = []
    for index in (best, last):
        stretch = [loss for step, loss in losses if evaluations[index - 1][0] < step <= evaluations[index][0]]
        if not stretch:
            return None
        means.append(sum(stretch) / len(stretch))
    rose = evaluations[last][1] > evaluations[best][1] * (1 + THRESHOLD)
    fell = means[1] < means[0] * (1 - THRESHOLD)
    if not (rose and fell):
        return None
    return Overfitting(
        since=evaluations[best][0],
        until=evaluations[last][0],
        validation=(evaluations[best][1], evaluations[last][1]),
        training=(means[0], means[1]),
    )
