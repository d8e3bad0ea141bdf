"""Backward passes of normalizations and activations, compared with those that JAX derives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.sections.families import GATED_ACTIVATIONS
from maxlm.model.layers.mlp import ACTIVATIONS, recomputed
from maxlm.model.layers.norm import NormKind, normalize

B, T, D = 2, 5, 32
# Relative error of sums of float32 numbers, and of the rounding of bfloat16.
TOLERANCE = {'float32': 1e-5, 'bfloat16': 1e-2}
IN_LOOP = pytest.mark.parametrize('in_loop', [False, True], ids=['unrolled', 'loop'])
DTYPES = pytest.mark.parametrize('dtype', TOLERANCE)


def normal(seed, shape, dtype='float32'):
    return jnp.asarray(np.random.default_rng(seed).normal(1, 2, shape), dtype)


def norm_by_definition(x_BTD, scale_D, bias_D, *, is_centered, epsilon):
    """Computes in float32; the backward pass is derived by JAX."""
    y_BTD = x_BTD.astype(jnp.float32)
    if is_centered:
        y_BTD = y_BTD - y_BTD.mean(-1, keepdims=True)
    y_BTD = y_BTD / jnp.sqrt(jnp.square(y_BTD).mean(-1, keepdims=True) + epsilon)
    y_BTD = y_BTD * (1 if scale_D is None else scale_D[None, None]) + (0 if bias_D is None else bias_D[None, None])
    return y_BTD.astype(x_BTD.dtype)


def assert_same_pull_back(function, definition, arguments, dtype):
    """Asserts equal results, and equal gradients for one random gradient of the result."""
    found, pull_back = jax.vjp(jax.jit(function), *arguments)
    expected, pull_back_of_definition = jax.vjp(definition, *arguments)
    cotangent = normal(9, expected.shape, expected.dtype)
    for ours, theirs in zip(
        jax.tree.leaves((found, pull_back(cotangent))),
        jax.tree.leaves((expected, pull_back_of_definition(cotangent))),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype
        largest = np.abs(np.asarray(theirs, np.float32)).max()
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=0, atol=TOLERANCE[dtype] * largest
        )


@DTYPES
@IN_LOOP
@pytest.mark.parametrize(
    ('is_centered', 'has_scale', 'has_bias'),
    [(True, True, True), (True, True, False), (True, False, False), (False, True, False), (False, False, False)],
    ids=['layernorm', 'layernorm without bias', 'layernorm without parameters', 'rmsnorm', 'rmsnorm without scale'],
)
def test_gradients_of_norms(dtype, in_loop, is_centered, has_scale, has_bias):
    # A large epsilon changes the gradients noticeably.
    kind = NormKind(is_centered, 0.5, in_loop)
    arguments = (
        normal(0, (B, T, D), dtype),
        normal(1, (D,)) if has_scale else None,
        normal(2, (D,)) if has_bias else None,
    )
    assert_same_pull_back(
        lambda *args: normalize(*args, kind),
        lambda *args: norm_by_definition(*args, is_centered=is_centered, epsilon=0.5),
        arguments,
        dtype,
    )


@pytest.mark.parametrize('is_centered', [False, True])
def test_a_norm_keeps_its_input_and_its_statistics(is_centered):
    x_BTD, scale_D = normal(0, (B, T, D), 'bfloat16'), normal(1, (D,))
    _, pull_back = jax.vjp(lambda x: normalize(x, scale_D, None, NormKind(is_centered, 1e-6)), x_BTD)
    kept = sum(array.nbytes for array in jax.tree.leaves(pull_back))
    assert kept == x_BTD.nbytes + scale_D.nbytes + 4 * B * T * (2 if is_centered else 1)


@pytest.mark.parametrize('name', ACTIVATIONS)
def test_an_activation_keeps_its_inputs(name):
    inputs = [normal(seed, (B, T, D), 'bfloat16') for seed in range(2 if name in GATED_ACTIVATIONS else 1)]
    _, pull_back = jax.vjp(recomputed(ACTIVATIONS[name], in_loop=True), *inputs)
    assert sum(array.nbytes for array in jax.tree.leaves(pull_back)) == sum(x.nbytes for x in inputs)


@DTYPES
@IN_LOOP
@pytest.mark.parametrize('name', ACTIVATIONS)
def test_gradients_of_activations(dtype, in_loop, name):
    inputs = [normal(seed, (B, T, D), dtype) for seed in range(2 if name in GATED_ACTIVATIONS else 1)]

    def definition(*arguments):
        """Rounds once, so it is more precise than the derivative of the operations in bfloat16."""
        return ACTIVATIONS[name](*(x.astype(jnp.float32) for x in arguments)).astype(dtype)

    assert_same_pull_back(recomputed(ACTIVATIONS[name], in_loop=in_loop), definition, inputs, dtype)
