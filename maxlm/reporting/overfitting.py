"""Whether a run learns its training text by heart, told by its two losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from maxlm.reporting.curves import Point, finite

# How much a loss must change to count: evaluations of a part of the split are noisy by less.
THRESHOLD = 0.01


class Overfitting(NamedTuple):
    """From the best evaluation (`since`) to the last one the validation loss rose while the training loss fell."""

    since: float
    until: float
    validation: tuple[float, float]
    training: tuple[float, float]

    @property
    def words(self) -> str:
        return (
            f'Overfitting since step {self.since:,.0f}: the validation loss rose from {self.validation[0]:.3f} to '
            f'{self.validation[1]:.3f} while the training loss fell from {self.training[0]:.3f} to '
            f'{self.training[1]:.3f}. The best model is that of step {self.since:,.0f}.'
        )


def find_overfitting(training: Sequence[Point], validation: Sequence[Point]) -> Overfitting | None:
    """Compares the evaluation with the lowest loss with the last one; None where the two losses do not part.

    The training loss at an evaluation is the mean since the evaluation before, for single steps are noisy. At least two
    evaluations must follow on the best one.
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
