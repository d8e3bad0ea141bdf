"""Sums of each objective of a one-layer model against the log-probabilities of the same tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.sections.posttraining import DpoConfig, GrpoConfig
from maxlm.training.forward import make_log_probs
from maxlm.training.losses.dpo import preference_terms
from maxlm.training.losses.grpo import policy_sums
from maxlm.training.objectives import DPO_PARTS, aux_names, make_objective, zero_sums
from tests.small import small_batch, small_config, small_layout, small_state

NUM_SOURCES = 3
SOURCES = np.array([0, 0, 1, 1, 1, 2, 2, 2], np.int32)
DPO = DpoConfig(beta=0.3, rpo_alpha=0.5)
GRPO = GrpoConfig(num_generations=4, max_completion_length=10, kl_coef=0.2)


def config_of(objective, **sections):
    config = small_config(model__num_layers=1, model__dim=16, model__num_heads=2, train__z_loss=0.1)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, objective=objective), **sections)


CONFIGS = {
    'next_token': config_of('next_token'),
    'dpo': config_of('dpo', dpo=DPO),
    'grpo': config_of('grpo', grpo=GRPO),
    'budget': config_of('grpo', grpo=dataclasses.replace(GRPO, loss_type='dr_grpo', kl_coef=0.0)),
}


def batch_of_responses():
    rng = np.random.default_rng(0)
    batch = small_batch(CONFIGS['next_token'])
    shape = batch['tokens'].shape
    return {
        **batch,
        'sources': SOURCES,
        'predicted': batch['weights'],
        'advantages': np.broadcast_to(rng.normal(size=(8, 1)), shape).astype(np.float32),
        'old_log_probs': rng.normal(-4, 0.3, shape).astype(np.float32),
    }


@pytest.fixture(scope='module')
def run():
    """Returns a function of a batch that computes all objectives and log-probabilities of model and reference."""
    layout = small_layout(CONFIGS['next_token'])
    params, reference = (small_state(CONFIGS['next_token'], layout, seed).params for seed in (0, 1))

    @jax.jit
    def every_objective(batch):
        log_probs = make_log_probs(CONFIGS['next_token'], layout)
        found = {}
        for name, config in CONFIGS.items():
            other = reference if name in ('dpo', 'grpo') else None
            found[name] = make_objective(config, layout, NUM_SOURCES)(params, other, None, batch, None)
        of_model, of_reference = log_probs(params, None, batch, None), log_probs(reference, None, batch, None)
        expected = {
            'dpo': preference_terms(
                of_model.log_probs_BT, of_reference.log_probs_BT, batch['weights'], batch['segments'], DPO
            ),
            'grpo': policy_sums(
                *of_model[:2],
                of_reference.log_probs_BT,
                old_log_probs_BT=batch['old_log_probs'],
                advantages_BT=batch['advantages'],
                predicted_BT=batch['predicted'],
                weights_BT=batch['weights'],
                config=GRPO,
            ),
        }
        return found, expected, of_model.log_probs_BT

    return lambda batch: jax.device_get(every_objective(batch))


@pytest.fixture(scope='module')
def found(run):
    return run(batch_of_responses())


def test_the_loss_of_the_next_token(found):
    objective, sums = found[0]['next_token']
    weights_BT = batch_of_responses()['weights']
    np.testing.assert_allclose(sums.loss, -(weights_BT * found[2]).sum(), rtol=1e-5)
    assert sums.tokens == sums.weight == weights_BT.sum()
    assert sums.part_counts == dict.fromkeys(sums.parts, sums.tokens)
    # The objective includes the z-loss, but the loss does not. Z is about the vocabulary size.
    np.testing.assert_allclose(objective, sums.loss + sums.parts['z_loss'], rtol=1e-5)
    np.testing.assert_allclose(sums.parts['z_loss'], 0.1 * np.log(61) ** 2 * sums.tokens, rtol=0.02)


def test_losses_by_source(found):
    _, sums = found[0]['next_token']
    loss_B = -(batch_of_responses()['weights'] * found[2]).sum(axis=1)
    tokens_B = batch_of_responses()['weights'].sum(axis=1)
    for source in range(NUM_SOURCES):
        np.testing.assert_allclose(sums.source_loss[source], loss_B[source == SOURCES].sum(), rtol=1e-5)
        assert sums.source_tokens[source] == tokens_B[source == SOURCES].sum()
    assert len(set(map(float, sums.source_loss))) == NUM_SOURCES


def test_a_nonfinite_loss_affects_only_its_source(run):
    batch = batch_of_responses()
    batch['weights'] = batch['weights'].copy()
    batch['weights'][2, 0] = np.nan
    _, sums = run(batch)[0]['next_token']
    assert np.isfinite(sums.source_loss).tolist() == [True, False, True]
    assert not np.isfinite(sums.loss)


def test_the_loss_of_preferences(found):
    objective, sums = found[0]['dpo']
    terms = found[1]['dpo']
    np.testing.assert_allclose([objective, sums.loss], terms.objective, rtol=1e-5)
    assert sums.weight == terms.pairs > 0
    assert sums.part_counts == dict.fromkeys(sums.parts, terms.pairs)
    assert sums.tokens == batch_of_responses()['weights'].sum()
    for name, value in sums.parts.items():
        np.testing.assert_allclose(value, getattr(terms, DPO_PARTS[name]), rtol=1e-5, atol=1e-6)
    # The model differs from its reference.
    assert terms.margin != 0


def test_the_loss_of_responses(found):
    objective, sums = found[0]['grpo']
    expected = found[1]['grpo']
    np.testing.assert_allclose([objective, sums.loss], expected.objective, rtol=1e-5)
    parts = {
        'clip_fraction': expected.clipped,
        'entropy': expected.entropy,
        'approx_kl': expected.old_kl,
        'kl': expected.reference_kl,
    }
    assert sums.parts.keys() == parts.keys()
    for name, value in parts.items():
        np.testing.assert_allclose(sums.parts[name], value, rtol=1e-5)
    assert sums.tokens == batch_of_responses()['predicted'].sum()
    assert sums.part_counts == dict.fromkeys(sums.parts, sums.tokens)
    assert sums.weight == batch_of_responses()['weights'].sum()
    assert expected.reference_kl > 0


def test_a_budget_counts_the_longest_response_of_every_row(found):
    _, sums = found[0]['budget']
    assert sums.weight == 8 * GRPO.max_completion_length
    assert 'kl' not in sums.parts
    # Negative control: the loss differs without the KL divergence from a reference.
    assert sums.loss != found[0]['grpo'][1].loss


@pytest.mark.parametrize('name', CONFIGS)
def test_sums_begin_as_zeros_of_the_same_shapes(found, name):
    _, sums = found[0][name]
    config = CONFIGS[name]
    zeros = zero_sums(config, NUM_SOURCES if config.train.objective == 'next_token' else 0)
    assert set(sums.parts) == set(zeros.parts) == set(aux_names(config))
    for zero, value in zip(jax.tree.leaves(zeros), jax.tree.leaves(sums), strict=True):
        assert (zero.shape, zero.dtype) == (value.shape, value.dtype) == (value.shape, jnp.float32)
        assert not np.any(zero)
