"""Reference point of KTO in the training step and in evaluations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.mesh import reduces_gradients_once
from maxlm.training.forward import make_log_probs
from maxlm.training.losses.kto import answer_terms, mismatched_answers
from maxlm.training.step import make_eval_step, make_train_step
from tests.answers import pack
from tests.small import VOCAB, small_config, small_layout, small_state

KTO = {
    'train__objective': 'dpo',
    'train__init_from': 'runs/sft',
    'dpo__loss_type': 'kto',
    'dpo__beta': 0.3,
    'model__num_layers': 1,
    'data__seq_len': 32,
}


def make_batch():
    """Returns a batch of eight rows, each with two to four answers with labels and one pair."""
    rng = np.random.default_rng(0)

    def document():
        prompt, answer = (rng.integers(1, VOCAB, rng.integers(1, 4)).tolist() for _ in range(2))
        return prompt, answer

    rows = []
    for row in range(8):
        rows.append([document(), document()])
        for is_desirable in rng.random(row % 3) < 0.5:
            rows[-1] += [document(), None] if is_desirable else [None, document()]
    return pack(*rows, length=32)


def state_of(config, layout):
    """Returns a state whose reference is sure of wrong tokens, so the reference point is above 0."""
    state = small_state(config, layout)
    other = small_state(config, layout, seed=3)
    reference = jax.tree.map(lambda a, b: (a + 5 * b).astype(a.dtype), state.reference, other.params)
    return state._replace(reference=reference)


@pytest.fixture(scope='module')
def expected():
    """Returns the terms of all rows at once, and the reference point."""
    config = small_config(**KTO)
    layout = small_layout(config)
    state, batch = state_of(config, layout), make_batch()
    log_probs = jax.jit(make_log_probs(config, layout))

    def ratios(batch):
        return [log_probs(tree, None, batch, None).log_probs_BT for tree in (state.params, state.reference)]

    permuted, count = mismatched_answers(batch)
    of_model, of_reference = ratios(permuted)
    point = float((permuted['weights'] * (of_model - of_reference)).sum() / count)
    assert point > 0.5
    terms = answer_terms(*ratios(batch), batch['weights'], batch['segments'], jnp.full(8, point), config.dpo)
    without = answer_terms(*ratios(batch), batch['weights'], batch['segments'], jnp.zeros(8), config.dpo)
    assert abs(without.objective - terms.objective) > 0.1
    return terms, point


LAYOUTS = {
    'accumulation': (1, {'train__per_device_batch_size': 2}),
    'reduced once': (2, {'mesh__data': 2, 'mesh__zero_stage': 1, 'train__per_device_batch_size': 2}),
    'context': (4, {'mesh__fsdp': 2, 'mesh__context': 2, 'train__per_device_batch_size': 2}),
}


@pytest.mark.parametrize('name', LAYOUTS)
def test_micro_batches_and_devices_do_not_matter(expected, name):
    terms, point = expected
    devices, settings = LAYOUTS[name]
    config = small_config(devices, **KTO, **settings)
    layout = small_layout(config)
    assert config.rounds > 1
    assert reduces_gradients_once(config) == (name == 'reduced once')
    state, batch = state_of(config, layout), layout.put_batch(make_batch(), 8)
    sums = jax.jit(make_eval_step(config, layout))(state.params, state.reference, batch)
    _, metrics = jax.jit(make_train_step(config, layout))(state, batch)
    means = {
        'loss': terms.objective / terms.answers,
        'reference_point': point,
        'rewards/chosen': terms.chosen_reward / terms.desirable,
        'rewards/rejected': terms.rejected_reward / terms.undesirable,
        'rewards/accuracies': terms.accuracy / terms.answers,
        'logps/chosen': terms.chosen_log_prob / terms.desirable,
        'logps/rejected': terms.rejected_log_prob / terms.undesirable,
    }
    evaluated = {'loss': sums.loss / sums.weight}
    evaluated |= {key: total / sums.part_counts[key] for key, total in sums.parts.items()}
    assert evaluated.keys() == means.keys()
    for key, value in means.items():
        np.testing.assert_allclose([evaluated[key], metrics[key]], value, rtol=1e-4, err_msg=key)
