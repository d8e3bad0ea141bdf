"""Tests the memory benchmark on a small model: its stages are consistent and detect a difference."""

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import hf_memory
from maxlm.checkpoint.streaming import StreamedArray
from maxlm.errors import EXIT_DONE, EXIT_FAILED
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Runs the stages in this process, without measuring its memory."""

    def run(stage, directory, num_layers):
        hf_memory.STAGES[stage](directory, num_layers)
        return {'peak_bytes': 1000, 'seconds': 1.0}

    sizes = {'dim': 16, 'num_heads': 2, 'ffn_dim': 24, 'vocab_size': 40, 'max_positions': 16}
    monkeypatch.setattr(hf_memory, 'LLAMA_7B', sizes)
    monkeypatch.setattr(hf_memory, '_run', run)


def command(tmp_path):
    return ['--num-layers=2', f'--directory={tmp_path}', f'--output={tmp_path}/result.json']


def test_results_are_consistent(tmp_path):
    assert hf_memory.main(command(tmp_path)) == EXIT_DONE
    result = json.loads((tmp_path / 'result.json').read_text())
    # Each layer has 4 attention kernels, 3 feed-forward kernels and 2 norms. The model adds embedding, head and a norm.
    assert result['parameters'] == 2 * (4 * 16**2 + 3 * 16 * 24 + 2 * 16) + 2 * 40 * 16 + 16
    assert result['largest_tensor_bytes'] == 4 * 40 * 16
    assert result['bound_bytes'] == 4 * 40 * 16 + 2 * 10**9
    assert result['export_peak_bytes'] == result['import_peak_bytes'] == 1000
    # No temporary files remain.
    assert [path.name for path in tmp_path.iterdir()] == ['result.json']


def test_a_peak_beyond_the_bound_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_memory, 'GB', -(10**9))
    assert hf_memory.main(command(tmp_path)) == EXIT_FAILED


def test_changed_parameter_is_detected(tmp_path, monkeypatch):
    arrays = hf_memory._array

    def changed(path, shape, num_layers):
        array = arrays(path, shape, num_layers)
        if path != 'blocks.feedforward.down.kernel':
            return array
        # bfloat16 cannot represent this value.
        return StreamedArray(array.shape, lambda layer: array.read(layer) + np.float32(1 / 3), array.is_stacked)

    monkeypatch.setattr(hf_memory, '_array', changed)
    with pytest.raises(AssertionError, match='down'):
        hf_memory.main(command(tmp_path))


GROW = """
import numpy as np
from benchmarks.hf_memory import _peak_bytes
before = _peak_bytes()
np.ones(300 * 2**20, np.uint8)
print(before, _peak_bytes())
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_peak_memory_of_the_process():
    # This process may have had a higher peak before, so the test starts a new process.
    done = subprocess.run([sys.executable, '-c', GROW], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert 50 * 2**20 < before < after - 250 * 2**20
