"""AdamW against its formula, and direction, decay and learning rate by kind of parameter."""

import functools

import jax
import numpy as np
import optax
import pytest

from maxlm.errors import InputError
from maxlm.model.parameters import kind_of
from maxlm.training.optimizers.optimizer import make_optimizer, map_kinds
from maxlm.training.optimizers.parameter_groups import DECAYED
from maxlm.training.optimizers.schedule import make_schedule
from tests.small import small_config, small_layout

# path → (shape, logical axes, kind)
PARAMETERS = {
    ('embedding',): ((6, 4), ('vocab', 'embed'), 'table'),
    ('position_embedding',): ((5, 4), ('position', 'embed'), 'table'),
    ('head', 'kernel'): ((4, 6), ('embed', 'vocab'), 'head'),
    ('blocks', 'query', 'kernel'): ((2, 4, 2, 3), ('layers', 'embed', 'heads', 'head_dim'), 'matrix'),
    ('blocks', 'query', 'bias'): ((2, 2, 3), ('layers', 'heads', 'head_dim'), 'vector'),
    ('blocks', 'down', 'kernel'): ((2, 8, 4), ('layers', 'ffn', 'embed'), 'matrix'),
    ('blocks', 'norm', 'scale'): ((2, 4), ('layers', 'norm'), 'vector'),
}
AXES = {path: axes for path, (_, axes, _) in PARAMETERS.items()}
KINDS = {path: kind for path, (_, _, kind) in PARAMETERS.items()}


def tree(values):
    """Returns the nested dict of values by path."""
    nested = {}
    for (*folders, name), value in values.items():
        node = nested
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = value
    return nested


def by_path(nested):
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(nested)}


def random_params(seed):
    rng = np.random.default_rng(seed)
    return tree({path: rng.normal(size=shape).astype(np.float32) for path, (shape, *_) in PARAMETERS.items()})


@functools.cache
def run(*, steps=1, **settings):
    """Returns the parameters before and after some steps on random gradients, with constant learning rates."""
    settings = {'learning_rate': 0.5, 'schedule': 'constant', 'warmup_steps': 0, **settings}
    config = small_config(**{f'optimizer__{key}': value for key, value in settings.items()})
    optimizer = make_optimizer(config, AXES, small_layout(config), make_schedule(config.optimizer, 20))
    before = params = random_params(0)
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(random_params(step + 1), state, params)
        params = optax.apply_updates(params, updates)
    return before, params


def moves(**settings):
    """Returns the change of each parameter in the first step by path."""
    before, after = run(**settings)
    return by_path(jax.tree.map(lambda a, b: np.asarray(b) - a, before, after))


def test_kinds():
    assert by_path(map_kinds(lambda kind, _: kind)(random_params(0))) == KINDS
    # Adapters and routers, which these parameters do not have, are decayed like matrices.
    assert {*KINDS.values(), 'adapter', 'router'} == set(DECAYED['all'])
    adapter = tuple(map(jax.tree_util.DictKey, ('blocks', 'attention', 'query', 'lora_a')))
    assert kind_of(adapter) == 'adapter'
    assert kind_of(tuple(map(jax.tree_util.DictKey, ('blocks', 'feedforward', 'router', 'kernel')))) == 'router'
    assert [mask for mask, kinds in DECAYED.items() if 'adapter' in kinds] == ['matrices', 'projections', 'all']
    with pytest.raises(InputError, match=r'blocks\.gain: rename it to kernel'):
        kind_of(tuple(map(jax.tree_util.DictKey, ('blocks', 'gain'))))


def test_adamw_equals_the_formula():
    settings = {'learning_rate': 0.1, 'weight_decay': 0.5, 'epsilon': 1e-8, 'beta1': 0.9, 'beta2': 0.95}
    before, after = run(steps=3, **settings)
    expected, after = {path: np.array(value) for path, value in by_path(before).items()}, by_path(after)
    for path, value in expected.items():
        m, v = np.zeros_like(value), np.zeros_like(value)
        for step in range(1, 4):
            grad = np.array(by_path(random_params(step))[path])
            m = 0.9 * m + 0.1 * grad
            v = 0.95 * v + 0.05 * grad**2
            adam = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
            decay = 0 if path[-1] in ('scale', 'bias') else 0.5
            value -= 0.1 * (adam + decay * value)
        np.testing.assert_allclose(after[path], value, rtol=1e-5, atol=1e-6)


def test_adamw_equals_optax_bit_for_bit():
    _, params = run(steps=3, weight_decay=0.2)
    mask = map_kinds(lambda kind, _: kind != 'vector')
    optimizer = optax.adamw(0.5, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.2, mask=mask)
    expected = random_params(0)
    state = optimizer.init(expected)
    for step in range(3):
        updates, state = optimizer.update(random_params(step + 1), state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    # The states are equal too, so that checkpoints are interchangeable.
    config = small_config()
    ours = make_optimizer(config, AXES, small_layout(config), make_schedule(config.optimizer, 20)).init(expected)
    assert jax.tree.structure(ours) == jax.tree.structure(optax.adamw(lambda _: 0.5, mask=mask).init(expected))


@pytest.mark.parametrize('name', ['adamw', 'muon'])
@pytest.mark.parametrize(
    ('mask', 'decayed'),
    [
        ('matrices', {'table', 'head', 'matrix'}),
        ('projections', {'matrix'}),
        ('all', {'table', 'head', 'matrix', 'vector'}),
    ],
)
def test_decay_applies_to_masked_parameters_at_their_rate(name, mask, decayed):
    rates = {'learning_rate': 0.5, 'embedding_learning_rate': 0.25}
    without = moves(name=name, weight_decay=0.0, **rates)
    with_decay = moves(name=name, weight_decay=0.1, weight_decay_mask=mask, **rates)
    for path, before in by_path(random_params(0)).items():
        rate = 0.25 if KINDS[path] == 'table' else 0.5
        pulled = -rate * 0.1 * np.array(before) if KINDS[path] in decayed else 0 * before
        np.testing.assert_allclose(with_decay[path] - without[path], pulled, atol=1e-6)
    assert any(np.abs(with_decay[path] - without[path]).max() > 1e-2 for path in KINDS if KINDS[path] in decayed)


@pytest.mark.parametrize(
    ('settings', 'ratios'),
    [
        ({'name': 'adamw'}, {'table': 1, 'head': 1, 'matrix': 1, 'vector': 1}),
        ({'name': 'adamw', 'embedding_learning_rate': 2.0}, {'table': 4, 'head': 1, 'matrix': 1, 'vector': 1}),
        ({'name': 'muon'}, {'table': 1, 'head': 1, 'matrix': 1, 'vector': 1}),
        ({'name': 'muon', 'adam_learning_rate': 1.0}, {'table': 2, 'head': 2, 'matrix': 1, 'vector': 2}),
        (
            {'name': 'muon', 'adam_learning_rate': 1.0, 'embedding_learning_rate': 0.25},
            {'table': 0.5, 'head': 2, 'matrix': 1, 'vector': 2},
        ),
    ],
)
def test_every_kind_has_its_peak_learning_rate(settings, ratios):
    same_rate = moves(name=settings['name'], learning_rate=0.5, weight_decay=0.1)
    for path, move in moves(learning_rate=0.5, weight_decay=0.1, **settings).items():
        np.testing.assert_allclose(move, ratios[KINDS[path]] * same_rate[path], rtol=1e-5, atol=1e-6)


def test_other_peaks_follow_the_schedule():
    settings = {'schedule': 'linear', 'warmup_steps': 4, 'weight_decay': 0.0, 'steps': 3}
    same_rate, other_rate = run(**settings), run(embedding_learning_rate=1.5, **settings)
    (before, one), (_, three) = map(by_path, same_rate), map(by_path, other_rate)
    # Both move by 1/4 + 2/4 + 3/4 of the peak.
    np.testing.assert_allclose(
        three['embedding',] - before['embedding',], 3 * (one['embedding',] - before['embedding',]), rtol=1e-4
    )
    assert np.abs(one['embedding',] - before['embedding',]).max() > 0.1


def test_muon_updates_the_matrices_of_blocks_and_adamw_the_rest():
    adamw, muon = moves(name='adamw', weight_decay=0.0), moves(name='muon', weight_decay=0.0)
    for path, kind in KINDS.items():
        same_rate = np.allclose(adamw[path], muon[path], rtol=1e-5)
        assert same_rate == (kind != 'matrix'), path
