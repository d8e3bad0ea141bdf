from __future__ import annotations

import pytest

from maxlm.data.loader.batch_rows import BatchRows
from maxlm.data.loader.skipped_batches import data_index
from maxlm.errors import InputError
from maxlm.trainer.continuation import (
    batch_size_text,
    check_same_data,
    learning_rate,
    newest_progress,
    schedule_change,
    trained_before,
    with_batch_size,
)
from maxlm.training.run_control import RunControl
from maxlm.workdir.files import write_run_files
from tests.small import small_config


def rows_of(decisions, size, steps):
    """Returns the rows of steps after a change to batches of `size`."""
    rows = BatchRows.of(size, decisions.batch_sizes)
    firsts = [rows.first_row(data_index(step, decisions.skips)) for step in steps]
    return [row for first in firsts for row in range(first, first + size)]


def test_the_next_batch_begins_with_the_next_sequence():
    decisions = with_batch_size(RunControl(), 5, before=8, now=12)
    assert decisions == RunControl(batch_sizes=((0, 0, 8), (5, 5, 12)))
    assert rows_of(decisions, 12, range(5, 9)) == list(range(40, 88))
    assert trained_before(decisions) == (5, 40)
    assert 'step 6 continues with sequence 41 of' in batch_size_text(decisions, 5, before=8, now=12)
    assert with_batch_size(decisions, 7, before=12, now=12) is decisions
    assert trained_before(RunControl()) == (0, 0)


@pytest.mark.parametrize('size', [3, 8, 16])
@pytest.mark.parametrize('skips', [((2, 4),), ((2, 4), (9, 11)), ((9, 11), (12, 13)), ((2, 4), (7, 9))])
def test_skipped_batches_stay_skipped(skips, size):
    """Batches of 4 until step 5: sequences that are skipped then are not read after the change either."""
    step, before = 5, RunControl(skips=skips)
    after = with_batch_size(before, step, before=4, now=size)
    first = 4 * data_index(step, skips)
    skipped = {row for start, stop in skips for row in range(4 * start, 4 * stop)}
    read = rows_of(after, size, range(step, step + 60))
    assert len(read) == len({*read})
    assert min(read) >= first
    assert not skipped & {*read}
    # At most the rest of the batches at both ends of each range is skipped in addition.
    left_out = {*range(first, max(read))} - {*read} - skipped
    assert len(left_out) <= 2 * (size - 1) * len(skips)
    # Negative control: the numbers of batches to skip mean other sequences with the new size.
    unconverted = rows_of(before._replace(batch_sizes=after.batch_sizes), size, range(step, step + 60))
    assert bool(skipped & {*unconverted}) == (skips[-1][0] > data_index(step, skips))


def test_a_new_run_has_no_progress(tmp_path):
    assert newest_progress(tmp_path) == (0, RunControl(), {})


def test_changed_data_is_refused_unless_allowed(capsys):
    check_same_data({'seed': 1}, {'seed': 1}, allow_dataset_change=False)
    with pytest.raises(InputError, match='cannot resume with different data: seed was 1 and is 2'):
        check_same_data({'seed': 1}, {'seed': 2}, allow_dataset_change=False)
    check_same_data({'seed': 1}, {'seed': 2}, allow_dataset_change=True)


SCHEDULE = {'optimizer__schedule': 'linear', 'optimizer__warmup_steps': 2, 'optimizer__learning_rate': 1.0}
HOURS = {'train__num_steps': 0, 'train__hours': 1.0}


@pytest.mark.parametrize(
    ('settings', 'words'),
    [
        ({}, None),
        ({'train__log_every': 7}, None),
        ({'train__num_steps': 22}, 'train.num_steps was 12 and is 22: the learning rate of step 8 was 0.5 and is 0.75'),
        (
            {'optimizer__min_learning_rate': 0.5},
            'optimizer.min_learning_rate was 0.0 and is 0.5: the learning rate of step 8 was 0.5 and is 0.75',
        ),
        # The schedule of a budget is a share of the time: half of it is spent.
        (HOURS, 'train.hours was 0.0 and is 1.0: the learning rate of step 8 was 0.5 and is 0.667'),
    ],
)
def test_changes_of_the_schedule_are_reported(tmp_path, settings, words):
    tokenizer = tmp_path / 'tokenizer.json'
    tokenizer.write_text('{}')
    workdir = tmp_path / 'run'
    workdir.mkdir()
    write_run_files(workdir, small_config(**SCHEDULE, train__num_steps=12), tokenizer)
    config = small_config(**{**SCHEDULE, 'train__num_steps': 12, **settings})
    now = RunControl(planned_step=7, planned_share=0.5, warmup_share=0.25) if config.by_budget else RunControl()
    found = schedule_change(workdir, config, RunControl(), now, 7, 0)
    assert (found is None) == (words is None)
    if found:
        assert found[0].startswith(words)
        assert found[1] == pytest.approx(0.5)
        assert found[2] == pytest.approx(learning_rate(config, now, 7, 0))
    # A skipped step does not count.
    assert learning_rate(config, now, 8, 1) == learning_rate(config, now, 7, 0) or config.by_budget
    assert schedule_change(tmp_path / 'none', config, RunControl(), now, 7, 0) is None
