"""Loss of reward models against TRL, and its use in the objective."""

from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl.trainer.reward_trainer import RewardTrainer

from maxlm.config.sections.posttraining import RewardModelConfig
from maxlm.data.chat.scored_tokens import SCORED, with_scored_tokens
from maxlm.training.gradients import make_gradients
from maxlm.training.losses.reward import score_terms
from tests.answers import END_OF_DOCUMENT, pack
from tests.small import small_config, small_layout, small_state

# Answers of different lengths; the second row ends with a document without an answer.
PAIRS = [
    [([3, 4], [5, 6]), ([3, 4], [7])],
    [([8], [9, 10, 11]), ([8], [12, 13]), ([14, 15], [16]), ([14, 15], [17, 18])],
]
BATCH = with_scored_tokens(pack(*PAIRS, length=24), END_OF_DOCUMENT)


def trl_loss(chosen, rejected, coefficient):
    """Returns the mean loss of TRL and its metrics."""
    trainer = object.__new__(RewardTrainer)

    def gather(x):
        return x

    trainer.__dict__ |= {
        'model': SimpleNamespace(training=False),
        'args': SimpleNamespace(center_rewards_coefficient=coefficient or None),
        'accelerator': SimpleNamespace(gather=gather, gather_for_metrics=gather),
        '_metrics': {'eval': defaultdict(list)},
        '_total_train_tokens': 0,
    }
    logits = torch.cat([chosen, rejected])[:, None]
    loss = trainer.compute_loss(lambda **_: SimpleNamespace(logits=logits), {})
    return loss, {name: value[0] for name, value in trainer._metrics['eval'].items() if name != 'num_tokens'}


@pytest.mark.parametrize('coefficient', [0.0, 0.3])
def test_loss_and_gradient_equal_those_of_trl(coefficient):
    scores = np.random.default_rng(0).normal(0, 2, BATCH['tokens'].shape).astype(np.float32)
    config = RewardModelConfig(center_rewards_coefficient=coefficient)

    def objective(scores_BT):
        terms = score_terms(scores_BT, BATCH[SCORED], BATCH['segments'], config)
        return terms.objective, terms

    (_, terms), gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))(scores)
    # The last tokens of the answers, in the order of `PAIRS`.
    chosen_at, rejected_at = [(0, 3), (1, 3), (1, 11)], [(0, 7), (1, 7), (1, 16)]
    tensor = torch.tensor(scores, requires_grad=True)
    chosen, rejected = (tensor[tuple(zip(*places, strict=True))] for places in (chosen_at, rejected_at))
    loss, metrics = trl_loss(chosen, rejected, coefficient)
    (3 * loss).backward()
    assert float(terms.pairs) == 3
    assert float(terms.objective) == pytest.approx(3 * loss.item(), rel=1e-6)
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-5, atol=1e-7)
    assert float(terms.accuracy) == pytest.approx(3 * metrics['accuracy'])
    assert float(terms.margin) == pytest.approx(3 * metrics['margin'], rel=1e-5)
    assert float(terms.mean_score) == pytest.approx(3 * metrics['mean_reward'], rel=1e-5)
    assert float(terms.chosen_score + terms.rejected_score) == pytest.approx(6 * metrics['mean_reward'], rel=1e-5)


def test_scores_without_a_partner_do_not_count():
    scored = BATCH[SCORED].copy()
    scored[1, 16] = 0
    terms = score_terms(jnp.ones_like(scored), scored, BATCH['segments'], RewardModelConfig())
    assert float(terms.pairs) == 2


ROWS = {'data__seq_len': 24, 'train__global_batch_size': 4}


@pytest.mark.parametrize(
    'settings',
    [
        {'train__per_device_batch_size': 1},
        {'mesh__fsdp': 2, 'mesh__tensor': 2},
        {'mesh__context': 2, 'mesh__fsdp': 2},
        {'mesh__stage': 2, 'mesh__fsdp': 2, 'train__per_device_batch_size': 1},
    ],
)
def test_every_layout_has_the_same_loss_and_gradients(settings):
    loss, gradients = _loss_and_gradients(small_config(train__objective='reward', **ROWS))
    others = _loss_and_gradients(small_config(4, train__objective='reward', **ROWS, **settings))
    assert others[0] == pytest.approx(loss, rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), gradients, others[1])
    assert np.abs(gradients['score']['kernel']).max() > 0


def _loss_and_gradients(config):
    layout = small_layout(config)
    state = small_state(config, layout)
    batch = layout.put_batch({name: np.concatenate([rows, rows]) for name, rows in BATCH.items()}, 4)
    gradients = jax.jit(make_gradients(config, layout))
    sums, found, _ = gradients(state, batch, jax.random.key(0), None)
    assert float(sums.weight) == 6
    return float(sums.loss), jax.device_get(found)
