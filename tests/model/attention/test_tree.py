"""Attention in rows of token trees against attention in separate texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.inference.prefix_tree import flatten
from maxlm.model.attention import chunked
from maxlm.model.attention.chunked import attend_blockwise
from maxlm.model.attention.tree import TokenTree, tree_attention

H = 8


@pytest.mark.parametrize('window', [0, 4])
@pytest.mark.parametrize(('ranges', 'softcap'), [(1, 0.0), (5, 0.0), (5, 0.7)])
def test_a_text_in_a_tree_equals_the_text_alone(window, ranges, softcap, monkeypatch):
    monkeypatch.setattr(chunked, 'RANGES', ranges)
    monkeypatch.setattr(chunked, 'MIN_RANGE', 1)
    texts = [[1, 2, 3, 4], [1, 2, 3, 5, 6, 7, 8, 9], [1, 2, 9, 9], [2, 2]]
    laid = flatten(texts)
    T = len(laid.tokens) + 2
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, T, heads, H), np.float32) for heads in (4, 2, 2))
    ends = np.arange(1, T + 1)[None]
    depths = np.zeros((1, T), int)
    ends[0, :-2], depths[0, :-2] = laid.ends, laid.depths

    @jax.jit
    def run(q, k, v):
        limits = {'window': window, 'softcap': softcap}
        found = tree_attention(q, k, v, TokenTree(jnp.asarray(ends), jnp.asarray(depths)), **limits)
        alone = [attend_blockwise(q[:, path], k[:, path], v[:, path], None, **limits) for path in laid.paths]
        return found, alone, attend_blockwise(q, k, v, None, **limits)

    found, alone, causal = jax.device_get(run(q, k, v))
    for path, expected in zip(laid.paths, alone, strict=True):
        np.testing.assert_allclose(found[:, path], expected, rtol=1e-5, atol=1e-5)
    # Padding attends to itself.
    np.testing.assert_allclose(found[0, -1], np.repeat(v[0, -1], 2, axis=0), rtol=1e-5)
    # Negative control: plain causal attention over the row differs.
    assert np.abs(causal - found).max() > 0.1
