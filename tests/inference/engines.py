"""Small models and engines that share compiled programs, and continuations computed without a cache."""

from __future__ import annotations

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
from tests.small import small_config, small_layout

GREEDY = Sampling(temperature=0)
NUM_IDS = 257
CONTEXT = 100
# Beyond one chunk of the prompt's length, and so long that padding reaches past the context.
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(40, 110))]
MAX_TOKENS = 12
# More rows than token ids, and an odd number, which devices cannot share equally.
MODEL = {'model__dim': 16, 'model__vocab_size': 1023, 'model__max_positions': CONTEXT}
SCALED = {'model__family': 'llama', 'model__rope_scaling_factor': 4.0, 'model__original_max_positions': 25}
FAMILIES = {
    'gpt2': {'model__family': 'gpt2'},
    'gpt_neox': {'model__family': 'gpt_neox', 'model__dim': 32},
    'llama, grouped': {'model__family': 'llama', 'model__num_kv_heads': 2},
    'qwen3': {'model__family': 'qwen3', 'model__num_kv_heads': 1},
    'nanochat': {'model__family': 'nanochat'},
    'linear': {**SCALED, 'model__rope_scaling': 'linear'},
    'yarn': {**SCALED, 'model__rope_scaling': 'yarn'},
    'llama3': {**SCALED, 'model__rope_scaling': 'llama3'},
    # Within the original context: behind it keys stay as they were rotated, which one pass does otherwise.
    'dynamic': {**SCALED, 'model__rope_scaling': 'dynamic', 'model__original_max_positions': CONTEXT},
    'windows': {'model__family': 'llama', 'model__sliding_window': 5, 'model__attention_pattern': 'SL'},
}
# A prompt of one chunk takes one program, longer prompts no other.
SETTINGS = {'num_slots': 3, 'chunk': 32}


@functools.cache
def load(family, num_devices=1, **mesh):
    settings = {f'mesh__{axis}': size for axis, size in mesh.items()}
    config = small_config(num_devices=num_devices, **{**MODEL, **FAMILIES[family]}, **settings)
    layout = small_layout(config)
    # Spread far enough that rounding does not change which token is the likeliest.
    params = random_params(config, layout, std=0.4)
    return LoadedModel(config, layout, params, bytes_tokenizer(), Path('tokenizer.json'), 1)


def _programs(config, layout, *, all_rows, **settings):
    made = compiled.CompiledFunctions(config, layout, **settings)
    if all_rows:
        made.row_counts = [made.num_slots]
    return made


_shared_programs = functools.cache(_programs)


def new_engine(model, *, share=True, all_rows=False, **settings):
    """Returns an engine with empty slots whose kernels are turned as those of larger models are.

    Engines with the same settings share their programs, unless a test changes what programs are made of (`share`).
    With `all_rows` decoding calls always have all slots, as where rows are split over devices: one program less.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, 'TURNED_INPUTS', 1)
        make = functools.partial(_shared_programs if share else _programs, all_rows=all_rows)
        patch.setattr(engine_module, 'CompiledFunctions', make)
        return Engine(model, **{**SETTINGS, **settings})


@functools.cache
def engine(family, **settings):
    """Returns an engine that tests share: its slots may hold anything."""
    return new_engine(load(family), **settings)


@functools.cache
def forward(family):
    """(params, tokens [1, T]) → the logits [T, V] behind each token, over all ids of the model."""
    model = load(family)
    graph, _ = nnx.split(abstract_model(model.config, model.layout))

    @jax.jit
    def logits(params, tokens_1T):
        decoder = nnx.merge(graph, params)
        hidden_1TD, _ = decoder(tokens_1T)
        return decoder.logits(hidden_1TD)[0]

    return logits


def naive_logits(family, tokens, num_ids=NUM_IDS):
    """Returns the logits [T, V] behind each token."""
    # What stands behind a token does not matter to it, so one length serves all.
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(forward(family)(load(family).params, padded))[: len(tokens), :num_ids]


def naive(family, prompt, num_ids=NUM_IDS, max_tokens=MAX_TOKENS):
    """Returns the greedy continuation, each token by a pass over the whole text before it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(np.argmax(naive_logits(family, tokens, num_ids)[-1])))
    return tokens[len(prompt) :]


def likeliest(family, prompt, ids):
    """Returns the likeliest token at each place of a continuation: equal to `ids` only where these are greedy."""
    return naive_logits(family, [*prompt, *ids])[len(prompt) - 1 : -1].argmax(-1).tolist()


def requests_of(prompts, sampling=GREEDY, max_tokens=MAX_TOKENS, **settings):
    return [Request(tuple(prompt), max_tokens, sampling, **settings) for prompt in prompts]


def generate(engine, prompts, **settings):
    return [samples[0].ids for samples in engine.complete(requests_of(prompts, **settings))]
