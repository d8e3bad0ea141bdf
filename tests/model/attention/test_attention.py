"""Attention against a NumPy formula."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.model.attention import decode, kernels
from maxlm.model.attention.chunked import attend_blockwise
from maxlm.parallel.partitioning import SINGLE_DEVICE, SingleDevice
from tests.model.attention.masked import masked_attention
from tests.small import small_config


def reference(q, k, v, mask):
    B, _, N, H = q.shape
    group = N // k.shape[2]
    out = np.zeros_like(q)
    for b in range(B):
        for n in range(N):
            scores = q[b, :, n] @ k[b, :, n // group].T / np.sqrt(H)
            scores = np.where(mask[b], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[b, :, n] = weights / weights.sum(-1, keepdims=True) @ v[b, :, n // group]
    return out


@pytest.mark.parametrize('kv_heads', [1, 2, 4])
def test_attention_equals_the_formula(kv_heads):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 6, 4, 8))
    k, v = rng.normal(size=(2, 2, 6, kv_heads, 8))
    causal = np.broadcast_to(np.tril(np.ones((6, 6), bool)), (2, 6, 6))
    mask = causal & (rng.random((2, 6, 6)) < 0.6) | np.eye(6, dtype=bool)
    sliding = causal & ~np.tril(np.ones((6, 6), bool), -3)
    for attend, meant in [
        (partial(attend_blockwise, segments_BT=None, window=0), causal),
        (partial(attend_blockwise, segments_BT=None, window=3), sliding),
        (partial(masked_attention, mask_BTS=mask), mask),
    ]:
        out = jax.jit(attend)(*(x.astype(np.float32) for x in (q, k, v)))
        np.testing.assert_allclose(out, reference(q, k, v, meant), atol=1e-5)
    assert not np.allclose(out, reference(q, k, v, causal), atol=1e-3)


@pytest.mark.parametrize('queries', [512, 500])
def test_blocks_of_queries_change_nothing(queries, monkeypatch):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, queries, 4, 8), np.float32)
    k, v = rng.standard_normal((2, 1, 512, 2, 8), np.float32)
    mask = rng.random((1, queries, 512)) < 0.5

    def run(query_block):
        monkeypatch.setattr(decode, 'QUERY_BLOCK', query_block)

        def loss(q, k, v):
            out = masked_attention(q, k, v, mask)
            return jnp.square(out).sum(), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    found = run(128)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(run(10_000)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    (_, out), _ = found
    np.testing.assert_allclose(out, reference(q, k, v, mask), atol=1e-4)


def test_a_fully_masked_row_is_finite():
    x = np.ones((1, 3, 1, 4), np.float32)
    nothing = np.zeros((1, 3, 3), bool)
    grad = jax.jit(jax.grad(lambda x: masked_attention(x, x, x, nothing).sum()))(x)
    assert np.all(np.isfinite(grad))


class Sharded(SingleDevice):
    """Partitioning with a sharded length axis."""

    def num_shards(self, axis):
        return 2 if axis == 'length' else 1


@pytest.mark.parametrize(
    ('attention', 'kernel'),
    [
        ('xla', 'chunked'),
        ('cudnn', 'cudnn'),
        ('cudnn_mask', 'cudnn_mask'),
        ('splash', 'splash'),
        ('tokamax', 'tokamax'),
    ],
)
def test_the_kernel_follows_the_config_and_the_mesh(attention, kernel):
    config = dataclasses.replace(small_config().model, attention=attention)
    assert kernels.choose_attention_kernel(config, SINGLE_DEVICE) is getattr(kernels, kernel)
    assert kernels.choose_attention_kernel(config, Sharded()) is kernels.ring
