"""Optimizers, schedules and callbacks of the user, with the code of their tutorials."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import maxlm
from maxlm.config.schema import UNDECIDED_STEPS
from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.training.decisions.run_control import RunControl
from maxlm.training.decisions.schedule_change import schedule_change
from maxlm.training.optimizers.schedule import Progress, make_schedule
from tests.cli.runs.test_train import SMALL
from tests.documentation import python_blocks
from tests.small import small_config
from tests.user_modules import write_module

OPTIMIZERS, CHECK = python_blocks('docs/tutorials/optimizer.md')
WATCH, WATCHED = python_blocks('docs/tutorials/callbacks.md')
# An optimizer whose state begins as a copy of the parameters, as that of schedule-free methods does, and contains
# Python numbers, None, a list and a tuple.
ANCHOR = """
import jax
import optax


def anchor(config, learning_rate, params):
    def init(values):
        start = jax.tree.map(lambda value: value + 0, values)
        return {'start': start, 'adam': adam.init(values), 'counts': [None, (0, 0.5)]}

    def update(grads, state, values):
        _, (count, decayed) = state['counts']
        updates, after = adam.update(grads, state['adam'], values)
        pull = jax.tree.map(lambda start, value: 0.01 * (start - value), state['start'], values)
        return optax.tree.add(updates, pull), {**state, 'adam': after, 'counts': [None, (count + 1, decayed / 2)]}

    adam = optax.adam(learning_rate)
    return optax.GradientTransformation(init, update)
"""


def losses(run):
    return [line['train/loss'] for line in run.metrics if 'train/loss' in line]


@pytest.fixture
def warnings(monkeypatch):
    """Returns a list to which the warnings of the test are added."""
    found = []
    monkeypatch.setattr(logger, 'warning', found.append)
    return found


@pytest.fixture
def config(dataset):
    settings = {**SMALL, 'data.path': dataset, 'train.num_steps': 6, 'eval.interval': 3, 'train.log_every': 1}
    return maxlm.Config.get('tiny', settings)


def test_the_code_of_the_optimizer_tutorial_runs(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch, OPTIMIZERS, 'my_optimizers')
    monkeypatch.syspath_prepend(tmp_path)
    exec(CHECK, {})
    # Negative control: the check of the tutorial finds a schedule without restarts.
    write_module(tmp_path, monkeypatch, OPTIMIZERS.replace('[cycle, cycle]', '[cycle]'), 'my_optimizers')
    with pytest.raises(AssertionError):
        exec(CHECK, {})


def test_a_run_with_functions_of_the_user_resumes_bit_for_bit(config, tmp_path, monkeypatch, warnings):
    name = write_module(tmp_path, monkeypatch, OPTIMIZERS + ANCHOR)
    config = config.replace({'optimizer.name': f'{name}:anchor', 'optimizer.schedule': f'{name}:restarts'})
    whole = maxlm.Trainer(config, workdir=tmp_path / 'whole').train()
    stopped = maxlm.Trainer(config, workdir=tmp_path / 'run', callbacks=[lambda step, _: step >= 2]).train()
    assert stopped.outcome == 'preempted'
    # The file of the module changes, but not its functions.
    (tmp_path / f'{name}.py').write_text(f'{OPTIMIZERS}{ANCHOR}\n# Edited.\n')
    resumed = maxlm.Trainer(config, workdir=tmp_path / 'run').train()
    assert f'{name}:anchor: the file of its module has changed since the last start' in warnings
    assert losses(resumed) == losses(whole)
    norms = [
        [line.get('train/param_norm') for line in each.metrics if 'train/loss' in line] for each in (whole, resumed)
    ]
    assert norms[0] == norms[1]
    assert [line['train/learning_rate'] for line in whole.metrics if 'train/loss' in line][:4] == pytest.approx(
        [config.optimizer.learning_rate * share for share in (1, 0.75, 0.25, 1)]
    )


def test_state_that_contains_parameters_starts_from_a_checkpoint(config, tmp_path, monkeypatch):
    found = []

    def train(config, name, part):
        def keep(step, metrics, state):
            found.append(jax.device_get(part(state)))

        callbacks = [maxlm.StateCallback(keep, every=100)]
        return maxlm.Trainer(config, workdir=tmp_path / name, callbacks=callbacks).train().workdir

    config = config.replace({'train.num_steps': 2, 'eval.interval': 0})
    first = train(config, 'first', lambda state: state.params)
    name = write_module(tmp_path, monkeypatch, ANCHOR)
    config = config.replace({'optimizer.name': f'{name}:anchor', 'train.init_from': first})
    train(config, 'second', lambda state: (state.opt_state['start'], state.params))
    jax.tree.map(np.testing.assert_array_equal, found[0], found[1][0])
    # Negative control: the second run has changed its parameters.
    assert np.abs(found[1][0]['embedding'] - found[1][1]['embedding']).max() > 0


def test_an_ignored_learning_rate_is_reported(config, tmp_path, monkeypatch, warnings):
    name = write_module(tmp_path, monkeypatch, OPTIMIZERS.replace('optax.lion(learning_rate', 'optax.lion(1e-3'))
    config = config.replace({'optimizer.name': f'{name}:lion', 'train.num_steps': 1, 'eval.interval': 0})
    maxlm.Trainer(config, workdir=tmp_path / 'run').train()
    assert any('its updates do not use the argument learning_rate' in text for text in warnings)


def schedule_of(monkeypatch, directory, body, num_steps=100, progress=None, **settings):
    name = write_module(directory, monkeypatch, f'import jax.numpy as jnp\nimport optax\n\n\n{body}')
    config = OptimizerConfig(learning_rate=1.0, schedule=f'{name}:make', **settings)
    return make_schedule(config, num_steps, progress)


LINE = 'def make(config, num_steps):\n    return optax.linear_schedule(1.0, 0.0, num_steps)\n'


def test_a_schedule_of_a_budget_is_stretched_over_it(tmp_path, monkeypatch):
    fixed = schedule_of(monkeypatch, tmp_path, LINE)
    assert [float(fixed(step)) for step in (0, 25, 100)] == [1, 0.75, 0]
    # At step 20 half of the run is completed, and 20 steps are left.
    progress = Progress(*map(jnp.float32, (20, 0.5, 40, 0.0)))
    changed = schedule_of(monkeypatch, tmp_path, LINE, UNDECIDED_STEPS, progress)
    assert [float(changed(step)) for step in (20, 30, 40)] == pytest.approx([0.5, 0.25, 0])
    # The warm-up keeps its number of steps.
    warmup = 'def make(config, num_steps):\n    return optax.linear_schedule(0.0, 1.0, config.warmup_steps)\n'
    progress = Progress(*map(jnp.float32, (20, 0.5, 40, 0.1)))
    warm = schedule_of(monkeypatch, tmp_path, warmup, UNDECIDED_STEPS, progress, warmup_steps=40)
    assert [float(warm(jnp.int32(step))) for step in (20, 30, 39)] == pytest.approx([0.5, 0.75, 39 / 40])


@pytest.mark.parametrize(
    ('body', 'message'),
    [
        ('def make(config, num_steps): pass', 'returned NoneType; it must return a schedule'),
        ('def make(config, num_steps): return 1e-3', 'returned float; it must return a schedule'),
        ('def make(config): return optax.constant_schedule(1.0)', r'must accept the arguments \(config, num_steps\)'),
        (
            'def make(config, num_steps): return lambda step: 1.0 if step < 9 else 0.0',
            'TracerBoolConversionError.*; fix',
        ),
        ('def make(config, num_steps): return lambda step: jnp.ones(3) * step', 'must return a float scalar'),
        ('def make(config, num_steps): return lambda step: None', 'must return a float scalar'),
        ('def make(config, num_steps): return optax.linear_schedule(config.peak, 0, 9)', "no attribute 'peak'"),
    ],
)
def test_mistakes_of_schedules_are_named(body, message, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=message) as error:
        schedule_of(monkeypatch, tmp_path, body)
    assert '\n' not in str(error.value)
    assert str(error.value).startswith('optimizer.schedule user_module_')


def test_a_change_to_a_schedule_of_the_user_is_reported(tmp_path, monkeypatch):
    name = write_module(tmp_path, monkeypatch, f'import optax\n\n\n{LINE}')
    old, new = small_config(), small_config(optimizer__schedule=f'{name}:make')
    text, _, rate = schedule_change(old, new, before=RunControl(), now=RunControl(), step=5, skipped=0)
    assert text.startswith(f'optimizer.schedule was cosine and is {name}:make: the learning rate of step 6 was ')
    assert rate == pytest.approx(0.75)
    # The function of the earlier attempt may no longer exist.
    gone = dataclasses.replace(old, optimizer=dataclasses.replace(old.optimizer, schedule=f'{name}:gone'))
    text, _, rate = schedule_change(gone, new, before=RunControl(), now=RunControl(), step=5, skipped=0)
    assert text.endswith('the learning rate of step 6 is 0.75')


def test_the_code_of_the_callback_tutorial_runs(config, tmp_path, monkeypatch):
    settings = {'train.num_steps': 4, 'model.scan_layers': True}
    monkeypatch.setattr(maxlm.Config, 'get', lambda name, overrides: config.replace(settings))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(WATCH.replace('every=25', 'every=1'), names)
    exec(WATCHED.replace('[25, 50, 75, 100]', '[1, 2, 3, 4]').replace('norms[100]', 'norms[4]'), names)
    assert names['run'].outcome == 'finished'
    # The newest line was written after the callback of an earlier step.
    assert names['run'].summary['perf/callback_seconds'] > 0


def test_callbacks_receive_the_state_and_stop_the_run(config, tmp_path):
    calls = []

    def observe(step, metrics, state):
        calls.append((step, metrics, int(state.step), float(optax.tree.norm(state.params))))
        return jnp.bool_(step >= 4)

    run = maxlm.Trainer(config, workdir=tmp_path / 'run', callbacks=[maxlm.StateCallback(observe, every=2)]).train()
    assert run.outcome == 'preempted'
    assert [(step, at) for step, _, at, _ in calls] == [(2, 2), (4, 4)]
    for step, metrics, _, norm in calls:
        (line,) = [line for line in run.metrics if line['step'] == step and 'train/loss' in line]
        assert metrics['train/loss'] == line['train/loss']
        assert norm == pytest.approx(line['train/param_norm'], rel=1e-5)
    # The run ends after the next step.
    assert run.checkpoints[-1].step == 5


@pytest.mark.parametrize(
    ('function', 'kind', 'message'),
    [
        (lambda step, metrics, state: 0.5, InputError, 'after step 2: returned float; it must return True'),
        (lambda step, metrics, state: metrics['train/los'], KeyError, 'train/los'),
        (
            lambda step, metrics, state: jax.tree.map(lambda leaf: leaf.delete(), state.params) and None,
            InputError,
            'arrays of the state were deleted; remove',
        ),
    ],
)
def test_errors_of_callbacks_are_named(config, tmp_path, function, kind, message):
    trainer = maxlm.Trainer(config, workdir=tmp_path / 'run', callbacks=[maxlm.StateCallback(function, every=2)])
    with pytest.raises(kind, match=message) as error:
        trainer.train()
    if kind is KeyError:
        assert 'after step 2: this exception ended the run' in error.value.__notes__[0]
    events = [json.loads(line) for line in (tmp_path / 'run/events.jsonl').read_text().splitlines()]
    assert events[-1]['kind'] == 'failed'


@pytest.mark.parametrize(
    ('callback', 'message'),
    [
        (None, r'None must be a function of \(step, metrics\)'),
        (lambda step: None, r'must accept the arguments \(step, metrics\)'),
        (maxlm.StateCallback(lambda step, metrics: None, every=1), r'the arguments \(step, metrics, state\)'),
        (maxlm.StateCallback(print, every=0), 'every=0 must be a number of steps of at least 1'),
        (maxlm.StateCallback, 'must be a function'),
    ],
)
def test_unusable_callbacks_are_refused(config, tmp_path, callback, message):
    with pytest.raises(InputError, match=message):
        maxlm.Trainer(config, workdir=tmp_path / 'run', callbacks=[callback])
