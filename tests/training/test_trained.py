"""What is trained and what stays: by pattern, with no state of the optimizer for the rest."""

import jax
import numpy as np
import optax
import pytest

from maxlm.errors import InputError
from maxlm.training.state import abstract_state, init_state
from maxlm.training.step import make_train_step
from maxlm.training.trained import dotted_names, is_trained, trained_part, with_trained
from tests.small import small_batch, small_config, small_layout


def flat(tree):
    return dict(zip(dotted_names(tree), jax.tree.leaves(tree), strict=True))


def step_of(config):
    layout = small_layout(config)
    before = init_state(config, layout)
    batch = layout.put_batch(small_batch(config), config.train.global_batch)
    after, metrics = jax.jit(make_train_step(config, layout))(before, batch)
    return jax.device_get((before, after, metrics))


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_frozen_parameters_stay_and_have_no_moments(name):
    frozen = ('embedding', 'blocks.attention')
    config = small_config(optimizer__name=name, optimizer__frozen=frozen, optimizer__warmup_steps=0)
    before, after, _ = step_of(config)
    for name, old in flat(before.params).items():
        stays = name == 'embedding' or name.startswith('blocks.attention.')
        assert np.array_equal(old, flat(after.params)[name]) == stays, name
        assert is_trained(config, name) != stays
    moments = {path for leaf in jax.tree_util.tree_leaves_with_path(after.opt_state) for path in [str(leaf[0])]}
    assert any('feedforward' in path for path in moments)
    # The norm before attention is another module.
    assert not any("'attention'" in path or "'embedding'" in path for path in moments)


def test_the_others_move_as_they_would_with_all():
    config = small_config(optimizer__warmup_steps=0, optimizer__clip_norm=0.0)
    _, everything, whole = step_of(config)
    _, some, part = step_of(
        small_config(optimizer__warmup_steps=0, optimizer__clip_norm=0.0, optimizer__frozen=('embedding',))
    )
    for name, moved in flat(some.params).items():
        if name != 'embedding':
            np.testing.assert_allclose(moved, flat(everything.params)[name], atol=1e-6)
    # The norm is that of what is trained.
    assert 0 < part['grad_norm'] < whole['grad_norm']


def test_trained_wins_over_frozen_and_the_average_moves_with_it():
    config = small_config(
        optimizer__frozen=('*',),
        optimizer__trained=('final_norm',),
        optimizer__warmup_steps=0,
        optimizer__ema_decay=0.9,
    )
    before, after, _ = step_of(config)
    moved = {n for n, old in flat(before.params).items() if not np.array_equal(old, flat(after.params)[n])}
    assert moved
    assert all(name.startswith('final_norm') for name in moved)
    averaged = {n for n, old in flat(before.ema).items() if not np.array_equal(old, flat(after.ema)[n])}
    assert averaged == moved


def test_patterns_that_name_nothing_are_refused():
    for key, patterns, words in (
        (
            'frozen',
            ('blocks.attnetion.*',),
            r"optimizer\.frozen: 'blocks\.attnetion\.\*' names no parameter; there are: ",
        ),
        ('trained', ('had',), r"optimizer\.trained: 'had' names no parameter"),
        ('frozen', ('*',), 'leaves nothing to train'),
    ):
        config = small_config(**{f'optimizer__{key}': patterns})
        with pytest.raises(InputError, match=words):
            abstract_state(config, small_layout(config))
    with pytest.raises(InputError, match='needs patterns'):
        small_config(optimizer__frozen=(3,))
    with pytest.raises(InputError, match=r'mesh\.offload=all with optimizer\.frozen.*mesh\.offload=none'):
        small_config(optimizer__frozen=('embedding',), mesh__offload='all')


def test_parts_are_put_together_again():
    tree = {'embedding': 1, 'blocks': {'attention': {'query': 2, 'key': 3}, 'norm': 4}}
    config = small_config(optimizer__frozen=('blocks.attention.query', '*.norm'))
    part = trained_part(config, tree)
    assert part == {'embedding': 1, 'blocks': {'attention': {'key': 3}}}
    new = jax.tree.map(lambda value: -value, part)
    assert with_trained(tree, new) == {'embedding': -1, 'blocks': {'attention': {'query': 2, 'key': -3}, 'norm': 4}}
    # Where all is trained it is the same tree, and the program the same as ever.
    assert trained_part(small_config(), tree) is tree


def test_moments_of_what_is_trained_lie_where_the_parameters_do():
    config = small_config(
        num_devices=8, mesh__tensor=2, model__vocab_size=64, optimizer__frozen=('embedding',), optimizer__moments='int8'
    )
    layout = small_layout(config)
    abstract, state = abstract_state(config, layout), init_state(config, layout)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for wanted, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)
    assert 'embedding' not in optax.tree.get(state.opt_state, 'mu')
