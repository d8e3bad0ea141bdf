"""Provides small models, engines that share compiled functions, and continuations computed without a cache."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.inference.engine import compiled
from maxlm.inference.engine import engine as engine_module
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.requests import Request
from maxlm.inference.load import LoadedModel
from maxlm.inference.sampling import Sampling
from maxlm.model.layers import linear
from maxlm.training.state import abstract_model
from tests.parameters import random_params
from tests.small import EXPERTS, LATENT, STREAM, small_config, small_layout

GREEDY = Sampling(temperature=0)
NUM_IDS = 257
CONTEXT = 100
# The longest prompt exceeds one chunk, and its padding reaches past the context.
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(40, 110))]
MAX_TOKENS = 12
# The vocabulary has more rows than the tokenizer, and an odd number, which devices cannot split equally.
MODEL = {'model__dim': 16, 'model__vocab_size': 1023, 'model__max_positions': CONTEXT}
SCALED = {'model__family': 'llama', 'model__rope_scaling_factor': 4.0, 'model__original_max_positions': 25}
FAMILIES = {
    'gpt2': {'model__family': 'gpt2'},
    'gpt_neox': {'model__family': 'gpt_neox', 'model__dim': 32},
    'llama, grouped': {'model__family': 'llama', 'model__num_kv_heads': 2},
    'qwen3': {'model__family': 'qwen3', 'model__num_kv_heads': 1},
    'nanochat': {'model__family': 'nanochat'},
    'gemma2': {'model__family': 'gemma2', 'model__sliding_window': 5, 'model__dim': 32},
    'smollm3': {'model__family': 'smollm3', 'model__attention_pattern': 'NL'},
    'linear': {**SCALED, 'model__rope_scaling': 'linear'},
    'yarn': {**SCALED, 'model__rope_scaling': 'yarn'},
    'llama3': {**SCALED, 'model__rope_scaling': 'llama3'},
    # Keys in the cache keep the rotation of the original context, so texts stay within it; one pass rotates all keys
    # again.
    'dynamic': {**SCALED, 'model__rope_scaling': 'dynamic', 'model__original_max_positions': CONTEXT},
    'latent': {**LATENT, 'model__q_lora_rank': 20},
    'experts': EXPERTS,
    # Learned positions are part of the embeddings that are smeared.
    'stream': {
        'model__family': 'gpt2',
        'model__num_layers': 3,
        'model__value_embedding_pattern': 'NV',
        'model__value_gate_channels': 12,
        'model__relative_attention_multiplier': 1.3,
        **STREAM,
    },
    'windows': {'model__family': 'llama', 'model__sliding_window': 5, 'model__attention_pattern': 'SL'},
    'value embeddings': {
        'model__family': 'nanochat',
        'model__num_kv_heads': 2,
        'model__value_embedding_pattern': 'NV',
        'model__value_gate_channels': 12,
    },
}
# A prompt of one chunk needs one compiled function; longer prompts need no other.
SETTINGS = {'num_slots': 3, 'chunk': 32}


@functools.cache
def load(family, num_devices=1, **mesh):
    settings = {f'mesh__{axis}': size for axis, size in mesh.items()}
    config = small_config(num_devices=num_devices, **{**MODEL, **FAMILIES[family]}, **settings)
    layout = small_layout(config)
    # The large standard deviation keeps rounding from changing the most likely token.
    params = random_params(config, layout, std=0.4)
    return LoadedModel(config, layout, params, bytes_tokenizer(), Path('tokenizer.json'), 1)


def _programs(config, layout, *, all_rows, **settings):
    made = compiled.CompiledFunctions(config, layout, **settings)
    if all_rows:
        made.row_counts = [made.num_slots]
    return made


_shared_programs = functools.cache(_programs)


def new_engine(model, *, share=True, all_rows=False, **settings):
    """Returns an engine with empty slots and transposed kernels, as in larger models.

    Engines with the same settings share their compiled functions, unless `share` is False. Tests that change what is
    compiled need that. With `all_rows`, decoding calls always include all slots, as when rows are split over devices;
    this saves one compilation.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, 'MIN_TRANSPOSED_INPUTS', 1)
        make = functools.partial(_shared_programs if share else _programs, all_rows=all_rows)
        patch.setattr(engine_module, 'CompiledFunctions', make)
        return Engine(model, **{**SETTINGS, **settings})


@functools.cache
def engine(family, **settings):
    """Returns an engine that tests share. Its slots may contain anything."""
    return new_engine(load(family), **settings)


@functools.cache
def forward(family):
    """Returns a function from (params, tokens [1, T]) to logits [T, V] after each token, over all ids of the model."""
    model = load(family)
    graph, _ = nnx.split(abstract_model(model.config, model.layout))

    @jax.jit
    def logits(params, tokens_1T):
        decoder = nnx.merge(graph, params)
        hidden_1TD, _, _ = decoder(tokens_1T)
        return decoder.logits(hidden_1TD)[0]

    return logits


def naive_logits(family, tokens, num_ids=NUM_IDS):
    """Returns the logits [T, V] after each token."""
    # Later tokens do not affect a position, so one padded length serves all texts.
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(forward(family)(load(family).params, padded))[: len(tokens), :num_ids]


def naive(family, prompt, num_ids=NUM_IDS, max_tokens=MAX_TOKENS):
    """Returns the greedy continuation, computed with a pass over the complete text for each token."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(np.argmax(naive_logits(family, tokens, num_ids)[-1])))
    return tokens[len(prompt) :]


def likeliest(family, prompt, ids):
    """Returns the most likely token at each position of a continuation. It equals `ids` only if these are greedy."""
    return naive_logits(family, [*prompt, *ids])[len(prompt) - 1 : -1].argmax(-1).tolist()


def requests_of(prompts, sampling=GREEDY, max_tokens=MAX_TOKENS, **settings):
    return [Request(tuple(prompt), max_tokens, sampling, **settings) for prompt in prompts]


def embed(engine, prompts):
    """Returns the deltas of requests for embeddings, one for each prompt."""
    deltas = {}
    for number, prompt in enumerate(prompts):
        request = Request(tuple(prompt), 0, embed=True)
        engine.submit(request, lambda delta, number=number: deltas.update({number: delta}))
    while engine.step():
        pass
    return [deltas[number] for number in range(len(prompts))]


def score_prompts(engine, prompts, max_tokens=0, beside=(), **settings):
    """Returns the deltas of each prompt, whose log-probabilities are requested."""
    deltas = {number: [] for number in range(len(prompts))}
    for request in beside:
        engine.submit(request, lambda delta: None)
    for number, prompt in enumerate(prompts):
        request = Request(tuple(prompt), max_tokens, GREEDY, score_prompt=True, **settings)
        engine.submit(request, lambda delta, number=number: deltas[number].append(delta))
    while engine.step():
        pass
    return [deltas[number] for number in range(len(prompts))]


def prompt_log_probs(family, prompt):
    """Returns log softmax(logits) [T - 1, V] before each token from the second one, over all ids of the model."""
    logits = naive_logits(family, prompt, num_ids=None)[:-1].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def mean_hidden_state(family, prompt):
    """Returns the mean of the last hidden states [D], computed without a cache."""
    model = load(family)
    graph, _ = nnx.split(abstract_model(model.config, model.layout))
    hidden_1TD, _, _ = nnx.merge(graph, model.params)(np.array([prompt], np.int32))
    return np.asarray(hidden_1TD[0], np.float32).mean(axis=0)


def generate(engine, prompts, **settings):
    return [samples[0].ids for samples in engine.complete(requests_of(prompts, **settings))]


# llguidance allows a comma although no key may follow it.
DEAD_END = {
    'type': 'object',
    'properties': {'score': {'type': 'integer', 'minimum': 10, 'maximum': 99}},
    'patternProperties': {'^score$': {'minimum': 0}},
    'required': ['score'],
    'additionalProperties': False,
}
