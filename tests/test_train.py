"""Whole runs: exact resume, preemption, bad input, the golden curve, and that every key is read."""

import collections
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from maxlm import train
from maxlm.config.keys import SECTIONS
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, exit_code
from maxlm.runtime.events import ENDS, read_events
from maxlm.runtime.goodput import read_ledger
from maxlm.runtime.items import restore_params
from maxlm.runtime.layers import ParamsReader, StreamedArray, write_step
from maxlm.runtime.metrics import read_metrics
from maxlm.runtime.workdir import read_config
from maxlm.training.state import abstract_state
from tests.conftest import ROOT
from tests.cpu import cpu_flags, fast_environment
from tests.golden.curve import FILE, golden_run
from tests.small import small_layout

TINY = str(ROOT / 'configs/tiny.py')
# A model small enough for many runs, on all eight virtual devices.
SMALL = {
    'model.num_layers': 1,
    'model.dim': 16,
    'model.num_heads': 2,
    'model.ffn_dim': 32,
    'model.dropout': 0.1,
    'data.window': 16,
    'data.prefetch': 2,
    'train.num_steps': 20,
    'train.log_every': 1,
    'optimizer.warmup_steps': 5,
    'eval.every': 10,
    'eval.num_batches': 1,
    'eval.samples': 0,
    'metrics.tensorboard': 'false',
    'metrics.devices_seconds': 0,
    'metrics.peak_tflops': 1,
}


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


# What clocks measure, and what hangs on it.
CLOCKED = ('time', 'perf/', 'cost/', 'goodput/', 'device/', 'host/')


def curve(workdir):
    """Step → what training computed, without what clocks measured."""
    lines = collections.defaultdict(dict)
    for line in read_metrics(Path(workdir)):
        lines[line['step']] |= {k: v for k, v in line.items() if not k.startswith(CLOCKED)}
    return dict(lines)


def ends(workdir):
    """How the lives of a run ended."""
    events = read_events(Path(workdir)).lines
    return [(event['life'], event['kind'], event['code']) for event in events if event['kind'] in ENDS]


def same(tree, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))


def test_resume_at_every_step_is_exact(dataset, tmp_path):
    whole = tmp_path / 'whole'
    last = 8
    settings = {'train__num_steps': last, 'checkpoint__every_steps': 1, 'checkpoint__keep_last': last}
    settings |= {'optimizer__ema_decay': 0.9}
    assert run(dataset, whole, **settings) == EXIT_DONE
    wanted_curve, wanted_params, wanted_average = curve(whole), params_of(whole, last), params_of(whole, last, 'ema')
    assert not same(wanted_average, wanted_params)
    assert len(wanted_curve) == last
    for step in range(1, last):
        # What a run leaves that was killed after it had saved `step` and gone on a little: later lines, no later save.
        resumed = tmp_path / f'from_{step}'
        shutil.copytree(whole, resumed)
        for later in range(step + 1, last + 1):
            shutil.rmtree(resumed / 'checkpoints' / str(later))
        assert run(dataset, resumed, **settings) == EXIT_DONE
        assert curve(resumed) == wanted_curve, step
        assert same(params_of(resumed, last), wanted_params), step
        assert same(params_of(resumed, last, 'ema'), wanted_average), step
    other = tmp_path / 'other'
    assert run(dataset, other, **settings, train__seed=1) == EXIT_DONE
    assert curve(other)[last]['train/loss'] != wanted_curve[last]['train/loss']
    reordered = tmp_path / 'reordered'
    assert run(dataset, reordered, **settings, data__seed=1) == EXIT_DONE
    assert curve(reordered)[1]['train/loss'] != wanted_curve[1]['train/loss']
    assert not same(params_of(reordered, last), wanted_params)


def test_a_finished_run_has_nothing_to_do_and_can_be_extended(dataset, tmp_path, capsys):
    workdir = tmp_path / 'run'
    assert run(dataset, workdir, train__num_steps=3) == EXIT_DONE
    before = (workdir / 'metrics.jsonl').read_text()
    assert run(dataset, workdir, train__num_steps=3) == EXIT_DONE
    assert 'nothing to do' in capsys.readouterr().out
    assert (workdir / 'metrics.jsonl').read_text() == before
    best = curve(workdir)[3]['train/best_loss']
    # What is remembered without the file.
    (workdir / 'metrics.jsonl').unlink()
    assert run(dataset, workdir, train__num_steps=5) == EXIT_DONE
    assert sorted(curve(workdir)) == [4, 5]
    assert curve(workdir)[4]['train/best_loss'] <= best
    assert (workdir / 'checkpoints' / '5').is_dir()
    # Each start is a life, with its beginning and its end.
    assert ends(workdir) == [(1, 'finished', EXIT_DONE), (2, 'finished', EXIT_DONE), (3, 'finished', EXIT_DONE)]
    lives = read_ledger(workdir).lives
    assert [(life.number, life.start_step, life.step, life.closed) for life in lives] == [
        (1, 0, 3, True),
        (2, None, None, True),
        (3, 3, 5, True),
    ]
    assert lives[1].seconds['step'] == sum(life.seconds['lost'] for life in lives) == 0


def test_a_run_starts_with_the_config_and_the_parameters_of_another(dataset, tmp_path, capsys):
    first, second = tmp_path / 'first', tmp_path / 'second'
    assert run(dataset, first, optimizer__ema_decay=0.9) == EXIT_DONE
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
    # The same windows in the same order, with a loss that the first run had at its end and not at its start.
    assert curve(second)[1]['train/loss'] < curve(first)[1]['train/loss'] - 0.1
    # Started again it goes on, whatever has become of the other.
    shutil.rmtree(first / 'checkpoints')
    command[-1] = '--config.train.num_steps=5'
    assert exit_code(train.main, [*command, f'--config.train.init_from={first}']) == EXIT_DONE
    assert 'going on from step 3' in capsys.readouterr().out
    assert sorted(curve(second)) == [1, 2, 3, 4, 5]


def test_an_imported_workdir_is_trained_on(dataset, tmp_path, capsys):
    first, imported = tmp_path / 'first', tmp_path / 'imported'
    assert run(dataset, first, train__num_steps=3) == EXIT_DONE
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
    # The same as a new run from the same parameters.
    assert (
        exit_code(train.main, [*command, f'--workdir={tmp_path}/new', f'--config.train.init_from={first}']) == EXIT_DONE
    )
    assert curve(imported) == curve(tmp_path / 'new')
    assert same(params_of(imported, 2), params_of(tmp_path / 'new', 2))
    # Control: not the same as from random ones.
    assert exit_code(train.main, [*command, f'--workdir={tmp_path}/random']) == EXIT_DONE
    assert curve(imported)[1] != curve(tmp_path / 'random')[1]
    # Another model is refused by the name of what differs.
    assert exit_code(train.main, [*command, f'--workdir={copied}', '--config.model.num_layers=2']) == EXIT_BAD_INPUT
    assert 'model.num_layers=1' in capsys.readouterr().err


def test_lines_of_the_log_and_what_stands_in_the_workdir(dataset, tmp_path, capsys):
    workdir = tmp_path / 'run'
    assert run(dataset, workdir, train__num_steps=4, train__log_every=2, eval__every=4) == EXIT_DONE
    out = capsys.readouterr().out
    for words in (
        'parameters on 8 × cpu',
        'memory      fits: ',
        'step       2  loss',
        'validation loss',
        'MFU',
        'unigram',
    ):
        assert words in out
    steps = [line['step'] for line in read_metrics(workdir)]
    assert steps == [2, 4, 4]
    last = read_metrics(workdir)[1]
    assert last['train/tokens'] == 4 * 8 * 16
    assert {'train/perplexity', 'train/param_norm', 'perf/mfu', 'perf/mfu_full', 'perf/data_wait_seconds'} < last.keys()
    assert last['train/best_loss'] == min(line['train/loss'] for line in read_metrics(workdir)[:2])
    assert last['perf/mfu'] < last['perf/mfu_full']
    names = {entry.name for entry in workdir.iterdir()}
    small = {'config.json', 'events.jsonl', 'goodput.jsonl', 'metrics.jsonl', 'run.log', 'tokenizer.json'}
    assert names == {'checkpoints', 'report.html', *small}


def test_tensorboard_gets_the_same_numbers(dataset, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    workdir = tmp_path / 'run'
    assert run(dataset, workdir, train__num_steps=3, metrics__tensorboard='true') == EXIT_DONE
    events = EventAccumulator(str(workdir / 'tensorboard'), size_guidance={'tensors': 0})
    events.Reload()
    from tensorboard.util import tensor_util

    shown = {event.step: tensor_util.make_ndarray(event.tensor_proto).item() for event in events.Tensors('train/loss')}
    assert shown == pytest.approx({step: line['train/loss'] for step, line in curve(workdir).items()})


def start_process(command):
    environment = {**os.environ, 'XLA_FLAGS': cpu_flags(1)}
    return subprocess.Popen(
        [sys.executable, '-m', 'maxlm.train', *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )


def test_sigterm_saves_and_the_next_start_goes_on_exactly(dataset, tmp_path):
    # Real processes: this is about signals. The run is long enough to be caught in its middle.
    settings = {'train__num_steps': 400, 'checkpoint__every_steps': 0, 'eval__every': 0, 'train__log_every': 1}
    whole = start_process(arguments(dataset, tmp_path / 'whole', **settings))
    stopped = start_process(arguments(dataset, tmp_path / 'stopped', **settings))
    deadline = time.time() + 120
    while not (tmp_path / 'stopped/metrics.jsonl').exists() or len(read_metrics(tmp_path / 'stopped')) < 3:
        assert time.time() < deadline
        time.sleep(0.02)
    stopped.send_signal(signal.SIGTERM)
    stopped.send_signal(signal.SIGTERM)
    out, _ = stopped.communicate(timeout=120)
    assert stopped.returncode == EXIT_PREEMPTED
    assert 'SIGTERM' in out
    saved = [int(entry.name) for entry in (tmp_path / 'stopped/checkpoints').iterdir() if entry.name.isdigit()]
    assert len(saved) == 1
    assert 3 <= saved[0] < 400
    again = start_process(arguments(dataset, tmp_path / 'stopped', **settings))
    assert again.wait(timeout=120) == EXIT_DONE
    assert whole.wait(timeout=120) == EXIT_DONE
    assert curve(tmp_path / 'stopped') == curve(tmp_path / 'whole')
    assert ends(tmp_path / 'stopped') == [(1, 'preempted', EXIT_PREEMPTED), (2, 'finished', EXIT_DONE)]
    events = read_events(tmp_path / 'stopped').lines
    assert [event['from_step'] for event in events if event['kind'] == 'resumed'] == saved


def test_a_run_whose_loss_is_not_finite_stops(dataset, tmp_path, capsys):
    workdir = tmp_path / 'run'
    # At this rate the first real update blows the parameters up.
    settings = {'optimizer__learning_rate': 1e30, 'optimizer__clip_norm': 0, 'optimizer__warmup_steps': 0}
    assert run(dataset, workdir, **settings, train__max_skipped_steps=3) == EXIT_FAILED
    out = capsys.readouterr().out
    assert 'train.max_skipped_steps' in out
    assert 'after 2 rollback(s)' in out
    assert read_metrics(workdir)[-1]['train/skipped'] >= 3


def test_the_real_1b_configuration_shortened(dataset, tmp_path):
    # One real layer of width 1536 with the full vocabulary; only lengths and counts are cut, to suit a CPU.
    shortened = {
        'model.num_layers': 1,
        'data.window': 32,
        'data.path': dataset,
        'train.num_steps': 2,
        'train.global_batch': 8,
        'train.micro_batch': 1,
        'train.log_every': 1,
        'eval.num_batches': 1,
        'metrics.tensorboard': 'false',
        'metrics.peak_tflops': 1,
    }
    command = [f'--config={ROOT}/configs/1b.py', f'--workdir={tmp_path}/run']
    command += [f'--config.{key}={value}' for key, value in shortened.items()]
    subprocess.run([sys.executable, '-m', 'maxlm.train', *command], check=True, cwd=ROOT, env=fast_environment())
    model = read_config(tmp_path / 'run').model
    assert (model.dim, model.num_heads, model.vocab_size, model.max_positions) == (1536, 24, 50_000, 2048)
    losses = [line['train/loss'] for line in read_metrics(tmp_path / 'run') if 'train/loss' in line]
    assert np.all(np.abs(np.array(losses) - np.log(50_000)) < 0.5)


def test_golden_curve(dataset, tmp_path):
    golden = json.loads(FILE.read_text())
    assert golden_run(dataset, tmp_path / 'same') == pytest.approx(golden, rel=1e-2)
    # Control: the tolerance tells runs apart, a short one, all in the warm-up that both have, already.
    other = golden_run(dataset, tmp_path / 'other', seed=1, num_steps=10)['train/loss 10']
    assert other != pytest.approx(golden['train/loss 10'], rel=1e-2)


def test_every_config_key_is_read(dataset, tmp_path, monkeypatch, change_batches):
    read = set()

    def watch(section, cls):
        original = cls.__getattribute__

        def recording(self, name):
            # Reading all keys alike (checking bounds, writing JSON) does not mean that a key does something.
            reader = sys._getframe(1).f_globals['__name__']
            if reader.startswith('maxlm.') and reader not in ('maxlm.config.rules', 'maxlm.runtime.workdir'):
                read.add(f'{section}.{name}')
            return original(self, name)

        monkeypatch.setattr(cls, '__getattribute__', recording)

    for section, cls in SECTIONS.items():
        watch(section, cls)
    # The three ways to say how long a run is, the two to say how much at a time and how long the warm-up, and what only
    # some choices of another key look at.
    by_family = {
        'llama': {'train__num_steps': 2, 'model__rotary_scaling': 'yarn', 'model__dtype': 'float16'},
        'gpt2': {
            'train__num_tokens': 256,
            'train__global_batch_tokens': 128,
            'optimizer__warmup_tokens': 128,
            'metrics__wandb': 'offline',
        },
        'qwen3': {'train__num_steps': 2, 'model__attention_pattern': 'S', 'model__sliding_window': 4},
        'gpt_neox': {'train__num_epochs': 0.025, 'model__rotary_scaling': 'llama3'},
        'nanochat': {
            'train__num_steps': 2,
            'optimizer__name': 'muon',
            'optimizer__schedule': 'wsd',
            # Only what lies in a bucket is fetched.
            'data__sources': f"(('file://{dataset}', 1.0),)",
            'data__cache': tmp_path / 'cache',
            'data__allow_change': 'true',
        },
    }
    for family, chosen in by_family.items():
        settings = {
            'model__family': family,
            'eval__every': 2,
            'eval__samples': 1,
            'metrics__tensorboard': 'true',
            **chosen,
        }
        command = arguments(dataset, tmp_path / family, **settings)
        command = [word for word in command if not word.endswith(('num_steps=20', 'warmup_steps=5'))]
        assert train.main([*command, '--config.optimizer.warmup_steps=0']) == EXIT_DONE
        assert read_config(tmp_path / family).train.num_steps == 2
    # What only a run that goes on looks at.
    assert train.main([*command, '--config.optimizer.warmup_steps=0', '--config.train.num_steps=3']) == EXIT_DONE
    # What only a run that goes back looks at.
    change_batches(poisoned={0, 1})
    assert run(dataset, tmp_path / 'back', train__num_steps=2, train__max_skipped_steps=1) == EXIT_DONE
    declared = {f'{section}.{field.name}' for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)}
    assert declared - read == set()
    # Control: a key that nobody reads would be found.
    assert (declared | {'train.unread'}) - read == {'train.unread'}
