"""Splash attention interpreted on CPUs against attention by XLA, and the blocks of scores that it computes."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model.attention import kernels
from maxlm.model.attention.chunked import attend_blockwise
from maxlm.model.attention.kernels import AttentionInputs, attend_shards
from maxlm.model.attention.splash import attend_splash, block_size, num_visible_blocks, supports_length
from maxlm.parallel.layout import make_layout
from maxlm.parallel.partitioning import SINGLE_DEVICE
from maxlm.planning.estimate.work import estimate_work
from tests.model.attention.masked import masked_attention
from tests.parameters import abstract_params, decoder_graph
from tests.small import small_config

B, T, N, H = 2, 256, 4, 8
# Documents end within blocks and at their boundaries. The second row has padding, which is a document of zeros.
SEGMENTS = np.zeros((B, T), np.int32)
SEGMENTS[0] = np.repeat([1, 2, 3, 4], [100, 28, 1, 127])
SEGMENTS[1, :200] = np.repeat([1, 2], [150, 50])
ERROR = 2e-5


def inputs(kv_heads):
    rng = np.random.default_rng(0)
    heads = (N, kv_heads, kv_heads, N)
    return tuple(jnp.asarray(rng.normal(size=(B, T, count, H)), jnp.float32) for count in heads)


def value_and_gradients(attend, arrays, *segments):
    @jax.jit
    def run(q, k, v, do):
        output, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *segments), q, k, v)
        return output, *pull(do)

    return run(*arrays)


def by_splash(window, partitioning=SINGLE_DEVICE, softcap=0.0):
    attend = partial(attend_splash, window=window, softcap=softcap, interpret=True)

    def run(q, k, v, segments):
        return attend_shards(attend, AttentionInputs(q, k, v, None, segments), partitioning)

    return run


@jax.jit
def _by_mask(q, k, v, do, mask):
    output, pull = jax.vjp(lambda q, k, v: masked_attention(q, k, v, mask), q, k, v)
    return output, *pull(do)


def by_mask(window, arrays, segments):
    """Returns output and gradients by XLA. The mask is an argument, so that one program serves all tests."""
    behind = np.arange(T)[:, None] - np.arange(T)[None, :]
    mask = np.broadcast_to((behind >= 0) & (behind < (window or T)), (B, T, T))
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    return _by_mask(*arrays, mask)


def largest_error(ours, theirs):
    assert all(np.isfinite(x).all() for x in ours)
    return max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ('window', 'kv_heads', 'segments'),
    [(0, 2, SEGMENTS), (1, N, SEGMENTS), (100, 1, None), (90, 2, SEGMENTS)],
    ids=['grouped documents', 'window of one', 'one head of keys', 'all'],
)
def test_splash_equals_attention(window, kv_heads, segments, monkeypatch):
    # Small blocks split a short row into several blocks.
    monkeypatch.setattr('maxlm.model.attention.splash.BLOCK', 128)
    arrays = inputs(kv_heads)
    ours = value_and_gradients(by_splash(window), arrays, segments)
    assert largest_error(ours, by_mask(window, arrays, segments)) < ERROR
    # Negative controls: another window, and documents added or removed.
    wrong = window + 1 if window else 140
    assert largest_error(ours, by_mask(wrong, arrays, segments)) > 10 * ERROR
    other = SEGMENTS if segments is None else None
    assert window == 1 or largest_error(ours, by_mask(window, arrays, other)) > 10 * ERROR


def test_a_soft_cap_of_scores():
    arrays = inputs(2)
    ours = value_and_gradients(by_splash(90, softcap=0.7), arrays, SEGMENTS)
    chunked = partial(attend_blockwise, window=90, softcap=0.7)
    assert largest_error(ours, value_and_gradients(chunked, arrays, SEGMENTS)) < ERROR
    # Negative control: without the cap.
    assert largest_error(ours, by_mask(90, arrays, SEGMENTS)) > 10 * ERROR


def test_every_device_has_its_rows_and_heads():
    config = small_config(num_devices=4, mesh__fsdp=2, mesh__tensor=2)
    layout = make_layout(config.mesh, jax.devices()[:4])
    arrays = inputs(2)
    ours = value_and_gradients(by_splash(0, layout), arrays, SEGMENTS)
    assert largest_error(ours, by_mask(0, arrays, SEGMENTS)) < ERROR
    # Negative control: rows in another order.
    assert largest_error(ours, by_mask(0, arrays, SEGMENTS[::-1])) > 10 * ERROR


@pytest.mark.parametrize(('length', 'size'), [(128, 128), (640, 128), (768, 384), (1024, 512), (4096, 512)])
def test_blocks_divide_the_length(length, size):
    assert supports_length(length)
    assert block_size(length) == size
    assert not supports_length(length + 64)


@pytest.mark.parametrize(('length', 'window'), [(2048, 0), (2048, 1), (2048, 2), (2048, 513), (2048, 514), (768, 100)])
def test_visible_blocks_are_those_that_the_mask_touches(length, window):
    query, key = np.arange(length)[:, None], np.arange(length)
    seen = (key <= query) & ((query - key < window) | (window == 0))
    size = block_size(length)
    blocks = seen.reshape(length // size, size, length // size, size).any((1, 3))
    assert num_visible_blocks(length, window) == blocks.sum()


def with_splash(config):
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attention='splash'))


def test_unsupported_row_lengths_use_another_kernel(monkeypatch):
    """Prompts may have any length; in training, `maxlm.config.resolve` ensures a valid length of rows."""
    config = with_splash(small_config(data__seq_len=T, model__max_positions=T))
    graph, params = decoder_graph(config.model), abstract_params(config)
    lengths = []
    monkeypatch.setattr(kernels, 'attend_splash', lambda q, *_, **__: lengths.append(q.shape[1]) or q)
    for length in (T // 2, T // 2 + 1):
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        jax.eval_shape(lambda params, tokens: nnx.merge(graph, params)(tokens)[0], params, tokens)
    assert set(lengths) == {T // 2}


def test_work_counts_complete_blocks():
    config = with_splash(small_config(data__seq_len=2048, data__document_mask=False, model__num_heads=2))
    per_pair = 2 * 2 * config.model.num_heads * config.model.head_dim
    # Blocks of 512² up to the diagonal have 2 products forward, and 3 and 4 in the two kernels of the backward pass.
    pairs = config.train.global_batch_size * (4 * 5 / 2) * 512**2
    assert estimate_work(config).attention_flops == 9 * per_pair * pairs
    # Negative control: with a window, only the diagonal and one adjacent block remain.
    narrow = dataclasses.replace(config.model, attention_pattern='S', sliding_window=512)
    pairs = config.train.global_batch_size * (4 + 3) * 512**2
    assert estimate_work(dataclasses.replace(config, model=narrow)).attention_flops == 9 * per_pair * pairs
