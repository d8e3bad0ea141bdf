"""Tests that the keys of advantages, losses and dynamic sampling of section grpo must be consistent."""

import pytest

from maxlm.config.loading import build, default
from maxlm.config.validation_rl import check_grpo
from maxlm.errors import InputError

GAE = {'grpo__advantage_estimator': 'gae'}


def make(**settings):
    values = default()
    values.model.num_layers, values.model.dim, values.model.num_heads = 1, 8, 1
    values.train.num_steps, values.train.global_batch_size, values.train.objective = 1, 16, 'grpo'
    values.train.init_from, values.grpo.prompts, values.grpo.max_completion_length = 'start', 'prompts.jsonl', 8
    values.eval.interval = 0
    for key, value in settings.items():
        section, name = key.split('__')
        values[section][name] = value
    config = build(values)
    check_grpo(config)
    return config


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        *(
            ({f'grpo__{key}': value}, [f'grpo.{key}={value}', 'no effect', 'grpo.advantage_estimator=grpo'])
            for key, value in {'gamma': 0.9, 'lam': 0.9, 'vf_coef': 0.2, 'cliprange_value': 0.1}.items()
        ),
        ({**GAE, 'grpo__scale_rewards': False}, ['grpo.scale_rewards=False', 'grpo.advantage_estimator=gae']),
        (
            {'grpo__loss_type': 'cispo', 'grpo__epsilon_high': 5.0, 'grpo__epsilon': 0.1},
            ['grpo.epsilon=0.1', 'no effect', 'grpo.loss_type=cispo'],
        ),
        ({'grpo__kl_estimator': 'k1'}, ['grpo.kl_estimator=k1', 'no effect', 'grpo.kl_coef=0']),
        ({'grpo__kl_in_reward': True}, ['grpo.kl_in_reward=True', 'no effect', 'grpo.kl_coef=0']),
        ({'grpo__num_generations': 1}, ['grpo.num_generations=1', 'grpo.advantage_estimator=grpo', 'gae']),
        (
            {'grpo__num_generations': 1, 'grpo__advantage_estimator': 'rloo'},
            ['grpo.num_generations=1', 'grpo.advantage_estimator=rloo'],
        ),
        ({'grpo__loss_type': 'cispo'}, ['grpo.epsilon_high=0.2', 'grpo.loss_type=cispo', '5']),
        (
            {'grpo__max_num_gen_batches': 2, 'grpo__max_staleness': 1},
            ['grpo.max_num_gen_batches=2', 'grpo.max_staleness=1'],
        ),
        ({'grpo__max_tool_calls': 3}, ['grpo.max_tool_calls=3', 'no effect', 'grpo.tools=()']),
        ({'grpo__max_num_gen_batches': 2, **GAE}, ['grpo.max_num_gen_batches=2', 'grpo.advantage_estimator=gae']),
    ],
)
def test_invalid_settings_are_rejected(settings, fragments):
    with pytest.raises(InputError) as error:
        make(**settings)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    'settings',
    [
        {},
        {**GAE, 'grpo__gamma': 0.9, 'grpo__lam': 1.0, 'grpo__vf_coef': 0.5, 'grpo__num_generations': 1},
        {'grpo__kl_coef': 0.1, 'grpo__kl_estimator': 'k2', 'grpo__kl_in_reward': True},
        {'grpo__loss_type': 'cispo', 'grpo__epsilon_high': 5.0},
        {'grpo__max_num_gen_batches': 2},
    ],
)
def test_valid_settings_are_accepted(settings):
    make(**settings)


def test_only_ppo_has_a_value_head():
    assert make(**GAE).model.value_head
    assert not make().model.value_head
    # The model of another run is that of its config.
    assert not make(model__value_head=True).model.value_head
