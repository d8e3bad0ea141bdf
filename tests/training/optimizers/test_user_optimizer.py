"""Optimizers of the user: placement of their state, mistakes, masks, and steps that are skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from maxlm.config.validation import validate
from maxlm.errors import InputError
from maxlm.planning.estimate.state_bytes import planned_state_bytes, state_bytes
from maxlm.training.optimizers.state_placement import state_axes
from maxlm.training.optimizers.user_optimizer import Parameter
from maxlm.training.state import abstract_state, ignores_schedule, init_state
from maxlm.training.step import make_train_step
from tests.small import EXPERTS, small_batch, small_config, small_layout

MODULE = 'tests.training.optimizers.user_optimizers'
GOOD = ('lion', 'adafactor', 'schedule_free', 'muon', 'factors')
SAVING = ('fsdp', 'expert', 'context')
MESH = {'mesh__fsdp': 4, 'mesh__tensor': 2}


def config_of(name, num_devices=1, **settings):
    return small_config(num_devices, optimizer__name=f'{MODULE}:{name}', **settings)


def abstract_of(name, num_devices=1, **settings):
    config = config_of(name, num_devices, **settings)
    return abstract_state(config, small_layout(config))


def specs(abstract):
    return {jax.tree_util.keystr(path): x.sharding.spec for path, x in jax.tree.leaves_with_path(abstract.opt_state)}


@pytest.mark.parametrize('name', GOOD)
@pytest.mark.parametrize('settings', [{}, EXPERTS, {'optimizer__frozen_params': ('embedding',)}])
def test_planned_bytes_equal_those_of_the_state(name, settings):
    settings = {**settings, **MESH}
    config = config_of(name, 8, **settings)
    planned, abstract = planned_state_bytes(config), abstract_of(name, 8, **settings)
    assert planned.moments == state_bytes(abstract).moments
    # Negative control: AdamW's state has another size.
    assert planned.moments != planned_state_bytes(small_config(8, **settings)).moments


def test_state_of_the_parameters_shape_is_sharded_like_them():
    abstract = abstract_of('schedule_free', 8, **MESH)
    for path, param in jax.tree.leaves_with_path(abstract.params):
        name = jax.tree_util.keystr(path)
        found = specs(abstract)
        assert found[f'.z{name}'] == found[f'.base_optimizer_state[0].nu{name}'] == param.sharding.spec


def test_state_of_other_shapes_is_sharded_by_the_axes_that_it_shares():
    found = specs(abstract_of('adafactor', 8, **MESH))
    up = "['blocks']['feedforward']['up']['kernel']"
    assert found[f'[0].v_row{up}'] == P('stage', SAVING)
    assert found[f'[0].v_col{up}'] == P('stage', 'tensor')
    assert found[f'[0].v{up}'] == P(None)
    found = specs(abstract_of('factors', 8, **MESH))
    assert found[f'.moments{up}["sum"]'.replace('"', "'")] == P('stage')
    # No name relates the list to the parameters.
    assert found['.factors[11]'] == P(None, SAVING, None)
    assert found['.count'] == P()


def test_axes():
    kernel = Parameter('kernel', (2, 32, 128), jnp.float32, ('layers', 'embed', 'ffn'), 'matrix')
    shards = {'embed': 4, 'ffn': 2}

    def axes(shape, param=kernel, **changes):
        return state_axes(shape, param, lambda axis: {**shards, **changes}.get(axis, 1))

    assert axes((2, 32)) == ('layers', 'embed')
    assert axes((2, 32, 32)) == ('layers', 'embed', 'norm')
    assert axes((2, 128, 128)) == ('layers', 'ffn', 'embed')
    assert axes((2, 128), ffn=3) == ('layers', 'embed')
    assert axes((7, 9)) == axes((7, 9), None) == ('norm', 'norm')
    assert axes((8, 16), None) == ('norm', 'embed')
    experts = Parameter('e', (2, 4, 32), jnp.float32, ('layers', 'experts', 'expert_embed'), 'matrix')
    assert axes((2, 4, 8), experts) == ('layers', 'experts', 'expert_embed')
    assert axes(()) == ()


def test_inputs_and_outputs_of_matrices():
    out = Parameter('out', (2, 4, 8, 32), jnp.float32, ('layers', 'heads', 'head_dim', 'embed'), 'matrix')
    assert (out.input_axes, out.output_axes) == ((1, 2), (3,))
    up = Parameter('up', (2, 4, 32, 8), jnp.float32, ('layers', 'experts', 'expert_embed', 'expert_ffn'), 'matrix')
    assert (up.input_axes, up.output_axes) == ((2,), (3,))


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('returns_nothing', 'returned NoneType; it must return an optax.GradientTransformation'),
        ('returns_pair', 'returned tuple; it must return'),
        ('fails', "failed with AttributeError: 'OptimizerConfig' object has no attribute 'beta3' at .*; fix"),
        ('takes_too_little', r'takes_too_little\(config\) must accept the arguments \(config, learning_rate, params\)'),
        ('missing', "has no 'missing'"),
        ('string', 'failed with TypeError: .*str.* is not a valid JAX type'),
        ('typed_key', r'state is a key; use jax.random.key_data\(key\)'),
        ('empty_array', 'state has no elements'),
        ('changes_dtype', r"changes state\['sum'\] from bfloat16\[\] to float32\[\]; they must"),
        ('changes_structure', r'changes state from PyTreeDef\(.*\) to PyTreeDef\(.*\); they'),
        ('changes_shape', r"changes updates\['blocks'\].*from float32\[2, 4, 8\] to float32\[4, 8\]"),
        ('plateau', "failed with TypeError: .*'value'.*; fix the function"),
    ],
)
def test_mistakes_are_named(name, message):
    with pytest.raises(InputError, match=f'^optimizer.name {MODULE}:{name}: .*{message}') as error:
        abstract_of(name)
    assert '\n' not in str(error.value)


def test_an_ignored_schedule_is_found():
    for name, ignored in {'ignores_schedule': True, **dict.fromkeys((*GOOD, 'needs_params'), False)}.items():
        config = config_of(name)
        assert ignores_schedule(config, small_layout(config)) == ignored, name


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'optimizer__moment_dtype': 'int8'}, 'optimizer.moment_dtype=int8 has no effect'),
        ({'optimizer__embedding_learning_rate': 0.1}, 'optimizer.embedding_learning_rate=0.1 has no effect'),
        ({'optimizer__cautious_decay': True}, 'optimizer.cautious_decay=True has no effect'),
        ({'optimizer__groups': (('embedding', 'beta1=0.5'),)}, 'optimizer.groups=.* has no effect'),
        ({'optimizer__adam_learning_rate': 0.1}, 'optimizer.adam_learning_rate=0.1 has no effect'),
        ({'mesh__host_offload': 'optimizer'}, 'host offload requires optimizer.name=adamw'),
        (
            {'optimizer__name': 'lion'},
            'must be one of adamw, muon, soap, or a function of yours as package',
        ),
        ({'optimizer__name': 'my-module:lion'}, 'must have the form package.module:name'),
        ({'optimizer__schedule': 'cos'}, "package.module:name; did you mean 'cosine'"),
    ],
)
def test_keys_without_effect_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        validate(
            config_of('lion', **{key: value for key, value in settings.items() if key != 'optimizer__name'})
            if 'optimizer__name' not in settings
            else small_config(**settings)
        )


class Step:
    """A compiled step with its initial state."""

    def __init__(self, config, optimizer=None):
        self.config, self.layout = config, small_layout(config)
        self.state = init_state(config, self.layout, optimizer=optimizer)
        self.program = jax.jit(make_train_step(config, self.layout, optimizer=optimizer))

    def run(self, state, *, scale=1.0):
        rows = small_batch(self.config)
        return self.program(state, self.layout.put_batch({**rows, 'weights': scale * rows['weights']}, 8))


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_a_skipped_step_leaves_the_state_unchanged():
    step = Step(config_of('factors', optimizer__ema_decay=0.9, optimizer__warmup_steps=0))
    before, _ = step.run(step.state)
    bad, metrics = step.run(before, scale=np.float32(np.nan))
    assert bool(metrics['skipped'])
    assert float(metrics['update_norm']) == 0
    for name in ('params', 'opt_state', 'ema'):
        assert same(getattr(bad, name), getattr(before, name))
    # Negative control: a good step changes each of them.
    good, metrics = step.run(before)
    assert not any(same(getattr(good, name), getattr(before, name)) for name in ('params', 'opt_state', 'ema'))
    assert float(metrics['update_norm']) > 0
    assert int(good.opt_state.count) == 2


def test_frozen_parameters_have_no_state_and_do_not_change():
    settings = {'model__lora_rank': 2, 'optimizer__trainable_params': ('final_norm',), 'optimizer__warmup_steps': 0}
    step = Step(config_of('lion', **settings))
    trained = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(step.state.opt_state[0].mu)}
    assert all('lora' in name or 'final_norm' in name for name in trained)
    after, _ = step.run(step.state)
    for path, old in jax.tree.leaves_with_path(step.state.params):
        name = jax.tree_util.keystr(path)
        new = after.params
        for key in path:
            new = new[key.key]
        assert np.array_equal(old, new) == (name not in trained), name


def test_the_step_takes_an_optimizer():
    config = small_config(optimizer__warmup_steps=0)
    step = Step(config, optax.sgd(0.5))
    after, metrics = step.run(step.state)
    assert 'learning_rate' not in metrics
    moved = optax.tree.norm(optax.tree.sub(after.params, step.state.params))
    # The gradients are clipped to a norm of 1.
    assert float(metrics['grad_norm']) > 1
    np.testing.assert_allclose(float(moved), 0.5, rtol=1e-5)
    with pytest.raises(InputError, match=r'optimizer.name of make_train_step: state.* is a key'):
        init_state(config, step.layout, optimizer=optax.GradientTransformation(lambda _: jax.random.key(0), None))
    offloaded = small_config(mesh__host_offload='optimizer')
    with pytest.raises(InputError, match='with an optimizer of your own; set'):
        init_state(offloaded, step.layout, optimizer=optax.sgd(0.5))
