"""Tests the checks of equal bits: equal runs pass, and another seed, one other bit or a missing step fails."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import gpu_checks
from benchmarks.gpu_checks import FACTS, METRICS, Settings, compare, main, make_batch, run_steps
from maxlm.checkpoint.checksums import ITEM
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, InputError, exit_code
from tests.conftest import ROOT
from tests.cpu import cpu_flags
from tests.small import small_config

STEPS, SAVED = 4, 2
# These packages are not installed on a bare GPU machine.
ABSENT = ('grain', 'clu', 'tensorflow', 'array_record', 'tensorflow_datasets', 'matplotlib')
TINY = [f'--config={ROOT}/configs/tiny.py', '--config.model.num_layers=1', '--config.model.dim=32']


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """Two equal runs, and one with another seed."""
    directory = tmp_path_factory.mktemp('runs')
    for name, seed in {'first': 0, 'second': 0, 'other': 1}.items():
        config = small_config(8, model__vocab_size=256, train__seed=seed, train__deterministic=True)
        run_steps(config, directory / name, steps=STEPS, save_step=SAVED)
    return directory


@pytest.fixture
def changed(runs, tmp_path):
    """A copy of the second run, in which a test changes something."""
    shutil.copytree(runs / 'second', tmp_path / 'changed')
    return tmp_path / 'changed'


def test_equal_runs_are_equal(runs):
    compared = compare(runs / 'first', runs / 'second', steps=STEPS)
    assert compared == {'equal': True, 'steps': STEPS, 'compared': STEPS, 'differences': [], 'same_final_state': True}
    facts = json.loads((runs / 'first' / FACTS).read_text())
    assert facts['machine']['device'] == 'cpu'
    assert facts['attention'] == 'xla'


def test_another_seed_is_found(runs):
    compared = compare(runs / 'first', runs / 'other', steps=STEPS)
    assert not compared['equal']
    assert not compared['same_final_state']
    assert compared['differences'][0]['step'] == 1


def test_one_bit_of_one_loss_is_found(runs, changed):
    lines = [json.loads(line) for line in (changed / METRICS).read_text().splitlines()]
    lines[2]['train/loss'] = float(np.nextafter(np.float32(lines[2]['train/loss']), np.float32(9)))
    (changed / METRICS).write_text(''.join(json.dumps(line) + '\n' for line in lines))
    compared = compare(runs / 'first', changed, steps=STEPS)
    assert not compared['equal']
    assert [(each['step'], each['name']) for each in compared['differences']] == [(3, 'train/loss')]
    assert compared['same_final_state']


def test_one_bit_of_the_final_state_is_found(runs, changed):
    (path,) = (changed / 'checkpoints' / str(STEPS) / ITEM).glob('metadata')
    content = json.loads(path.read_text())
    name = next(iter(content['params']))
    text, value = content['params'][name].rsplit(' ', 1)
    content['params'][name] = f'{text} {int(value, 16) ^ 1:08x}'
    path.write_text(json.dumps(content))
    compared = compare(runs / 'first', changed, steps=STEPS)
    assert (compared['equal'], compared['same_final_state'], compared['differences']) == (False, False, [])


def test_a_missing_step_is_found(runs, changed):
    lines = (changed / METRICS).read_text().splitlines(keepends=True)
    (changed / METRICS).write_text(''.join(lines[1:]))
    assert not compare(runs / 'first', changed, steps=STEPS)['equal']


def test_batches_depend_on_the_step_alone():
    config = small_config(model__vocab_size=256)
    text = np.arange(256, dtype=np.int32)
    first, again, other = (make_batch(config, text, step) for step in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first['tokens'], other['tokens'])


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--checks=resume,all'], 'all does not exist'),
        (['--steps=4', '--save-step=4'], '--save-step=4'),
        (['--steps=1'], '--save-step=0'),
    ],
)
def test_wrong_arguments(words, message, capsys):
    assert exit_code(main, [*TINY, *words]) == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err


def test_a_used_directory_is_refused(runs):
    with pytest.raises(InputError, match='new or empty directory'):
        gpu_checks.run_checks(Settings('tiny', [], STEPS, SAVED, through_train=False), ['resume'], runs)


def test_runs_of_the_train_command_write_each_step(tmp_path):
    settings = Settings('tiny', ['train.deterministic=true'], 20, 10, through_train=True)
    command = settings.command(tmp_path, steps=20)
    assert command[1:3] == ['-m', 'maxlm.train']
    assert {'--config.train.log_every=1', '--config.train.compilation_cache_dir='} <= {*command}
    assert '--config.train.deterministic=true' in command


@pytest.mark.multiprocess
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path):
    (tmp_path / 'absent').mkdir()
    for name in ABSENT:
        (tmp_path / 'absent' / f'{name}.py').write_text('raise ImportError\n')
    environment = {**os.environ, 'XLA_FLAGS': cpu_flags(1), 'PYTHONPATH': f'{tmp_path / "absent"}:{ROOT}'}
    command = [sys.executable, '-m', 'benchmarks.gpu_checks', *TINY, '--config.data.seq_len=16', '--checks=resume']
    command += ['--steps=6', f'--output={tmp_path / "result.json"}']
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == EXIT_DONE, done.stdout + done.stderr[-3000:]
    result = json.loads((tmp_path / 'result.json').read_text())
    check = result['checks']['resume']
    assert check['equal'], check
    # The steps between the checkpoint and the kill are computed twice.
    assert check['killed_after'] >= check['saved'] + gpu_checks.STEPS_AFTER_SAVE
    assert check['compared'] > 6
    assert len(result['losses']) == 6
    assert 'train.deterministic=true' in result['overrides']


def test_a_difference_fails(monkeypatch, runs, tmp_path, capsys):
    monkeypatch.setattr(gpu_checks, '_run', lambda settings, workdir: shutil.copytree(_source(runs, workdir), workdir))
    command = [*TINY, f'--steps={STEPS}', '--checks=deterministic', f'--workdir={tmp_path / "runs"}']
    assert main(command) == EXIT_FAILED
    assert 'deterministic: 4 steps, DIFFERENT' in capsys.readouterr().out


def _source(runs, workdir):
    return runs / ('first' if workdir.name == 'uninterrupted' else 'other')
