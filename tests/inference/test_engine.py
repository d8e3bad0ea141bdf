"""Cached decoding against a loop that computes everything again for every token."""

import functools
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.data.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.inference.engine import Engine
from maxlm.inference.load import LoadedModel
from maxlm.inference.sampling import Sampling
from maxlm.training.state import abstract_model, init_state
from tests.small import small_config, small_layout

GREEDY = Sampling(temperature=0)
NUM_IDS = 257
CONTEXT = 100
# Beyond one bucket of the prompt's length, and so long that padding reaches past the context.
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(40, 110))]
MAX_TOKENS = 12
# Spread far enough that rounding does not change which token is the likeliest.
MODEL = {'model__init_std': 0.4, 'model__dim': 16, 'model__vocab_size': 1024, 'model__max_positions': CONTEXT}
FAMILIES = {
    'learned positions': {'model__family': 'gpt2'},
    'rotary positions': {'model__family': 'llama', 'model__num_kv_heads': 2},
}


pytestmark = pytest.mark.usefixtures('compile_once')


@functools.cache
def load(family):
    config = small_config(**{**MODEL, **FAMILIES[family]})
    layout = small_layout(config)
    params = init_state(config, layout).params
    return LoadedModel(config, layout, params, bytes_tokenizer(), Path('tokenizer.json'), 1)


@functools.cache
def engine(family):
    return Engine(load(family))


@functools.cache
def forward(family):
    """(params, tokens [1, T], index) → the logits behind the token at `index`, over all ids of the model."""
    model = load(family)
    graph, _ = nnx.split(abstract_model(model.config, model.layout))

    @jax.jit
    def logits(params, tokens_1T, index):
        decoder = nnx.merge(graph, params)
        hidden_1TD, _ = decoder(tokens_1T)
        return decoder.logits(hidden_1TD)[0, index]

    return logits


def naive(family, prompt, num_ids=NUM_IDS, max_tokens=MAX_TOKENS):
    tokens = list(prompt)
    for _ in range(max_tokens):
        # What stands behind a token does not matter to it, so one length serves all.
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = forward(family)(load(family).params, jnp.asarray(padded), len(tokens) - 1)
        tokens.append(int(np.argmax(logits[:num_ids])))
    return tokens[len(prompt) :]


def generate(family, prompts, *, sampling=GREEDY, seed=0, max_tokens=MAX_TOKENS):
    return engine(family).generate(prompts, max_tokens=max_tokens, sampling=sampling, seed=seed)


@pytest.mark.parametrize('family', FAMILIES)
def test_a_batch_equals_one_at_a_time_equals_a_loop_without_cache(family):
    together = generate(family, PROMPTS)
    assert generate(family, PROMPTS[1:2]) == together[1:2]
    assert together == [naive(family, prompt) for prompt in PROMPTS]
    # Control: prompts matter, and the model does not just repeat one token.
    assert len({tuple(row) for row in together}) == len(PROMPTS)
    assert all(len(set(row)) > 2 for row in together)


@pytest.mark.parametrize('family', FAMILIES)
def test_ids_that_the_tokenizer_does_not_have_never_come(family):
    assert max(max(row) for row in generate(family, PROMPTS)) < NUM_IDS
    # Control: the model would like to.
    assert max(naive(family, PROMPTS[1], num_ids=1024)) >= NUM_IDS


def test_the_seed_decides():
    warm = Sampling(temperature=3.0)
    first = generate('learned positions', PROMPTS, sampling=warm)
    assert generate('learned positions', PROMPTS, sampling=warm) == first
    other = generate('learned positions', PROMPTS, sampling=warm, seed=1)
    assert all(a != b for a, b in zip(first, other, strict=True))
    assert max(max(row) for row in first + other) < NUM_IDS
    # Rows of the same prompt draw for themselves; batch mates do not matter.
    rows = generate('learned positions', [PROMPTS[0], PROMPTS[0], PROMPTS[2]], sampling=warm)
    assert rows[0] != rows[1]
    assert (rows[0], rows[2]) == (first[0], first[2])
    # The number of tokens that are asked for does not change the first of them.
    shorter = generate('learned positions', PROMPTS, sampling=warm, max_tokens=5)
    assert shorter == [row[:5] for row in first]


def with_end(family, end):
    """The engine for a tokenizer whose end of document is `end`."""
    tokenizer = types.SimpleNamespace(vocab_size=NUM_IDS, end_of_document=end)
    return Engine(load(family)._replace(tokenizer=tokenizer))


def test_a_row_stops_at_the_end_of_its_document():
    family = 'rotary positions'
    rows = generate(family, PROMPTS)
    # A token that some rows have early and others never.
    end = rows[0][3]
    ending = with_end(family, end)
    stopped = ending.generate(PROMPTS, max_tokens=MAX_TOKENS, sampling=GREEDY, seed=0)
    for row, whole in zip(stopped, rows, strict=True):
        assert row == (whole[: whole.index(end)] if end in whole else whole)
    assert len(stopped[0]) <= 3
    assert max(map(len, stopped)) == MAX_TOKENS
    # The stream repeats the end in rows that are done, and ends with the last of them.
    columns = list(ending.stream(PROMPTS, max_tokens=MAX_TOKENS, sampling=GREEDY, seed=0))
    assert [int(column[0]) for column in columns] == stopped[0] + [end] * (MAX_TOKENS - len(stopped[0]))
    alone = list(ending.stream(PROMPTS[:1], max_tokens=MAX_TOKENS, sampling=GREEDY, seed=0))
    assert len(alone) == len(stopped[0]) + 1


def test_a_document_that_ends_at_once():
    family = 'rotary positions'
    end = generate(family, PROMPTS[:1])[0][0]
    assert with_end(family, end).generate(PROMPTS[:1], max_tokens=5, sampling=GREEDY, seed=0) == [[]]


def test_a_row_stops_at_the_end_of_a_turn_too():
    family = 'rotary positions'
    rows = generate(family, PROMPTS)
    # The end of a document comes in one row, that of a turn in another, earlier.
    end, end_of_turn = rows[0][6], rows[1][3]
    tokenizer = types.SimpleNamespace(vocab_size=NUM_IDS, end_of_document=end)
    chat = types.SimpleNamespace(end_of_turn=end_of_turn)
    stopped, alone = (
        Engine(load(family)._replace(tokenizer=tokenizer, chat=template)).generate(
            PROMPTS, max_tokens=MAX_TOKENS, sampling=GREEDY, seed=0
        )
        for template in (chat, None)
    )
    for row, whole in zip(stopped, rows, strict=True):
        stop = min(whole.index(one) if one in whole else len(whole) for one in (end, end_of_turn))
        assert row == whole[:stop]
    assert len(stopped[1]) <= 3
    # Control: without a template it is a token like others.
    assert end_of_turn in alone[1]
    engine = Engine(load(family)._replace(tokenizer=tokenizer, chat=chat))
    columns = list(engine.stream(PROMPTS[1:2], max_tokens=MAX_TOKENS, sampling=GREEDY, seed=0))
    assert [int(column[0]) for column in columns] == [*stopped[1], end_of_turn]


def refusal(prompts, max_tokens):
    with pytest.raises(InputError) as info:
        generate('learned positions', prompts, max_tokens=max_tokens)
    assert '\n' not in str(info.value)
    return str(info.value)


def test_what_does_not_fit_is_refused():
    assert refusal([[1], []], 5) == 'the prompt is empty; give at least one character to continue'
    assert 'max_tokens=0: must be at least 1' in refusal([[1]], 0)
    message = refusal([[1], [2] * 90], 11)
    assert 'max_tokens=11: the prompt has 90 tokens and the context of the model 100; at most 10' in message
    assert 'at most 0 tokens' in refusal([[1] * 101], 1)
    # Control: up to the last position it works, and is right.
    prompt = list(range(90))
    assert generate('learned positions', [prompt], max_tokens=10)[0] == naive(
        'learned positions', prompt, max_tokens=10
    )
