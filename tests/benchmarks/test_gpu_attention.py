"""Tests that the check of GPU attention detects errors, with formulas in place of the kernels."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_attention
from benchmarks.gpu_attention import (
    RESULTS,
    Shape,
    check,
    differing_elements,
    documents,
    find_changes,
    find_mistakes,
    largest_error,
    random_segments,
    reference,
    repeat,
)
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


@pytest.fixture
def short_documents(monkeypatch):
    monkeypatch.setattr(gpu_attention, 'TOKENS_PER_DOCUMENT', 8)


def test_equal_results_of_repeated_runs(formulas, short_documents):
    (result,) = repeated = repeat(documents, [SHAPE], 3)
    assert find_changes(repeated) == []
    assert result['repeats'] == 3
    for name in RESULTS:
        assert result[name]['results'] == 1
        assert result[name]['differing_elements'] == 0
        assert result[name]['error'] < gpu_attention.TOLERANCE
    # The output in bfloat16 differs from the formula in float32.
    assert result['output']['error'] > 0


def test_wrong_results_of_repeated_runs(formulas, short_documents, monkeypatch):
    """A kernel that ignores the documents in one of three runs is detected by its values and by its bits."""

    def leak_in_bfloat16(*arrays):
        return leak(*arrays).astype(jnp.bfloat16)

    (wrong,) = repeat(leak_in_bfloat16, [SHAPE], 2)
    assert [mistake.split(': ')[1].split()[0] for mistake in find_changes([wrong])] == list(RESULTS)

    right, calls = gpu_attention._value_and_gradients, []

    def sometimes_wrong(kernel, window):
        if kernel is reference:
            return right(kernel, window)
        runs = right(kernel, window), right(leak_in_bfloat16, window)
        return lambda *arrays: (calls.append(1), runs[len(calls) == 2](*arrays))[1]

    monkeypatch.setattr(gpu_attention, '_value_and_gradients', sometimes_wrong)
    (changed,) = repeat(documents, [SHAPE], 3)
    assert {changed[name]['results'] for name in RESULTS} == {2}
    assert all(changed[name]['differing_elements'] > 0 for name in RESULTS)
    mistakes = find_changes([changed])
    assert len(mistakes) == len(RESULTS) + 1
    assert 'the output changes between runs' in mistakes[-1]


def test_rounding_of_gradients_is_recorded_but_no_mistake():
    same = {'results': 1, 'differing_elements': 0, 'error': 0.01}
    result = {**SHAPE._asdict(), 'repeats': 9, **dict.fromkeys(RESULTS, same), 'dq': {**same, 'results': 9}}
    assert find_changes([result]) == []
    # Controls: an output that changes, and a gradient that is not finite.
    assert len(find_changes([{**result, 'output': {**same, 'results': 2}}])) == 1
    assert len(find_changes([{**result, 'dk': {**same, 'error': float('nan')}}])) == 1


def test_bits_are_compared():
    zeros, minus = jnp.zeros(3), -jnp.zeros(3)
    assert differing_elements(zeros, zeros) == 0
    assert differing_elements(zeros, minus.at[0].set(0)) == 2
    nan = jnp.full(2, jnp.nan, jnp.bfloat16)
    assert differing_elements(nan, nan) == 0


def test_invalid_number_of_repeats(capsys):
    assert exit_code(gpu_attention.main, ['--repeats=1']) == EXIT_BAD_INPUT
    assert '--repeats=1' in capsys.readouterr().err
