"""Tests the step benchmark: its figures are consistent, and it runs with only JAX and its dependencies installed."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import step
from benchmarks.step import compare, different_steps, failed_checks, random_batch, repository_text, text_tokens
from maxlm.config.schema import ModelConfig
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, InputError, exit_code
from maxlm.training.flops import training_flops
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
    assert result['update_norms'][-1] > 0
    assert {len(result[key]) for key in ('grad_norms', 'update_norms', 'second_moment_ratios', 'skipped')} == {6}
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


# Losses of a run without spikes, which fall from 11 to about 3.3.
LOSSES = [3.3 + 7.7 * 0.8**step + 0.05 * math.sin(step) for step in range(43)]
RESULT = {'name': 'one', 'tokens': 'text', 'global_batch': 8, 'window': 16, 'steps': 12, 'step_seconds': 0.3}


@pytest.mark.parametrize(
    ('step', 'by', 'same'),
    [
        (40, 0.04, True),
        (40, -0.04, True),
        (40, 0.06, False),
        (40, -0.06, False),
        (40, np.nan, False),
        # Early losses may differ more.
        (5, 0.09, True),
        (5, 0.11, False),
    ],
)
def test_compare_results_step_by_step(step, by, same):
    other = {**RESULT, 'losses': LOSSES}
    losses = [loss * (1 + by) if number == step else loss for number, loss in enumerate(LOSSES)]
    result = {**RESULT, 'step_seconds': 0.2, 'losses': losses}
    compared = compare(result, other)
    assert compared['speed'] == pytest.approx(1.5)
    assert compared['other_loss'] == pytest.approx(np.mean(LOSSES[-10:]))
    assert compared['same_loss'] == same
    failures = [line for line in failed_checks(result, other) if ' has loss ' in line]
    assert [line.partition(':')[0] for line in failures] == ([] if same else [f'step {step}'])
    assert all(f'one has loss {LOSSES[step]:.4g}' in line for line in failures)


def test_spikes_are_found_with_their_values(capsys):
    result = {**RESULT, 'losses': LOSSES, 'grad_norms': [1.0] * 43, 'skipped': [False] * 43}
    assert failed_checks(result, None) == []
    for spike in (4, 20, 42):
        spiked = {**result, 'losses': [loss * (1 + 0.5 * (n == spike)) for n, loss in enumerate(LOSSES)]}
        spiked['grad_norms'] = [1.0 + 337 * (n == spike) for n in range(43)]
        (line,) = failed_checks(spiked, None)
        assert line.startswith(
            f'step {spike}: loss {spiked["losses"][spike]:.4g}  grad_norm 338  skipped 0; the loss is'
        )
    # Less than the bound, and a low loss.
    for factor in (1.04, 0.5):
        near = [loss * (factor if n == 30 else 1) for n, loss in enumerate(LOSSES)]
        assert failed_checks({**result, 'losses': near}, None) == []
    (line,) = failed_checks(
        {**result, 'losses': [math.nan if n == 42 else loss for n, loss in enumerate(LOSSES)]}, None
    )
    assert line.startswith('step 42: loss nan')
    assert 'not finite' in line


def test_the_recorded_runs():
    """The bfloat16 run on the H200 fails with its spike, also beside the fp8 run, which passes alone."""
    plain, fp8 = (
        json.loads((ROOT / f'benchmarks/results/{name}.json').read_text()) for name in ('1b_h200', '1b_fp8_h200')
    )
    assert failed_checks(fp8, None) == []
    (line,) = failed_checks(plain, None)
    assert line.startswith('step 29: loss 8.602;')
    assert different_steps(fp8['losses'], plain['losses']) == [28, 29]


def test_a_failed_check_is_the_exit_code(monkeypatch, capsys, tmp_path):
    measured = {**RESULT, 'losses': LOSSES[:]}
    monkeypatch.setattr(step, 'measure', lambda config, **options: measured)
    monkeypatch.setattr(step, 'machine', dict)
    monkeypatch.setattr(step, '_print', lambda result: None)
    output = tmp_path / 'result.json'
    command = ['--config=configs/tiny.py', f'--output={output}', '--tokens=text']
    assert exit_code(step.main, command) == EXIT_DONE
    measured['losses'][20] = 9.0
    assert exit_code(step.main, [*command, f'--beside={output}', f'--output={tmp_path}/second.json']) == EXIT_FAILED
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith('error: step 20: loss 9') for line in lines] == [True, True]
    # The result is written nevertheless.
    assert json.loads((tmp_path / 'second.json').read_text())['losses'][20] == 9


@pytest.mark.parametrize('key', ['tokens', 'global_batch', 'window', 'steps'])
def test_results_of_other_settings_are_not_compared(key):
    with pytest.raises(InputError, match=key):
        compare({**RESULT, 'losses': [1.0]}, {**RESULT, key: 'other', 'losses': [1.0]})


def test_results_with_another_warmup_are_not_compared():
    with pytest.raises(InputError, match='--warmup'):
        compare({**RESULT, 'losses': [1.0]}, {**RESULT, 'losses': [1.0, 1.0]})


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
