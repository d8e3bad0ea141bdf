"""Dependencies of the decoder's logits, and equality of equivalent computations.

`test_blocks.py` tests loops over layers, rematerialization and dropout; `test_initializers.py` initial parameters.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model.layers.kv_cache import init_caches
from maxlm.model.layers.masks import layer_windows
from tests.parameters import decoder_graph, logits, random_params
from tests.small import LATENT, model_keys, small_batch, small_config

SINKS = model_keys(family='llama', attention_sinks=True)
# Settings, and the execution of layers: scanned, unrolled, or with unstacked arrays in the cached call.
CASES = {
    'gpt2': (model_keys(family='gpt2'), 'loop'),
    'gpt_neox': (model_keys(family='gpt_neox', num_kv_heads=2), 'unrolled'),
    'llama, all switches': (
        model_keys(family='llama', num_kv_heads=1, norm='layernorm', use_bias=True, tie_embeddings=True),
        'apart',
    ),
    'qwen3, sliding': (
        model_keys(family='qwen3', num_kv_heads=2, head_dim=12, attention_pattern='S', sliding_window=3),
        'unrolled',
    ),
    'nanochat': (model_keys(family='nanochat'), 'apart'),
    'latent attention': ({**LATENT, 'model__q_lora_rank': 20}, 'apart'),
    'latent attention, experts': (
        {**LATENT, **model_keys(num_experts=4, num_experts_per_token=2, expert_ffn_dim=16, num_dense_layers=1)},
        'loop',
    ),
    'latent attention, full queries, yarn': (
        {
            **LATENT,
            **model_keys(
                rope_scaling='yarn',
                rope_scaling_factor=4.0,
                rope_mscale_all_dim=0.7,
                attention_pattern='SL',
                sliding_window=3,
            ),
        },
        'loop',
    ),
    'sinks': ({**SINKS, 'model__num_kv_heads': 2}, 'apart'),
    'sinks, clamped, mixed windows': (
        {**SINKS, **model_keys(activation='swiglu_oai', use_bias=True, attention_pattern='SL', sliding_window=3)},
        'loop',
    ),
    'gemma2, all switches': (
        model_keys(
            family='gemma2',
            num_kv_heads=2,
            sliding_window=3,
            rope_local_theta=77.0,
            attention_multiplier=0.7,
            attention_softcap=2.0,
        ),
        'apart',
    ),
    'smollm3': (model_keys(family='smollm3', attention_pattern='NL'), 'loop'),
    'olmo3': (
        model_keys(
            family='olmo3',
            num_layers=3,
            attention_pattern='SLN',
            sliding_window=3,
            residual_multiplier=0.5,
            logits_scaling=2.0,
        ),
        'apart',
    ),
    'mixed windows': (
        model_keys(num_layers=4, attention_pattern='SL', sliding_window=3),
        'loop',
    ),
}
# Number of prefill tokens in each of two rows, padded to eight; the following tokens are decoded one by one.
LENGTHS, PADDED = np.array([7, 4]), 8


def make(**overrides):
    config = small_config(**overrides)
    return config, decoder_graph(config.model), random_params(config)


def influence(graph, params, tokens, segments, positions):
    """Returns [T, T]: the gradient of the hidden state at position t by the embedding of token s."""
    T = tokens.shape[1]

    def scores(embedding_SD):
        # Position s reads row s of a separate table, so that its gradient is separate.
        model = nnx.merge(graph, {**params, 'embedding': embedding_SD})
        hidden, _, _ = model(jnp.arange(T)[None], segments_BT=segments, positions_BT=positions)
        return (jnp.square(hidden[0]) + hidden[0]).sum(-1)

    return jnp.abs(jax.jacrev(scores)(params['embedding'][tokens[0]])).sum(-1)


class Results(NamedTuple):
    """Results of one program with six traces of a decoder, which saves the compiler's fixed costs.

    Attributes:
        influence: [T, T] of a row with three documents.
        full: logits of two rows by a pass without cache; the fields below are by prefill and token by token.
        moved: logits of the last step with positions that are too small by two.
    """

    config: object
    batch: dict
    influence: np.ndarray
    full: np.ndarray
    prefill: np.ndarray
    steps: np.ndarray
    moved: np.ndarray


@pytest.fixture(scope='module', params=CASES)
def results(request):
    settings, layers = CASES[request.param]
    config, graph, params = make(**settings, model__scan_layers=layers == 'loop')
    batch = small_batch(config)
    # Row 1 has three documents and no padding.
    packed = [batch[name][1:2] for name in ('tokens', 'segments', 'positions')]

    @jax.jit
    def run(params, packed, tokens):
        seen, full = influence(graph, params, *packed), logits(graph, params, tokens)
        blocks = None
        if layers == 'apart':
            blocks = [jax.tree.map(lambda x, n=n: x[n], params['blocks']) for n in range(config.model.num_layers)]

        def cached(tokens, positions, cache):
            model = nnx.merge(graph, params)
            hidden, cache, _ = model(tokens, positions_BT=positions, cache=cache, blocks=blocks)
            return model.logits(hidden), cache

        def step(cache, at):
            found, cache = cached(jnp.take_along_axis(tokens, at[:, None], axis=1), at[:, None], cache)
            return cache, found[:, 0]

        positions = jnp.broadcast_to(jnp.arange(PADDED), (2, PADDED))
        cache = init_caches(config.model, 2, 16, unstacked=layers == 'apart')
        prefill, cache = cached(tokens[:, :PADDED], positions, cache)
        at = LENGTHS[None] + np.arange(PADDED)[:, None]
        cache, steps = jax.lax.scan(step, cache, at)
        moved, _ = cached(jnp.take_along_axis(tokens, at[-1][:, None], axis=1), at[-1][:, None] - 2, cache)
        return seen, full, prefill, steps, moved[:, 0]

    found = jax.device_get(run(params, packed, batch['tokens'][:2]))
    return Results(config, {name: array[1] for name, array in batch.items()}, *found)


def allowed_pairs(results):
    segments = results.batch['segments']
    T = len(segments)
    # The windows of several layers add up.
    reach = sum(window - 1 if window else T for window in layer_windows(results.config.model))
    allowed = np.tril(np.ones((T, T), bool)) & ~np.tril(np.ones((T, T), bool), -reach - 1)
    return allowed & (segments[:, None] == segments[None, :])


def test_no_token_depends_on_later_tokens_or_other_documents(results):
    assert np.all(results.influence[~allowed_pairs(results)] == 0)


def test_every_token_depends_on_its_document_up_to_itself(results):
    assert np.all(results.influence[allowed_pairs(results)] > 0)


def test_prefill_equals_the_full_pass(results):
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(results.prefill[row, :length], results.full[row, :length], atol=3e-5)


def test_cached_steps_equal_the_full_pass(results):
    for offset, step in enumerate(results.steps):
        np.testing.assert_allclose(step, results.full[np.arange(2), LENGTHS + offset], atol=3e-5)


def test_the_same_token_at_another_position_gives_other_logits(results):
    """Negative control of the previous test."""
    assert not np.allclose(results.moved, results.steps[-1], atol=1e-2)


@pytest.fixture(scope='module')
def of_documents():
    """Returns segments of a row, influence without isolation, and logits of the row and of its second document."""
    config, graph, params = make(model__family='llama', model__num_layers=1)
    batch = {name: array[1:2] for name, array in small_batch(config).items()}
    tokens, segments, positions = (batch[name] for name in ('tokens', 'segments', 'positions'))
    second = np.flatnonzero(segments[0] == 2)

    @jax.jit
    def run(params):
        packed = logits(graph, params, tokens, segments_BT=segments, positions_BT=positions)
        seen = influence(graph, params, tokens, None, positions)
        return seen, packed, logits(graph, params, tokens[:, second])

    return segments[0], *jax.device_get(run(params))


def test_without_isolation_documents_attend_to_each_other(of_documents):
    _, seen, *_ = of_documents
    causal = np.tril(np.ones(seen.shape, bool))
    assert np.all(seen[causal] > 0)
    assert np.all(seen[~causal] == 0)


def test_a_document_gives_the_same_logits_alone_and_packed(of_documents):
    segments, _, packed, alone = of_documents
    second = np.flatnonzero(segments == 2)
    np.testing.assert_allclose(packed[:, second], alone, atol=2e-5)
    first = np.flatnonzero(segments == 1)
    shorter = min(len(first), len(second))
    assert not np.allclose(packed[:, first[:shorter]], alone[:, :shorter], atol=1e-2)


def test_windows_follow_the_pattern_and_change_logits():
    settings = model_keys(num_layers=3, family='llama', sliding_window=3)
    config, graph, params = make(**settings, model__attention_pattern='SSL')
    five = dataclasses.replace(config.model, num_layers=5)
    assert layer_windows(five) == [3, 3, 0, 3, 3]
    tokens = small_batch(config)['tokens'][:1]
    changes = [{'attention_pattern': 'SLS'}, {'sliding_window': 16}, {'attention_pattern': 'L'}]
    graphs = [graph, *(decoder_graph(dataclasses.replace(config.model, **change)) for change in changes)]
    found, other, wide, full = jax.jit(lambda params: [logits(graph, params, tokens) for graph in graphs])(params)
    assert not np.allclose(found, other, atol=1e-2)
    np.testing.assert_array_equal(wide, full)
    assert not np.allclose(found, full, atol=1e-2)


def test_logits_are_soft_capped():
    config, graph, params = make(model__logit_softcap=2.0, model__num_layers=1)
    plain_graph = decoder_graph(dataclasses.replace(config.model, logit_softcap=0.0))
    tokens = small_batch(config)['tokens'][:1]
    found, plain = jax.jit(lambda params: [logits(variant, params, tokens) for variant in (graph, plain_graph)])(params)
    assert np.abs(plain).max() > 2
    np.testing.assert_allclose(found, 2 * np.tanh(plain / 2), atol=1e-5)
