"""Tests the run on a GPU with a tiny model on CPUs: killed, resumed with the same losses, evaluated and exported."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_run, gpu_run_prepare
from benchmarks.gpu_run import SETTINGS, PartError, main
from benchmarks.gpu_run_prepare import ARCHIVE, PACKAGES, download_wheels
from benchmarks.gpu_run_results import REPEATED, compare_repeated
from maxlm.config.loading import load
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, InputError, exit_code
from maxlm.telemetry.goodput import ACTIVITIES
from tests.benchmarks.only_packages import hide_others
from tests.conftest import ROOT
from tests.cpu import cpu_flags

# Packages of a GPU machine without those that `prepare` downloads.
INSTALLED = ('jax', 'flax', 'optax', 'orbax-checkpoint', 'tokenizers', 'safetensors', 'tqdm', 'psutil', 'jinja2')
# PyTorch imports optree if its metadata is installed.
PEERS = ('torch', 'transformers', 'optree')
TINY = {
    'train.num_steps': 800,
    'train.log_every': 1,
    'train.global_batch_size': 8,
    'train.per_device_batch_size': 0,
    'model.num_layers': 1,
    'model.dim': 16,
    'model.num_heads': 1,
    'model.vocab_size': 0,
    'model.max_positions': 128,
    'model.dtype': 'float32',
    'data.seq_len': 32,
    'optimizer.warmup_steps': 20,
    'eval.interval': 200,
    'eval.num_batches': 2,
    'checkpoint.save_interval_steps': 200,
    'metrics.peak_tflops': 1,
    'metrics.device_stats_interval_seconds': 0.2,
}


def script(*words, **variables):
    environment = {**os.environ, 'PYTHON': sys.executable, 'XLA_FLAGS': cpu_flags(1), **variables}
    command = ['bash', f'{ROOT}/benchmarks/gpu_run.sh', *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.multiprocess
def test_a_tiny_run(tmp_path):
    texts, carried, out = tmp_path / 'texts', tmp_path / 'carried', tmp_path / 'out'
    texts.mkdir()
    for number, part in enumerate((ROOT / 'LICENSE').read_text().split('\n\n')):
        (texts / f'{number:03}.txt').write_text(part)
    small = ('--tokenizer=bpe:300', '--validation-fraction=0.2', '--packages')
    done = script('prepare', carried, '--input', texts, *small)
    assert done.returncode == EXIT_DONE, done.stdout + done.stderr
    assert f'KiB  {carried / ARCHIVE}' in done.stdout
    assert [path.name for path in carried.iterdir()] == [ARCHIVE]

    hidden = hide_others(tmp_path / 'site', (*INSTALLED, *PEERS, *PACKAGES))
    # TensorFlow and CLU would be found otherwise.
    assert {'tensorflow', 'clu', 'pyarrow', 'zstandard', 'rensa'} <= hidden
    overrides = [f'--config.{key}={value}' for key, value in TINY.items()]
    done = script('run', carried, '--minutes=0', '--exact', *overrides, OUT=str(out), PYTHONPATH=str(tmp_path / 'site'))
    log = (out / 'run.log').read_text()
    assert done.returncode == EXIT_DONE, done.stderr + log[-3000:]
    result = json.loads((out / 'run.json').read_text())
    assert result['failed'] == []
    parts = ['train until killed', 'resume', 'evaluate', 'export', 'transformers']
    assert list(result['seconds']) == parts

    # The steps after the checkpoint are repeated bit by bit.
    resumption = result['resumption']
    assert resumption['resumed_from_step'] % TINY['checkpoint.save_interval_steps'] == 0
    assert resumption['killed_after_step'] > resumption['resumed_from_step'] > 0
    assert resumption['repeated_lines'] == resumption['killed_after_step'] - resumption['resumed_from_step']
    assert (resumption['different'], resumption['largest_loss_difference']) == (0, 0)

    assert result['steps'] == TINY['train.num_steps']
    assert result['tokens'] == TINY['train.num_steps'] * 8 * 32
    assert [step for step, _, _ in result['curve']] == list(range(1, result['steps'] + 1))
    times = [seconds for _, seconds, _ in result['curve']]
    assert 0 < times[0] < times[-1]
    losses = [loss for _, _, loss in result['curve']]
    assert losses[-1] < losses[0] - 1
    assert [step for step, _ in result['validation_curve']] == [200, 400, 600, 800]
    assert result['evaluation']['loss'] == pytest.approx(result['validation_curve'][-1][1], abs=0.3)
    assert all(value > 0 for value in result['speed'].values())
    assert 0 < result['goodput']['fraction'] < 1
    assert [attempt['start_step'] for attempt in result['goodput']['attempts']] == [0, resumption['resumed_from_step']]
    assert result['devices']['host/ram_gib']['max'] > 0
    assert result['versions'].keys() >= {'jax', 'grain'}
    assert result['machine']['device'] == 'cpu'
    assert result['exported']['parameters'] > 1000
    assert result['exported']['bytes'] > 2 * result['exported']['parameters']
    assert result['transformers']['text']
    # Nothing else remains.
    assert {path.name for path in out.iterdir()} == {'run.json', 'run.log'}


def test_settings_are_those_of_a_gpt2_of_124_million():
    settings = [f'{key}={value}' for key, value in SETTINGS.items()]
    config = load(f'{ROOT}/{gpu_run.CONFIG}', [*settings, 'train.hours=0.1'])
    assert config.train.num_steps == 0
    model = config.model
    block = 12 * model.dim**2 + 13 * model.dim
    assert model.num_layers * block + (model.vocab_size + model.max_positions + 2) * model.dim == 124_242_432
    # The kill comes before the learning rate falls, so that the repeated steps have the rates that they had before.
    assert config.optimizer.warmup_steps < config.checkpoint.save_interval_steps


def line(step, loss, **more):
    return {'step': step, 'train/loss': loss, 'train/grad_norm': 1.0, 'train/param_norm': 2.0, **more}


@pytest.mark.parametrize('name', [None, *REPEATED])
def test_repeated_steps_are_compared(tmp_path, name):
    before = [line(step, 1.0 / step) for step in range(1, 6)]
    after = [dict(each) for each in before]
    # Steps up to 2 are not repeated.
    after[1]['train/loss'] = 9.0
    if name:
        after[3][name] += 1e-6
    seconds = dict.fromkeys(ACTIVITIES, 1.0)
    common = {'host': 'h', 'why': 'saved', 'seconds': seconds, 'dollars': None, 'saved_step': 2}
    lives = [
        {'life': number, 'began': 10.0 * number, 'time': 10.0 * number + 5, 'start_step': start, 'step': step, **common}
        for number, start, step in ((1, 0, 2), (2, 2, 5))
    ]
    for file, lines in (('metrics.jsonl', after), ('goodput.jsonl', lives)):
        (tmp_path / file).write_text(''.join(json.dumps(each) + '\n' for each in lines))
    found = compare_repeated(before, tmp_path)
    assert (found['killed_after_step'], found['resumed_from_step'], found['repeated_lines']) == (5, 2, 3)
    assert found['different'] == (name is not None)
    assert found['largest_loss_difference'] == pytest.approx(1e-6 if name == 'train/loss' else 0)


def test_a_run_that_ends_early_fails(tmp_path, monkeypatch, capsys):
    """A command that is not killed, because it has no checkpoint, is a failure that the result names."""
    monkeypatch.setattr(gpu_run, '_python', lambda command: [sys.executable, '-c', 'import sys; sys.exit(5)'])
    with pytest.raises(PartError, match='exit code 5'):
        gpu_run._train_and_kill(['maxlm.train'], tmp_path / 'workdir', tmp_path / 'log')
    with pytest.raises(PartError, match=r'maxlm\.hf failed with exit code 5'):
        gpu_run._call(['maxlm.hf'], tmp_path / 'log')

    (tmp_path / 'data').mkdir()
    shutil.make_archive(str(tmp_path / 'data'), 'gztar', tmp_path, 'data')
    output = tmp_path / 'run.json'
    assert main([str(tmp_path), f'--output={output}']) == EXIT_FAILED
    (failure,) = json.loads(output.read_text())['failed']
    assert failure.startswith('the run ended before it was killed')
    assert failure in capsys.readouterr().err


def test_repeated_steps_that_differ_fail_only_if_exact(tmp_path, monkeypatch):
    (tmp_path / 'data').mkdir()
    shutil.make_archive(str(tmp_path / 'data'), 'gztar', tmp_path, 'data')
    monkeypatch.setattr(gpu_run, '_run', lambda workdir, words, result, output: result.update(resumption=found))
    for different, words, code in (
        (1, [], EXIT_DONE),
        (1, ['--exact'], EXIT_FAILED),
        (0, ['--exact'], EXIT_DONE),
    ):
        found = {'different': different}
        assert main([str(tmp_path), f'--output={tmp_path / "run.json"}', *words]) == code


def test_bad_input(tmp_path, capsys, monkeypatch):
    assert exit_code(main, [str(tmp_path), '--output=run.json']) == EXIT_BAD_INPUT
    assert f'run benchmarks/gpu_run.sh prepare {tmp_path} first' in capsys.readouterr().err
    with pytest.raises(InputError, match='no-such-package is not installed'):
        download_wheels(tmp_path, ['no-such-package'], '3.12')

    def write(archive: Path, *_):
        archive.write_bytes(b'0' * 2**20)
        return EXIT_DONE

    monkeypatch.setattr(gpu_run_prepare, 'write_data', write)
    words = [str(tmp_path / 'carried'), '--packages']
    assert exit_code(gpu_run_prepare.main, [*words, '--limit-mib=1']) == EXIT_DONE
    assert exit_code(gpu_run_prepare.main, [*words, '--limit-mib=0.9']) == EXIT_BAD_INPUT
    assert 'above --limit-mib=0.9' in capsys.readouterr().err
    for words in ((), ('train', tmp_path)):
        done = script(*words)
        assert done.returncode == EXIT_BAD_INPUT
        assert 'usage: benchmarks/gpu_run.sh prepare|run DIR' in done.stderr


def test_wheels_are_downloaded_in_the_installed_versions(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        gpu_run_prepare.subprocess, 'run', lambda command: calls.append(command) or subprocess.CompletedProcess([], 0)
    )
    download_wheels(tmp_path, ['tenacity'], '3.12')
    (command,) = calls
    assert '--python-version=3.12' in command
    assert command[-1].startswith('tenacity==')
    monkeypatch.setattr(gpu_run_prepare.subprocess, 'run', lambda command: subprocess.CompletedProcess([], 1))
    with pytest.raises(InputError, match='pip finds no wheels of tenacity=='):
        download_wheels(tmp_path, ['tenacity'], '3.12')
