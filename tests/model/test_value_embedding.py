"""Value embeddings against a NumPy model of the formulas of nanochat, with and without a cache, and their gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model.decoder import Decoder
from maxlm.model.layers.kv_cache import init_caches
from maxlm.model.value_embedding import value_layers
from tests.parameters import decoder_graph, logits, random_params
from tests.small import EXPERTS, model_keys, small_batch, small_config

CHANNELS = 5
# The settings of nanochat beside its family. Layers 0, 2 and 4 have value embeddings.
NANOCHAT = model_keys(
    family='nanochat',
    num_layers=5,
    num_kv_heads=2,
    head_dim=12,
    rope_theta=100_000.0,
    norm_epsilon=1.19e-7,
    attention_pattern='SL',
    sliding_window=4,
    relative_attention_multiplier=1.44,
    value_embedding_pattern='NV',
    value_gate_channels=CHANNELS,
)
# Settings, and the execution of layers: scanned, unrolled, or with unstacked arrays in the cached calls.
CASES = {
    # Two periods of two layers, and a last layer.
    'loop': ({}, 'loop'),
    'unrolled': ({}, 'unrolled'),
    'apart': ({}, 'apart'),
    # Layers 1 and 4; one window per layer, and full attention in the last layer.
    'other patterns': (model_keys(attention_pattern='SLSSL', value_embedding_pattern='NNV'), 'loop'),
    # A loop over two periods of three layers, two of which have a value embedding.
    'two in a period': (
        model_keys(num_layers=6, value_embedding_pattern='VNV', attention_pattern='L', sliding_window=0),
        'loop',
    ),
    'no gate': (model_keys(num_layers=2, value_embedding_pattern='V', value_gate_channels=0), 'loop'),
}
LENGTH, PREFILLED = 12, 5


def rms(x, model):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + model.norm_epsilon)


def rotated(x_BTNH, model):
    half = model.head_dim // 2
    angles = np.arange(x_BTNH.shape[1])[:, None] * model.rope_theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x_BTNH[..., :half], x_BTNH[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def reference(model, params, tokens_BT):
    """Returns the logits [B, T, V] of a nanochat model in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    (B, T), L, K, H = tokens_BT.shape, model.num_layers, model.num_kv_heads, model.head_dim
    x_BTD = rms(params['embedding'][tokens_BT], model)
    # The pattern ends at the last layer.
    letters = (L * model.value_embedding_pattern)[-L:]
    for layer in range(L):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params['blocks'])
        attention, feedforward = block['attention'], block['feedforward']
        h_BTD = rms(x_BTD, model)
        q, k, v = (np.tensordot(h_BTD, attention[name]['kernel'], 1) for name in ('query', 'key', 'value'))
        if letters[layer] == 'V':
            number = letters[:layer].count('V')
            rows_BTKH = params['value_embeddings'][number][tokens_BT].reshape(B, T, K, H)
            if 'value_gates' in params:
                gate_CK = params['value_gates'][number]
                rows_BTKH = 3 / (1 + np.exp(-h_BTD[..., :CHANNELS] @ gate_CK))[..., None] * rows_BTKH
            v = v + rows_BTKH
        q, k = (rotated(rms(each, model), model) for each in (q, k))
        k, v = (np.repeat(each, model.num_heads // K, axis=2) for each in (k, v))
        scores = 1.44 / np.sqrt(H) * np.einsum('BTNH,BSNH->BNTS', q, k)
        behind = np.arange(T)[:, None] - np.arange(T)[None]
        window = {'S': model.sliding_window, 'L': T}[model.attention_pattern[layer % len(model.attention_pattern)]]
        scores = np.where((behind >= 0) & (behind < window), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        o_BTNH = np.einsum('BNTS,BSNH->BTNH', weights / weights.sum(-1, keepdims=True), v)
        x_BTD = x_BTD + np.tensordot(o_BTNH, attention['out']['kernel'], 2)
        inner = np.square(np.maximum(rms(x_BTD, model) @ feedforward['up']['kernel'], 0))
        x_BTD = x_BTD + inner @ feedforward['down']['kernel']
    return 15 * np.tanh(rms(x_BTD, model) @ params['head']['kernel'] / 15)


def make(**overrides):
    config = small_config(**{**NANOCHAT, **overrides})
    return config.model, random_params(config), small_batch(config)['tokens'][:2, :LENGTH]


@pytest.mark.parametrize('case', CASES)
def test_logits_with_and_without_a_cache_equal_the_reference(case):
    settings, layers = CASES[case]
    model, params, tokens = make(**settings, model__scan_layers=layers == 'loop')
    graph = decoder_graph(model)

    @jax.jit
    def run(params, tokens):
        blocks = None
        if layers == 'apart':
            blocks = [jax.tree.map(lambda x, n=n: x[n], params['blocks']) for n in range(model.num_layers)]

        def cached(cache, tokens, start):
            decoder = nnx.merge(graph, params)
            positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
            hidden, cache, _ = decoder(tokens, positions_BT=positions, cache=cache, blocks=blocks)
            return cache, decoder.logits(hidden)

        cache = init_caches(model, 2, LENGTH, unstacked=layers == 'apart')
        cache, prefill = cached(cache, tokens[:, :PREFILLED], 0)

        def step(cache, at):
            cache, found = cached(cache, jax.lax.dynamic_slice_in_dim(tokens, at, 1, axis=1), at)
            return cache, found[:, 0]

        _, steps = jax.lax.scan(step, cache, jnp.arange(PREFILLED, LENGTH))
        return logits(graph, params, tokens), jnp.concatenate([prefill, steps.swapaxes(0, 1)], axis=1)

    expected = reference(model, params, tokens)
    for found in run(params, tokens):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    # Negative controls: another order of the tables, and no gate.
    swapped = {**params, 'value_embeddings': params['value_embeddings'][::-1]}
    assert np.abs(reference(model, swapped, tokens) - expected).max() > 0.1
    if model.value_gate_channels:
        ungated = {name: tree for name, tree in params.items() if name != 'value_gates'}
        assert np.abs(reference(model, ungated, tokens) - expected).max() > 0.1


@pytest.mark.parametrize('settings', [{'scan_layers': True}, {'scan_layers': False, 'remat_policy': 'full'}])
def test_gradients_equal_finite_differences_of_the_reference(settings):
    model, params, tokens = make()
    graph = decoder_graph(dataclasses.replace(model, **settings))
    gradients = jax.jit(jax.grad(lambda params: jnp.square(logits(graph, params, tokens)).mean()))(params)
    rng = np.random.default_rng(2)
    for name in ('value_embeddings', 'value_gates', 'embedding'):
        direction = rng.standard_normal(params[name].shape)

        def loss(step, name=name, direction=direction):
            moved = {**params, name: params[name] + step * direction}
            return np.square(reference(model, moved, tokens)).mean()

        expected = (loss(1e-5) - loss(-1e-5)) / 2e-5
        assert abs(expected) > 1e-3
        assert np.vdot(gradients[name], direction) == pytest.approx(expected, rel=1e-4)
    # Tables of other tokens have no gradient.
    absent = np.setdiff1d(np.arange(model.vocab_size), tokens)
    assert len(absent)
    assert not np.any(gradients['value_embeddings'][:, absent])


def test_the_pattern_ends_at_the_last_layer():
    model, *_ = make()
    assert value_layers(model) == [True, False, True, False, True]
    assert value_layers(dataclasses.replace(model, num_layers=4)) == [False, True, False, True]
    assert value_layers(dataclasses.replace(model, value_embedding_pattern='')) == [False] * 5


def test_dense_first_layers_have_their_own_tables():
    keys = model_keys(value_embedding_pattern='VNV', value_gate_channels=CHANNELS)
    config = small_config(**EXPERTS, **keys)
    params, tokens = random_params(config), small_batch(config)['tokens'][:2]
    graph = decoder_graph(config.model)
    run = jax.jit(lambda params: logits(graph, params, tokens))
    # Without a table, the layer adds 0 to its values. The first layer is dense.
    both = run(params)
    for number in range(2):
        tables = np.array(params['value_embeddings'])
        tables[number] = 0
        assert np.abs(run({**params, 'value_embeddings': tables}) - both).max() > 1e-2
    assert params['value_embeddings'].shape == (2, config.model.vocab_size, config.model.dim)


def test_initial_values_of_other_parameters_do_not_depend_on_value_embeddings():
    model = small_config(**model_keys(family='nanochat')).model
    gated = dataclasses.replace(model, value_embedding_pattern='NV', value_gate_channels=CHANNELS)
    plain, other = (
        jax.jit(lambda model=model: nnx.to_pure_dict(nnx.state(Decoder(model, rngs=nnx.Rngs(0)))))()
        for model in (model, gated)
    )
    tables, gates = other.pop('value_embeddings'), other.pop('value_gates')
    jax.tree.map(np.testing.assert_array_equal, plain, other)
    # As in nanochat: tables uniform with standard deviation 1/√D, gates uniform from 0 to 0.02.
    assert np.std(tables) == pytest.approx(model.dim**-0.5, rel=0.05)
    assert 0 <= gates.min() < 0.01 < gates.max() < 0.02
