"""The step benchmark: its numbers hang together, and it runs where only JAX and its friends are installed."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.step import random_batch
from maxlm.config.keys import ModelConfig
from maxlm.planning.flops import training_flops
from tests.conftest import ROOT

# On a bare GPU machine these cannot be imported.
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


def test_runs_on_a_bare_machine_and_its_numbers_hang_together(tmp_path):
    output = tmp_path / 'result.json'
    overrides = ['model.num_layers=1', 'model.dim=32', 'data.window=16', 'metrics.peak_tflops=1']
    environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
    command = [f'--config={ROOT}/configs/tiny.py', '--steps=3', '--vocab_size=64', f'--output={output}']
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
        vocab_size=64,
        activation='swiglu',
    )
    flops = training_flops(model, 16)
    assert result['mfu_causal'] == pytest.approx(result['tokens_per_second'] * flops.causal / 1e12)
    assert result['mfu_full'] == pytest.approx(result['tokens_per_second'] * flops.full / 1e12)
    assert {'device', 'jax', 'flax', 'date'} <= result['machine'].keys()


def test_random_batches_are_packed_like_real_ones():
    batch = random_batch(np.random.default_rng(0), 4, 64, 50, 10)
    for row in range(4):
        segments, positions = batch['segments'][row], batch['positions'][row]
        starts = np.flatnonzero(np.diff(segments, prepend=0))
        np.testing.assert_array_equal(positions[starts], 0)
        np.testing.assert_array_equal(np.diff(positions)[np.diff(segments) == 0], 1)
        # The last token of a document has no target, and only that one.
        np.testing.assert_array_equal(np.flatnonzero(batch['weights'][row][:-1] == 0) + 1, starts[1:])
    assert batch['segments'].max() > 3
    np.testing.assert_array_equal(batch['tokens'][:, 1:], batch['targets'][:, :-1])


def test_gpu_script_refuses_a_machine_without_one(tmp_path):
    environment = {**os.environ, 'PYTHON': sys.executable, 'OUT': str(tmp_path)}
    done = subprocess.run(['bash', f'{ROOT}/benchmarks/gpu.sh'], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert 'no GPU' in done.stderr
    assert list(tmp_path.iterdir()) == []
