"""Residual scales, embedding residual, smear and backout against the formulas of nanochat in NumPy.

The reference is a complete model: Karpathy 2026, nanochat/gpt.py, without value embeddings.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model.decoder import Decoder
from maxlm.model.layers.kv_cache import init_caches
from maxlm.model.smear import NO_TOKEN, previous_ids
from tests.parameters import decoder_graph, logits, random_params
from tests.small import model_keys, small_batch, small_config

L, CHANNELS, HEAD_DIM, THETA = 3, 5, 8, 1e5
OPTIONS = {
    'residual_scale': True,
    'embedding_residual': True,
    'smear_channels': CHANNELS,
    'backout_layer': L // 2,
}
NANOCHAT = model_keys(
    family='nanochat',
    num_layers=L,
    num_kv_heads=2,
    rope_theta=THETA,
    attention_multiplier=1.44 / HEAD_DIM**0.5,
    norm_epsilon=1.2e-7,
)
PARAMETERS = {
    'residual_scale': ('residual_scales',),
    'embedding_residual': ('embedding_scales',),
    'smear_channels': ('smear_gate', 'smear_scale'),
    'backout_layer': ('backout_scale',),
}
CASES = {**{name: (name,) for name in OPTIONS}, 'all': tuple(OPTIONS)}


def make(options, **overrides):
    settings = model_keys(**{name: OPTIONS[name] for name in options})
    config = small_config(**{**NANOCHAT, **settings, **overrides})
    return config, decoder_graph(config.model), random_params(config)


def rms(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1.2e-7)


def rotated(x_TNH):
    half = HEAD_DIM // 2
    angles = np.arange(len(x_TNH))[:, None] * THETA ** -(np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x_TNH[..., :half], x_TNH[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def reference(params, tokens_T):
    """Returns the logits [T, V] of one document. Options without parameters are off."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    e = rms(params['embedding'][tokens_T])
    if 'smear_gate' in params:
        C = len(params['smear_gate'])
        gate = params['smear_scale'] / (1 + np.exp(-e[1:, :C] @ params['smear_gate']))
        e = np.concatenate([e[:1], e[1:] + gate[:, None] * e[:-1]])
    x, middle = e, None
    hidden = np.triu(np.full((len(x), len(x)), -np.inf), 1)
    for layer in range(L):
        if 'residual_scales' in params:
            x = params['residual_scales'][layer] * x
        if 'embedding_scales' in params:
            x = x + params['embedding_scales'][layer] * e
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params['blocks'])
        attention, feedforward = block['attention'], block['feedforward']
        q, k, v = (np.einsum('td,dnh->tnh', rms(x), attention[name]['kernel']) for name in ('query', 'key', 'value'))
        # Each of two key/value heads serves two query heads.
        q, k, v = 1.2 * rms(rotated(q)), 1.2 * rms(rotated(k)).repeat(2, axis=1), v.repeat(2, axis=1)
        scores = np.einsum('tnh,snh->nts', q, k) / HEAD_DIM**0.5 + hidden
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum('nts,snh->tnh', weights / weights.sum(-1, keepdims=True), v)
        x = x + np.einsum('tnh,nhd->td', attended, attention['out']['kernel'])
        x = x + np.maximum(rms(x) @ feedforward['up']['kernel'], 0) ** 2 @ feedforward['down']['kernel']
        middle = x if layer == L // 2 else middle
    if 'backout_scale' in params:
        x = x - params['backout_scale'] * middle
    return 15 * np.tanh(rms(x) @ params['head']['kernel'] / 15)


@pytest.mark.parametrize('options', CASES.values(), ids=CASES)
def test_logits_follow_the_formulas(options):
    config, graph, params = make(options)
    tokens = small_batch(config)['tokens'][:2]
    found = jax.jit(functools.partial(logits, graph))(params, tokens)
    for row in range(2):
        np.testing.assert_allclose(found[row], reference(params, tokens[row]), atol=1e-5)
    # Control: each parameter matters.
    for option in options:
        for name in PARAMETERS[option]:
            changed = reference({**params, name: params[name] + 0.1}, tokens[0])
            assert np.abs(changed - found[0]).max() > 1e-3


@pytest.mark.parametrize('layers', ['loop', 'unrolled', 'apart'])
def test_decoding_with_a_cache_follows_the_formulas(layers):
    """Two chunks of prefill and single tokens."""
    config, graph, params = make(CASES['all'], model__scan_layers=layers == 'loop')
    tokens = small_batch(config)['tokens'][:2]
    blocks = None
    if layers == 'apart':
        blocks = [jax.tree.map(lambda x, n=n: x[n], params['blocks']) for n in range(L)]
    cache = init_caches(config.model, 2, 16, unstacked=layers == 'apart')

    @jax.jit
    def call(params, cache, tokens, start, before):
        model = nnx.merge(graph, params)
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, cache, _ = model(
            tokens, positions_BT=positions, previous_BT=previous_ids(tokens, before), cache=cache, blocks=blocks
        )
        return model.logits(hidden), cache

    found, start = [], 0
    for stop in (4, 8, 9, 10, 11):
        before = tokens[:, start - 1] if start else np.full(2, NO_TOKEN)
        part, cache = call(params, cache, tokens[:, start:stop], start, before)
        found.append(part)
        start = stop
    found = np.concatenate(found, axis=1)
    for row in range(2):
        np.testing.assert_allclose(found[row], reference(params, tokens[row, :start]), atol=1e-5)


def test_a_cached_call_requires_the_previous_token():
    config, graph, params = make(CASES['all'])
    with pytest.raises(AssertionError, match='previous tokens'):
        nnx.merge(graph, params)(np.zeros((1, 1), np.int32), cache=init_caches(config.model, 1, 16))


def test_documents_are_separate_or_in_one_row():
    config, graph, params = make(CASES['all'])
    batch = small_batch(config)
    tokens, segments, positions = (batch[name][1] for name in ('tokens', 'segments', 'positions'))
    found = jax.jit(functools.partial(logits, graph))(
        params, tokens[None], segments_BT=segments[None], positions_BT=positions[None]
    )
    for number in (1, 2, 3):
        places = np.flatnonzero(segments == number)
        np.testing.assert_allclose(found[0, places], reference(params, tokens[places]), atol=1e-5)
    # Without segments, documents attend to each other, and the first token of a document is smeared.
    assert np.abs(found[0] - reference(params, tokens)).max() > 1e-2


def gradients(options, **overrides):
    config, graph, params = make(options, **overrides)
    batch = small_batch(config)

    @jax.jit
    def gradient(params):
        return jax.grad(lambda params: jnp.square(logits(graph, params, batch['tokens'])).mean())(params)

    return gradient(params)


@functools.cache
def plain_gradients():
    return gradients(CASES['all'])


def test_every_parameter_has_a_gradient():
    found = plain_gradients()
    for names in PARAMETERS.values():
        for name in names:
            assert np.all(np.isfinite(found[name]))
            assert np.all(np.abs(found[name]) > 1e-7), name


@pytest.mark.parametrize(
    'settings',
    [
        {'scan_layers': False},
        {'remat_policy': 'full'},
        {'attention_pattern': 'LS', 'sliding_window': 16},
    ],
    ids=['unrolled', 'rematerialized', 'loop over two layers and a rest'],
)
def test_other_loops_give_the_same_gradients(settings):
    found = gradients(CASES['all'], **model_keys(**settings))
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(plain_gradients()), strict=True):
        np.testing.assert_allclose(leaf, expected, atol=2e-6 * np.abs(expected).max())


def saved_floats(num_layers, options):
    """Returns the number of values that the backward pass of a loop without rematerialization reads."""
    settings = {**NANOCHAT, **model_keys(**{name: OPTIONS[name] for name in options}, num_layers=num_layers)}
    config = small_config(**settings, model__remat_policy='full')
    graph, params = decoder_graph(config.model), random_params(config)
    tokens = small_batch(config)['tokens']
    _, pull_back = jax.eval_shape(lambda params: jax.vjp(functools.partial(logits, graph), params, tokens), params)
    return sum(leaf.size for leaf in jax.tree.leaves(pull_back))


def test_layers_do_not_save_the_earlier_states():
    """The input of the first layer and the state for backout exist once, not once per layer."""
    rows = small_config(**NANOCHAT).train.global_batch_size * small_config(**NANOCHAT).data.seq_len

    def per_layer(options):
        return saved_floats(9, options) - saved_floats(8, options)

    assert per_layer(('embedding_residual', 'backout_layer')) - per_layer(()) < rows


def test_initial_values():
    """The linear rules are those of nanochat for three layers."""
    config = small_config(**{**NANOCHAT, **model_keys(**OPTIONS)})
    made = Decoder(config.model, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(made.residual_scales[...], [1.15, 1.10, 1.05], rtol=1e-6)
    np.testing.assert_allclose(made.embedding_scales[...], [0.20, 0.125, 0.05], rtol=1e-6)
    assert made.smear_gate.shape == (CHANNELS,)
    assert np.all(made.smear_gate[...] >= 0)
    assert 0 < made.smear_gate[...].max() < 0.02
    assert made.smear_scale[...] == 0
    assert made.backout_scale[...] == np.float32(0.2)
    # The options do not change the initial values of other parameters, and are off by default.
    plain = Decoder(small_config(**NANOCHAT).model, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(plain.head.kernel[...], made.head.kernel[...])
    names = {name for names in PARAMETERS.values() for name in names}
    assert names.isdisjoint(nnx.to_pure_dict(nnx.state(plain)))
    assert names < set(nnx.to_pure_dict(nnx.state(made)))
    # One layer has the values of the first.
    one = Decoder(dataclasses.replace(config.model, num_layers=1, backout_layer=0), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(one.residual_scales[...], [1.15], rtol=1e-6)
