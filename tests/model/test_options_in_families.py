"""Options of nanochat in models of other families: decoding with a cache, causality and packed documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model.layers.kv_cache import init_caches
from maxlm.model.smear import NO_TOKEN, previous_ids
from tests.parameters import decoder_graph, random_params
from tests.small import EXPERTS, LATENT, STREAM, model_keys, small_config

VALUES = model_keys(value_embedding_pattern='NV', value_gate_channels=7, relative_attention_multiplier=1.3)
FAMILIES = {
    'gpt2': {'model__family': 'gpt2', **VALUES},
    'parallel residual': {'model__family': 'gpt_neox', **VALUES},
    'grouped heads': {'model__family': 'llama', 'model__num_kv_heads': 2, **VALUES},
    'windows, post-norms, soft caps': {'model__family': 'gemma2', 'model__sliding_window': 4, **VALUES},
    'layers without positions': {'model__family': 'smollm3', 'model__attention_pattern': 'NL', **VALUES},
    'experts, first dense layer': {**EXPERTS, 'model__family': 'qwen3_moe', **VALUES},
    # Latent attention supports the options of the stream alone.
    'latent attention': LATENT,
    'latent attention, experts': {**EXPERTS, **LATENT},
}
FAST = ('parallel residual', 'windows, post-norms, soft caps', 'experts, first dense layer', 'latent attention')
LENGTH, FIRST_DOCUMENT, PREFILLED, POSITION = 12, 5, 4, 8


@pytest.fixture(
    scope='module',
    params=[name if name in FAST else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES],
)
def results(request):
    """Returns the logits of one pass and with a cache, and gradients of one hidden state in one and two documents."""
    config = small_config(**{'model__num_layers': 3, **FAMILIES[request.param], **STREAM})
    model, graph = config.model, decoder_graph(config.model)
    params = random_params(config)
    # Different tokens, so that the rows of the tables belong to one position each.
    tokens = np.random.default_rng(0).permutation(model.vocab_size)[None, :LENGTH].astype(np.int32)
    segments = (np.arange(LENGTH) >= FIRST_DOCUMENT)[None].astype(np.int32) + 1
    positions = np.where(segments == 1, np.arange(LENGTH), np.arange(LENGTH) - FIRST_DOCUMENT).astype(np.int32)

    @jax.jit
    def run(params, tokens):
        def cached(cache, tokens, start, before):
            decoder = nnx.merge(graph, params)
            at = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
            hidden, cache, _ = decoder(tokens, positions_BT=at, cache=cache, previous_BT=previous_ids(tokens, before))
            return cache, decoder.logits(hidden)

        cache, prefill = cached(init_caches(model, 1, LENGTH), tokens[:, :PREFILLED], 0, jnp.array([NO_TOKEN]))

        def step(cache, at):
            cache, found = cached(cache, tokens[:, at][:, None], at, tokens[:, at - 1])
            return cache, found[:, 0]

        _, steps = jax.lax.scan(step, cache, jnp.arange(PREFILLED, LENGTH))

        def hidden(params, **kwargs):
            model = nnx.merge(graph, params)
            hidden_BTD, _, _ = model(tokens, **kwargs)
            # A sum would be 0 after a norm.
            return jnp.square(hidden_BTD[0, POSITION]).sum() + hidden_BTD[0, POSITION, 0], model.logits(hidden_BTD)

        (_, full), whole = jax.value_and_grad(hidden, has_aux=True)(params)
        packed = jax.grad(lambda params: hidden(params, segments_BT=segments, positions_BT=positions)[0])(params)
        tables = [{name: grad.get(name) for name in ('embedding', 'value_embeddings')} for grad in (whole, packed)]
        return full, jnp.concatenate([prefill, steps.swapaxes(0, 1)], axis=1), *tables

    return tokens[0], run(params, tokens)


def test_decoding_with_a_cache_equals_the_full_pass(results):
    _, (full, cached, *_) = results
    np.testing.assert_allclose(cached, full, atol=1e-5 * max(1, np.abs(full).max()))
    assert np.abs(full).max() > 0.1


@pytest.mark.parametrize('packed', [False, True])
def test_a_position_depends_on_the_earlier_tokens_of_its_document_alone(results, packed):
    tokens, (_, _, *gradients) = results
    start = FIRST_DOCUMENT if packed else 0
    for name, table in gradients[packed].items():
        if table is None:
            continue
        # The last axes are those of the vocabulary and the width.
        sizes = np.abs(table).max(-1).reshape(-1, table.shape[-2]).max(0)[tokens]
        assert np.all(sizes[start : POSITION + 1] > 0), name
        assert not np.any(sizes[:start]), name
        assert not np.any(sizes[POSITION + 1 :]), name
