"""Tests goodput computed from heartbeats: lost steps, idle time, and complete accounting of all time."""

import json

import pytest

from maxlm.errors import InputError
from maxlm.telemetry.goodput import (
    ACTIVITIES,
    CATEGORIES,
    STEP_CATEGORIES,
    GoodputLog,
    attempts_of,
    compact,
    read_goodput,
)
from maxlm.workdir.files import goodput_name


class Run:
    """Generates heartbeats of a run. Startup takes 5 s. Each step waits 0.25 s for data and takes 1 s."""

    def __init__(self):
        self.lines = []
        self.now, self.attempt = 1000.0, 0

    def start(self, step=0, *, pause=0.0, known=True):
        self.now += pause
        self.attempt += 1
        self.began, self.step, self.saved_step = self.now, step, None
        self.start_step = step if known else None
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self.spend('start', 5.0)
        self.line('beat')
        return self

    def spend(self, name, seconds):
        self.seconds[name] += seconds
        self.now += seconds

    def steps(self, count, *, beats=True):
        for _ in range(count):
            self.spend('data_wait', 0.25)
            self.spend('step', 0.5)
            if beats:
                # A heartbeat in the middle of a step.
                self.line('beat')
            self.spend('step', 0.5)
            self.step += 1
        return self

    def evaluate(self):
        self.spend('evaluation', 2.0)
        return self

    def save(self):
        self.spend('checkpoint', 3.0)
        self.saved_step = self.step
        self.line('saved')
        return self

    def roll_back(self, step):
        self.spend('restore', 4.0)
        self.step = step
        self.line('rollback')
        return self

    def kill(self):
        """Ends the attempt right after a heartbeat, so that all of its time is recorded."""
        self.line('beat')
        return self

    def end(self):
        self.spend('other', 0.5)
        self.line('end')
        return self

    def line(self, why):
        self.lines.append(
            {
                'time': self.now,
                'life': self.attempt,
                'process': 0,
                'host': 'a',
                'began': self.began,
                'step': self.step if self.start_step is not None else None,
                'saved_step': self.saved_step,
                'start_step': self.start_step,
                'seconds': dict(self.seconds),
                'dollars': (self.now - self.began) / 100,
                'why': why,
            }
        )


def totals(run, **options):
    """Returns the categories whose time is not zero."""
    ledger = GoodputLog(attempts_of(run.lines, **options), [])
    assert set(ledger.totals) == set(CATEGORIES)
    # The categories account for all time.
    assert ledger.seconds == pytest.approx(run.now - 1000.0)
    return {name: pytest.approx(seconds) for name, seconds in ledger.totals.items() if seconds}


def test_one_attempt_equals_its_last_heartbeat():
    run = Run().start().steps(4).evaluate().save().steps(2).save().end()
    assert totals(run) == {
        'start': 5.0,
        'step': 6.0,
        'data_wait': 1.5,
        'evaluation': 2.0,
        'checkpoint': 6.0,
        'other': 0.5,
    }


@pytest.mark.parametrize('beats', [True, False])
def test_steps_after_the_checkpoint_of_a_killed_attempt_are_lost(beats):
    run = Run().start().steps(4, beats=beats).save().steps(3, beats=beats).evaluate().kill()
    run.start(4, pause=60.0).steps(2, beats=beats).save().end()
    assert totals(run) == {
        'start': 10.0,
        'step': 6.0,
        'data_wait': 1.5,
        'checkpoint': 6.0,
        'other': 0.5,
        'lost': 3 * 1.25 + 2.0,
        'idle': 60.0,
    }
    first, second = attempts_of(run.lines)
    assert (first.seconds['lost'], second.seconds['lost'], second.seconds['idle']) == (pytest.approx(5.75), 0.0, 60.0)
    assert (first.is_closed, second.is_closed, second.start_step, second.step) == (False, True, 4, 6)
    # Control: without `count_lost`, the seconds stay in their categories.
    naive = totals(run, count_lost=False)
    assert 'lost' not in naive
    assert naive['step'] == 9.0
    assert naive['evaluation'] == 2.0


def test_attempt_killed_before_its_first_checkpoint_loses_all_but_startup():
    run = Run().start().steps(4).save().steps(1).kill()
    run.start(4, pause=1.0).steps(3).kill()
    run.start(4, pause=1.0).steps(1).save().end()
    found = totals(run)
    assert found['step'] == 5.0
    assert found['lost'] == 4 * 1.25
    assert found['start'] == 15.0
    # The run restarts from step 0.
    run = Run().start().steps(4).kill()
    run.start(0).steps(4).save().end()
    assert totals(run)['lost'] == 5.0


def test_unfinished_step_is_lost():
    run = Run().start().steps(4).save()
    run.spend('data_wait', 0.25)
    run.spend('step', 0.5)
    run.kill()
    run.start(4).end()
    assert totals(run)['lost'] == 0.75


def test_restore_of_an_earlier_checkpoint_loses_steps_of_two_attempts():
    # The checkpoints of the second attempt and the last checkpoint of the first attempt are damaged.
    run = Run().start().steps(2).save().steps(2).save().end()
    run.start(4).steps(2).save().end()
    run.start(2).steps(1).end()
    found = totals(run)
    assert found['step'] == 3.0
    assert found['lost'] == 4 * 1.25
    attempts = attempts_of(run.lines)
    assert [attempt.seconds['lost'] for attempt in attempts] == pytest.approx([2.5, 2.5, 0.0])


def test_rollbacks_within_an_attempt():
    run = Run().start().steps(4).save().steps(6).roll_back(4).steps(2).save().end()
    found = totals(run)
    assert found['step'] == 6.0
    assert found['lost'] == 6 * 1.25
    assert found['restore'] == 4.0
    # The run rolls back twice to the same step, the second time without a heartbeat in between, and is then killed.
    run = Run().start().steps(4).save().steps(2).roll_back(4).steps(1, beats=False).roll_back(4).steps(3).kill()
    run.start(4).end()
    assert totals(run)['lost'] == (2 + 1 + 3) * 1.25
    assert totals(run)['step'] == 4.0


def test_regular_end_loses_nothing():
    run = Run().start().steps(4).save()
    # This time is between the save and the last heartbeat.
    run.spend('step', 0.01)
    run.end()
    run.start(4, pause=9.0).end()
    found = totals(run)
    assert 'lost' not in found
    assert found['idle'] == 9.0
    # Control: for a killed attempt, this time belongs to an unfinished step.
    run.lines[-3]['why'] = 'beat'
    assert totals(run)['lost'] == 0.01


def test_attempts_without_a_restored_step_lose_nothing():
    run = Run().start().steps(4).save().steps(2).kill()
    for _ in range(2):
        run.start(known=False, pause=1.0).kill()
    assert 'lost' not in totals(run)
    run.start(4).end()
    assert totals(run)['lost'] == 2.5
    assert totals(run)['idle'] == 2.0


def test_steps_without_heartbeats_share_time_equally():
    run = Run().start().steps(10, beats=False).kill()
    run.start(4).end()
    assert totals(run)['lost'] == 6 * 1.25
    assert totals(run)['step'] == 4.0


def test_clock_skew_gives_no_negative_idle_time():
    run = Run().start().steps(2).save().end()
    run.start(2, pause=-100.0).end()
    assert attempts_of(run.lines)[1].seconds['idle'] == 0.0


@pytest.mark.parametrize('is_repeated', [False, True])
def test_compaction_keeps_all_attempts(is_repeated):
    run = Run().start().steps(4).evaluate().save().steps(3).roll_back(4).steps(2).save().steps(2).kill()
    run.start(6, pause=3.0).steps(3).kill()
    run.start(6).steps(1).save().end()
    kept = compact(compact(run.lines) if is_repeated else run.lines)
    assert len(kept) < len(run.lines) / 2
    assert attempts_of(kept) == attempts_of(run.lines)
    # Control: the result differs without the heartbeats of saves.
    assert attempts_of([line for line in kept if line['why'] != 'saved']) != attempts_of(run.lines)


def test_empty_directory_has_no_attempts(tmp_path):
    ledger = read_goodput(tmp_path)
    assert (ledger.attempts, ledger.notes, ledger.seconds, ledger.fraction, ledger.dollars) == ([], [], 0, 0.0, None)


def test_reading_reports_incomplete_and_invalid_files(tmp_path):
    run = Run().start().steps(4).save().steps(2).kill()
    text = ''.join(json.dumps(line) + '\n' for line in run.lines)
    (tmp_path / goodput_name(3)).write_text(text + '{"time": 12')
    ledger = read_goodput(tmp_path, process=3)
    assert ledger.notes == ['goodput-3.jsonl: skipped the incomplete last line']
    assert ledger.fraction == pytest.approx(6 / ledger.seconds)
    assert ledger.dollars == pytest.approx(ledger.seconds / 100)
    assert read_goodput(tmp_path).attempts == []
    (tmp_path / goodput_name(0)).write_text('{"life": 1}\n')
    with pytest.raises(InputError, match=r'goodput\.jsonl: not a goodput log'):
        read_goodput(tmp_path)


def test_unknown_price_is_not_zero():
    run = Run().start().steps(1).save().end()
    run.start(1).end()
    for line in run.lines:
        line['dollars'] = None
    assert GoodputLog(attempts_of(run.lines), []).dollars is None
    run.lines[-1]['dollars'] = 2.0
    assert GoodputLog(attempts_of(run.lines), []).dollars == 2.0


def test_step_categories_are_activities():
    assert set(STEP_CATEGORIES) < set(ACTIVITIES) < set(CATEGORIES)
