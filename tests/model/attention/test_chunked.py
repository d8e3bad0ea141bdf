"""Attention and gradients in ranges of queries against the complete array of scores."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.model.attention import chunked
from maxlm.model.attention.chunked import attend_blockwise
from maxlm.planning.compiled.program import read_program

H = 8


# Splits short rows like long ones, but into fewer ranges.
SMALL = {'RANGES': 4, 'MIN_RANGE': 16, 'QUERY_BLOCK': 32}


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(chunked, name, value)


def dense(q, k, v, mask_BTT, softcap=0.0):
    N = q.shape[2]
    k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum('BTNH,BSNH->BNTS', q, k) / np.sqrt(H)
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    weights = jax.nn.softmax(jnp.where(mask_BTT[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum('BNTS,BSNH->BTNH', weights, v)


def mask_of(B, T, segments, window):
    behind = np.arange(T)[:, None] - np.arange(T)[None, :]
    mask = np.broadcast_to((behind >= 0) & (behind < (window or T)), (B, T, T))
    return mask if segments is None else mask & (segments[:, :, None] == segments[:, None, :])


def inputs(B, T, N, K, documents):
    rng = np.random.default_rng(T)
    q, k, v, g = (rng.standard_normal((B, T, heads, H), np.float32) for heads in (N, K, K, N))
    segments = np.sort(rng.integers(0, documents, (B, T)), axis=1) if documents else None
    return (q, k, v), segments, g


def with_gradients(attend, qkv, g):
    def total(q, k, v):
        o = attend(q, k, v)
        return (o * g).sum(), o

    (_, o), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*qkv)
    return o, *gradients


@jax.jit
def _dense_with_gradients(qkv, g, mask):
    return with_gradients(lambda q, k, v: dense(q, k, v, mask), qkv, g)


def of_all_scores(qkv, segments, g, window):
    """Returns output and gradients. The mask is an argument, so that one program serves all tests."""
    return _dense_with_gradients(qkv, g, mask_of(*g.shape[:2], segments, window))


def of_blocks(qkv, segments, g, window):
    attend = partial(attend_blockwise, segments_BT=segments, window=window)
    return jax.jit(partial(with_gradients, attend))(qkv, g)


def difference(found, expected):
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(found, expected, strict=True))


# Lengths of one range, slightly more than one, several with a short last one, and ranges of two blocks each.
@pytest.mark.parametrize(
    ('B', 'T', 'N', 'K', 'documents', 'window'),
    [
        (2, 7, 2, 2, 0, 0),
        (2, 18, 2, 1, 3, 0),
        (1, 18, 2, 2, 0, 5),
        (2, 90, 4, 2, 4, 0),
        (2, 90, 4, 2, 4, 20),
        (1, 256, 2, 1, 5, 0),
        (1, 256, 2, 1, 5, 44),
    ],
)
def test_outputs_and_gradients_equal_dense_attention(B, T, N, K, documents, window, small):
    qkv, segments, g = inputs(B, T, N, K, documents)
    found = of_blocks(qkv, segments, g, window)
    assert difference(found, of_all_scores(qkv, segments, g, window)) < 2e-5
    # Negative controls: another window, and no documents.
    assert difference(found, of_all_scores(qkv, segments, g, 3)) > 1e-2
    if documents:
        assert difference(found, of_all_scores(qkv, None, g, window)) > 1e-2


@pytest.mark.parametrize('T', [18, 90])
def test_a_soft_cap_of_scores(T, small):
    qkv, segments, g = inputs(2, T, 4, 2, 3)
    mask = mask_of(2, T, segments, 9)
    capped = partial(attend_blockwise, segments_BT=segments, window=9, softcap=0.7)
    found = jax.jit(partial(with_gradients, capped))(qkv, g)
    expected = jax.jit(partial(with_gradients, lambda q, k, v: dense(q, k, v, mask, 0.7)))(qkv, g)
    assert difference(found, expected) < 2e-5
    # Negative control: without the cap.
    assert difference(found, of_all_scores(qkv, segments, g, 9)) > 1e-2


def test_bfloat16_is_near(small):
    qkv, segments, g = inputs(2, 90, 4, 2, 3)
    expected = of_all_scores(qkv, segments, g, 0)
    low = of_blocks([x.astype(jnp.bfloat16) for x in qkv], segments, g.astype(jnp.bfloat16), 0)
    assert all(x.dtype == jnp.bfloat16 for x in low)
    assert 1e-3 < difference([x.astype(jnp.float32) for x in low], expected) < 0.1


def shapes_in(T):
    qkv, _, g = inputs(1, T, 1, 1, 0)

    def total(q, k, v):
        return (attend_blockwise(q, k, v, None, window=0) * g).sum()

    text = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(*qkv))
    return {tuple(map(int, part.split(']')[0].split(','))) for part in text.split('f32[')[1:] if part[0].isdigit()}


def test_no_array_of_all_scores_exists(monkeypatch):
    def largest():
        return max(np.prod(shape) for shape in shapes_in(4096))

    assert largest() == chunked.QUERY_BLOCK * 4096
    # Negative control: with one range of one block it does.
    monkeypatch.setattr(chunked, 'RANGES', 1)
    monkeypatch.setattr(chunked, 'QUERY_BLOCK', 4096)
    assert largest() == 4096 * 4096


def test_most_masked_scores_are_not_computed():
    def share(attend, window):
        """Returns the fraction of the dense products."""
        T = 1024
        qkv, _, _ = inputs(1, T, 1, 1, 0)
        compiled = jax.jit(lambda q, k, v: attend(q, k, v, None, window=window)).lower(*qkv).compile()
        return read_program(compiled.as_text(), {'data': 1}).flops / (4 * T * T * H)

    # Eight ranges compute (1 + … + 8) / 64 of the products.
    assert share(attend_blockwise, 0) == 36 / 64
    # The first range has 128 keys and the other seven have 128 + 127.
    assert share(attend_blockwise, 128) == (128 + 7 * 255) / (8 * 1024)
    # Negative control.
    mask = mask_of(1, 1024, None, 0)
    assert share(lambda q, k, v, *_, **__: dense(q, k, v, mask), 0) == 1
