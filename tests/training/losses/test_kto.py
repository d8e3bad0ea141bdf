"""KTO and APO-zero losses of a table computed by hand, and the permutation of answers."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.sections.posttraining import DpoConfig
from maxlm.training.losses.kto import answer_terms, mismatched_answers
from tests.answers import pack

# Three answers of 2, 1 and 2 tokens: a pair, a missing desirable answer, and an undesirable answer. The first position
# of a document is the prompt. Padding follows.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 4, 4, 4, 5]], np.int32)
WEIGHTS = np.array([[1, 1, 0, 1, 0, 0, 1, 1, 0, 0]], np.float32)
MODEL = np.array([[-1.0, -2.0, 9.0, -4.0, 9.0, 9.0, -3.0, -2.5, 9.0, 9.0]], np.float32)
REFERENCE = np.array([[-1.5, -2.5, 7.0, -2.0, 7.0, 7.0, -3.5, -2.5, 7.0, 7.0]], np.float32)
# r = log p/q: 1 for the desirable answer; -2 and 0.5 for the undesirable answers. With beta = 0.5 and z = 0.4:
#   desirable      1 - σ(0.5 · (1 - 0.4))     = 1 - σ(0.3)   = 0.425557
#   undesirable    1 - σ(0.5 · (0.4 + 2))     = 1 - σ(1.2)   = 0.231475
#                  1 - σ(0.5 · (0.4 - 0.5))   = 1 - σ(-0.05) = 0.512497
# The weights are 2 and 3. The derivative of 1 - σ(x) is -σ(x) · (1 - σ(x)).
LOSS = 2 * 0.425557 + 3 * (0.231475 + 0.512497)
SLOPES = [-0.5 * 2 * 0.244458, 0.5 * 3 * 0.177894, 0.5 * 3 * 0.249844]
DPO = DpoConfig(beta=0.5, loss_type='kto', desirable_weight=2.0, undesirable_weight=3.0)


@partial(jax.jit, static_argnames='dpo')
def terms_of(model, reference, weights, point, dpo=DPO):
    return answer_terms(model, reference, weights, SEGMENTS, point, dpo)


def test_the_loss_of_a_table():
    found = terms_of(MODEL, REFERENCE, WEIGHTS, jnp.array([0.4]))
    assert found._asdict() == pytest.approx(
        {
            'objective': LOSS,
            'answers': 3,
            'desirable': 1,
            'undesirable': 2,
            # The reward of the last answer is above the reference point.
            'accuracy': 2,
            'chosen_reward': 0.5,
            'rejected_reward': -1 + 0.25,
            'chosen_log_prob': -3,
            'rejected_log_prob': -4 - 5.5,
            'reference_point': 1.2,
        },
        rel=2e-6,
    )
    # Negative controls: another reference point, and exchanged model and reference.
    assert abs(terms_of(MODEL, REFERENCE, WEIGHTS, jnp.array([0.0])).objective - LOSS) > 0.1
    assert abs(terms_of(REFERENCE, MODEL, WEIGHTS, jnp.array([0.4])).objective - LOSS) > 0.1


def test_the_gradient_of_a_table():
    gradient = jax.grad(lambda *given: terms_of(*given).objective, argnums=(0, 1))
    by_model, by_reference = gradient(MODEL, REFERENCE, WEIGHTS, jnp.array([0.4]))
    desirable, first, second = SLOPES
    expected = [desirable, desirable, 0, first, 0, 0, second, second, 0, 0]
    np.testing.assert_allclose(by_model[0], expected, rtol=1e-5)
    assert not by_reference.any()


def test_apo_zero_has_no_reference_point():
    dpo = DpoConfig(beta=0.5, loss_type='apo_zero_unpaired')
    found = terms_of(MODEL, REFERENCE, WEIGHTS, None, dpo)
    losses = [1 / (1 + math.exp(0.5)), 1 / (1 + math.exp(1.0)), 1 / (1 + math.exp(-0.25))]
    assert found.objective == pytest.approx(sum(losses), rel=1e-6)
    assert found.reference_point == 0


def test_padding_may_be_nonfinite_and_answers_may_not():
    point, padding = jnp.array([0.4]), np.where(WEIGHTS == 0, np.nan, 0).astype(np.float32)
    assert terms_of(MODEL + padding, REFERENCE + padding, WEIGHTS, point).objective == pytest.approx(LOSS, rel=2e-6)
    broken = np.where(np.arange(10) == 3, np.nan, MODEL)
    assert np.isnan(terms_of(broken, REFERENCE, WEIGHTS, point).objective)
    nothing = terms_of(MODEL, REFERENCE, WEIGHTS * 0, point)
    assert list(nothing) == [0.0] * len(nothing)


def make_row(pairs):
    return pack([document for pair in pairs for document in pair], length=24)


def answers_of(batch, row=0):
    """Returns (prompt, answer) of each document of a row with nonzero weights."""
    found = []
    for segment in range(1, batch['segments'][row].max() + 1):
        (places,) = (batch['segments'][row] == segment).nonzero()
        targets = places[batch['weights'][row, places] > 0]
        if len(targets):
            assert (np.diff(targets) == 1).all()
            assert batch['positions'][row, places].tolist() == list(range(len(places)))
            prompt = batch['tokens'][row, places[0] : targets[0] + 1].tolist()
            found.append((prompt, batch['targets'][row, targets].tolist()))
    return found


A, B, C, D = ([1, 2], [11]), ([3], [12, 13, 14]), ([4, 5, 6], [15, 16]), ([7], [17])
ROWS = {
    # Prompt k precedes answer k + 1 of 3, modulo 3.
    'labels': ([(A, None), (None, B), (None, C)], [(A[0], B[1]), (B[0], C[1]), (C[0], A[1])]),
    'pairs': ([(A, B), (C, D)], [(A[0], C[1]), (B[0], D[1]), (C[0], A[1]), (D[0], B[1])]),
    # The answers of a pair are not exchanged with each other.
    'pair and label': ([(A, B), (C, None)], [(B[0], C[1]), (C[0], A[1])]),
    'one pair': ([(A, B)], []),
    'one label': ([(None, A)], []),
    'nothing': ([], []),
}


@pytest.mark.parametrize('name', ROWS)
def test_mismatched_answers(name):
    pairs, expected = ROWS[name]
    batch = make_row(pairs)
    assert len(answers_of(batch)) == sum(document is not None for pair in pairs for document in pair)
    permuted, count = jax.device_get(jax.jit(mismatched_answers)(batch))
    assert answers_of(permuted) == expected
    assert count == len(expected)
    assert sorted(permuted['tokens'][0]) == sorted(batch['tokens'][0])
    for key, array in batch.items():
        assert (permuted[key].shape, permuted[key].dtype) == (array.shape, array.dtype), key


def test_rows_are_permuted_independently():
    rows = [make_row(ROWS[name][0]) for name in ROWS]
    together, count = jax.jit(mismatched_answers)(jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows))
    for row, name in enumerate(ROWS):
        assert answers_of(jax.device_get(together), row) == ROWS[name][1]
    assert count == sum(len(expected) for _, expected in ROWS.values())
