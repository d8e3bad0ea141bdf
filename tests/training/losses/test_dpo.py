"""DPO, IPO and ORPO losses against a NumPy loop over pairs."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxlm.config.sections.posttraining import DpoConfig
from maxlm.training.losses.dpo import PreferenceTerms
from maxlm.training.losses.dpo import preference_terms as terms_without_jit


@partial(jax.jit, static_argnums=4)
def preference_terms(log_probs, reference, weights, segments, dpo):
    return terms_without_jit(log_probs, None if dpo.loss_type == 'orpo' else reference, weights, segments, dpo)


objective_and_gradient = jax.jit(
    jax.value_and_grad(lambda *given: preference_terms(*given).objective), static_argnums=4
)

LOSSES = {
    'sigmoid': DpoConfig(beta=0.3),
    'smoothed': DpoConfig(beta=0.3, label_smoothing=0.2),
    'ipo': DpoConfig(beta=0.4, loss_type='ipo'),
    'with next token': DpoConfig(beta=0.3, rpo_alpha=0.7),
    'ipo with next token': DpoConfig(beta=0.4, loss_type='ipo', rpo_alpha=0.7),
    'orpo': DpoConfig(beta=0.8, loss_type='orpo'),
}


@dataclasses.dataclass
class Answer:
    """Log-probabilities of a response by model and reference, after a prompt of the given length."""

    prompt: int
    model: np.ndarray
    reference: np.ndarray


def make_pairs(count, seed=0):
    rng = np.random.default_rng(seed)

    def answer(prompt):
        length = int(rng.integers(1, 6))
        return Answer(prompt, -rng.exponential(2.0, length), -rng.exponential(2.0, length))

    return [(answer(prompt), answer(prompt)) for prompt in rng.integers(1, 4, count)]


def pack(rows, length, seed=1):
    """Returns the pairs as arrays [B, T] of a batch; values without weight are arbitrary."""
    rng = np.random.default_rng(seed)
    log_probs, reference = rng.normal(-3, 2, (2, len(rows), length))
    weights, segments = np.zeros((len(rows), length)), np.zeros((len(rows), length), np.int32)
    for row, pairs in enumerate(rows):
        place = number = 0
        for answer in [answer for pair in pairs for answer in pair]:
            number += 1
            start, stop = place + answer.prompt, place + answer.prompt + len(answer.model)
            log_probs[row, start:stop], reference[row, start:stop] = answer.model, answer.reference
            weights[row, start:stop] = 1
            # The last token of a document has no target.
            segments[row, place : stop + 1] = number
            place = stop + 1
        if pairs and length - place > 2:
            # Padding of the packing, followed by padding at the end of a shard.
            segments[row, place : length - 1] = number + 1
    return log_probs, reference, weights, segments


def expected(pairs, dpo):
    """Returns the terms and the gradient of the objective by the log-probabilities of each response."""
    sums, gradients = np.zeros(len(PreferenceTerms._fields)), []
    for chosen, rejected in pairs:
        scale = [1, 1] if dpo.loss_type == 'sigmoid' else [len(chosen.model), len(rejected.model)]
        model = [chosen.model.sum() / scale[0], rejected.model.sum() / scale[1]]
        reference = [chosen.reference.sum() / scale[0], rejected.reference.sum() / scale[1]]
        if dpo.loss_type == 'orpo':
            reference = [0, 0]
        rewards = [dpo.beta * (model[i] - reference[i]) for i in range(2)]
        h = (model[0] - model[1]) - (reference[0] - reference[1])
        if dpo.loss_type == 'ipo':
            loss, slope = (h - 0.5 / dpo.beta) ** 2, 2 * (h - 0.5 / dpo.beta)
            slopes = [slope, -slope]
        elif dpo.loss_type == 'orpo':
            probabilities = np.exp(model)
            odds = probabilities / (1 - probabilities)
            preferred = odds[0] / (odds[0] + odds[1])
            loss = -model[0] - dpo.beta * np.log(preferred)
            by_odds = -dpo.beta * (1 - preferred) / (1 - probabilities)
            slopes = [by_odds[0] - 1, -by_odds[1]]
        else:
            probability = 1 / (1 + np.exp(-dpo.beta * h))
            loss = -np.log(probability) * (1 - dpo.label_smoothing) - np.log(1 - probability) * dpo.label_smoothing
            slope = dpo.beta * (probability - (1 - dpo.label_smoothing))
            slopes = [slope, -slope]
        loss -= dpo.rpo_alpha * chosen.model.mean()
        gradients.append(slopes[0] / scale[0] - dpo.rpo_alpha / len(chosen.model))
        gradients.append(slopes[1] / scale[1])
        sums += [loss, 1, h > 0, rewards[0] - rewards[1], *rewards, *model]
    return PreferenceTerms(*sums), gradients


def as_jax(batch):
    return tuple(jnp.asarray(x, jnp.int32 if x.dtype == np.int32 else jnp.float32) for x in batch)


def rows_of(pairs):
    return [pairs[:3], [], pairs[3:4], pairs[4:]]


@pytest.mark.parametrize('dpo', LOSSES.values(), ids=LOSSES)
def test_terms_equal_the_numpy_formula(dpo):
    pairs = make_pairs(7)
    found = preference_terms(*as_jax(pack(rows_of(pairs), 64)), dpo)
    reference, _ = expected(pairs, dpo)
    np.testing.assert_allclose(found, reference, rtol=2e-6)
    assert 0 < found.accuracy < found.pairs == 7
    for other in LOSSES.values():
        if other != dpo:
            assert abs(found.objective - expected(pairs, other)[0].objective) > 1e-2


@pytest.mark.parametrize('dpo', LOSSES.values(), ids=LOSSES)
def test_gradients_equal_the_derived_formula(dpo):
    pairs = make_pairs(7, seed=3)
    batch = pack(rows_of(pairs), 64)
    _, gradient = objective_and_gradient(*as_jax(batch), dpo)
    weights, segments = batch[2:]
    _, by_answer = expected(pairs, dpo)
    places = [(row, s) for row in range(4) for s in np.unique(segments[row]) if weights[row][segments[row] == s].any()]
    by_hand = np.zeros_like(weights)
    for (row, segment), value in zip(places, by_answer, strict=True):
        by_hand[row] += value * weights[row] * (segments[row] == segment)
    np.testing.assert_allclose(gradient, by_hand, rtol=1e-5, atol=1e-7)
    # Compares with finite differences of the loss in double precision.
    place = tuple(np.argwhere(weights)[5])
    with jax.enable_x64():
        ends = []
        for step in (1e-6, -1e-6):
            moved = [x.copy() for x in batch]
            moved[0][place] += step
            ends.append(float(preference_terms(*map(jnp.asarray, moved), dpo).objective))
    np.testing.assert_allclose((ends[0] - ends[1]) / 2e-6, by_hand[place], rtol=1e-6)


@pytest.mark.parametrize('name', ['with next token', 'ipo with next token'])
def test_packing_and_padding_do_not_matter(name):
    pairs = make_pairs(7, seed=5)
    ways = [([[pair] for pair in pairs], 24), (rows_of(pairs), 64), (rows_of(pairs), 97), ([pairs], 200)]
    found = [preference_terms(*as_jax(pack(*way, seed=seed)), LOSSES[name]) for seed, way in enumerate(ways)]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-5)


@pytest.mark.parametrize('dpo', LOSSES.values(), ids=LOSSES)
def test_wrong_inputs_change_the_terms(dpo):
    pairs = make_pairs(7)
    right = expected(pairs, dpo)[0]
    swapped = preference_terms(*as_jax(pack(rows_of([pair[::-1] for pair in pairs]), 64)), dpo)
    assert abs(swapped.objective - right.objective) > 0.05
    np.testing.assert_allclose(swapped.margin, -right.margin, rtol=1e-5)
    log_probs, reference, weights, segments = pack(rows_of(pairs), 64)
    shifted = preference_terms(*as_jax((log_probs, reference, weights, np.where(segments, segments + 1, 0))), dpo)
    assert shifted.pairs < right.pairs
    exchanged = preference_terms(*as_jax((reference, log_probs, weights, segments)), dpo)
    assert abs(exchanged.objective - right.objective) > 0.05


def test_a_response_without_partner_is_no_pair():
    pairs = make_pairs(2)
    log_probs, reference, weights, segments = pack([pairs], 64)
    alone = [np.where(segments == 4, 0, weights), weights * 0]
    found = [preference_terms(*as_jax((log_probs, reference, w, segments)), DpoConfig()) for w in alone]
    np.testing.assert_allclose(found[0], expected(pairs[:1], DpoConfig())[0], rtol=2e-6)
    assert list(found[1]) == [0.0] * len(found[1])
    _, gradient = objective_and_gradient(*as_jax((log_probs, reference, alone[1], segments)), DpoConfig())
    assert not gradient.any()


def test_orpo_of_a_certain_answer_is_finite():
    log_probs, reference, weights, segments = pack([make_pairs(2)], 64)
    batch = as_jax((np.where(weights != 0, 0, log_probs), reference, weights, segments))
    value, gradient = objective_and_gradient(*batch, LOSSES['orpo'])
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_a_model_equal_to_its_reference():
    batch = pack(rows_of(make_pairs(7)), 64)
    found = preference_terms(*as_jax((batch[0], batch[0], *batch[2:])), DpoConfig())
    np.testing.assert_allclose(found.objective, 7 * np.log(2), rtol=1e-6)
    assert found.accuracy == found.margin == found.chosen_reward == 0


def test_extreme_values_are_finite_and_nan_propagates():
    log_probs, reference, weights, segments = pack([make_pairs(1)], 64)
    slopes = []
    for scale in (1e4, -1e4):
        batch = as_jax((log_probs * scale, reference, weights, segments))
        value, gradient = objective_and_gradient(*batch, DpoConfig())
        assert np.isfinite(value)
        slopes.append(float(abs(gradient).max()))
    # The slopes of a certain correct and a certain wrong preference.
    np.testing.assert_allclose(sorted(slopes), [0, 0.1], atol=1e-6)

    # Padding may contain NaN; responses may not.
    def objective(*batch):
        return preference_terms(*as_jax(batch), DpoConfig()).objective

    with_nan = np.where(weights == 0, np.nan, log_probs)
    assert np.isfinite(objective(with_nan, with_nan, weights, segments))
    with_nan[tuple(np.argwhere(weights)[0])] = np.nan
    assert np.isnan(objective(with_nan, reference, weights, segments))
    assert np.isnan(objective(log_probs, reference, weights * np.nan, segments))


def test_only_sums_are_reduced_across_devices():
    rows = [[pair] for pair in make_pairs(8)]
    batch = as_jax(pack(rows, 32))
    mesh = jax.make_mesh((8,), ('data',))
    split = NamedSharding(mesh, PartitionSpec('data'))

    def objective(log_probs, *rest):
        terms = preference_terms(log_probs, *rest, DpoConfig())
        return terms.objective, terms

    step = jax.jit(jax.value_and_grad(objective, has_aux=True), in_shardings=split, out_shardings=((None, None), split))
    compiled = step.lower(*batch).compile()
    text = compiled.as_text()
    assert 'all-gather' not in text
    assert 'all-to-all' not in text
    assert 'all-reduce' in text
    (_, terms), gradient = compiled(*(jax.device_put(x, split) for x in batch))
    (_, alone), alone_gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))(*batch)
    np.testing.assert_allclose(terms, alone, rtol=1e-6)
    np.testing.assert_allclose(gradient, alone_gradient, rtol=1e-6)
