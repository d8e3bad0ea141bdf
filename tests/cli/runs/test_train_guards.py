"""Runs that diverge or end early: rollbacks, early stopping, budgets."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

from maxlm.checkpoint.drop_optimizer import drop_optimizer
from maxlm.checkpoint.restore import is_params_only
from maxlm.data.loader.batches import Batches, TrainingRows
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, InputError
from maxlm.telemetry.events import read_events
from maxlm.telemetry.goodput import read_goodput
from maxlm.telemetry.metrics import read_metrics
from maxlm.trainer import setup, training_loop
from maxlm.trainer.budget import RunBudget
from maxlm.trainer.throughput import Throughput
from maxlm.workdir.files import read_config
from maxlm.workdir.step_dirs import to_path
from tests.cli.runs.test_train import curve, ends, params_of, run, same

pytestmark = pytest.mark.usefixtures('shared_steps')

# Saves at steps 4, 8, 12, …, and one evaluation at the end.
SETTINGS = {
    'model__dropout': 0,
    'train__num_steps': 16,
    'guard__max_consecutive_skips': 3,
    'checkpoint__save_interval_steps': 4,
    'eval__interval': 16,
    'guard__rollback_skip_steps': 2,
    'optimizer__schedule': 'constant',
}


def steps_in(workdir):
    return sorted(int(path.name) for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit())


@pytest.mark.parametrize(('dropped', 'target'), [((4, 8), 12), ((), 0)])
def test_a_rollback_keeps_steps_without_optimizer_state(dataset, tmp_path, change_batches, capsys, dropped, target):
    settings = {**SETTINGS, 'guard__rollback_skip_steps': 16, 'checkpoint__max_to_keep': 9}
    assert run(dataset, tmp_path, **{**settings, 'train__num_steps': 12}) == EXIT_DONE
    for step in dropped:
        assert drop_optimizer(tmp_path, step) > 0
    change_batches(poisoned={13, 14, 15})
    capsys.readouterr()
    assert run(dataset, tmp_path, **{**settings, 'train__num_steps': 17}) == EXIT_DONE
    assert f'rolling back to step {target} and' in capsys.readouterr().out
    assert {4, 8, 12, 16, 17} <= set(steps_in(tmp_path))
    assert [is_params_only(to_path(tmp_path / f'checkpoints/{step}')) for step in (4, 8)] == [bool(dropped)] * 2


def test_a_checkpoint_larger_than_the_limit_is_refused_at_the_start(dataset, tmp_path, capsys):
    needed = r'checkpoint.max_gib=1e-06: one checkpoint needs \d+\.?\d* KiB; set it to 0.001 or more for two'
    assert run(dataset, tmp_path / 'run', **SETTINGS, checkpoint__max_gib=1e-6) == EXIT_BAD_INPUT
    assert re.search(needed, capsys.readouterr().err)
    assert not (tmp_path / 'run').exists()


def test_a_slow_run_sends_one_alert_of_each_kind(dataset, tmp_path):
    alerts = tmp_path / 'alerts.jsonl'
    settings = {**SETTINGS, 'train__log_every': 1, 'eval__interval': 4, 'alerts__file': alerts}
    slow = {'alerts__min_mfu': 1.0, 'alerts__min_tokens_per_second': 1e12}
    assert run(dataset, tmp_path / 'run', **settings, **slow) == EXIT_DONE
    sent = [json.loads(line) for line in alerts.read_text().splitlines()]
    assert sorted(alert['kind'] for alert in sent) == ['mfu', 'throughput']
    assert {event['step'] for event in read_events(tmp_path / 'run').lines if event.get('alert')} <= {5, 6}
    # Negative control: a threshold that each step reaches.
    alerts.unlink()
    assert run(dataset, tmp_path / 'fast', **settings, alerts__min_tokens_per_second=1e-9) == EXIT_DONE
    assert not alerts.exists()


def test_a_rollback_equals_a_run_without_the_skipped_batches(dataset, tmp_path, change_batches, capsys):
    # Batches 9, 10 and 11 belong to steps 10 to 12. With the margin of two, batches 7 to 11 are skipped.
    change_batches(poisoned={9, 10, 11})
    alerts = tmp_path / 'alerts.jsonl'
    assert run(dataset, tmp_path / 'run', **SETTINGS, alerts__file=alerts) == EXIT_DONE
    out = capsys.readouterr().out
    # Checkpoint 8 has already trained on batch 7.
    assert 'rolling back to step 4 and skipping the batches of steps 8 to 12' in out
    sent = [json.loads(line) for line in alerts.read_text().splitlines()]
    assert [alert['kind'] for alert in sent if alert['kind'] != 'skipped'] == ['rollback']
    # At most one alert of a kind is sent per minute; the last one includes the number of suppressed ones.
    assert sum(1 + alert['held_back'] for alert in sent if alert['kind'] == 'skipped') == 3
    # The run's files contain all alerts, and that steps after the fourth were lost.
    kinds = [event['kind'] for event in read_events(tmp_path / 'run').lines if event.get('alert')]
    assert kinds == ['skipped', 'skipped', 'skipped', 'rollback']
    assert read_goodput(tmp_path / 'run').totals['lost'] > 0
    change_batches(left_out=((7, 12),))
    assert run(dataset, tmp_path / 'never', **SETTINGS) == EXIT_DONE
    assert curve(tmp_path / 'run') == curve(tmp_path / 'never')
    assert read_goodput(tmp_path / 'never').totals['lost'] == 0
    assert same(params_of(tmp_path / 'run', 16), params_of(tmp_path / 'never', 16))
    # Negative controls: skipped batches change the result, and a resumed run keeps the skips.
    change_batches()
    assert run(dataset, tmp_path / 'plain', **SETTINGS) == EXIT_DONE
    assert curve(tmp_path / 'plain')[16]['train/loss'] != curve(tmp_path / 'run')[16]['train/loss']
    change_batches(poisoned={9, 10, 11})
    assert run(dataset, tmp_path / 'run', **SETTINGS | {'train__num_steps': 18}) == EXIT_DONE
    assert curve(tmp_path / 'run')[18]['train/skipped_steps'] == 0


def test_a_rollback_lowers_the_learning_rates(dataset, tmp_path, change_batches):
    change_batches(poisoned={9, 10, 11})
    settings = {**SETTINGS, 'guard__rollback_lr_factor': 0.5, 'optimizer__warmup_steps': 0, 'eval__interval': 0}
    assert run(dataset, tmp_path / 'run', **settings) == EXIT_DONE
    rates = [curve(tmp_path / 'run')[step]['train/learning_rate'] for step in range(1, 17)]
    # The run returned to step 4.
    assert rates == pytest.approx(4 * [rates[0]] + 12 * [rates[0] / 2])
    # A resumed run keeps the factor.
    assert run(dataset, tmp_path / 'run', **{**settings, 'train__num_steps': 17}) == EXIT_DONE
    assert curve(tmp_path / 'run')[17]['train/learning_rate'] == rates[-1]
    # Negative control: without the factor, the rates and the losses after the rollback differ.
    settings['guard__rollback_lr_factor'] = 1
    assert run(dataset, tmp_path / 'other', **settings) == EXIT_DONE
    before, after = curve(tmp_path / 'other'), curve(tmp_path / 'run')
    assert before[16]['train/learning_rate'] == rates[0]
    assert before[5]['train/loss'] == after[5]['train/loss']
    assert before[7]['train/loss'] != after[7]['train/loss']


def test_a_diverging_run_stops_and_keeps_its_checkpoint(dataset, tmp_path, change_batches, capsys):
    workdir = tmp_path / 'run'
    change_batches(poisoned=range(9, 10_000))
    assert run(dataset, workdir, **SETTINGS, guard__max_rollbacks=1) == EXIT_FAILED
    out = capsys.readouterr().out
    assert out.count('rollback: ') == 1
    assert 'after 1 rollback (guard.max_rollbacks)' in out
    assert 'the newest checkpoint is from step 4' in out
    assert steps_in(workdir) == [4]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params_of(workdir, 4)))
    assert ends(workdir) == [(1, 'diverged', EXIT_FAILED)]


def test_early_stopping_saves_and_stays_stopped(dataset, tmp_path, capsys):
    workdir = tmp_path / 'run'
    settings = SETTINGS | {
        'eval__interval': 2,
        'guard__early_stopping_patience': 2,
        'guard__early_stopping_min_delta': 100,
    }
    assert run(dataset, workdir, **settings) == EXIT_DONE
    # The first evaluation is an improvement, the next two are not.
    assert 'guard.early_stopping_patience' in capsys.readouterr().out
    assert steps_in(workdir) == [4, 6]
    assert read_metrics(workdir)[-1]['step'] == 6
    assert run(dataset, workdir, **settings) == EXIT_DONE
    assert 'nothing to do: the validation loss has not improved on' in capsys.readouterr().out
    assert run(dataset, workdir, **settings | {'guard__early_stopping_patience': 0}) == EXIT_DONE
    assert steps_in(workdir)[-1] == 16


@pytest.fixture
def slow_clock(monkeypatch):
    """Simulates a clock on which each step takes a minute and the start takes no time."""

    class Clocked(RunBudget):
        def __init__(self, *arguments, began, throughput, **more):
            super().__init__(
                *arguments, began=0.0, throughput=throughput, clock=lambda: 60.0 * throughput.steps, **more
            )

    monkeypatch.setattr(setup, 'RunBudget', Clocked)
    monkeypatch.setattr(Throughput, 'seconds', property(lambda throughput: 60.0 * throughput.steps))


def test_a_budget_stops_a_run_with_its_state_saved(dataset, tmp_path, slow_clock, capsys):
    workdir = tmp_path / 'run'
    settings = SETTINGS | {'guard__max_dollars': 9, 'train__price_per_hour': 7.5}
    assert run(dataset, workdir, **settings) == EXIT_DONE
    out = capsys.readouterr().out
    # Eight devices at 7.50 $/h cost one dollar per minute; metrics are read one step late.
    assert re.search(r'budget: (8[0-9])% of guard.max_dollars=9 is spent', out)
    assert 'guard.max_dollars=9 is used up' in out
    (last,) = [step for step in steps_in(workdir) if step % 4]
    assert last in (9, 10)
    assert run(dataset, workdir, **settings) == EXIT_DONE
    assert 'nothing to do: guard.max_dollars=9 is used up' in capsys.readouterr().out


def test_the_schedule_ends_with_the_budget(dataset, tmp_path, slow_clock, capsys):
    workdir = tmp_path / 'run'
    schedule = {'optimizer__schedule': 'cosine', 'optimizer__min_learning_rate': 0}
    settings = SETTINGS | {'train__num_steps': 0, 'train__hours': 1} | schedule
    assert run(dataset, workdir, **settings) == EXIT_DONE
    out = capsys.readouterr().out
    num_steps = read_config(workdir).train.num_steps
    # The budget of one hour allows 60 steps of a minute, minus a reserve. Changes below 10 % are not reported.
    assert 58 <= num_steps <= 60
    (reported,) = map(int, re.findall(r'at 60 s per step the budget allows (\d+) steps', out))
    assert abs(reported - num_steps) <= 0.1 * num_steps
    assert 'did not reach its minimum' not in out
    assert steps_in(workdir)[-1] == num_steps
    rates = {line['step']: line['train/learning_rate'] for line in read_metrics(workdir) if 'train/loss' in line}
    # Each step is a large share of the budget, so the length is decided early, and then rates decay to the end.
    assert int(re.findall(r'step +(\d+)  at 60 s per step', out)[0]) < 10
    assert all(rates[step + 1] < rates[step] for step in range(10, num_steps))
    assert rates[num_steps] < 0.1 * rates[25]
    # A resumed run knows the length from the start.
    assert run(dataset, workdir, **settings) == EXIT_DONE
    assert f'nothing to do: step {num_steps} of {num_steps} is done' in capsys.readouterr().out


def test_a_budget_that_is_spent_before_the_length_is_known(dataset, tmp_path, slow_clock, capsys):
    settings = SETTINGS | {'train__num_steps': 0, 'train__hours': 0.03, 'optimizer__schedule': 'cosine'}
    assert run(dataset, tmp_path / 'run', **settings) == EXIT_DONE
    assert 'train.hours=0.03 was spent before the end of the schedule' in capsys.readouterr().out


def test_a_revised_length_is_resumed_bit_for_bit(dataset, tmp_path, monkeypatch, capsys):
    """Steps take one minute, and two minutes from step 33 on."""

    def seconds(steps):
        return 60.0 * steps + 60.0 * max(0, steps - 32)

    class Clocked(RunBudget):
        def __init__(self, *arguments, began, throughput, **more):
            super().__init__(
                *arguments,
                began=seconds(first),
                throughput=throughput,
                clock=lambda: seconds(first + throughput.steps),
                **more,
            )

    monkeypatch.setattr(setup, 'RunBudget', Clocked)
    monkeypatch.setattr(training_loop, 'LENGTH_CHANGE', 0.02)
    monkeypatch.setattr(
        Throughput, 'seconds', property(lambda throughput: seconds(first + throughput.steps) - seconds(first))
    )
    monkeypatch.setattr(Throughput, 'pauses', {}, raising=False)
    settings = SETTINGS | {'train__num_steps': 0, 'train__hours': 1, 'optimizer__schedule': 'cosine'}
    settings |= {'optimizer__min_learning_rate': 0, 'checkpoint__max_to_keep': 99}
    first = 0
    assert run(dataset, tmp_path / 'run', **settings) == EXIT_DONE
    lengths = [*map(int, re.findall(r'per step the budget allows (\d+) steps', capsys.readouterr().out))]
    assert lengths[0] >= 58
    assert lengths[-1] <= 47
    rates = {
        line['step']: line['train/learning_rate'] for line in read_metrics(tmp_path / 'run') if 'train/loss' in line
    }
    assert rates[lengths[-1]] < 0.05 * rates[25]
    # A run that resumes after the last decision has the same rates and final parameters.
    replanned = [event['step'] for event in read_events(tmp_path / 'run').lines if event['kind'] == 'length']
    first = min(step for step in steps_in(tmp_path / 'run') if step >= replanned[-1])
    assert 33 < first < lengths[-1]
    shutil.copytree(tmp_path / 'run', tmp_path / 'again')
    for step in steps_in(tmp_path / 'again'):
        if step > first:
            shutil.rmtree(tmp_path / 'again' / 'checkpoints' / str(step))
    assert run(dataset, tmp_path / 'again', **settings) == EXIT_DONE
    assert curve(tmp_path / 'again') == curve(tmp_path / 'run')
    assert same(params_of(tmp_path / 'again', lengths[-1]), params_of(tmp_path / 'run', lengths[-1]))


def test_the_state_before_damaged_data_is_saved(dataset, tmp_path, monkeypatch, capsys):
    original = Batches.__getitem__

    def damaged(self, step):
        if isinstance(self.order, TrainingRows) and step == 6:
            raise InputError('train-00000: damaged')
        return original(self, step)

    monkeypatch.setattr(Batches, '__getitem__', damaged)
    alerts = tmp_path / 'alerts.jsonl'
    assert run(dataset, tmp_path / 'run', **SETTINGS, alerts__file=alerts) == EXIT_BAD_INPUT
    assert [json.loads(line)['kind'] for line in alerts.read_text().splitlines()] == ['failed']
    assert 'error: train-00000: damaged' in capsys.readouterr().err
    assert steps_in(tmp_path / 'run') == [4, 6]
    monkeypatch.setattr(Batches, '__getitem__', original)
    assert run(dataset, tmp_path / 'run', **SETTINGS) == EXIT_DONE
    assert run(dataset, tmp_path / 'uninterrupted', **SETTINGS) == EXIT_DONE
    assert curve(tmp_path / 'run') == curve(tmp_path / 'uninterrupted')
