"""Rotary positions against plain formulas; test_parity.py compares the scalings with Transformers."""

import dataclasses

import jax
import numpy as np
import pytest

from maxlm.model.layers.rope import rotary_angles, rotate
from tests.small import small_config


def rotary_config(**settings):
    """Returns a resolved model config with head dimension 8; rotary positions apply to all dimensions by default."""
    model = small_config(model__family='llama', model__head_dim=8).model
    return dataclasses.replace(model, rope_theta=100.0, **settings)


@pytest.mark.parametrize('fraction', [1.0, 0.5])
def test_rotary_equals_the_formula(fraction):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 5, 2, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 0, 7]])
    config = rotary_config(partial_rotary_factor=fraction)
    out = np.asarray(jax.jit(lambda x: rotate(x, rotary_angles(positions, config)))(x))
    half = int(8 * fraction) // 2
    for t in range(5):
        for i in range(half):
            angle = positions[0, t] * 100.0 ** (-2 * i / (2 * half))
            turn = np.exp(1j * angle) * (x[0, t, :, i] + 1j * x[0, t, :, i + half])
            np.testing.assert_allclose(out[0, t, :, i], turn.real, atol=1e-5)
            np.testing.assert_allclose(out[0, t, :, i + half], turn.imag, atol=1e-5)
    np.testing.assert_array_equal(out[..., 2 * half :], x[..., 2 * half :])


def test_rotary_scores_depend_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 1, 8), np.float32)
    config = rotary_config()

    @jax.jit
    def score(at_q, at_k):
        def turn(x, at):
            return rotate(x, rotary_angles(at.reshape(1, 1), config))

        return (turn(q, at_q) * turn(k, at_k)).sum()

    near = float(score(np.int32(9), np.int32(4)))
    assert near == pytest.approx(float(score(np.int32(105), np.int32(100))), abs=1e-4)
    assert near != pytest.approx(float(score(np.int32(9), np.int32(5))), abs=1e-3)


_angles = jax.jit(rotary_angles, static_argnums=1)


def cosines(config, positions, length=None):
    rotary = _angles(np.array(positions), config, None if length is None else np.array(length))
    return np.asarray(rotary.cos_BT1P)[:, :, 0]


def test_linear_scaling_divides_positions():
    plain, scaled = rotary_config(), rotary_config(rope_scaling='linear', rope_scaling_factor=4.0)
    np.testing.assert_allclose(cosines(scaled, [[4, 40, 100]]), cosines(plain, [[1, 10, 25]]), atol=1e-5)
    assert not np.allclose(cosines(scaled, [[4]]), cosines(plain, [[4]]), atol=1e-2)


def test_dynamic_scaling_starts_beyond_the_original_context():
    plain = rotary_config()
    dynamic = rotary_config(rope_scaling='dynamic', rope_scaling_factor=2.0, original_max_positions=16)
    np.testing.assert_allclose(cosines(dynamic, [[3, 15]]), cosines(plain, [[3, 15]]), atol=1e-6)
    beyond = cosines(dynamic, [[3, 16]])
    assert not np.allclose(beyond[0, 0], cosines(plain, [[3, 15]])[0, 0], atol=1e-4)
    # Each row uses its own length, or the given length if its last positions are padding.
    np.testing.assert_array_equal(cosines(dynamic, [[3, 16], [3, 15]])[1], cosines(dynamic, [[3, 15]])[0])
    np.testing.assert_allclose(cosines(dynamic, [[3, 16]], [4]), cosines(plain, [[3, 16]]), atol=1e-6)


@pytest.mark.parametrize('scaling', ['yarn', 'llama3'])
def test_fast_pairs_stay_and_slow_pairs_are_interpolated(scaling):
    settings = {'head_dim': 64, 'original_max_positions': 1024, 'rope_scaling_factor': 8.0}
    plain = dataclasses.replace(rotary_config(**settings), rope_theta=10_000.0)
    scaled = dataclasses.replace(plain, rope_scaling=scaling, rope_attention_factor=1.0)
    one = np.array([[1]])
    frequency, scaled_frequency = (np.arcsin(_angles(one, config).sin_BT1P[0, 0, 0]) for config in (plain, scaled))
    ratio = frequency / scaled_frequency
    np.testing.assert_allclose(ratio[0], 1, rtol=1e-4)
    np.testing.assert_allclose(ratio[-4:], 8, rtol=1e-4)
    assert np.any((ratio > 1.5) & (ratio < 7))
