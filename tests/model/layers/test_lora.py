"""LoRA adapters: target modules, contribution to the output, and no effect at initialization."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model.blocks import Block
from maxlm.model.decoder import Decoder
from maxlm.model.layers import linear as linear_module
from maxlm.model.layers.linear import Linear, fused_apply
from maxlm.model.layers.lora import Adapter, adapter_of
from maxlm.parallel.partitioning import SINGLE_DEVICE
from tests.adapters import adapter_arrays, with_arrays
from tests.small import VOCAB, small_config

RANK = {'model__lora_rank': 3, 'model__lora_alpha': 6.0}


def started(config, seed=0):
    return nnx.to_pure_dict(nnx.state(Decoder(config.model, rngs=nnx.Rngs(seed))))


SIZES = {'model__dim': 64, 'model__num_kv_heads': 2, 'model__family': 'llama'}


@pytest.fixture(scope='module')
def drawn():
    """Returns the config of a model with adapters and its initial parameters."""
    config = small_config(**SIZES, **RANK)
    return config, dict(dotted(jax.device_get(jax.jit(partial(started, config))())))


def params_of(config):
    """Returns random parameters with new adapters, if any. This is faster than initialization."""

    def random(path, shape):
        name = jax.tree_util.keystr(path, simple=True, separator='.')
        rng = np.random.default_rng(sum(name.encode()))
        noise = rng.standard_normal(shape.shape, np.float32) / max(1, shape.shape[-1]) ** 0.5
        return {'scale': 1 + noise, 'lora_b': 0 * noise}.get(name.rpartition('.')[2], noise)

    return jax.tree_util.tree_map_with_path(random, jax.eval_shape(partial(started, config)))


def dotted(params, prefix=''):
    for name, value in params.items():
        if isinstance(value, dict):
            yield from dotted(value, f'{prefix}{name}.')
        else:
            yield f'{prefix}{name}', value


def forward(config):
    """Returns a function of params and tokens that computes hidden states."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0))))
    return lambda params, tokens_BT: nnx.merge(graph, params)(tokens_BT)[0]


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, 16), dtype=np.int32)


@pytest.mark.parametrize('family', ['gpt2', 'llama', 'nanochat'])
def test_names_match_the_modules(family):
    def linears(**settings):
        config = small_config(model__family=family, model__lora_rank=3, **settings)
        block = nnx.eval_shape(lambda: Block(config.model, partitioning=SINGLE_DEVICE, rngs=nnx.Rngs(0)))
        modules = {'.'.join(map(str, path)): module for path, module in nnx.iter_modules(block)}
        return config, {name: module for name, module in modules.items() if isinstance(module, Linear)}

    config, found = linears()
    assert set(found) == set(config.model.projections)
    assert all(module.lora_a is not None for module in found.values())
    # The name of each module determines its adapter.
    for name in found:
        _, others = linears(model__lora_target_modules=(name,))
        assert {other for other, module in others.items() if module.lora_a is not None} == {name}
        assert {other for other, module in others.items() if module.lora_b is not None} == {name}


def test_the_scale():
    model = small_config(model__lora_rank=8, model__lora_alpha=20.0, model__lora_target_modules=('*.out',)).model
    assert adapter_of(model, 'attention.out') == Adapter(8, 2.5)
    assert adapter_of(model, 'attention.query') is None


def test_initial_values(drawn):
    config, params = drawn
    shapes = {path.removeprefix('blocks.'): array.shape for path, array in params.items() if 'lora' in path}
    assert shapes['attention.key.lora_a'] == (2, 64, 3)
    assert shapes['attention.key.lora_b'] == (2, 3, 2, 16)
    assert shapes['attention.out.lora_a'] == (2, 4, 16, 3)
    assert shapes['attention.out.lora_b'] == (2, 3, 64)
    for name, fan_in in {'attention.out': 64, 'feedforward.down': config.model.ffn_dim}.items():
        lora_a, bound = params[f'blocks.{name}.lora_a'], fan_in**-0.5
        # Values are uniform within the bound.
        assert 0.95 * bound < np.abs(lora_a).max() <= bound
        np.testing.assert_allclose(lora_a.std(), bound / 3**0.5, rtol=0.1)
        assert not np.array_equal(lora_a[0], lora_a[1])
        assert not np.any(params[f'blocks.{name}.lora_b'])


def test_other_parameters_start_as_without_adapters(drawn):
    _, params = drawn
    config = small_config(**SIZES)
    base = dict(dotted(jax.device_get(jax.jit(partial(started, config))())))
    assert {path for path in params if 'lora' not in path} == set(base)
    assert all(np.array_equal(params[path], array) for path, array in base.items())
    # Negative control: another seed gives other parameters.
    assert not np.array_equal(params['embedding'], jax.jit(lambda: started(config, seed=1)['embedding'])())


@pytest.mark.parametrize(
    'settings',
    [
        {'model__family': 'llama', 'model__num_kv_heads': 2, 'model__scan_layers': False},
        {'model__dtype': 'bfloat16', 'model__family': 'gpt_neox'},
        {'model__matmul_precision': 'fp8', 'model__dim': 64, 'model__family': 'nanochat'},
    ],
    ids=str,
)
def test_new_adapters_change_nothing(settings):
    config, plain = small_config(**settings, **RANK), small_config(**settings)
    params = params_of(config)
    run = jax.jit(forward(config))
    expected, found = jax.jit(forward(plain))(params_of(plain), TOKENS), run(params, TOKENS)
    assert np.array_equal(found, expected)
    assert found.dtype == jnp.dtype(config.model.dtype)
    # Negative control: other adapters change the output.
    changed = run(with_arrays(params, adapter_arrays(config.model)), TOKENS)
    assert np.abs(np.float32(changed) - np.float32(expected)).mean() > 0.02


def test_the_program_without_adapters_is_unchanged():
    def program(**settings):
        config = small_config(model__family='llama', **settings)
        params = jax.eval_shape(lambda: started(config))
        return str(jax.make_jaxpr(jax.grad(lambda *args: forward(config)(*args).sum()))(params, TOKENS))

    plain = program()
    assert program(model__lora_target_modules=('attention.query',), model__lora_alpha=3.0) == plain
    assert program(model__lora_rank=1, model__lora_target_modules=('attention.query',)) != plain


def test_scan_and_remat_change_nothing():
    def results(**settings):
        config = small_config(model__family='llama', **settings, **RANK)
        params = with_arrays(params_of(config), adapter_arrays(config.model))

        def loss(params):
            return (forward(config)(params, TOKENS) ** 2 * jnp.arange(config.model.dim)[None, None, :]).mean()

        return jax.jit(jax.value_and_grad(loss))(params)

    expected = results()
    found = results(model__remat_policy='dots', model__scan_layers=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, expected)
    gradients = dict(dotted(expected[1]))
    assert all(np.abs(gradient).max() > 1e-3 for path, gradient in gradients.items() if 'lora' in path)


def make_linear(rng, in_shape, out_shape, adapter, axis='heads'):
    linear = Linear(
        in_shape,
        out_shape,
        in_axes=('heads', 'head_dim') if len(in_shape) == 2 else ('embed',),
        out_axes=(axis, 'head_dim')[: len(out_shape)],
        init=lambda key, shape, dtype: rng.standard_normal(shape, np.float32),
        use_bias=True,
        matmul='default',
        partitioning=SINGLE_DEVICE,
        rngs=nnx.Rngs(0),
        adapter=adapter,
    )
    if adapter:
        for name in ('lora_a', 'lora_b'):
            setattr(linear, name, nnx.Param(rng.standard_normal(getattr(linear, name).shape, np.float32)))
    return linear


@pytest.mark.parametrize(('in_shape', 'out_shape'), [((6,), (2, 5)), ((2, 3), (7,)), ((6,), (7,))])
def test_the_formula(in_shape, out_shape):
    linear = make_linear(np.random.default_rng(1), in_shape, out_shape, Adapter(4, 2.5))
    x = np.random.default_rng(0).normal(size=(3, 5, *in_shape)).astype(np.float32)
    n = len(in_shape)
    plain = np.tensordot(x, linear.kernel[...], n) + np.asarray(linear.bias[...])
    added = 2.5 * np.tensordot(np.tensordot(x, linear.lora_a[...], n), linear.lora_b[...], 1)
    np.testing.assert_allclose(jax.jit(linear.__call__)(x), plain + added, rtol=1e-5, atol=1e-5)
    assert np.abs(added).mean() > 0.1


def test_fused_projections_equal_separate_ones_with_joined_kernels(monkeypatch):
    monkeypatch.setattr(linear_module, 'MIN_FUSED_ROWS', 10)
    adapters = (Adapter(2, 0.5), None, Adapter(3, 2.0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)

    def run(apply):
        rng = np.random.default_rng(1)
        linears = [make_linear(rng, (8,), (heads, 6), one) for heads, one in zip((4, 2, 2), adapters, strict=True)]
        graph, params = nnx.split(linears)

        def total(params, x):
            outputs = apply(nnx.merge(graph, params), x)
            return sum(((i + 1) * jnp.sin(y)).sum() for i, y in enumerate(outputs)), outputs

        compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True)).lower(params, x).compile()
        products = jax.jit(lambda params: total(params, x)[1]).lower(params).compile().as_text().count(' dot(')
        return jax.tree.leaves(compiled(params, x)), products

    together, num_together = run(fused_apply)
    alone, num_alone = run(lambda linears, x: [linear(x) for linear in linears])
    for found, expected in zip(together, alone, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert np.abs(found - 1.01 * expected).max() > 1e-3
    # There are three kernels, two lora_a and two lora_b. Fused, the kernels are one product, and the lora_a are one.
    assert (num_together, num_alone) == (4, 7)
