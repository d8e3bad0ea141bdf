"""Tests sampling against plain NumPy and against the probabilities."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.inference.sampling import (
    Sampling,
    apply_penalties,
    has_penalty,
    log_prob,
    sample,
    sample_rows,
    sampling_keys,
    stack_settings,
    top_k_mask,
    top_log_probs,
)


def random_logits(rows, vocab, seed=0):
    return np.random.default_rng(seed).normal(scale=2, size=(rows, vocab)).astype(np.float32)


_keys = jax.jit(lambda seed, number: jax.random.split(jax.random.key(seed), number), static_argnums=1)
_draw_rows, _keep_likeliest, _draw = jax.jit(sample_rows), jax.jit(top_k_mask), jax.jit(sample)


def keys(number, seed=0):
    return _keys(seed, number)


def sample_with(logits_BV, keys_B, sampling):
    return _draw_rows(logits_BV, keys_B, stack_settings([sampling] * len(logits_BV)))


@partial(jax.jit, static_argnames='number')
def draw_many(logits_V, seed, rows, *, number):
    logits_BV = jnp.broadcast_to(logits_V, (number, len(logits_V)))
    rows = jax.tree.map(lambda x_1: jnp.broadcast_to(x_1, (number, *x_1.shape[1:])), rows)
    return sample_rows(logits_BV, jax.random.split(jax.random.key(seed), number), rows)


def draws(logits_V, sampling, *, seed=0):
    """Returns the counts of at most six tokens in 20,000 samples."""
    # All logits have one length, so that one compiled function serves all tests.
    padded = np.full(6, -np.inf, np.float32)
    padded[: len(logits_V)] = logits_V
    tokens = np.asarray(draw_many(padded, seed, stack_settings([sampling]), number=20_000))
    assert tokens.max() < len(logits_V)
    return np.bincount(tokens, minlength=len(logits_V))


def softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def kept_by_numpy(logits_V, top_k, top_p):
    """Returns the ids that can be sampled, added one by one from the most likely."""
    kept, reached = [], 0.0
    for token in np.argsort(-logits_V, kind='stable'):
        if reached >= top_p or (top_k and len(kept) == top_k):
            break
        kept.append(token)
        reached += softmax(logits_V.astype(np.float64))[token]
    return set(kept)


def chi_square(counts, probabilities):
    expected = counts.sum() * probabilities
    return float(np.sum((counts - expected) ** 2 / expected))


def test_greedy():
    logits = random_logits(16, 50)
    for sampling in (Sampling(temperature=0), Sampling(temperature=0, top_k=3, top_p=0.5)):
        assert sample_with(logits, keys(16), sampling).tolist() == logits.argmax(-1).tolist()
    # Among equal logits the first one is chosen, regardless of the key.
    assert sample_with(np.array([[1.0, 3.0, 3.0]], np.float32), keys(1, seed=5), Sampling(temperature=0)).tolist() == [
        1
    ]
    assert sample_with(logits, keys(16), Sampling()).tolist() != logits.argmax(-1).tolist()


def test_limits_of_the_temperature():
    logits = random_logits(1, 6)[0]
    counts = draws(logits, Sampling(temperature=1e-4))
    assert counts[logits.argmax()] == counts.sum()
    # The 0.999 quantile of chi-square with 5 degrees of freedom is 20.5.
    hot = draws(logits, Sampling(temperature=1e6))
    assert chi_square(hot, np.full(6, 1 / 6)) < 20.5
    assert chi_square(draws(logits, Sampling()), np.full(6, 1 / 6)) > 1000


@pytest.mark.parametrize('temperature', [0.5, 1.0, 2.0])
def test_samples_follow_the_probabilities(temperature):
    logits = 0.4 * random_logits(1, 6, seed=3)[0]
    counts = draws(logits, Sampling(temperature=temperature))
    assert chi_square(counts, softmax(logits / temperature)) < 20.5
    # Control: the test distinguishes similar temperatures.
    assert chi_square(counts, softmax(logits / temperature / 1.1)) > 20.5


def test_samples_of_kept_tokens_follow_relative_probabilities():
    logits = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32))
    counts = draws(logits, Sampling(top_k=3))
    assert counts[[0, 2]].tolist() == [0, 0]
    # The 0.999 quantile for 2 degrees of freedom is 13.8.
    assert chi_square(counts[[1, 3, 4]], np.array([0.4, 0.3, 0.15]) / 0.85) < 13.8
    counts = draws(logits, Sampling(top_p=0.8))
    assert np.flatnonzero(counts).tolist() == [1, 3, 4]
    counts = draws(logits, Sampling(top_p=0.69))
    assert np.flatnonzero(counts).tolist() == [1, 3]


@pytest.mark.parametrize('top_k', [0, 1, 2, 7, 30, 100])
@pytest.mark.parametrize('top_p', [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_tokens_that_can_be_sampled(top_k, top_p):
    logits = random_logits(20, 30, seed=top_k)
    rows = stack_settings([Sampling(top_k=top_k, top_p=top_p)] * 20)
    result = np.asarray(_keep_likeliest(logits, top_k_B=rows.top_k_B, top_p_B=rows.top_p_B, min_p_B=rows.min_p_B))
    for row, given in zip(result, logits, strict=True):
        kept = np.flatnonzero(np.isfinite(row))
        assert set(kept) == kept_by_numpy(given, top_k, top_p)
        assert given.argmax() in kept
        np.testing.assert_array_equal(row[kept], given[kept])
        assert np.all(row[np.isinf(row)] < 0)


def test_temperature_comes_before_top_p():
    # At temperature 1 the first token alone reaches 0.6; at the higher temperature it does not.
    logits = np.log(np.array([0.6, 0.21, 0.19], np.float32))
    assert np.flatnonzero(draws(logits, Sampling(top_p=0.6 - 1e-3))).tolist() == [0]
    assert len(np.flatnonzero(draws(logits, Sampling(top_p=0.6 - 1e-3, temperature=10)))) == 2


@pytest.mark.parametrize('sampling', [Sampling(), Sampling(temperature=0.7, top_k=5), Sampling(top_p=0.8)])
def test_other_rows_of_the_batch_do_not_matter(sampling):
    logits, row_keys = random_logits(8, 40), keys(8)
    together = sample_with(logits, row_keys, sampling)
    alone = [int(sample_with(logits[row : row + 1], row_keys[row : row + 1], sampling)[0]) for row in range(8)]
    assert together.tolist() == alone
    backwards = sample_with(logits[::-1], row_keys[::-1], sampling)
    assert backwards.tolist() == alone[::-1]
    # Control: the key of a row changes the samples.
    assert sample_with(logits, keys(8, seed=1), sampling).tolist() != alone


def test_ids_are_int32():
    for sampling in (Sampling(), Sampling(temperature=0)):
        tokens = sample_with(random_logits(3, 5), keys(3), sampling)
        assert (tokens.dtype, tokens.shape) == (jnp.int32, (3,))


@pytest.mark.parametrize(
    ('values', 'fragments'),
    [
        ({'temperature': -0.1}, 'temperature=-0.1: must be at least 0'),
        ({'temperature': float('nan')}, 'temperature=nan'),
        ({'top_k': -1}, 'top_k=-1: must be at least 0'),
        ({'top_p': 0.0}, r'top_p=0\.0: must be above 0'),
        ({'top_p': 1.1}, r'top_p=1\.1: .* at most 1'),
        ({'top_p': float('nan')}, 'top_p=nan'),
        ({'temperature': float('inf')}, 'temperature=inf: must be a finite number'),
        ({'min_p': -0.1}, 'min_p=-0.1: must be from 0 to 1'),
        ({'min_p': 1.1}, 'min_p=1.1'),
        ({'repetition_penalty': 0.0}, r'repetition_penalty=0\.0: must be above 0'),
        ({'presence_penalty': float('nan')}, 'presence_penalty=nan'),
        ({'frequency_penalty': float('-inf')}, 'frequency_penalty=-inf'),
    ],
)
def test_values_out_of_range(values, fragments):
    with pytest.raises(InputError, match=fragments):
        Sampling(**values)


def test_min_p_is_relative_to_the_likeliest():
    logits = np.log(np.array([0.5, 0.3, 0.04, 0.16], np.float32))
    for min_p, kept in ((0.0, [0, 1, 2, 3]), (0.2, [0, 1, 3]), (0.5, [0, 1]), (1.0, [0])):
        assert np.flatnonzero(draws(logits, Sampling(min_p=min_p))).tolist() == kept
    # All limits apply together.
    assert np.flatnonzero(draws(logits, Sampling(min_p=0.2, top_k=2))).tolist() == [0, 1]


def test_rows_have_separate_settings():
    logits, row_keys = random_logits(5, 40), keys(5)
    settings = [
        Sampling(temperature=0),
        Sampling(),
        Sampling(temperature=2, top_k=3),
        Sampling(top_p=0.3),
        Sampling(min_p=0.5),
    ]
    together = _draw_rows(logits, row_keys, stack_settings(settings)).tolist()
    alone = [int(sample_with(logits[i : i + 1], row_keys[i : i + 1], row)[0]) for i, row in enumerate(settings)]
    assert together == alone
    # Control: settings in another order give other samples.
    assert _draw_rows(logits, row_keys, stack_settings(settings[::-1])).tolist() != alone


def test_a_shared_temperature_equals_one_per_row():
    logits, row_keys = random_logits(16, 40), keys(16)
    for temperature in (0.0, 0.7):
        found = _draw(logits, row_keys, temperature).tolist()
        assert found == sample_with(logits, row_keys, Sampling(temperature=temperature)).tolist()
        assert found != sample_with(logits, keys(16, seed=1), Sampling(temperature=3)).tolist()


def test_a_key_depends_on_seed_sample_and_position():
    numbers = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]], np.uint32)
    data = jax.random.key_data(sampling_keys(*(jnp.asarray(column) for column in numbers.T))).tolist()
    assert len({tuple(row) for row in data}) == 4
    assert data[0] == data[4]


def test_penalties():
    logits = np.array([[2.0, -1.0, 0.5, 3.0]], np.float32)
    in_prompt, counts = np.array([[True, True, False, False]]), np.array([[0, 0, 3, 0]])

    def found(**settings):
        rows = stack_settings([Sampling(**settings)])
        assert has_penalty(rows).tolist() == [bool(settings)]
        return np.asarray(apply_penalties(jnp.asarray(logits), rows, in_prompt, counts))[0]

    np.testing.assert_allclose(found(), logits[0])
    np.testing.assert_allclose(found(repetition_penalty=2.0), [1.0, -2.0, 0.25, 3.0])
    np.testing.assert_allclose(found(presence_penalty=0.5), [2.0, -1.0, 0.0, 3.0])
    np.testing.assert_allclose(found(frequency_penalty=0.5), [2.0, -1.0, -1.0, 3.0])
    np.testing.assert_allclose(found(frequency_penalty=-0.5, repetition_penalty=2.0), [1.0, -2.0, 1.75, 3.0])


def test_log_probabilities():
    logits = random_logits(3, 30)
    expected = np.log(softmax(logits.astype(np.float64)))
    np.testing.assert_allclose(
        log_prob(jnp.asarray(logits), jnp.array([3, 0, 7])), expected[np.arange(3), [3, 0, 7]], atol=1e-5
    )
    ids, values = top_log_probs(jnp.asarray(logits), 4)
    order = np.argsort(-logits)[:, :4]
    assert ids.tolist() == order.tolist()
    np.testing.assert_allclose(values, np.take_along_axis(expected, order, axis=1), atol=1e-5)
