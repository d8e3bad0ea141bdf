"""Tests that the check of GPU attention detects errors, with formulas in place of the kernels."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_attention
from benchmarks.gpu_attention import Shape, check, documents, find_mistakes, largest_error, random_segments, reference
from maxlm.errors import EXIT_BAD_INPUT, exit_code
from maxlm.model.attention import cudnn
from tests.model.attention import cudnn_on_cpu

SHAPE = Shape(B=2, T=32, N=4, K=2, H=8, window=7)


def leak(q, k, v, segments, window):
    return reference(q, k, v, jnp.ones_like(segments), window)


@pytest.fixture
def formulas(monkeypatch):
    # Kernels accumulate in float32 for operands of any dtype.
    def run(function):
        return lambda *arrays, window: function(*map(jnp.float32, arrays[:-1]), arrays[-1], window=window)

    def forward(*arrays, window):
        output, statistics = run(cudnn_on_cpu.run_forward)(*arrays, window=window)
        return output.astype(jnp.bfloat16), statistics

    def backward(*arrays, window):
        return tuple(x.astype(jnp.bfloat16) for x in run(cudnn_on_cpu.run_backward)(*arrays, window=window))

    monkeypatch.setattr(cudnn, 'run_forward', forward)
    monkeypatch.setattr(cudnn, 'run_backward', backward)


def test_correct_kernels_pass_and_leaks_are_detected(formulas):
    checks = check({'documents': documents}, leak, [SHAPE])
    assert {result['packing'] for result in checks} >= {'one', 'one_more', 'single_tokens'}
    assert find_mistakes(checks) == []
    # Control: a leak between documents is detected in each packing of several documents.
    leaking = [{**result, 'errors': {**result['errors'], 'documents': result['errors']['leak']}} for result in checks]
    assert len(find_mistakes(leaking)) == len(checks) - 1
    blind = [{**result, 'errors': {**result['errors'], 'leak': 0.0}} for result in checks]
    assert all('leak was not seen' in mistake for mistake in find_mistakes(blind))
    assert len(find_mistakes(blind)) == len(checks) - 1


def test_errors():
    expected = (np.ones((1, 2, 1, 4), np.float32), np.zeros((1, 2, 1, 4), np.float32))
    assert largest_error(expected, expected) == 0
    found = (expected[0].copy(), expected[1].copy())
    found[0][0, 1] += 0.5
    assert largest_error(found, expected) == pytest.approx(0.5)
    # Errors of values that should be 0 are relative to the magnitude of the remaining values.
    found = (expected[0], expected[1] + 0.1)
    assert largest_error(found, expected) == pytest.approx(1.0)
    assert not largest_error((expected[0], expected[1] * np.nan), expected) <= gpu_attention.TOLERANCE


@pytest.mark.parametrize('count', [2, 17, 64])
def test_random_segments(count):
    segments = random_segments(np.random.default_rng(0), 2, 32, count)
    assert (segments[:, 0] == 1).all()
    assert set(np.diff(segments, axis=1).reshape(-1)) <= {0, 1}
    assert segments[:, -1].sum() == count


def test_no_gpu(capsys):
    assert exit_code(gpu_attention.main, []) == EXIT_BAD_INPUT
    assert 'compute capability 9.0' in capsys.readouterr().err
