"""Norm kernels interpreted on CPUs against the definition, on one device and on a mesh."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from flax import nnx

from maxlm.config.resolve import resolve
from maxlm.errors import InputError
from maxlm.model.layers import norm_kernels
from maxlm.model.layers.norm import Norm
from maxlm.model.layers.norm_kernels import FusedNorm, add_and_normalize
from maxlm.parallel.partitioning import SINGLE_DEVICE
from tests.model.layers.test_norm import TOLERANCE, norm_by_definition, normal
from tests.small import small_config, small_layout

EPSILON = 0.5


def definition(stream, branch, scale, bias, branch_bias=None, *, is_centered):
    if branch_bias is not None:
        # The branch contains the bias already.
        zero = branch_bias - jax.lax.stop_gradient(branch_bias)
        zero = zero.reshape((1,) * (branch.ndim - 1) + zero.shape)
        branch = (branch.astype(np.float32) + zero).astype(branch.dtype)
    total = stream if branch is None else stream + branch
    return total, norm_by_definition(total, scale, bias, is_centered=is_centered, epsilon=EPSILON)


def pulled(function, arguments, seed=7):
    """Returns the results of a function and the gradients of its arguments, for random gradients of the results."""
    outputs, pull = jax.vjp(jax.jit(function), *arguments)
    cotangents = [normal(seed + index, output.shape, output.dtype) for index, output in enumerate(outputs)]
    return jax.tree.leaves((outputs, pull(tuple(cotangents))))


def assert_close(found, expected, dtype):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE[dtype] * np.abs(theirs).max())


@pytest.fixture
def small_tiles(monkeypatch):
    """Makes tiles and numbers of programs so small that few rows need several tiles, programs and rounds."""
    monkeypatch.setattr(norm_kernels, 'TILE', 128)
    monkeypatch.setattr(norm_kernels, 'MAX_PROGRAMS', 3)
    monkeypatch.setattr(norm_kernels, 'TILES_PER_PROGRAM', 2)


SHAPES = {'full tiles': (2, 16, 32), 'partial tiles': (1, 37, 24), 'wide rows': (3, 5, 200)}
# Subtracts the mean; has a branch, scale and bias.
NORMS = {
    'layernorm': (True, True, True, True),
    'layernorm without branch': (True, False, True, False),
    'layernorm without parameters': (True, True, False, False),
    'rmsnorm': (False, True, True, False),
    'rmsnorm of the stream': (False, False, False, False),
}
# An interpreted kernel takes seconds to compile.
CHOSEN = [
    ('layernorm', 'partial tiles', 'float32'),
    ('layernorm without branch', 'wide rows', 'bfloat16'),
    ('layernorm without parameters', 'full tiles', 'float32'),
    ('rmsnorm', 'partial tiles', 'bfloat16'),
    ('rmsnorm of the stream', 'wide rows', 'float32'),
]
ALL = [
    case if case in CHOSEN else pytest.param(*case, marks=pytest.mark.nightly)
    for case in itertools.product(NORMS, SHAPES, TOLERANCE)
]


@pytest.mark.parametrize(('norm', 'rows', 'dtype'), ALL)
def test_kernels_equal_the_definition(small_tiles, norm, rows, dtype):
    shape, (is_centered, has_branch, has_scale, has_bias) = SHAPES[rows], NORMS[norm]
    arguments = (
        normal(0, shape, dtype),
        normal(1, shape, dtype) if has_branch else None,
        normal(2, shape[-1:]) if has_scale else None,
        normal(3, shape[-1:]) if has_bias else None,
        normal(4, shape[-1:]) if has_branch and has_scale else None,
    )
    plan = FusedNorm(is_centered, EPSILON, True, SINGLE_DEVICE)
    found = pulled(lambda *args: add_and_normalize(*args, plan), arguments)
    assert_close(found, pulled(lambda *args: definition(*args, is_centered=is_centered), arguments), dtype)


def test_a_norm_without_the_stream_has_one_result(small_tiles):
    x, scale = normal(0, (1, 37, 24)), normal(1, (24,))
    plan = FusedNorm(True, EPSILON, False, SINGLE_DEVICE)
    found = pulled(lambda x, scale: add_and_normalize(x, None, scale, None, None, plan)[1:], (x, scale))
    expected = pulled(lambda x, scale: definition(x, None, scale, None, is_centered=True)[1:], (x, scale))
    assert_close(found, expected, 'float32')


def test_the_kernels_keep_the_sum_and_its_statistics():
    stream, branch, scale = normal(0, (6, 32), 'bfloat16'), normal(1, (6, 32), 'bfloat16'), normal(2, (32,))
    plan = FusedNorm(True, EPSILON, True, SINGLE_DEVICE)
    _, pull_back = jax.vjp(lambda *args: add_and_normalize(*args, scale, None, None, plan), stream, branch)
    kept = sum(array.nbytes for array in jax.tree.leaves(pull_back))
    assert kept == stream.nbytes + scale.nbytes + 2 * 4 * 6


@pytest.mark.parametrize('settings', [{'norm': 'layernorm'}, {'norm': 'rmsnorm', 'norm_unit_offset': True}])
def test_a_norm_with_kernels_equals_that_of_xla(settings):
    config = dataclasses.replace(small_config().model, **settings)
    x, branch = normal(0, (2, 3, 32)), normal(1, (2, 3, 32))
    results = []
    for kernel in ('xla', 'pallas'):
        norm = Norm(dataclasses.replace(config, norm_kernel=kernel), 32, rngs=nnx.Rngs(0), partitioning=SINGLE_DEVICE)
        norm.scale[...] = normal(2, (32,))
        results.append([norm(x), *norm.add_and_normalize(x, branch), *norm.add_and_normalize(x, None)])
    assert_close(results[1], results[0], 'float32')


@pytest.mark.parametrize('axis', ['fsdp', 'context', 'tensor'])
def test_each_device_normalizes_its_rows(axis):
    config = small_config(num_devices=2, **{'mesh__fsdp': 1, f'mesh__{axis}': 2})
    layout = small_layout(config)
    arguments = (*(normal(seed, (2, 8, 32)) for seed in (0, 1)), *(normal(seed, (32,)) for seed in (2, 3, 4)))
    sharded = [
        jax.device_put(x, layout.named(*(('batch', 'length', 'activation') if x.ndim == 3 else ('norm',))))
        for x in arguments
    ]
    run = jax.jit(lambda *args: pulled_back(FusedNorm(True, EPSILON, True, layout), *args))
    expected = pulled_back(FusedNorm(True, EPSILON, True, SINGLE_DEVICE), *arguments)
    assert_close(run(*sharded), expected, 'float32')
    reduced = [line for line in run.lower(*sharded).compile().as_text().splitlines() if ' all-reduce(' in line]
    # Only the gradients of scale, bias and the branch's bias are summed over the devices.
    assert all('f32[3,32]' in line for line in reduced)
    assert len(reduced) == (axis != 'tensor')


def pulled_back(plan, *arguments):
    outputs, pull = jax.vjp(lambda *args: add_and_normalize(*args, plan), *arguments)
    return jax.tree.leaves((outputs, pull((outputs[1], outputs[0]))))


@pytest.mark.parametrize(
    ('platform', 'overrides', 'message'),
    [
        ('cpu', {}, 'not available on cpu devices; set it to xla'),
        ('gpu', {'model__dim': 8200}, 'a model.dim of at most 8192; found 8200'),
        (
            'gpu',
            {'mesh__stage': 2, 'mesh__fsdp': 1, 'train__per_device_batch_size': 4},
            'a mesh.stage of at most 1; found 2',
        ),
    ],
)
def test_unsupported_settings(platform, overrides, message):
    config = small_config(num_devices=2, **overrides)
    fused = dataclasses.replace(config, model=dataclasses.replace(config.model, norm_kernel='pallas'))
    with pytest.raises(InputError, match=message):
        resolve(fused, platform=platform, num_devices=2, vocab_size=61, windows=100)
