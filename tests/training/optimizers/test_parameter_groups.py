"""Parameter groups: their syntax, the first match, their effect on each parameter, and errors that name near names."""

import jax
import numpy as np
import optax
import pytest

from maxlm.config import loading
from maxlm.config.serialization import from_json, to_json
from maxlm.errors import InputError
from maxlm.training.decisions.run_control import RunControl, with_rates
from maxlm.training.optimizers.optimizer import make_optimizer
from maxlm.training.optimizers.parameter_groups import check_groups, settings_of
from maxlm.training.optimizers.quantized_moments import Blocks
from maxlm.training.optimizers.schedule import make_schedule
from tests.messages import input_error
from tests.small import small_config, small_layout
from tests.training.optimizers.test_optimizer import AXES, PARAMETERS, by_path, moves, random_params, run

NAMES = ['.'.join(path) for path in PARAMETERS]
EMBEDDING, QUERY, BIAS = ('embedding',), ('blocks', 'query', 'kernel'), ('blocks', 'query', 'bias')
GROUPS = (
    ('*.bias', 'beta1=0.5', 'weight_decay=0.4'),
    ('embedding', 'learning_rate=0.25', 'beta2=0.5', 'eps=0.1', 'weight_decay=0'),
    ('blocks.query', 'learning_rate_ratio=3'),
)


def config_of(**settings):
    return small_config(**{f'optimizer__{key}': value for key, value in settings.items()})


def test_the_first_matching_pattern_applies():
    config = config_of(name='muon', learning_rate=0.5, adam_learning_rate=1.0, groups=GROUPS)
    # The bias is also in blocks.query, but in an earlier group.
    assert settings_of(config, BIAS)[:5] == (2.0, 0.5, 0.95, 1e-8, 0.4)
    assert settings_of(config, QUERY)[:5] == (3.0, 0.9, 0.95, 1e-8, 0.1)
    assert settings_of(config, EMBEDDING)[:5] == (0.5, 0.9, 0.5, 0.1, 0.0)
    assert settings_of(config, ('position_embedding',))[:5] == (2.0, 0.9, 0.95, 1e-8, 0.1)


def test_a_group_equals_a_run_with_its_settings():
    """Each parameter of a group moves as in a run whose section has the settings of the group."""
    grouped = by_path(run(steps=3, groups=GROUPS)[1])
    common = by_path(run(steps=3)[1])
    alone = {
        BIAS: {'beta1': 0.5, 'weight_decay': 0.4, 'weight_decay_mask': 'all'},
        EMBEDDING: {'learning_rate': 0.25, 'beta2': 0.5, 'eps': 0.1, 'weight_decay': 0.0},
        QUERY: {'learning_rate': 1.5},
    }
    for path, after in grouped.items():
        expected = by_path(run(steps=3, **alone[path])[1])[path] if path in alone else common[path]
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6, err_msg=str(path))
        assert np.allclose(after, common[path], atol=1e-3) == (path not in alone)


@pytest.mark.parametrize('moments', ['float32', 'int8'])
def test_the_state_has_the_same_structure(moments):
    def state_of(**settings):
        config = config_of(moment_dtype=moments, **settings)
        optimizer = make_optimizer(config, AXES, small_layout(config), make_schedule(config.optimizer, 20))
        return jax.eval_shape(optimizer.init, random_params(0))

    grouped, plain = state_of(groups=GROUPS, cautious_decay=True, weight_decay_schedule='cosine'), state_of()
    assert jax.tree.structure(grouped) == jax.tree.structure(plain)
    assert not any(isinstance(leaf, Blocks) for leaf in jax.tree.leaves(plain))


def test_cautious_decay_skips_elements_that_the_update_moves_away_from_zero():
    plain, cautious, none = (
        moves(weight_decay=decay, cautious_decay=on) for decay, on in ((0.1, False), (0.1, True), (0.0, False))
    )
    for path, param in by_path(random_params(0)).items():
        toward = none[path] * param <= 0
        np.testing.assert_allclose(cautious[path], np.where(toward, plain[path], none[path]), atol=1e-6)
    assert 0.2 < (none[QUERY] * np.array(by_path(random_params(0))[QUERY]) <= 0).mean() < 0.8


def test_the_cosine_of_the_decay_ends_with_the_run():
    """After n of 20 steps, the decay has the factor (1 + cos(π n / 20)) / 2; groups keep their own schedule."""
    settings = {'weight_decay_schedule': 'cosine', 'groups': (('embedding', 'weight_decay_schedule=constant'),)}
    factors = {EMBEDDING: [1, 1, 1], QUERY: [(1 + np.cos(np.pi * n / 20)) / 2 for n in range(3)]}
    for path, each in factors.items():
        without, decayed = (by_path(run(steps=3, weight_decay=decay, **settings)[1]) for decay in (0.0, 0.1))
        value = gap = 0
        for step, factor in enumerate(each):
            before = by_path(run(steps=step, weight_decay=0.1, **settings)[1])[path]
            gap = gap - 0.5 * 0.1 * factor * np.array(before)
            value = np.array(decayed[path]) - np.array(without[path])
        np.testing.assert_allclose(value, gap, atol=1e-6)


def test_command_line_and_files_give_the_same_groups(tmp_path):
    path = tmp_path / 'base.py'
    lines = [
        'from maxlm.config.loading import default',
        'def get_config():',
        '    config = default()',
        '    config.model.num_layers, config.model.dim, config.model.num_heads = 1, 8, 1',
        '    config.data.seq_len, config.data.path = 8, "data"',
        '    config.train.num_steps = config.train.global_batch_size = 8',
        f'    config.optimizer.groups = {GROUPS!r}',
        '    return config',
    ]
    path.write_text('\n'.join(lines))
    config = loading.load(str(path))
    assert config.optimizer.groups == GROUPS
    assert from_json(to_json(config)) == config
    assert loading.override(config, ["optimizer.groups=(('head', 'beta1=0.5'),)"]).optimizer.groups == (
        ('head', 'beta1=0.5'),
    )


@pytest.mark.parametrize(
    ('groups', 'message'),
    [
        (('embedding', 'beta1=0.5'), "'embedding' is not a pattern and its settings; use ((.*"),
        ((('embedding',),), "('embedding',) is not a pattern and its settings"),
        ((('embedding', {'beta1': 0.5}),), 'is not a pattern and its settings'),
        ((('embedding', 'beta3=0.5'),), "'beta3=0.5' is not KEY=VALUE; did you mean 'beta"),
        ((('embedding', 'beta1'),), "'beta1' is not KEY=VALUE"),
        ((('embedding', 'beta1=x'),), "'embedding': optimizer.beta1='x': must be a number"),
        ((('embedding', 'beta1=1'),), 'optimizer.beta1=1.0: must be at least 0 and below 1'),
        ((('embedding', 'learning_rate_ratio=0'),), 'learning_rate_ratio=0.0: must be greater than 0'),
        ((('embedding', 'beta1=0.5', 'beta1=0.6'),), 'beta1 is set twice'),
        ((('embedding', 'learning_rate=1', 'learning_rate_ratio=1'),), 'sets learning_rate and learning_rate_ratio'),
    ],
)
def test_wrong_groups_are_refused(groups, message):
    with pytest.raises(InputError) as error:
        config_of(groups=groups)
    assert str(error.value).startswith('optimizer.groups: ')
    assert message.removesuffix('(.*') in str(error.value)


@pytest.mark.parametrize(
    ('groups', 'settings', 'message'),
    [
        ((('embeding', 'beta1=0.5'),), {}, "'embeding' matches no parameter; nearest: embedding"),
        ((('*.qery', 'beta1=0.5'),), {}, 'nearest: blocks.query.kernel, blocks.query.bias'),
        ((('x', 'beta1=0.5'),), {}, 'choose from: embedding, position_embedding, '),
        ((('embedding', 'beta1=0.5'),), {'frozen_params': ('embedding',)}, 'matches only parameters that are not'),
        ((('blocks', 'beta1=0.5'), ('*.bias', 'beta1=0.6')), {}, "'*.bias' matches only parameters of groups before"),
        ((('*.kernel', 'beta1=0.5'),), {'name': 'muon', 'frozen_params': ('head',)}, 'sets beta1, but muon trains'),
    ],
)
def test_groups_without_effect_are_refused(groups, settings, message):
    with input_error(message):
        check_groups(config_of(groups=groups, **settings), NAMES)
    # Negative control: the groups of the other tests are usable.
    check_groups(config_of(groups=GROUPS), NAMES)


def test_a_rollback_scales_the_rates_of_groups():
    config = config_of(learning_rate=0.5, groups=GROUPS)
    scaled = with_rates(config, RunControl()._replace(rate_factor=0.5))
    for path in PARAMETERS:
        before, after = settings_of(config, path), settings_of(scaled, path)
        # The ratio stays, and the rate to which it applies is scaled.
        np.testing.assert_allclose(after.rate_ratio, before.rate_ratio, rtol=1e-6)
        assert after[1:] == before[1:]
    assert scaled.optimizer.learning_rate == 0.25


def test_own_constants_of_adam_equal_optax():
    """With a group whose values are those of the section, the result is that of optax."""
    grouped = run(steps=3, beta1=0.8, groups=(('embedding', 'beta1=0.7'),))[1]
    expected, optimizer = random_params(0), optax.adamw(0.5, b1=0.7, b2=0.95, eps=1e-8, weight_decay=0.1)
    state = optimizer.init(expected)
    for step in range(3):
        updates, state = optimizer.update(random_params(step + 1), state, expected)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(by_path(grouped)[EMBEDDING], expected['embedding'], rtol=1e-6, atol=1e-7)
