"""Memory and operations of reward models and value heads in plans."""

import dataclasses
import math

import jax

from maxlm.planning.estimate.memory import estimate_memory
from maxlm.planning.estimate.state_bytes import planned_state_bytes, scorer_bytes, state_bytes
from maxlm.training.flops import step_flops, training_flops
from maxlm.training.state import abstract_params, abstract_state
from tests.small import small_config, small_layout

WIDE = {'model__family': 'llama', 'model__vocab_size': 4096}
GRPO = {'train__objective': 'grpo', 'grpo__reward': 'reward_model', 'grpo__reward_model': 'runs/reward'}


def test_the_state_of_a_reward_model_has_the_planned_size():
    config = small_config(4, train__objective='reward', mesh__fsdp=4, **WIDE)
    planned, exact = planned_state_bytes(config), state_bytes(abstract_state(config, small_layout(config)))
    assert planned.parameters == exact.parameters
    # Plans leave out the counters of the optimizer.
    assert exact.moments - planned.moments == 8
    # The head has one output instead of one for each token.
    language = small_config(4, mesh__fsdp=4, model__tie_embeddings=False, **WIDE)
    fewer = planned_state_bytes(language).parameters - planned_state_bytes(config).parameters
    assert fewer == (config.model.vocab_size - 1) * config.model.dim * 4 // 4


def test_products_of_a_vocabulary_do_not_count():
    reward, language = (small_config(train__objective=name, **WIDE).model for name in ('reward', 'next_token'))
    saved = training_flops(language, 16).full - training_flops(reward, 16).full
    assert saved == 6 * reward.dim * (reward.vocab_size - 1)


def test_the_reward_model_of_rollouts_is_part_of_the_memory():
    config = small_config(2, mesh__fsdp=2, **WIDE, **GRPO)
    # Without a checkpoint, it has the size of the policy.
    assert dataclasses.replace(config.scorer, reward_head=False) == dataclasses.replace(
        config.model, remat_policy='none', dropout=0.0
    )
    shapes = jax.tree.leaves(abstract_params(config.of_scorer, small_layout(config)))
    size = sum(4 * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in shapes)
    without = dataclasses.replace(config, scorer=None)
    assert estimate_memory(config, 'gpu').reward_model == scorer_bytes(config) == size > 0
    assert estimate_memory(config, 'gpu').total - estimate_memory(without, 'gpu').total == size


def test_the_state_of_ppo_has_the_planned_size():
    ppo = {'train__objective': 'grpo', 'grpo__advantage_estimator': 'gae'}
    config = small_config(4, mesh__fsdp=4, **ppo, **WIDE)
    planned, exact = planned_state_bytes(config), state_bytes(abstract_state(config, small_layout(config)))
    assert planned.parameters == exact.parameters
    assert exact.moments - planned.moments == 8
    # The value head.
    plain = small_config(4, mesh__fsdp=4, train__objective='grpo', **WIDE)
    assert planned.parameters - planned_state_bytes(plain).parameters == config.model.dim * 4 // 4
    assert training_flops(config.model, 16).full - training_flops(plain.model, 16).full == 6 * config.model.dim


def test_a_divergence_in_the_rewards_is_not_computed_by_the_step():
    kl = {'train__objective': 'grpo', 'grpo__kl_coef': 0.1, 'train__init_from': 'base'}
    loss, reward = (small_config(**kl, grpo__kl_in_reward=each, **WIDE) for each in (False, True))
    without = step_flops(small_config(train__objective='grpo', **WIDE), 16).full
    assert step_flops(reward, 16).full == without
    assert step_flops(loss, 16).full == without * 4 / 3
