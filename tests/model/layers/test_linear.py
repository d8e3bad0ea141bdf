"""Several projections of one input, fused and separate, and transposed kernels."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model.layers import linear
from maxlm.model.layers.linear import Linear, fused_apply, transpose_kernel, transposed_matmul
from maxlm.model.layers.weight_only_quantization import Weights
from maxlm.parallel.partitioning import SINGLE_DEVICE, SingleDevice
from maxlm.planning.compiled.program import read_program

D = 8
OUTPUTS = {'heads': (4, 6), 'kv_heads': (2, 6), 'ffn': (10,)}


class Split(SingleDevice):
    """Partitioning that reports sharded heads, as on a mesh."""

    def num_shards(self, axis):
        return 2 if axis == 'heads' else 1


def make(partitioning):
    return [
        new_linear(
            (D,), shape, ('embed',), (axis, 'head_dim')[: len(shape)], seed, partitioning, use_bias=axis != 'ffn'
        )
        for seed, (axis, shape) in enumerate(OUTPUTS.items())
    ]


def new_linear(in_shape, out_shape, in_axes, out_axes, seed, partitioning=SINGLE_DEVICE, *, use_bias=True):
    rng = np.random.default_rng(seed)
    made = Linear(
        in_shape,
        out_shape,
        in_axes=in_axes,
        out_axes=out_axes,
        init=lambda key, shape, dtype: rng.standard_normal(shape, np.float32),
        use_bias=use_bias,
        matmul='default',
        partitioning=partitioning,
        rngs=nnx.Rngs(0),
    )
    if use_bias:
        made.bias = nnx.Param(rng.standard_normal(out_shape, np.float32))
    return made


def outputs_and_gradients(apply, partitioning, x):
    graph, params = nnx.split(make(partitioning))

    def total(params, x):
        outputs = apply(nnx.merge(graph, params), x)
        return sum(((i + 1) * jnp.sin(y)).sum() for i, y in enumerate(outputs)), outputs

    compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True)).lower(params, x).compile()
    (_, outputs), gradients = compiled(params, x)
    text = compiled.as_text()
    return (
        [*outputs, *jax.tree.leaves(gradients)],
        text.count(' dot('),
        read_program(text, {'data': 1}),
    )


# For few rows, concatenating the kernels is not worth it.
@pytest.mark.parametrize(
    ('partitioning', 'rows', 'products'), [(SINGLE_DEVICE, (2, 5), 1), (SINGLE_DEVICE, (9, 1), 3), (Split(), (2, 5), 3)]
)
def test_fused_projections_equal_separate_ones(partitioning, rows, products, monkeypatch):
    monkeypatch.setattr(linear, 'MIN_FUSED_ROWS', 10)
    x = np.random.default_rng(0).standard_normal((*rows, D), np.float32)
    together, num_together, program = outputs_and_gradients(fused_apply, partitioning, x)
    alone, num_alone, separate = outputs_and_gradients(lambda linears, x: [f(x) for f in linears], SINGLE_DEVICE, x)
    assert [y.shape for y in together[:3]] == [(*rows, *shape) for shape in OUTPUTS.values()]
    for found, expected in zip(together, alone, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        # Negative control: a small factor is detected.
        assert np.abs(found - 1.01 * expected).max() > 1e-3
    # Products of the forward pass, and both products of the backward pass.
    assert (num_together, num_alone) == (3 * products, 9)
    assert program.flops == separate.flops


def transposed(module):
    module.kernel = nnx.Param(transpose_kernel(module.kernel[...], module.num_in))
    module.is_transposed = True
    return module


# One token, few tokens, and more tokens than are multiplied from the right.
@pytest.mark.parametrize('rows', [(1, 1), (3, 1), (2, 5)])
def test_a_transposed_kernel_gives_the_same(rows, monkeypatch):
    monkeypatch.setattr(linear, 'MAX_TRANSPOSED_ROWS', 4)
    monkeypatch.setattr(linear, 'MIN_FUSED_ROWS', 1)

    @jax.jit
    def run(x):
        expected = [module(x) for module in make(SINGLE_DEVICE)]
        one_by_one = [transposed(module)(x) for module in make(SINGLE_DEVICE)]
        together = fused_apply(list(map(transposed, make(SINGLE_DEVICE))), x)
        # The output projection, which contracts two axes.
        out = new_linear(OUTPUTS['heads'], (D,), ('heads', 'head_dim'), ('embed',), 9)
        plain, right = out(expected[0]), transposed(out)(expected[0])
        assert out.kernel.shape == (D, *OUTPUTS['heads'])
        out.is_transposed = False
        return expected, one_by_one, together, plain, right, out(expected[0])

    x = np.random.default_rng(0).standard_normal((*rows, D), np.float32)
    expected, one_by_one, together, plain, right, wrong = run(x)
    for found in (one_by_one, together):
        for y, plain_y in zip(found, expected, strict=True):
            assert y.shape == plain_y.shape
            np.testing.assert_allclose(y, plain_y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(right, plain, rtol=1e-5, atol=1e-5)
    # Negative control: the layout of a kernel matters.
    assert np.abs(wrong - plain).max() > 0.1


def test_few_rows_are_multiplied_from_the_left(monkeypatch):
    def product(num_rows):
        shapes = jax.ShapeDtypeStruct((num_rows, D), jnp.float32), jax.ShapeDtypeStruct((24, D), jnp.float32)
        # A new function, so that nothing is cached.
        text = jax.jit(functools.partial(transposed_matmul)).lower(*shapes).compile().as_text()
        found = re.search(r'f32\[(\d+),(\d+)\]\S* dot\(', text)
        return int(found[1]), int(found[2])

    assert product(linear.MAX_TRANSPOSED_ROWS) == (24, linear.MAX_TRANSPOSED_ROWS)
    assert product(linear.MAX_TRANSPOSED_ROWS + 1) == (linear.MAX_TRANSPOSED_ROWS + 1, 24)
    # Negative control: without the barrier, the compiler reverts the transposition.
    monkeypatch.setattr(jax.lax, 'optimization_barrier', lambda x: x)
    assert product(linear.MAX_TRANSPOSED_ROWS) == (linear.MAX_TRANSPOSED_ROWS, 24)


def test_kernels_that_are_transposed(monkeypatch):
    assert not any(module.should_be_transposed for module in make(SINGLE_DEVICE))
    monkeypatch.setattr(linear, 'MIN_TRANSPOSED_INPUTS', D)
    plain, quantized, scaled = make(SINGLE_DEVICE)
    quantized.quantize_kernel(Weights('int8', 0))
    scaled.matmul = 'fp8'
    # Kernels that will be quantized are not transposed.
    assert [module.should_be_transposed for module in (plain, quantized, scaled)] == [True, False, False]
