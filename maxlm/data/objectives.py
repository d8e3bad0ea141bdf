"""Which data a run can learn from: pairs of answers by preferences alone, and preferences from nothing else."""

from __future__ import annotations

from maxlm.config.keys import Config
from maxlm.data.records import Dataset
from maxlm.errors import InputError

PREFERENCE_OBJECTIVE = 'dpo'


def check_objective(config: Config, dataset: Dataset) -> None:
    """Compares `train.objective` with what a data set of the run holds.

    Raises:
        InputError: the objective needs preferences and there are none, or they are there and it does not.
    """
    objective = config.train.objective
    if objective == PREFERENCE_OBJECTIVE and not dataset.preferences:
        raise InputError(
            f'train.objective={objective}: {dataset.path} holds no preferences; prepare pairs of answers with '
            f'--format=preference --pack_window={config.data.window}'
        )
    if objective != PREFERENCE_OBJECTIVE and dataset.preferences:
        raise InputError(
            f'train.objective={objective}: {dataset.path} holds preferences, half of whose answers are not to be '
            f'learned; set train.objective={PREFERENCE_OBJECTIVE}, or prepare other data'
        )


def check_alike(a: Dataset, b: Dataset) -> None:
    """Raises InputError unless both of two data sets of a mixture hold preferences, or neither does."""
    if a.preferences != b.preferences:
        preferences, other = (a, b) if a.preferences else (b, a)
        raise InputError(
            f'data.sources: {preferences.path} holds preferences, and {other.path} does not; no objective learns from '
            'both'
        )
