"""The decoder: what a logit may depend on, and equal results of equal computations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model.blocks import drop
from maxlm.model.cache import init_caches
from maxlm.model.decoder import Decoder
from maxlm.model.windows import layer_windows
from tests.small import VOCAB, small_batch, small_config

SWITCHES = [
    {'model__family': 'gpt2'},
    {'model__family': 'gpt_neox', 'model__num_kv_heads': 2},
    {'model__family': 'llama', 'model__num_kv_heads': 1},
    {'model__family': 'llama', 'model__norm': 'layernorm', 'model__use_bias': True, 'model__tie_embeddings': True},
    {'model__family': 'qwen3', 'model__num_kv_heads': 2, 'model__head_dim': 12},
    {'model__family': 'nanochat'},
    {'model__family': 'llama', 'model__attention_pattern': 'S', 'model__sliding_window': 3},
    {'model__family': 'gpt2', 'model__num_layers': 5, 'model__attention_pattern': 'SL', 'model__sliding_window': 3},
]


@functools.cache
def make(**overrides):
    """A model whose parameters are all random, biases and scales too, so that none can hide a mistake."""
    config = small_config(**overrides)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0))))

    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Decoder(config.model, rngs=nnx.Rngs(0)))))()
    # By NumPy: XLA takes half a second for the draws of each shape.
    rng = np.random.default_rng(1)
    return config, graph, jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape, np.float32), params)


@functools.partial(jax.jit, static_argnums=0)
def logits(graph, params, tokens, **kwargs):
    model = nnx.merge(graph, params)
    hidden, _ = model(tokens, **kwargs)
    return model.logits(hidden)


def influence(graph, params, batch, *, isolated=True):
    """[T, T]: how much the embedding of token s changes the hidden state of position t, by gradient."""
    tokens, segments, positions = (jnp.asarray(batch[name]) for name in ('tokens', 'segments', 'positions'))
    T = tokens.shape[1]

    def scores(embedding_SD):
        # Position s reads row s of a table of its own, so that its gradient shows alone.
        model = nnx.merge(graph, {**params, 'embedding': embedding_SD})
        hidden, _ = model(jnp.arange(T)[None], segments_BT=segments if isolated else None, positions_BT=positions)
        return (jnp.square(hidden[0]) + hidden[0]).sum(-1)

    return np.asarray(jnp.abs(jax.jit(jax.jacrev(scores))(params['embedding'][tokens[0]])).sum(-1))


@pytest.mark.parametrize('switches', SWITCHES)
def test_no_token_sees_a_later_one_or_another_document(switches):
    config, graph, params = make(**switches)
    batch = small_batch(config)
    # Row 1 has three documents and no padding.
    batch = {name: array[1:2] for name, array in batch.items()}
    seen = influence(graph, params, batch)
    segments = batch['segments'][0]
    T = len(segments)
    allowed = np.tril(np.ones((T, T), bool)) & (segments[:, None] == segments[None, :])
    # Windows of several layers add up.
    reach = sum(window - 1 if window else T for window in layer_windows(config.model))
    allowed &= ~np.tril(np.ones((T, T), bool), -reach - 1)
    assert np.all(seen[~allowed] == 0)
    assert np.all(seen[allowed] > 0)


def test_without_isolation_documents_do_see_each_other():
    config, graph, params = make()
    batch = {name: array[1:2] for name, array in small_batch(config).items()}
    seen = influence(graph, params, batch, isolated=False)
    causal = np.tril(np.ones(seen.shape, bool))
    assert np.all(seen[causal] > 0)
    assert np.all(seen[~causal] == 0)


def test_a_document_gives_the_same_logits_alone_and_packed():
    config, graph, params = make(model__family='llama')
    batch = {name: jnp.asarray(array[1:2]) for name, array in small_batch(config).items()}
    packed = logits(graph, params, batch['tokens'], segments_BT=batch['segments'], positions_BT=batch['positions'])
    second = np.flatnonzero(batch['segments'][0] == 2)
    alone = logits(graph, params, batch['tokens'][:, second])
    np.testing.assert_allclose(packed[:, second], alone, atol=2e-5)
    first = np.flatnonzero(batch['segments'][0] == 1)
    shorter = min(len(first), len(second))
    assert not np.allclose(packed[:, first[:shorter]], alone[:, :shorter], atol=1e-2)


PATTERNS = {
    'uniform': {},
    # Two periods of two layers and a rest of one.
    'mixed': {'model__num_layers': 5, 'model__attention_pattern': 'SL', 'model__sliding_window': 3},
}


@pytest.mark.parametrize('remat', ['none', 'dots', 'dots_no_batch', 'full'])
@pytest.mark.parametrize('scan', [True, False])
@pytest.mark.parametrize('pattern', PATTERNS)
def test_scan_and_remat_change_nothing(remat, scan, pattern):
    config, graph, params = make(**PATTERNS[pattern])
    same = dataclasses.replace(config.model, remat=remat, scan_layers=scan)
    other_graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(same, rngs=nnx.Rngs(0))))
    tokens = jnp.asarray(small_batch(config)['tokens'])

    def loss(params, graph):
        return jnp.square(logits(graph, params, tokens)).mean()

    value, grads = jax.value_and_grad(loss)(params, graph)
    other_value, other_grads = jax.value_and_grad(loss)(params, other_graph)
    np.testing.assert_allclose(other_value, value, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), other_grads, grads)


@pytest.mark.parametrize('switches', SWITCHES)
@pytest.mark.parametrize('scan', [True, False])
def test_cached_decoding_equals_the_full_pass(switches, scan):
    config, graph, params = make(**switches, model__scan_layers=scan)
    tokens = jnp.asarray(small_batch(config)['tokens'][:2])
    full = logits(graph, params, tokens)

    @jax.jit
    def cached(tokens, positions, cache):
        model = nnx.merge(graph, params)
        hidden, cache = model(tokens, positions_BT=positions, cache=cache)
        return model.logits(hidden), cache

    # Prefill of 7 and 4 tokens padded to 8, then one token at a time; the rows are at different positions.
    lengths = np.array([7, 4])
    cache = init_caches(config.model, 2, 16)
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    prefill, cache = cached(tokens[:, :8], positions, cache)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(prefill[row, :length], full[row, :length], atol=3e-5)
    for offset in range(8):
        at = lengths + offset
        token = tokens[jnp.arange(2), at][:, None]
        step, cache = cached(token, at[:, None], cache)
        np.testing.assert_allclose(step[:, 0], full[jnp.arange(2), at], atol=3e-5)
    # Control: the same token at another position gives something else.
    moved, _ = cached(token, at[:, None] - 2, cache)
    assert not np.allclose(moved, step, atol=1e-2)


def test_dropout_needs_a_key_and_keeps_the_mean():
    config, graph, params = make(model__dropout=0.5)
    tokens = jnp.asarray(small_batch(config)['tokens'])
    plain = logits(graph, params, tokens)
    _, other_graph, _ = make(model__dropout=0.0)
    np.testing.assert_array_equal(plain, logits(other_graph, params, tokens))
    dropped = [logits(graph, params, tokens, dropout_key=jax.random.key(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert not np.allclose(dropped[0], dropped[2])
    x = jnp.ones(100_000)
    assert abs(drop(x, 0.3, jax.random.key(0)).mean() - 1) < 0.01


def test_windows_follow_the_pattern_and_are_seen():
    settings = {'model__num_layers': 5, 'model__sliding_window': 3}
    config, graph, params = make(**settings, model__attention_pattern='SSL')
    assert layer_windows(config.model) == [3, 3, 0, 3, 3]
    _, other_graph, _ = make(**settings, model__attention_pattern='SLS')
    tokens = jnp.asarray(small_batch(config)['tokens'])
    assert not np.allclose(logits(graph, params, tokens), logits(other_graph, params, tokens), atol=1e-2)
    _, wide_graph, _ = make(**{**settings, 'model__sliding_window': 16}, model__attention_pattern='SLS')
    _, full_graph, _ = make(model__num_layers=5)
    np.testing.assert_array_equal(logits(wide_graph, params, tokens), logits(full_graph, params, tokens))


def test_logits_are_bent_into_their_cap():
    config, graph, params = make(model__logit_softcap=2.0)
    _, plain_graph, _ = make()
    tokens = jnp.asarray(small_batch(config)['tokens'])
    plain = logits(plain_graph, params, tokens)
    assert np.abs(plain).max() > 2
    np.testing.assert_allclose(logits(graph, params, tokens), 2 * np.tanh(plain / 2), atol=1e-5)


def initial(**overrides):
    config = small_config(model__num_layers=8, model__dim=256, model__num_heads=8, **overrides)
    return nnx.to_pure_dict(nnx.state(Decoder(config.model, rngs=nnx.Rngs(0))))


def test_initial_parameters_of_gpt2():
    state = initial(model__init_std=0.02)
    assert state['embedding'].shape == (VOCAB, 256)
    assert np.std(state['embedding']) == pytest.approx(0.02, rel=0.05)
    assert np.std(state['position_embedding']) == pytest.approx(0.01, rel=0.05)
    attention = state['blocks']['attention']
    assert np.std(attention['query']['kernel']) == pytest.approx(0.02, rel=0.05)
    assert np.std(attention['out']['kernel']) == pytest.approx(0.02 / 4, rel=0.05)
    assert np.all(attention['out']['bias'] == 0)
    assert np.all(state['blocks']['attention_norm']['scale'] == 1)
    # Layers start differently.
    assert not np.allclose(attention['query']['kernel'][0], attention['query']['kernel'][1])


def test_initial_parameters_of_gpt_neox():
    state = initial(model__family='gpt_neox')
    for kernel in (state['blocks']['feedforward']['up']['kernel'], state['embedding'], state['head']['kernel']):
        assert np.std(kernel) == pytest.approx((2 / (5 * 256)) ** 0.5, rel=0.05)
    for kernel in (state['blocks']['feedforward']['down']['kernel'], state['blocks']['attention']['out']['kernel']):
        assert np.std(kernel) == pytest.approx(2 / (8 * 16), rel=0.05)


def test_initial_parameters_of_nanochat():
    state = initial(model__family='nanochat')
    assert np.std(state['embedding']) == pytest.approx(1, rel=0.05)
    assert np.std(state['head']['kernel']) == pytest.approx(0.001, rel=0.05)
    query = state['blocks']['attention']['query']['kernel']
    assert np.std(query) == pytest.approx(1 / 16, rel=0.05)
    assert np.abs(query).max() <= 3**0.5 / 16
    assert np.all(state['blocks']['attention']['out']['kernel'] == 0)
    assert np.all(state['blocks']['feedforward']['down']['kernel'] == 0)
    # Norms without parameters.
    assert set(state) == {'embedding', 'blocks', 'head'}
    assert set(state['blocks']) == {'attention', 'feedforward'}
