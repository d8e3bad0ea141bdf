"""End-to-end runs: output, files, extension, and starts from other checkpoints."""

import collections
import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import pytest

from maxlm.checkpoint.params import restore_params
from maxlm.checkpoint.streaming import ParamsReader, StreamedArray, write_step
from maxlm.cli.runs import train
from maxlm.config.schema import SECTIONS
from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.config.sections.ranges import Range
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, exit_code
from maxlm.telemetry.events import ENDS, read_events
from maxlm.telemetry.goodput import read_goodput
from maxlm.telemetry.metrics import read_metrics
from maxlm.training.state import abstract_state
from maxlm.workdir.files import read_config
from tests.conftest import ROOT
from tests.small import small_layout

pytestmark = pytest.mark.usefixtures('shared_steps')

TINY = str(ROOT / 'configs/tiny.py')
# A model small enough for many runs, on all eight virtual devices.
SMALL = {
    'model.num_layers': 1,
    'model.dim': 16,
    'model.num_heads': 2,
    'model.ffn_dim': 32,
    'model.dropout': 0.1,
    'data.seq_len': 16,
    'data.prefetch_buffer_size': 2,
    'train.num_steps': 20,
    'train.log_every': 1,
    'optimizer.warmup_steps': 5,
    'eval.interval': 10,
    'eval.num_batches': 1,
    'eval.num_samples': 0,
    'metrics.tensorboard': 'false',
    'metrics.device_stats_interval_seconds': 0,
    'metrics.peak_tflops': 1,
}
# With a constant rate, runs of different lengths share the same step.
CONSTANT = {'optimizer__schedule': 'constant'}


def arguments(dataset, workdir, config=TINY, **overrides):
    settings = {**SMALL, 'data.path': dataset, **{k.replace('__', '.'): v for k, v in overrides.items()}}
    return [
        f'--config={config}',
        f'--workdir={workdir}',
        *(f'--config.{key}={value}' for key, value in settings.items()),
    ]


def run(dataset, workdir, **overrides):
    return exit_code(train.main, arguments(dataset, workdir, **overrides))


def params_of(workdir, step, item='params'):
    config = read_config(workdir)
    abstract = abstract_state(config, small_layout(config)).params
    return jax.device_get(restore_params(Path(workdir) / 'checkpoints' / str(step), abstract, item=item))


# Metrics that depend on clocks or count the replays of an attempt.
CLOCKED = (
    'replay/',
    'time',
    'perf/',
    'cost/',
    'goodput/',
    'device/',
    'host/',
    'memory/',
    'rollout/tokens_per_second',
    'rollout/reward_seconds',
    'rollout/hidden_reward_seconds',
    'rollout/generate_seconds',
    'rollout/reward_wait_seconds',
    'rollout/tool_wait_seconds',
    'rollout/hidden_tool_seconds',
    'rollout/train_seconds',
)


def curve(workdir):
    """Returns the metrics of each step without those that depend on clocks."""
    lines = collections.defaultdict(dict)
    for line in read_metrics(Path(workdir)):
        lines[line['step']] |= {k: v for k, v in line.items() if not k.startswith(CLOCKED)}
    return dict(lines)


def ends(workdir):
    """Returns how the attempts of a run ended."""
    events = read_events(Path(workdir)).lines
    return [(event['life'], event['kind'], event['code']) for event in events if event['kind'] in ENDS]


def same(tree, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))


@pytest.fixture(scope='module')
def finished(dataset, tmp_path_factory):
    """Returns a run of four steps with metrics every two steps, a final evaluation, and TensorBoard."""
    workdir = tmp_path_factory.mktemp('finished') / 'run'
    settings = {'train__log_every': 2, 'eval__interval': 4, 'metrics__tensorboard': 'true', **CONSTANT}
    assert run(dataset, workdir, train__num_steps=4, **settings) == EXIT_DONE
    return workdir


def test_lines_of_metrics(finished):
    lines = read_metrics(finished)
    assert [line['step'] for line in lines] == [2, 4, 4]
    last = lines[1]
    assert last['train/tokens'] == 4 * 8 * 16
    assert {
        'train/perplexity',
        'train/param_norm',
        'perf/mfu',
        'perf/mfu_full',
        'perf/data_loading_seconds',
    } < last.keys()
    assert last['train/best_loss'] == min(line['train/loss'] for line in lines[:2])
    assert last['train/perplexity'] == pytest.approx(np.exp(last['train/loss']), rel=1e-5)
    assert last['perf/mfu'] < last['perf/mfu_full']
    assert last['train/skipped_steps'] == 0
    # The rates are those of steps two and four of the five warm-up steps.
    assert lines[0]['train/learning_rate'] < last['train/learning_rate']


def test_tensorboard_gets_the_same_numbers(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / 'tensorboard'), size_guidance={'scalars': 0})
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars('train/loss')}
    assert shown == pytest.approx({step: line['train/loss'] for step, line in curve(finished).items()})


def test_a_finished_run_has_nothing_to_do_and_can_be_extended(dataset, tmp_path, capsys):
    workdir = tmp_path / 'run'
    assert run(dataset, workdir, **CONSTANT, train__num_steps=3) == EXIT_DONE
    before = (workdir / 'metrics.jsonl').read_text()
    assert run(dataset, workdir, **CONSTANT, train__num_steps=3) == EXIT_DONE
    assert 'nothing to do' in capsys.readouterr().out
    assert (workdir / 'metrics.jsonl').read_text() == before
    best = curve(workdir)[3]['train/best_loss']
    # The run also resumes without the file.
    (workdir / 'metrics.jsonl').unlink()
    assert run(dataset, workdir, **CONSTANT, train__num_steps=5) == EXIT_DONE
    assert sorted(curve(workdir)) == [4, 5]
    assert curve(workdir)[4]['train/best_loss'] <= best
    assert (workdir / 'checkpoints' / '5').is_dir()
    # Each start is an attempt with a start and an end event.
    assert ends(workdir) == [(1, 'finished', EXIT_DONE), (2, 'finished', EXIT_DONE), (3, 'finished', EXIT_DONE)]
    attempts = read_goodput(workdir).attempts
    assert [(attempt.number, attempt.start_step, attempt.step, attempt.is_closed) for attempt in attempts] == [
        (1, 0, 3, True),
        (2, None, None, True),
        (3, 3, 5, True),
    ]
    assert attempts[1].seconds['step'] == sum(attempt.seconds['lost'] for attempt in attempts) == 0


def test_a_run_starts_with_the_config_and_the_parameters_of_another(dataset, tmp_path, capsys):
    first, second = tmp_path / 'first', tmp_path / 'second'
    assert run(dataset, first, **CONSTANT, optimizer__ema_decay=0.9) == EXIT_DONE
    capsys.readouterr()
    command = [f'--config={first}/config.json', f'--workdir={second}', '--config.train.num_steps=3']
    assert exit_code(train.main, [*command, f'--config.train.init_from={first}']) == EXIT_DONE
    assert (
        f'starting with the parameters of {first}/checkpoints/20/ema and a fresh optimizer' in capsys.readouterr().out
    )
    before, after = read_config(first), read_config(second)
    assert after.model == before.model
    assert after.mesh == before.mesh
    assert (after.train.num_steps, after.optimizer.ema_decay) == (3, 0.9)
    assert sorted(curve(second)) == [1, 2, 3]
    # The sequences and their order are equal, and the loss starts at the final value of the first run.
    assert curve(second)[1]['train/loss'] < curve(first)[1]['train/loss'] - 0.1
    # After a restart it resumes even if the other run has been deleted.
    shutil.rmtree(first / 'checkpoints')
    command[-1] = '--config.train.num_steps=5'
    assert exit_code(train.main, [*command, f'--config.train.init_from={first}']) == EXIT_DONE
    assert 'resuming from step 3' in capsys.readouterr().out
    assert sorted(curve(second)) == [1, 2, 3, 4, 5]


def test_an_imported_workdir_is_trained_on(dataset, tmp_path, capsys):
    first, imported = tmp_path / 'first', tmp_path / 'imported'
    assert run(dataset, first, **CONSTANT, train__num_steps=3) == EXIT_DONE
    reader = ParamsReader(first / 'checkpoints' / '3')
    arrays = {
        path: StreamedArray(shape, functools.partial(reader.read, path), path.startswith('blocks.'))
        for path, shape in reader.shapes.items()
    }
    write_step(imported, 0, arrays)
    shutil.copy(first / 'config.json', imported)
    shutil.copy(first / 'tokenizer.json', imported)
    copied = tmp_path / 'copied'
    shutil.copytree(imported, copied)
    capsys.readouterr()
    command = [f'--config={imported}/config.json', '--config.train.num_steps=2']
    assert exit_code(train.main, [*command, f'--workdir={imported}']) == EXIT_DONE
    assert 'checkpoints/0/params and a fresh optimizer' in capsys.readouterr().out
    # The result equals that of a new run from the same parameters.
    assert (
        exit_code(train.main, [*command, f'--workdir={tmp_path}/new', f'--config.train.init_from={first}']) == EXIT_DONE
    )
    assert curve(imported) == curve(tmp_path / 'new')
    assert same(params_of(imported, 2), params_of(tmp_path / 'new', 2))
    # Negative control: the result from random parameters differs.
    assert exit_code(train.main, [*command, f'--workdir={tmp_path}/random']) == EXIT_DONE
    assert curve(imported)[1] != curve(tmp_path / 'random')[1]
    # A different model is refused with the name of the differing key.
    assert exit_code(train.main, [*command, f'--workdir={copied}', '--config.model.num_layers=2']) == EXIT_BAD_INPUT
    assert 'model.num_layers=1' in capsys.readouterr().err


@dataclasses.dataclass(frozen=True)
class _FastOptimizerConfig(OptimizerConfig):
    learning_rate: Annotated[float, Range(0, 1e30)] = 1e30


def test_a_run_whose_loss_is_not_finite_stops(dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(SECTIONS, 'optimizer', _FastOptimizerConfig)
    workdir = tmp_path / 'run'
    # At this rate the first update with a nonzero rate makes the parameters diverge.
    settings = {'optimizer__learning_rate': 1e30, 'optimizer__max_grad_norm': 0, 'optimizer__warmup_steps': 0}
    assert run(dataset, workdir, **settings, guard__max_consecutive_skips=3) == EXIT_FAILED
    out = capsys.readouterr().out
    assert 'guard.max_consecutive_skips' in out
    assert 'after 2 rollbacks' in out
    assert read_metrics(workdir)[-1]['train/skipped_steps'] >= 3
    # A run that is too short for this many bad steps also fails, and saves none of them.
    short = tmp_path / 'short'
    assert run(dataset, short, **settings, train__num_steps=3, checkpoint__save_interval_steps=1) == EXIT_FAILED
    assert 'are not finite; there is no checkpoint' in capsys.readouterr().out
    assert not list(short.glob('checkpoints/[0-9]*'))
