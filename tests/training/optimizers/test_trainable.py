"""Frozen and trainable parameters, selected by pattern; frozen ones have no optimizer state."""

import functools

import jax
import numpy as np
import optax
import pytest

from maxlm.errors import InputError
from maxlm.training.optimizers.trainable import is_trained, merge_trainable, param_paths, trainable
from maxlm.training.state import abstract_state, init_state
from maxlm.training.step import make_train_step
from tests.small import small_batch, small_config, small_layout, small_state


def flat(tree):
    return dict(zip(param_paths(tree), jax.tree.leaves(tree), strict=True))


# Neither warm-up nor clipping reduces the first update.
PLAIN = {'model__num_layers': 1, 'model__dim': 16, 'model__num_heads': 2}
PLAIN |= {'optimizer__warmup_steps': 0, 'optimizer__max_grad_norm': 0.0}
FROZEN = ('embedding', 'blocks.attention')


def step_of(config):
    layout = small_layout(config)
    before = small_state(config, layout)
    batch = layout.put_batch(small_batch(config), config.train.global_batch_size)
    after, metrics = jax.jit(make_train_step(config, layout))(before, batch)
    return jax.device_get((before, after, metrics))


@pytest.fixture(scope='module')
def partly_frozen():
    config = small_config(**PLAIN, optimizer__frozen_params=FROZEN)
    return config, *step_of(config)


def test_frozen_parameters_stay(partly_frozen):
    config, before, after, _ = partly_frozen
    for name, old in flat(before.params).items():
        stays = name == 'embedding' or name.startswith('blocks.attention.')
        assert np.array_equal(old, flat(after.params)[name]) == stays, name
        assert is_trained(config, name) != stays


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_frozen_parameters_have_no_moments(name):
    config = small_config(optimizer__name=name, optimizer__frozen_params=FROZEN)
    state = abstract_state(config, small_layout(config))
    moments = {str(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)}
    assert any('feedforward' in path for path in moments)
    # The norm before attention belongs to a different module.
    assert not any("'attention'" in path or "'embedding'" in path for path in moments)


def test_trainable_parameters_move_as_in_full_training(partly_frozen):
    _, _, some, part = partly_frozen
    _, everything, full_metrics = step_of(small_config(**PLAIN))
    for name, moved in flat(some.params).items():
        if name != 'embedding' and not name.startswith('blocks.attention.'):
            # A thousandth of the learning rate: Adam's first update depends on the rounding of tiny gradients.
            np.testing.assert_allclose(moved, flat(everything.params)[name], atol=1e-5)
    # The gradient norm covers only trainable parameters.
    assert 0 < part['grad_norm'] < full_metrics['grad_norm']


def test_trainable_overrides_frozen_also_for_the_average():
    settings = {
        'optimizer__frozen_params': ('*',),
        'optimizer__trainable_params': ('final_norm',),
        'optimizer__ema_decay': 0.9,
    }
    before, after, _ = step_of(small_config(**PLAIN, **settings))
    moved = {n for n, old in flat(before.params).items() if not np.array_equal(old, flat(after.params)[n])}
    assert moved
    assert all(name.startswith('final_norm') for name in moved)
    averaged = {n for n, old in flat(before.ema).items() if not np.array_equal(old, flat(after.ema)[n])}
    assert averaged == moved


def test_patterns_without_match_are_refused():
    for key, patterns, fragments in (
        (
            'frozen_params',
            ('blocks.attnetion.*',),
            r"optimizer\.frozen_params: 'blocks\.attnetion\.\*' matches no parameter; choose from: ",
        ),
        ('trainable_params', ('absent',), r"optimizer\.trainable_params: 'absent' matches no parameter"),
        ('frozen_params', ('*',), 'freezes all parameters'),
    ):
        config = small_config(**{f'optimizer__{key}': patterns})
        with pytest.raises(InputError, match=fragments):
            abstract_state(config, small_layout(config))
    with pytest.raises(InputError, match='use patterns'):
        small_config(optimizer__frozen_params=(3,))
    with pytest.raises(
        InputError, match=r'mesh\.host_offload=all with optimizer\.frozen_params.*mesh\.host_offload=none'
    ):
        small_config(optimizer__frozen_params=('embedding',), mesh__host_offload='all')


def test_trainable_parameters_are_merged():
    tree = {'embedding': 1, 'blocks': {'attention': {'query': 2, 'key': 3}, 'norm': 4}}
    config = small_config(optimizer__frozen_params=('blocks.attention.query', '*.norm'))
    part = trainable(config, tree)
    assert part == {'embedding': 1, 'blocks': {'attention': {'key': 3}}}
    new = jax.tree.map(lambda value: -value, part)
    assert merge_trainable(tree, new) == {'embedding': -1, 'blocks': {'attention': {'query': 2, 'key': -3}, 'norm': 4}}
    # If all parameters are trainable, the tree and the program are unchanged.
    assert trainable(small_config(), tree) is tree


def test_moments_are_sharded_as_their_parameters():
    config = small_config(
        num_devices=8,
        mesh__tensor=2,
        model__vocab_size=64,
        optimizer__frozen_params=('embedding',),
        optimizer__moment_dtype='int8',
    )
    layout = small_layout(config)
    abstract, state = abstract_state(config, layout), jax.eval_shape(lambda: init_state(config, layout))
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for expected, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
    mu = optax.tree.get(abstract.opt_state, 'mu')
    assert 'embedding' not in mu
    query = ('blocks', 'attention', 'query', 'kernel')
    moment, param = (functools.reduce(lambda tree, key: tree[key], query, tree) for tree in (mu, abstract.params))
    assert moment.sharding == param.sharding
