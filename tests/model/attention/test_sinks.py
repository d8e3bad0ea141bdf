"""Attention with sinks against a softmax over the scores and the sink, and their gradients."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from maxlm.errors import InputError
from maxlm.model.attention import chunked
from maxlm.model.attention.chunked import attend_blockwise
from maxlm.model.attention.decode import attend_slots
from maxlm.model.attention.tree import TokenTree, tree_attention
from maxlm.model.layers.kv_cache import Slots
from tests.small import small_config

B, T, N, K, H = 2, 12, 4, 2, 8
CAUSAL = np.tril(np.ones((T, T), bool))


def reference(q, k, v, sinks, mask):
    """Appends the sink to the scores of the keys, as Transformers does for gpt-oss."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = jnp.where(mask, jnp.einsum('BTNH,BSNH->BNTS', q, k) / np.sqrt(H), -jnp.inf)
    column = jnp.broadcast_to(sinks[None, :, None, None], (B, N, T, 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum('BNTS,BSNH->BTNH', weights, v)


def arrays():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((B, T, N, H), np.float32)
    k, v = rng.standard_normal((2, B, T, K, H), np.float32)
    return q, k, v, np.array([-3, 0.5, 2, 200], np.float32)


def test_the_formula_equals_that_of_gpt_oss():
    q, k, v, sinks = arrays()
    module = SimpleNamespace(num_key_value_groups=N // K, sinks=torch.from_numpy(sinks), training=False)
    mask = torch.where(torch.from_numpy(CAUSAL), 0.0, float('-inf'))[None, None]
    q_BNTH, k_BKSH, v_BKSH = (torch.from_numpy(x).transpose(1, 2) for x in (q, k, v))
    theirs, _ = eager_attention_forward(module, q_BNTH, k_BKSH, v_BKSH, mask, scaling=H**-0.5)
    np.testing.assert_allclose(reference(q, k, v, sinks, CAUSAL), theirs.numpy(), atol=1e-5)


def on_slots(q, k, v, sinks):
    slots = Slots(k.swapaxes(1, 2), v.swapaxes(1, 2), None, None)
    return attend_slots(q, slots, jnp.broadcast_to(CAUSAL, (B, T, T)), sinks_N=sinks)


def on_tree(q, k, v, sinks):
    tree = TokenTree(jnp.full((B, T), T), jnp.broadcast_to(jnp.arange(T), (B, T)))
    return tree_attention(q, k, v, tree, window=0, sinks_N=sinks)


def blockwise(q, k, v, sinks, window=0):
    return attend_blockwise(q, k, v, None, window=window, sinks_N=sinks)


@pytest.mark.parametrize(
    ('attend', 'mask'),
    [
        (blockwise, CAUSAL),
        (partial(blockwise, window=3), CAUSAL & ~np.tril(CAUSAL, -3)),
        (on_slots, CAUSAL),
        (on_tree, CAUSAL),
    ],
    ids=['blockwise', 'window', 'slots', 'tree'],
)
def test_sinks_join_the_denominator(attend, mask):
    q, k, v, sinks = arrays()
    expected = reference(q, k, v, sinks, mask)
    np.testing.assert_allclose(jax.jit(attend)(q, k, v, sinks), expected, atol=1e-5)
    # The weights of the last head are almost 0.
    assert np.abs(expected[:, :, 3]).max() < 1e-6
    assert np.abs(attend(q, k, v, None) - expected)[:, :, 1].max() > 0.1


def test_gradients_equal_those_of_the_formula(monkeypatch):
    monkeypatch.setattr(chunked, 'MIN_RANGE', 4)
    *inputs, weights = *arrays(), np.random.default_rng(1).standard_normal((B, T, N, H), np.float32)

    def gradients(attend):
        return jax.jit(jax.grad(lambda *inputs: (attend(*inputs) * weights).sum(), argnums=(0, 1, 2, 3)))(*inputs)

    found, expected = gradients(blockwise), gradients(partial(reference, mask=CAUSAL))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert np.abs(found[3])[:3].min() > 1e-2


def test_fused_kernels_are_not_chosen():
    sinks = {'model__family': 'llama', 'model__attention_sinks': True}
    assert small_config(**sinks).model.attention == 'xla'
    with pytest.raises(InputError, match=r'mesh\.context=2 with model\.attention_sinks=True: ring attention'):
        small_config(2, **sinks, mesh__context=2)
    latent = {'model__kv_lora_rank': 8, 'model__qk_nope_head_dim': 8, 'model__qk_rope_head_dim': 4}
    with pytest.raises(InputError, match=r'model\.attention_sinks=True with model\.kv_lora_rank=8'):
        small_config(**sinks, **latent, model__v_head_dim=8)
    assert (
        dataclasses.replace(small_config(**sinks).model, attention_sinks=False)
        == small_config(model__family='llama').model
    )
