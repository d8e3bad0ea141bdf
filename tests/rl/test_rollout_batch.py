"""Tests the conversion of responses to training rows."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.rl.responses import Responses
from maxlm.rl.rewards.scorer import RewardScorer
from maxlm.rl.rollout_batch import gather_scores, make_proximal, response_batch, scored_rows
from maxlm.rl.rollout_generator import Sampler
from maxlm.training.forward import make_log_probs
from maxlm.training.losses.grpo import advantages
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
    return config, layout, params, responses, response_batch(config, prompts, responses, rewards)


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
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, per_device_batch_size=3))
    proximal = make_proximal(config, layout)
    predicted = batch['predicted'] > 0
    assert np.abs(proximal(params, batch) - batch['old_log_probs'])[predicted].max() < 1e-4
    # Negative control: other parameters.
    other = jax.tree.map(lambda leaf: 0.9 * leaf, params)
    assert np.abs(proximal(other, batch) - batch['old_log_probs'])[predicted].max() > 0.01


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
    batch = response_batch(config, [prompt, prompt], responses, np.array([0, 1], np.float32))
    assert batch['predicted'].sum(axis=1).tolist() == [R, R]
    assert batch['segments'].sum() == 2 * (T - 1)
    assert GrpoConfig().loss_type == 'dapo'
    assert batch['weights'].sum() == 2 * R
