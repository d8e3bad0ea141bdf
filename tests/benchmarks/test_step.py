"""Tests the step benchmark: its figures are consistent, and it runs with only JAX and its dependencies installed."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import step
from benchmarks.step import compare, random_batch, repository_text, text_tokens
from maxlm.config.schema import ModelConfig
from maxlm.errors import EXIT_BAD_INPUT, InputError, exit_code
from maxlm.planning.estimate.flops import training_flops
from tests.conftest import ROOT

# These packages are not installed on a bare GPU machine.
ABSENT = (
    'grain',
    'clu',
    'tensorflow',
    'array_record',
    'tensorflow_datasets',
    'tokenizers',
    'orbax',
    'tqdm',
    'scipy',
    'matplotlib',
)
RUN_WITHOUT = f"""
import sys
for name in {ABSENT}:
    sys.modules[name] = None
from benchmarks.step import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_runs_on_a_bare_machine_with_consistent_results(tmp_path):
    output = tmp_path / 'result.json'
    overrides = ['model.num_layers=1', 'model.dim=32', 'data.seq_len=16', 'metrics.peak_tflops=1']
    environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
    command = [f'--config={ROOT}/configs/tiny.py', '--steps=3', '--vocab-size=256', f'--output={output}']
    command += ['--tokens=text', '--xla=xla_backend_optimization_level=0']
    done = subprocess.run(
        [sys.executable, '-c', RUN_WITHOUT, *command, *(f'--config.{override}' for override in overrides)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert 'tokens/s' in done.stdout
    result = json.loads(output.read_text())
    assert result['overrides'] == overrides
    assert result['xla'] == ['xla_backend_optimization_level=0']
    assert len(result['losses']) == 6
    assert result['loss'] == result['losses'][-1]
    assert result['step_seconds_min'] <= result['step_seconds'] <= result['step_seconds_max']
    assert result['tokens_per_second'] == pytest.approx(8 * 16 / result['step_seconds'])
    model = ModelConfig(
        family='llama',
        num_layers=1,
        dim=32,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        ffn_dim=704,
        vocab_size=256,
        activation='swiglu',
        attention_pattern='L',
    )
    flops = training_flops(model, 16)
    assert result['mfu_causal'] == pytest.approx(result['tokens_per_second'] * flops.causal / 1e12)
    assert result['mfu_full'] == pytest.approx(result['tokens_per_second'] * flops.full / 1e12)
    assert {'device', 'jax', 'flax', 'date'} <= result['machine'].keys()


def test_random_batches_are_packed_like_training_data():
    batch = random_batch(np.random.default_rng(0), 4, 64, 50, 10)
    for row in range(4):
        segments, positions = batch['segments'][row], batch['positions'][row]
        starts = np.flatnonzero(np.diff(segments, prepend=0))
        np.testing.assert_array_equal(positions[starts], 0)
        np.testing.assert_array_equal(np.diff(positions)[np.diff(segments) == 0], 1)
        # Only the last token of a document has no target.
        np.testing.assert_array_equal(np.flatnonzero(batch['weights'][row][:-1] == 0) + 1, starts[1:])
    assert batch['segments'].max() > 3
    np.testing.assert_array_equal(batch['tokens'][:, 1:], batch['targets'][:, :-1])


def test_text_comes_from_the_repository():
    text = repository_text()
    assert (ROOT / 'README.md').read_bytes() in text.astype(np.uint8).tobytes()
    rows = text_tokens(np.random.default_rng(0), text, 5, 16)
    assert rows['tokens'].shape == rows['targets'].shape == (5, 16)
    np.testing.assert_array_equal(rows['tokens'][:, 1:], rows['targets'][:, :-1])
    assert rows['tokens'][0].astype(np.uint8).tobytes() in text.astype(np.uint8).tobytes()
    assert len(np.unique(rows['tokens'], axis=0)) == 5


RESULT = {'name': 'one', 'tokens': 'text', 'global_batch': 8, 'window': 16, 'steps': 12, 'step_seconds': 0.3}


@pytest.mark.parametrize(('by', 'same'), [(0.03, True), (-0.03, True), (0.2, False), (np.nan, False)])
def test_compare_results(by, same):
    # Only the last ten losses count.
    other = {**RESULT, 'losses': [9.0] * 5 + [2.0] * 10}
    compared = compare({**RESULT, 'step_seconds': 0.2, 'losses': [8.0] * 5 + [2.0 + by] * 10}, other)
    assert compared['speed'] == pytest.approx(1.5)
    assert compared['other_loss'] == 2
    assert compared['same_loss'] == same


@pytest.mark.parametrize('key', ['tokens', 'global_batch', 'window', 'steps'])
def test_results_of_other_settings_are_not_compared(key):
    with pytest.raises(InputError, match=key):
        compare({**RESULT, 'losses': [1.0]}, {**RESULT, key: 'other', 'losses': [1.0]})


def test_options_of_xla(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv('XLA_FLAGS', '--first=1')
    step._set_xla(['second=2', 'third='])
    assert os.environ['XLA_FLAGS'] == '--first=1 --second=2 --third='
    monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])
    for arguments, message in ((['--xla=second'], 'NAME=VALUE'), ([f'--beside={tmp_path}/none.json'], 'none.json')):
        assert exit_code(step.main, ['--config=configs/tiny.py', *arguments]) == EXIT_BAD_INPUT
        assert message in capsys.readouterr().err


def test_xla_receives_the_options(tmp_path):
    """XLA aborts on an unknown option. The control is the first test, which sets a known option."""
    command = [sys.executable, '-m', 'benchmarks.step', f'--config={ROOT}/configs/tiny.py', '--xla=no_such_option=1']
    environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert 'no_such_option' in done.stderr
