"""Tests that the check of the norm kernels detects errors, with formulas in place of the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_norm
from benchmarks.gpu_norm import Shape, chain, check, find_mistakes, measure
from maxlm.errors import EXIT_BAD_INPUT, exit_code
from maxlm.training.known_answers import residual_norm
from tests.model.layers.norm_kernels_on_cpu import use_formulas

SHAPES = [Shape(9, 24, 'layernorm', 'float32'), Shape(6, 32, 'rmsnorm', 'bfloat16')]


@pytest.fixture(autouse=True)
def formulas(monkeypatch):
    use_formulas(monkeypatch)


def test_correct_kernels_pass_and_wrong_ones_are_detected(monkeypatch):
    assert find_mistakes(check(SHAPES)) == []
    right = residual_norm.add_and_normalize
    monkeypatch.setattr(
        residual_norm, 'add_and_normalize', lambda *args: (right(*args)[0], right(*args)[1] * jnp.float32(1.02))
    )
    (mistake,) = find_mistakes(check(SHAPES[:1]))
    assert 'normalized sum is off by 0.02' in mistake


def test_changing_bits_are_detected(monkeypatch):
    runs = iter(range(100))

    def changing(run, count):
        first = run()
        return [[first[0]] * (1 + next(runs))]

    monkeypatch.setattr(gpu_norm, 'distinct_results', changing)
    checks = check(SHAPES)
    assert find_mistakes(checks) == ['rows=6 width=32 norm=rmsnorm dtype=bfloat16: 2 different results in 5 runs']


def test_both_chains_compute_the_same(monkeypatch):
    monkeypatch.setattr(gpu_norm, 'CHAIN', 3)
    (result,) = measure(SHAPES[:1], repeats=2)
    assert result['least_bytes'] == 8 * 3 * 9 * 24 * 4
    assert min(result['milliseconds'].values()) > 0
    rng = np.random.default_rng(0)
    stream, *branches = (jnp.asarray(rng.normal(size=(9, 24)), jnp.float32) for _ in range(4))
    found, expected = (chain(SHAPES[0], kernel)(stream, branches) for kernel in ('pallas', 'xla'))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_a_gpu_is_required():
    assert exit_code(gpu_norm.main, []) == EXIT_BAD_INPUT
