"""Tests the conversion of responses to training rows."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.rl.generation.responses import Responses
from maxlm.rl.generation.rollout_generator import Sampler
from maxlm.rl.rewards.scorer import RewardScorer
from maxlm.rl.rollout_batch import KL, gather_scores, make_passes, response_rows, scored_rows, with_advantages
from maxlm.training.batch import OLD_VALUES, PROXIMAL, RETURNS
from maxlm.training.forward import make_forward, make_log_probs
from maxlm.training.losses.advantages import advantages, generalized_advantages, whitened
from maxlm.training.state import init_state
from tests.small import small_config, small_layout

T, R = 24, 10
PROMPTS = [[3, 5, 7], [11], [2, 4, 6, 8, 10, 12, 14]]


def config_of(**overrides):
    return small_config(
        data__seq_len=T,
        train__global_batch_size=6,
        grpo__num_generations=2,
        grpo__max_completion_length=R,
        model__init_std=0.3,
        **overrides,
    )


@pytest.fixture(scope='module', params=['gpt2', 'llama'])
def sampled(request):
    """Returns a model, its responses to each prompt, and the rows that contain them."""
    config = config_of(model__family=request.param)
    layout = small_layout(config)
    params = init_state(config, layout).params
    responses = Sampler(config, layout, ends=(1, 13), max_prompt=T - R, max_tokens=R)(
        params, PROMPTS, seed=0, num_samples=2
    )
    prompts = [np.array(prompt, np.uint32) for prompt in PROMPTS for _ in range(2)]
    rewards = np.array([1, 0, 1, 1, 0, 1], np.float32)
    rows = response_rows(config, prompts, responses)
    return config, layout, params, responses, with_advantages(config, rows, rewards)[0]


def test_step_recomputes_the_log_probabilities_of_the_sampler(sampled):
    config, layout, params, responses, batch = sampled
    placed = layout.put_batch(batch, 6)
    log_probs = jax.jit(make_log_probs(config, layout))
    found = np.asarray(log_probs(params, None, placed, None).log_probs_BT)
    predicted = batch['predicted'] > 0
    assert predicted.sum() == responses.drawn
    assert np.abs(found - batch['old_log_probs'])[predicted].max() < 1e-4
    # Negative control: values of the neighboring token differ.
    for shift in (-1, 1):
        shifted = np.roll(batch['old_log_probs'], shift, axis=1)
        assert np.abs(found - shifted)[predicted].max() > 0.1
    other = layout.put_batch({**batch, 'targets': (batch['targets'] + 1) % 61}, 6)
    wrong = np.asarray(log_probs(params, None, other, None).log_probs_BT)
    assert np.abs(wrong - batch['old_log_probs'])[predicted].max() > 0.1


def test_proximal_log_probabilities_are_those_of_the_sampler(sampled):
    config, layout, params, _, batch = sampled
    # Three rows at a time.
    train = dataclasses.replace(config.train, per_device_batch_size=3)
    grpo = dataclasses.replace(config.grpo, max_staleness=1, prompts_per_rollout=3, num_iterations=2)
    passes = make_passes(dataclasses.replace(config, train=train, grpo=grpo), layout)
    predicted = batch['predicted'] > 0

    def proximal(params):
        found = passes(types.SimpleNamespace(params=params, reference=None), batch)
        assert found.keys() == {PROXIMAL}
        return found[PROXIMAL]

    assert np.abs(proximal(params) - batch['old_log_probs'])[predicted].max() < 1e-4
    # Negative control: other parameters.
    other = jax.tree.map(lambda leaf: 0.9 * leaf, params)
    assert np.abs(proximal(other) - batch['old_log_probs'])[predicted].max() > 0.01


def test_synchronous_rollouts_need_no_passes(sampled):
    assert make_passes(*sampled[:2]) is None


def test_passes_give_values_and_the_reference(sampled):
    config, layout, params, _, batch = sampled
    grpo = dataclasses.replace(config.grpo, advantage_estimator='gae', kl_coef=0.1, kl_in_reward=True)
    train = dataclasses.replace(config.train, objective='grpo', per_device_batch_size=3)
    ppo = dataclasses.replace(config, model=dataclasses.replace(config.model, value_head=True), grpo=grpo, train=train)
    kernel = np.random.default_rng(0).normal(size=(config.model.dim, 1)).astype(np.float32)
    params = {**params, 'value_head': {'kernel': kernel}}
    passes, predicted = make_passes(ppo, layout), batch['predicted'] > 0
    other = jax.tree.map(lambda leaf: 0.9 * leaf, params)
    found, same = (passes(types.SimpleNamespace(params=params, reference=each), batch) for each in (other, params))
    log_probs = make_log_probs(ppo, layout)(other, None, layout.put_batch(batch, 6), None).log_probs_BT
    log_ratio = np.where(predicted, batch['old_log_probs'] - np.asarray(log_probs), 0)
    np.testing.assert_allclose(found[KL], np.exp(-log_ratio) - 1 + log_ratio, atol=1e-4)
    assert found[KL].max() > 0.01
    # A policy does not differ from itself.
    assert np.abs(same[KL]).max() < 1e-4
    hidden, *_ = make_forward(ppo, layout)(params, None, layout.put_batch(batch, 6), None)
    np.testing.assert_allclose(found[OLD_VALUES], np.asarray(hidden) @ kernel[:, 0], rtol=1e-4, atol=1e-5)
    assert found[OLD_VALUES][predicted].std() > 0.1


GAE = GrpoConfig(num_generations=1, advantage_estimator='gae', kl_coef=0.1, kl_in_reward=True, kl_estimator='k1')


def rows_of_table():
    """Returns two responses of two tokens and one token, with values and KL divergences."""
    predicted = np.array([[0, 1, 1, 0], [0, 0, 1, 0]], np.float32)
    kl = np.array([[0, 0.5, -1, 0], [0, 0, 2, 0]], np.float32)
    values = np.array([[5, 0.2, 0.4, 5], [5, 5, -0.5, 5]], np.float32)
    return {'predicted': predicted, KL: kl, OLD_VALUES: values}


def test_reward_and_kl_are_those_of_the_tokens():
    """The reward is that of the last token, and each token pays for its KL divergence (Ziegler et al. 2019)."""
    config = types.SimpleNamespace(grpo=GAE)
    rows = rows_of_table()
    batch, metrics = with_advantages(config, rows, np.array([1, -1], np.float32))
    rewards = np.array([[0, -0.05, 1 + 0.1, 0], [0, 0, -1 - 0.2, 0]])
    expected = generalized_advantages(rewards, rows[OLD_VALUES], rows['predicted'], GAE)
    np.testing.assert_allclose(batch[RETURNS], expected.returns, rtol=1e-5)
    np.testing.assert_allclose(batch['advantages'], whitened(expected.advantages, rows['predicted']), rtol=1e-5)
    np.testing.assert_allclose(metrics['rollout/kl'], (0.5 - 1 + 2) / 3, rtol=1e-6)
    np.testing.assert_array_equal(batch['weights'], rows['predicted'])
    assert KL not in batch


def test_kl_of_a_response_lowers_its_reward():
    """Ahmadian et al. 2024: the KL divergence of the response is subtracted before the baseline."""
    grpo = dataclasses.replace(GAE, num_generations=2, advantage_estimator='rloo')
    rows = rows_of_table()
    del rows[OLD_VALUES]
    batch, _ = with_advantages(types.SimpleNamespace(grpo=grpo), rows, np.array([1, 1], np.float32))
    shaped = [1 - 0.1 * (0.5 - 1), 1 - 0.1 * 2]
    expected = np.array([[shaped[0] - shaped[1]], [shaped[1] - shaped[0]]])
    np.testing.assert_allclose(batch['advantages'], rows['predicted'] * expected, rtol=1e-5)
    # Equal rewards, but different divergences.
    np.testing.assert_array_equal(batch['weights'], rows['predicted'])


USED = np.array([True, False, True, True, True, False, False, False])
REWARDS = np.array([1, 100, 2, 6, -3, 7, 8, 9], np.float32)


def table_of_groups():
    """Returns two groups of four responses; response n has n % 3 + 1 tokens with the value n."""
    rng, lengths = np.random.default_rng(0), np.arange(8) % 3 + 1
    predicted = (np.arange(4) < lengths[:, None]).astype(np.float32)
    kl = (rng.normal(size=predicted.shape) * predicted).astype(np.float32)
    values = np.repeat(np.arange(8, dtype=np.float32)[:, None], 4, axis=1)
    return {'predicted': predicted, KL: kl, OLD_VALUES: values}


@pytest.mark.parametrize('estimator', ['grpo', 'rloo'])
def test_only_used_responses_are_compared(estimator):
    """Groups shrink to their used responses, and a response without others has weight 0."""
    grpo = GrpoConfig(num_generations=4, advantage_estimator=estimator, kl_coef=0.1, kl_in_reward=True)
    rows = table_of_groups()
    shaped = (REWARDS - 0.1 * rows[KL].sum(axis=1))[[0, 2, 3]]
    batch, metrics = with_advantages(types.SimpleNamespace(grpo=grpo), rows, REWARDS, USED)
    if estimator == 'rloo':
        expected = [shaped[i] - np.delete(shaped, i).mean() for i in range(3)]
    else:
        expected = (shaped - shaped.mean()) / (shaped.std(ddof=1) + 1e-6)
    found = batch['advantages'][:, 0]
    np.testing.assert_allclose(found[[0, 2, 3]], expected, rtol=1e-5)
    assert not found[[1, 4, 5, 6, 7]].any()
    assert batch['weights'].any(axis=1).tolist() == [True, False, True, True, False, False, False, False]
    used_tokens = rows['predicted'][USED].sum()
    np.testing.assert_allclose(metrics['rollout/kl'], rows[KL][USED].sum() / used_tokens, rtol=1e-5)


def test_values_are_whitened_over_used_responses():
    grpo, rows = dataclasses.replace(GAE, num_generations=4), table_of_groups()
    batch, metrics = with_advantages(types.SimpleNamespace(grpo=grpo), rows, REWARDS, USED)
    # The used responses alone give the same batch, also the one whose group has no other.
    alone = {name: values[USED] for name, values in rows.items()}
    one = dataclasses.replace(grpo, num_generations=1)
    expected, of_alone = with_advantages(types.SimpleNamespace(grpo=one), alone, REWARDS[USED])
    for name in ('advantages', RETURNS, 'weights'):
        np.testing.assert_allclose(batch[name][USED], expected[name], rtol=1e-6)
        assert expected[name].any()
    assert not batch['weights'][~USED].any()
    assert not batch['advantages'][~USED].any()
    assert metrics == pytest.approx(of_alone)
    # Negative control: the others change the whitening if they are used.
    whole, _ = with_advantages(types.SimpleNamespace(grpo=grpo), rows, REWARDS)
    assert not np.allclose(whole['advantages'][USED], expected['advantages'], rtol=1e-2)


def test_packed_responses_have_the_same_log_probabilities(sampled):
    """Checks that responses in one row do not attend to each other, like packed documents."""
    config, layout, params, _, batch = sampled
    lengths = (batch['segments'] > 0).sum(axis=1)
    packed = {name: np.zeros((3, 2 * T), rows.dtype) for name, rows in batch.items()}
    for row in range(6):
        start = 0 if row % 2 == 0 else lengths[row - 1]
        columns = slice(start, start + lengths[row])
        for name, rows in batch.items():
            packed[name][row // 2, columns] = rows[row, : lengths[row]]
        packed['segments'][row // 2, columns] = 1 + row % 2
    wide = small_config(
        data__seq_len=2 * T, train__global_batch_size=3, model__family=config.model.family, model__max_positions=2 * T
    )
    if config.model.position_embedding == 'learned':
        # Positions restart in each document, so padding the table does not change the result.
        params = {**params, 'position_embedding': np.pad(np.asarray(params['position_embedding']), [(0, T), (0, 0)])}
    log_probs = jax.jit(make_log_probs(wide, layout))
    found = np.asarray(log_probs(params, None, layout.put_batch(packed, 3), None).log_probs_BT)
    predicted = packed['predicted'] > 0
    assert np.abs(found - packed['old_log_probs'])[predicted].max() < 1e-4
    together = {**packed, 'segments': np.minimum(packed['segments'], 1)}
    found = np.asarray(log_probs(params, None, layout.put_batch(together, 3), None).log_probs_BT)
    assert np.abs(found - packed['old_log_probs'])[predicted].max() > 0.01


def test_rows_are_prompts_and_responses(sampled):
    config, _, _, responses, batch = sampled
    repeated = [prompt for prompt in PROMPTS for _ in range(2)]
    expected = advantages(np.array([1, 0, 1, 1, 0, 1], np.float32), config.grpo)
    for row, prompt in enumerate(repeated):
        num = responses.num_B[row]
        ids = [*prompt, *responses.tokens_BR[row, :num]]
        assert batch['tokens'][row, : len(ids) - 1].tolist() == ids[:-1]
        where = batch['predicted'][row] > 0
        assert batch['targets'][row, where].tolist() == responses.tokens_BR[row, :num].tolist()
        assert set(batch['advantages'][row, where]) == {expected[row]}
        assert batch['positions'][row, : len(ids) - 1].tolist() == list(range(len(ids) - 1))
        assert not batch['segments'][row, len(ids) - 1 :].any()
        # Responses to the second prompt have equal rewards, so their weights are zero.
        assert (batch['weights'][row] > 0).tolist() == (where & (row not in (2, 3))).tolist()


def test_each_process_scores_its_share(monkeypatch):
    texts, tasks = [f'{number}' for number in range(5)], [{'answer': str(n % 2)} for n in range(5)]
    with RewardScorer('numeric') as scorer:
        expected = gather_scores(scorer.score(texts[scored_rows(5)], tasks[scored_rows(5)]), 5)
        assert expected.rewards.tolist() == [1, 1, 0, 0, 0]
        scores = []
        monkeypatch.setattr(jax, 'process_count', lambda: 2)
        for process in range(2):
            monkeypatch.setattr(jax, 'process_index', lambda process=process: process)
            monkeypatch.setattr(
                'maxlm.rl.rollout_batch.multihost_utils',
                types.SimpleNamespace(process_allgather=lambda tree, tiled: scores.append(tree) or tree),
            )
            gather_scores(scorer.score(texts[scored_rows(5)], tasks[scored_rows(5)]), 5)
    assert [len(each.rewards) for each in scores] == [3, 3]
    assert [*scores[0].rewards, *scores[1].rewards][:5] == expected.rewards.tolist()


def test_truncated_response_fits():
    config = config_of()
    tokens = np.full((2, R), 9, np.int32)
    responses = Responses(tokens, np.full((2, R), -1, np.float32), np.array([R, R]), np.array([False, False]), 0)
    prompt = np.arange(T - R, dtype=np.uint32)
    rows = response_rows(config, [prompt, prompt], responses)
    batch, _ = with_advantages(config, rows, np.array([0, 1], np.float32))
    assert batch['predicted'].sum(axis=1).tolist() == [R, R]
    assert batch['segments'].sum() == 2 * (T - 1)
    assert GrpoConfig().loss_type == 'dapo'
    assert batch['weights'].sum() == 2 * R
