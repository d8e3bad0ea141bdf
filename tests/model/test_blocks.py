"""Scanned and unrolled blocks, rematerialization and dropout."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model.blocks import Block, dropout
from maxlm.parallel.partitioning import SINGLE_DEVICE
from tests.model.layers.norm_kernels_on_cpu import use_formulas
from tests.parameters import decoder_graph, logits, random_params
from tests.small import small_batch, small_config


def loss_and_gradients(config, **changes):
    """Returns a compiled function that maps parameters to loss and gradients."""
    graph = decoder_graph(dataclasses.replace(config.model, **changes))
    tokens = small_batch(config)['tokens'][:2]
    run = jax.jit(jax.value_and_grad(lambda params: jnp.square(logits(graph, params, tokens)).mean()))
    return lambda params: jax.device_get(run(params))


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found[1], expected[1])


def test_scanned_layers_equal_unrolled_layers():
    # Two periods of two layers, and one remaining layer.
    config = small_config(model__num_layers=5, model__attention_pattern='SL', model__sliding_window=3)
    params = random_params(config)
    looped, unrolled = loss_and_gradients(config), loss_and_gradients(config, scan_layers=False)
    expected = unrolled(params)
    assert_same(looped(params), expected)
    # Negative control: the order of layers matters.
    swapped = {**params, 'blocks': jax.tree.map(lambda x: x[::-1], params['blocks'])}
    assert abs(looped(swapped)[0] / expected[0] - 1) > 1e-3


@pytest.fixture(scope='module')
def plain():
    config = small_config()
    params = random_params(config)
    return config, params, loss_and_gradients(config, remat_policy='none')(params)


@pytest.mark.parametrize('remat', ['dots', 'dots_no_batch', 'full'])
def test_remat_changes_nothing(remat, plain):
    config, params, expected = plain
    assert_same(loss_and_gradients(config, remat_policy=remat)(params), expected)


@pytest.mark.nightly
def test_remat_changes_nothing_of_unrolled_layers(plain):
    config, params, expected = plain
    assert_same(loss_and_gradients(config, remat_policy='full', scan_layers=False)(params), expected)


def test_dropout_needs_a_key_and_depends_on_it():
    config = small_config(model__dropout=0.5, model__num_layers=1)
    tokens, params = small_batch(config)['tokens'][:2], random_params(config)

    def program(dropout):
        graph = decoder_graph(dataclasses.replace(config.model, dropout=dropout))
        return str(jax.make_jaxpr(lambda params: logits(graph, params, tokens))(params))

    assert program(0.5) == program(0.0)
    graph = decoder_graph(config.model)
    run = jax.jit(lambda params, key: logits(graph, params, tokens, dropout_key=key))
    dropped = [run(params, jax.random.key(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert not np.allclose(dropped[0], dropped[2])


def test_dropout_keeps_the_mean():
    dropped = np.asarray(jax.jit(lambda key: dropout(jnp.ones(100_000), 0.3, key))(jax.random.key(0)))
    assert abs(dropped.mean() - 1) < 0.01
    assert abs((dropped == 0).mean() - 0.3) < 0.01


@pytest.mark.parametrize(
    ('settings', 'changes', 'kernels'),
    [
        # The stream of the first and of the last norm has no branch.
        ({}, {'scan_layers': False}, [('forward', 2), ('forward with branch', 3)]),
        ({}, {'remat_policy': 'full'}, [('forward', 2), ('forward with branch', 1)]),
        ({'model__parallel_residual': True}, {'scan_layers': False}, [('forward', 4), ('forward with branch', 1)]),
        pytest.param(
            {'model__norm_placement': 'both'},
            {'scan_layers': False},
            [('forward', 6), ('forward with branch', 3)],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {'model__norm_placement': 'post'}, {'scan_layers': False}, [('forward', 5)], marks=pytest.mark.nightly
        ),
    ],
    ids=['unrolled', 'rematerialized', 'parallel', 'pre- and post-norm', 'post-norm'],
)
def test_norm_kernels_change_nothing(settings, changes, kernels, monkeypatch, plain):
    config, params, expected = plain
    if settings:
        config = small_config(**settings)
        params = random_params(config)
        expected = loss_and_gradients(config)(params)
    traced = use_formulas(monkeypatch)
    assert_same(loss_and_gradients(config, norm_kernel='pallas', **changes)(params), expected)
    forward = Counter(name for name in traced if name.startswith('forward'))
    # Rematerialized layers are traced twice.
    assert set(forward) == {name for name, _ in kernels}
    if 'remat_policy' not in changes:
        assert sorted(forward.items()) == kernels


UNROLLED = {'scan_layers': False, 'remat_policy': 'none'}


@pytest.mark.parametrize(
    ('changes', 'constant'),
    [
        (UNROLLED, ['attention', 'feedforward']),
        # The next block receives the complete stream.
        ({}, ['attention']),
        ({**UNROLLED, 'remat_policy': 'full'}, ['attention']),
        *(
            ({**UNROLLED, **change}, [])
            for change in (
                {'dropout': 0.5},
                {'norm_placement': 'both'},
                {'parallel_residual': True},
                {'residual_multiplier': 0.5},
                {'norm_kernel': 'xla'},
            )
        ),
    ],
)
def test_a_norm_kernel_computes_the_gradient_of_a_bias_that_reaches_it_unchanged(changes, constant):
    model = dataclasses.replace(small_config().model, **{'norm_kernel': 'pallas', **changes})
    block = nnx.eval_shape(lambda: Block(model, partitioning=SINGLE_DEVICE, rngs=nnx.Rngs(0)))
    last = {'attention': block.attention.out, 'feedforward': block.feedforward.down}
    assert [name for name, linear in last.items() if linear.is_bias_constant] == constant
