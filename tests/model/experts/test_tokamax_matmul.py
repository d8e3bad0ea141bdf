"""Products of groups of rows with Tokamax: a stand-in for its kernels, and the kernels compiled for an absent GPU.

Rows after the last group are unused.
"""

import dataclasses
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.installation import pip_install
from maxlm.model.experts import tokamax_matmul as module
from maxlm.model.experts.tokamax_matmul import tokamax_matmul
from maxlm.training.known_answers import experts
from maxlm.training.known_answers.check import wrong_kernel
from maxlm.training.known_answers.experts import experts_answer
from tests.gpu_compiler import needs_gpu_compiler, run_python
from tests.small import small_config

SIZES = np.array([3, 0, 4, 0])
USED, ROWS, WIDTH = SIZES.sum(), 9, 6


def kernels(lhs, rhs, sizes, axes, *, preferred_element_type, implementation):
    """Computes the products of `tokamax.ragged_dot_general` with the undefined values of its kernels.

    Unused rows of a result are NaN. Rows of other groups are multiplied by 0, and groups without rows have a gradient.
    """
    ends_E = jnp.cumsum(sizes)
    row_R1 = jnp.arange(len(lhs))[:, None]
    is_in_RE = ((row_R1 < ends_E[None, :]) & (row_R1 >= (ends_E - sizes)[None, :])).astype(lhs.dtype)
    if rhs.ndim == 2:
        product_EPQ = jnp.einsum('RE,RP,RQ->EPQ', is_in_RE, lhs, rhs)
        return jnp.where((sizes > 0)[:, None, None], product_EPQ, 1)
    ((_, (contracted,)), _) = axes.dot_dimension_numbers
    product_RQ = jnp.einsum('RE,RP,EPQ->RQ', is_in_RE, lhs, rhs if contracted == 1 else rhs.mT)
    return jnp.where(row_R1 < sizes.sum(), product_RQ, jnp.nan)


@pytest.fixture
def tokamax(monkeypatch):
    stand_in = types.SimpleNamespace(ragged_dot_general=kernels)
    monkeypatch.setitem(sys.modules, 'tokamax', stand_in)
    return stand_in


def test_undefined_values_of_the_kernels_change_nothing(tokamax, monkeypatch):
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32) for _ in range(2))
    # Unused rows are 0, and so are their gradients.
    x, weights = x.at[USED:].set(0), weights.at[USED:].set(0)
    up, down = (jnp.asarray(rng.normal(size=(len(SIZES), WIDTH, WIDTH)), jnp.float32) for _ in range(2))
    expert_R = np.append(np.repeat(np.arange(len(SIZES)), SIZES), [0] * (ROWS - USED))

    def plain(x, kernel):
        return jnp.einsum('RI,RIO->RO', x, kernel[expert_R])

    def grouped(x, kernel):
        return tokamax_matmul(x, kernel, jnp.asarray(SIZES))

    def loss(product):
        return lambda x, up, down: (product(jnp.sin(product(x, up)), down) * weights).sum()

    expected = jax.value_and_grad(loss(plain), argnums=(0, 1, 2))(x, up, down)
    found = jax.value_and_grad(loss(grouped), argnums=(0, 1, 2))(x, up, down)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    # Negative control: without the mask, NaN of unused rows is in the gradients.
    monkeypatch.setattr(module, '_used', lambda y_RO, sizes_E: y_RO)
    assert np.isnan(jax.grad(loss(grouped), argnums=1)(x, up, down)).any()


@pytest.mark.parametrize(
    ('shapes', 'expected'),
    [
        (((5, 128), (2, 128, 256)), ('mosaic', 'triton')),
        # Mosaic's products are wrong for this width.
        (((128, 128), (2, 128, 320)), ('triton',)),
        # A rank of an adapter, and a number of rows that is the width of a transposed operand.
        (((128, 128), (2, 128, 8)), ('triton',)),
        (((128, 128), (128, 256)), ('mosaic', 'triton')),
        (((5, 128), (5, 256)), ('triton',)),
    ],
)
def test_mosaic_computes_only_multiples_of_its_width(tokamax, shapes, expected):
    found = []
    tokamax.ragged_dot_general = lambda *_, implementation, **__: found.append(implementation)
    module._product(*map(jnp.zeros, shapes), jnp.array([3, 2]), None)
    assert found == [expected]


def test_wrong_kernels_are_named(tokamax, monkeypatch):
    monkeypatch.setattr(experts, 'installed_version', lambda name: '0.0.17')
    config = dataclasses.replace(small_config().model, expert_matmul='tokamax', dtype='float32')
    answers = [experts_answer(config, 32, 24)]
    assert wrong_kernel(answers, jax.devices()[:1]) == ''
    exact = tokamax.ragged_dot_general
    for wrong in (lambda y: y.at[..., -1].mul(1.1), lambda y: y.at[0].set(jnp.nan)):
        tokamax.ragged_dot_general = lambda *arguments, wrong=wrong, **rest: wrong(exact(*arguments, **rest))
        jax.clear_caches()
        found = wrong_kernel(answers, jax.devices()[:1])
        assert re.fullmatch(
            r'product of experts \(model\.expert_matmul=tokamax\) computes wrong results on cpu, device 0: product is '
            r'off by .*% for matrices of 32 × 24; install another version of tokamax \(found 0\.0\.17\), or set .*',
            found,
        )


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'tokamax', None)
    with pytest.raises(InputError, match=re.escape(f'tokamax is not installed; run {pip_install("experts")}')):
        tokamax_matmul(jnp.zeros((2, 8)), jnp.zeros((1, 8, 8)), jnp.array([2]))


def test_a_missing_kernel_is_an_error(tokamax):
    def unsupported(*_, **__):
        raise ExceptionGroup('all failed', [ValueError('first'), ValueError('Not supported on V100.')])

    tokamax.ragged_dot_general = unsupported
    with pytest.raises(InputError, match=r'no kernel for a product of float32 on this device \(Not supported on V100'):
        tokamax_matmul(jnp.zeros((2, 8)), jnp.zeros((1, 8, 8)), jnp.array([2]))


# Compiles the product of 4,096 rows and 32 groups with its gradients, and prints the bytes of its temporary memory. The
# command line has options of maxlm, which Tokamax would parse.
PROGRAM = """
import json
import jax
import jax.numpy as jnp
from maxlm.model.experts.grouped_matmul import RowGroups, grouped_matmul
from maxlm.planning.targets import compiling_for, parse_target, target_devices

target = parse_target('h100:1')
sharding = jax.sharding.SingleDeviceSharding(target_devices(target)[0])
shapes = [((4096, 256), jnp.bfloat16), ((32, 256, 128), jnp.bfloat16), ((32,), jnp.int32)]
arguments = [jax.ShapeDtypeStruct(shape, kind, sharding=sharding) for shape, kind in shapes]
found = {}
for name in ('tokamax', 'ragged_dot'):
    def loss(x, kernel, sizes):
        return grouped_matmul(x, kernel, RowGroups(sizes, 1), name).astype(jnp.float32).sum()

    with compiling_for(target):
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()
    found[name] = compiled.memory_analysis().temp_size_in_bytes
print(json.dumps(found))
"""


@needs_gpu_compiler
def test_kernels_compile_for_an_absent_gpu():
    done = run_python('-c', PROGRAM, '--config=configs/moe.py:8x1b', JAX_PLATFORMS='cpu')
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout.splitlines()[-1])
    # XLA's expansion has the rows once for each group.
    rows = 2 * 4096 * 256
    assert memory['tokamax'] < 4 * rows
    assert memory['ragged_dot'] > 16 * rows
