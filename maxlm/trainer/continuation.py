"""Continues a run whose config has changed since its newest checkpoint: data, batch size, schedule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from maxlm.checkpoint.item_metadata import CorruptCheckpointError, read_json
from maxlm.checkpoint.manager import saved_steps
from maxlm.config.loading import flatten
from maxlm.config.schema import Config
from maxlm.data.loader.batch_rows import BatchRows, changed, sequences_after
from maxlm.data.loader.batches import fingerprint_changes
from maxlm.data.loader.skipped_batches import data_index, merged
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.training.optimizers.schedule import Progress, make_schedule, rate_at
from maxlm.training.run_control import RunControl, apply_control, from_json
from maxlm.training.run_length import progress_of
from maxlm.workdir.files import CONFIG, read_config
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR

# Keys of the config that determine the learning rate of a step.
SCHEDULE_KEYS = (
    *(f'train.{key}' for key in ('num_steps', 'hours', 'dollars')),
    *(f'optimizer.{key}' for key in ('schedule', 'learning_rate', 'adam_learning_rate', 'embedding_learning_rate')),
    *(f'optimizer.{key}' for key in ('min_learning_rate', 'warmup_steps', 'wsd_decay_fraction')),
)


class SavedProgress(NamedTuple):
    """Progress of a run at its newest checkpoint.

    Attributes:
        step: its step; 0 for a new run.
        decisions: decisions of the run until then.
        data: data fingerprint of the checkpoint; {} for a new run.
    """

    step: int = 0
    decisions: RunControl = RunControl()
    data: Mapping[str, Any] = {}


def newest_progress(workdir: Any) -> SavedProgress:
    """Returns the progress from which a run will resume, without reading the state."""
    steps = saved_steps(workdir)
    if not steps:
        return SavedProgress()

    def read(step: int, item: str) -> dict[str, Any]:
        try:
            return dict(read_json(workdir / CHECKPOINTS_DIR / str(step) / item))
        except CorruptCheckpointError:
            # Either an older checkpoint will be used, or the checkpoint is an import, which has no history.
            return {}

    # All checkpoints of a run have the same data.
    data = next((found for step in reversed(steps) if (found := read(step, 'data'))), {})
    history = read(steps[-1], 'progress').get('history', {})
    return SavedProgress(steps[-1], from_json(history.get('decisions')), data)


def check_same_data(stored: Mapping[str, Any], present: Mapping[str, Any], *, allow_dataset_change: bool) -> None:
    """Checks that the data order is unchanged, because the step is the position in the data only for the same order.

    Raises:
        InputError: it has changed.
    """
    changes = fingerprint_changes(dict(stored), dict(present))
    if changes and not allow_dataset_change:
        raise InputError(
            f'the run cannot resume with different data: {changes}; restore the previous data, use a new workdir, or '
            f'set data.allow_dataset_change=True to continue at the same step of the new data order'
        )
    if changes:
        logger.warning(f'resuming with different data (data.allow_dataset_change=True): {changes}')


def with_batch_size(decisions: RunControl, step: int, *, before: int, now: int) -> RunControl:
    """Returns the decisions of a run that resumes after `step` with a global batch of `now` instead of `before`.

    The next batch begins with the first sequence that no batch has contained. Batches to skip are converted to those
    that contain their sequences.
    """
    if before == now:
        return decisions
    batch = data_index(step, decisions.skips)
    sizes = changed(decisions.batch_sizes, step=step, batch=batch, before=before, now=now)
    old, new = BatchRows.of(before, decisions.batch_sizes), BatchRows.of(now, sizes)
    skips = [
        # The last sequence of the range is in the last skipped batch.
        (start, stop)
        if stop <= batch
        else (new.batch_of(old.first_row(start)), new.batch_of(old.first_row(stop) - 1) + 1)
        for start, stop in decisions.skips
    ]
    return decisions._replace(batch_sizes=sizes, skips=merged(skips))


def trained_before(decisions: RunControl) -> tuple[int, int]:
    """Returns the number of steps and of sequences before the last change of the batch size."""
    if not decisions.batch_sizes:
        return 0, 0
    step, _, _ = decisions.batch_sizes[-1]
    return step, sequences_after(step, 0, decisions.batch_sizes)


def batch_size_text(decisions: RunControl, step: int, *, before: int, now: int) -> str:
    """Returns a log line about a changed batch size, for `with_batch_size`."""
    row = BatchRows.of(now, decisions.batch_sizes).first_row(data_index(step, decisions.skips))
    return (
        f'train.global_batch_size was {before} and is {now}: step {step + 1} continues with sequence {row + 1:,} of '
        'the data, the first that was not read'
    )


def schedule_change(
    workdir: Path, config: Config, before: RunControl, now: RunControl, step: int, skipped: int
) -> tuple[str, float, float] | None:
    """Returns a log line if the config changes the schedule of the run in a workdir, and both learning rates.

    Args:
        workdir: workdir with the config of the previous attempt.
        config: resolved config of this attempt.
        before: decisions in the checkpoint.
        now: decisions adapted to the config.
        step: number of completed steps.
        skipped: number of them that were skipped.
    """
    if not (workdir / CONFIG).is_file():
        return None
    old = read_config(workdir)
    values = {key: (flatten(old)[key], flatten(config)[key]) for key in SCHEDULE_KEYS}
    if config.by_budget or old.by_budget:
        # The length follows from the budget, which is named.
        del values['train.num_steps']
    changes = [f'{key} was {one} and is {two}' for key, (one, two) in values.items() if one != two]
    if not changes:
        return None
    first, second = (
        learning_rate(each, decisions, step, skipped) for each, decisions in ((old, before), (config, now))
    )
    text = f'{"; ".join(changes)}: the learning rate of step {step + 1} was {first:.3g} and is {second:.3g}'
    return text, first, second


def learning_rate(config: Config, decisions: RunControl, step: int, skipped: int) -> float:
    """Returns the learning rate after `step` steps, of which `skipped` were skipped, of a resolved config."""
    controlled = apply_control(config, decisions)
    if not config.by_budget:
        return float(make_schedule(controlled.optimizer, controlled.train.num_steps)(step - skipped))
    progress = Progress(*map(jnp.float32, progress_of(decisions, config)))
    return float(rate_at(controlled.optimizer, progress, jnp.int32(step)))
