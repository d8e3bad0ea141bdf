"""GRPO's loss and gradient against NumPy formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.training.losses.advantages import advantages
from maxlm.training.losses.grpo import Values, kl_divergence, policy_sums, token_weights

CONFIG = GrpoConfig(num_generations=4, max_completion_length=6)
RNG = np.random.default_rng(0)
B, T = 8, 10
REWARDS = np.array([1, 0, 0, 1, 0.5, 0.5, 0.5, 0.5], np.float32)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    starts, nums = rng.integers(1, 4, B), rng.integers(1, 6, B)
    where = np.arange(T)
    predicted = ((where >= starts[:, None]) & (where < (starts + nums)[:, None])).astype(np.float32)
    old = rng.normal(-1, 0.5, (B, T)).astype(np.float32)
    new = (old + rng.normal(0, 0.4, (B, T))).astype(np.float32)
    reference = (new + rng.normal(0, 0.4, (B, T))).astype(np.float32)
    return predicted, old, new, reference


def objective(new, *, config, predicted, old, reference, advantage, weights):
    sums = policy_sums(
        new,
        jnp.ones_like(new),
        reference,
        old_log_probs_BT=old,
        advantages_BT=jnp.broadcast_to(advantage[:, None], new.shape),
        predicted_BT=predicted,
        weights_BT=weights,
        config=config,
    )
    return sums.objective, sums


def by_hand(new, *, config, predicted, old, reference, advantage, weights):
    """Computes the loss of the paper and its derivative by each log-probability, token by token in float64."""
    loss, gradient = 0.0, np.zeros((B, T))
    for b in range(B):
        for t in range(T):
            if not predicted[b, t]:
                continue
            log_ratios = np.float64(new[b]) - np.float64(old[b])
            a, w, each = float(advantage[b]), float(weights[b, t]), predicted[b] > 0
            r = np.exp(log_ratios[each].mean() if config.loss_type == 'gspo' else log_ratios[t])
            low, high = 1 - config.epsilon, 1 + config.epsilon_high
            bounded = min(max(r, low), high)
            loss -= w * min(r * a, bounded * a)
            if r * a <= bounded * a:
                gradient[b, t] -= w * r * a
            if reference is not None:
                q = np.exp(float(reference[b, t]) - float(new[b, t]))
                loss += w * config.kl_coef * (q - np.log(q) - 1)
                gradient[b, t] += w * config.kl_coef * (1 - q)
    return loss, gradient


@pytest.mark.parametrize('loss_type', ['grpo', 'dapo', 'dr_grpo', 'gspo'])
@pytest.mark.parametrize('kl_coef', [0.0, 0.3])
def test_loss_and_gradient_equal_the_formula(loss_type, kl_coef):
    config = dataclasses.replace(CONFIG, loss_type=loss_type, kl_coef=kl_coef, epsilon_high=0.28)
    predicted, old, new, reference = batch()
    advantage = advantages(REWARDS, config)
    active = np.repeat([1.0, 0.0], 4)
    given = {
        'config': config,
        'predicted': predicted,
        'old': old,
        'reference': reference if kl_coef else None,
        'advantage': advantage,
        'weights': token_weights(predicted, active, config),
    }
    (found, sums), gradient = jax.value_and_grad(objective, has_aux=True)(jnp.asarray(new), **given)
    expected, expected_gradient = by_hand(new, **given)
    assert expected != 0
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    assert np.abs(expected_gradient).max() > 1e-3
    # Groups with equal rewards have no gradient.
    assert not gradient[4:].any()
    # Some tokens are clipped and counted; without clipping the gradient differs.
    assert 0 < float(sums.clipped) < float(sums.tokens) == predicted.sum()
    free = {**given, 'config': dataclasses.replace(config, epsilon=100.0, epsilon_high=100.0)}
    assert np.abs(by_hand(new, **free)[1] - expected_gradient).max() > 1e-3


def test_first_epoch_gives_the_policy_gradient():
    """In one epoch without clipping, the gradient is that of -Σ A · log p."""
    predicted, old, _, _ = batch(1)
    advantage = advantages(REWARDS, CONFIG)
    weights = token_weights(predicted, np.ones(B), CONFIG)
    given = {'config': CONFIG, 'predicted': predicted, 'old': old, 'reference': None}
    gradient = jax.grad(objective, has_aux=True)(jnp.asarray(old), **given, advantage=advantage, weights=weights)[0]
    np.testing.assert_allclose(gradient, -weights * advantage[:, None], atol=1e-7)
    # Negative control: the gradient differs after an update.
    moved = jax.grad(objective, has_aux=True)(jnp.asarray(old + 0.1), **given, advantage=advantage, weights=weights)[0]
    assert np.abs(moved + weights * advantage[:, None]).max() > 1e-2


# One response of three tokens with advantage 2, cap 2 and clipping to 0.8 … 1.2: probabilities at sampling time, by the
# proximal and by the trained policy; loss, gradient, sum of the importance weights and number of truncated ones.
TABLE = {
    # Importance weights 0.5, 3 and 0.5, and ratios 1.5, 1 and 0.5.
    'dapo': (
        ([[0.2, 0.2, 0.8]], [[0.1, 0.6, 0.4]], [[0.15, 0.6, 0.2]]),
        (-2 * (0.5 * 1.2 + 2 * 1 + 0.5 * 0.5), [0, -2 * 2 * 1, -2 * 0.5 * 0.5], 3, 1),
    ),
    # Geometric means: importance weight 51.2^⅓ > 2, ratio 1.1^⅓.
    'gspo': (
        ([[0.1, 0.1, 0.1]], [[0.4, 0.8, 0.16]], [[0.4, 0.8, 0.176]]),
        (-2 * 3 * 2 * 1.1 ** (1 / 3), [-2 * 2 * 1.1 ** (1 / 3)] * 3, 6, 3),
    ),
}
OLD, PROXIMAL, NEW = np.log(TABLE['dapo'][0])


def decoupled(new, proximal, *, config, old=OLD, advantage=2.0):
    sums = policy_sums(
        jnp.asarray(new, jnp.float32),
        jnp.ones_like(new),
        None,
        old_log_probs_BT=jnp.asarray(old, jnp.float32),
        advantages_BT=jnp.full(np.shape(new), advantage),
        predicted_BT=jnp.ones(np.shape(new)),
        weights_BT=jnp.ones(np.shape(new)),
        config=config,
        proximal_BT=None if proximal is None else jnp.asarray(proximal, jnp.float32),
    )
    return sums.objective, sums


@pytest.mark.parametrize('loss_type', TABLE)
def test_decoupled_loss_equals_a_table(loss_type):
    config = dataclasses.replace(CONFIG, max_staleness=1, loss_type=loss_type)
    probabilities, (loss, slope, importance, truncated) = TABLE[loss_type]
    old, proximal, new = np.log(probabilities)
    (found, sums), gradient = jax.value_and_grad(decoupled, has_aux=True)(new, proximal, config=config, old=old)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_allclose(gradient[0], slope, rtol=1e-5)
    np.testing.assert_allclose([sums.importance, sums.truncated], [importance, truncated], rtol=1e-5)
    # The KL divergence from the policy that sampled the tokens does not depend on the proximal policy.
    np.testing.assert_allclose(sums.old_kl, (np.exp(new - old) - 1 - (new - old)).sum(), rtol=1e-5)
    # Negative controls: the synchronous loss, and another cap.
    plain = decoupled(new, None, config=dataclasses.replace(config, max_staleness=0), old=old)[0]
    other = decoupled(new, proximal, config=dataclasses.replace(config, importance_sampling_cap=4.0), old=old)[0]
    assert min(abs(plain - loss), abs(other - loss)) > 0.1


@pytest.mark.parametrize('loss_type', TABLE)
def test_one_step_per_rollout_needs_no_proximal_log_probabilities(loss_type):
    """The first step has the ratio 1 and the gradient -w · A."""
    config = dataclasses.replace(CONFIG, max_staleness=1, loss_type=loss_type)
    (found, sums), gradient = jax.value_and_grad(decoupled, has_aux=True)(NEW, None, config=config)
    again, slope = jax.value_and_grad(decoupled, has_aux=True)(NEW, NEW, config=config)
    np.testing.assert_allclose(found, again[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6)
    each = [0.75, 2, 0.25] if loss_type == 'dapo' else [(0.75 * 3 * 0.25) ** (1 / 3)] * 3
    np.testing.assert_allclose(sums.importance, sum(each), rtol=1e-5)
    np.testing.assert_allclose(gradient[0], -2 * np.array(each), rtol=1e-5)


@pytest.mark.parametrize('loss_type', ['grpo', 'dapo', 'dr_grpo', 'gspo'])
def test_decoupled_loss_with_weights_of_one_is_the_synchronous_loss(loss_type):
    config = dataclasses.replace(CONFIG, loss_type=loss_type)
    decoupled_config = dataclasses.replace(config, max_staleness=1)
    (expected, _), slope = jax.value_and_grad(decoupled, has_aux=True)(NEW, None, config=config)
    (found, sums), gradient = jax.value_and_grad(decoupled, has_aux=True)(NEW, OLD, config=decoupled_config)
    assert (found, sums.importance, sums.truncated) == (expected, 3, 0)
    np.testing.assert_array_equal(gradient, slope)
    # Negative control: a proximal policy that differs from that at sampling time.
    assert decoupled(NEW, PROXIMAL, config=decoupled_config)[0] != expected


def test_token_weights_by_loss_type():
    predicted = np.zeros((2, 6), np.float32)
    predicted[0, :2], predicted[1, :4] = 1, 1
    each = {
        mean: token_weights(predicted, np.ones(2), dataclasses.replace(CONFIG, loss_type=mean))
        for mean in ('grpo', 'dapo', 'dr_grpo')
    }
    np.testing.assert_allclose(each['grpo'].sum(axis=1), [1, 1])
    np.testing.assert_allclose(each['dapo'].sum(axis=1), [2, 4])
    np.testing.assert_array_equal(each['dr_grpo'], each['dapo'])
    assert not token_weights(predicted, np.zeros(2), CONFIG).any()


def test_values_at_unpredicted_positions_are_ignored():
    predicted, old, new, _ = batch(2)
    advantage = advantages(REWARDS, CONFIG)
    weights = token_weights(predicted, np.ones(B), CONFIG)
    given = {'config': CONFIG, 'predicted': predicted, 'reference': None, 'advantage': advantage, 'weights': weights}
    expected = jax.value_and_grad(objective, has_aux=True)(jnp.asarray(new), **given, old=old)
    changed = np.where(predicted > 0, old, -1e30).astype(np.float32)
    found = jax.value_and_grad(objective, has_aux=True)(jnp.asarray(new), **given, old=changed)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    # Negative control: a token of a response changes the loss.
    changed = np.where(predicted > 0, old - 1, old).astype(np.float32)
    assert jax.value_and_grad(objective, has_aux=True)(jnp.asarray(new), **given, old=changed)[0][0] != expected[0][0]


# One token of probability ½ by the policy and ¼ by the reference, and one of 0.1 and 0.3: log(p/q), log²(p/q) / 2 and
# q/p - 1 - log(q/p) (Schulman 2020, "Approximating KL Divergence").
KL = {'k1': [0.6931472, -1.0986123], 'k2': [0.2402265, 0.6034745], 'k3': [0.1931472, 0.9013877]}


@pytest.mark.parametrize('estimator', KL)
def test_kl_estimators_equal_a_table(estimator):
    log_ratio = np.log(np.array([0.5, 0.1], np.float32) / np.array([0.25, 0.3], np.float32))
    np.testing.assert_allclose(kl_divergence(log_ratio, estimator), KL[estimator], rtol=1e-5)


@pytest.mark.parametrize('estimator', KL)
def test_expected_kl_estimates_are_the_divergence(estimator):
    """The expectations of k1 and k3 under p are the exact divergence, and that of k2 is close if p and q are."""
    rng = np.random.default_rng(3)
    p, q = (x / x.sum() for x in rng.uniform(0.9, 1.1, (2, 50)))
    exact = (p * np.log(p / q)).sum()
    found = (p * np.asarray(kl_divergence(np.log(p / q), estimator))).sum()
    np.testing.assert_allclose(found, exact, rtol=0.1 if estimator == 'k2' else 1e-3)
    # Negative control: the estimate of the divergence in the other direction.
    assert abs((q * np.asarray(kl_divergence(np.log(p / q), estimator))).sum() - exact) > 1e-6


def test_loss_contains_the_chosen_kl_estimator():
    predicted, old, new, reference = batch()
    given = {
        'predicted': predicted,
        'old': old,
        'reference': reference,
        'advantage': np.zeros(B, np.float32),
        'weights': predicted,
    }
    for estimator in KL:
        config = dataclasses.replace(CONFIG, kl_coef=0.3, kl_estimator=estimator)
        loss, sums = objective(jnp.asarray(new), config=config, **given)
        expected = (predicted * np.asarray(kl_divergence(new - reference, estimator))).sum()
        np.testing.assert_allclose(sums.reference_kl, expected, rtol=1e-5)
        np.testing.assert_allclose(loss, 0.3 * expected, rtol=1e-5)


# Value, old value and return of a token, and max((v - R)², (clip(v, v' - 0.2, v' + 0.2) - R)²) / 2: the value is in the
# range; it moved too far toward the return, so that the clipped value determines the loss; it moved away.
VALUES = [(0.1, 0.0, 1.0, 0.405), (0.9, 0.0, 1.0, 0.32), (-0.9, 0.0, 1.0, 1.805)]


def test_value_loss_equals_a_table():
    config = dataclasses.replace(CONFIG, cliprange_value=0.2, vf_coef=0.5)
    values, old, returns, losses = (jnp.array([column], jnp.float32) for column in zip(*VALUES, strict=True))

    def loss(values):
        zero = jnp.zeros_like(values)
        sums = policy_sums(
            zero,
            zero,
            None,
            old_log_probs_BT=zero,
            advantages_BT=zero,
            predicted_BT=zero + 1,
            weights_BT=zero + 1,
            config=config,
            values=Values(values, old, returns),
        )
        return sums.objective, sums

    (found, sums), gradient = jax.value_and_grad(loss, has_aux=True)(values)
    np.testing.assert_allclose(found, 0.5 * losses.sum(), rtol=1e-6)
    np.testing.assert_allclose([sums.value_loss, sums.value_clipped], [losses.sum(), 1], rtol=1e-6)
    # A clipped value has no gradient.
    np.testing.assert_allclose(gradient[0], [0.5 * (0.1 - 1), 0, 0.5 * (-0.9 - 1)], rtol=1e-6)


def test_the_largest_difference_covers_trained_tokens():
    predicted, old, new, _ = batch()
    new[predicted == 0] = np.inf
    words = {'reference': None, 'advantage': np.ones(B, np.float32), 'weights': predicted}
    sums = objective(new, config=CONFIG, predicted=predicted, old=old, **words)[1]
    assert sums.largest_difference == np.abs(new - old)[predicted > 0].max()
    assert objective(old, config=CONFIG, predicted=predicted, old=old, **words)[1].largest_difference == 0
