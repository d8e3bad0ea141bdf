"""Tests speculative decoding: drafts against a search in Python, and texts against those without drafts."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.inference.drafting.prompt_lookup import MAX_MATCH, MIN_MATCH, find_drafts, num_accepted
from maxlm.inference.engine import model_runner
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.grammar import json_grammar
from maxlm.inference.engine.requests import Request
from maxlm.inference.sampling import Sampling
from tests.inference.engines import GREEDY, generate, load, naive, naive_logits, new_engine

# The greedy text of this untrained model repeats itself.
FAMILY = 'gpt2'
NUM_DRAFT_TOKENS = 4
# Texts that repeat themselves, with a period below and above the number of drafted tokens, and one that does not.
PROMPTS = [[5, 6] * 10, list(range(20)) * 2 + [0, 1], list(range(100, 130))]


@pytest.fixture(scope='module')
def plain():
    return new_engine(load(FAMILY), all_rows=True)


@pytest.fixture(scope='module')
def drafting():
    return new_engine(load(FAMILY), all_rows=True, num_draft_tokens=NUM_DRAFT_TOKENS)


def searched(text, num):
    """Returns the draft for a list of tokens, or None without a match."""
    for size in range(MAX_MATCH, MIN_MATCH - 1, -1):
        for end in range(len(text) - 2, size - 2, -1):
            if text[end - size + 1 : end + 1] == text[len(text) - size :]:
                copied = text[end + 1 :]
                return [copied[i % len(copied)] for i in range(num)]
    return None


def test_drafts_follow_the_longest_and_latest_match():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 3, length).tolist() for length in rng.integers(1, 40, 200)]
    history = rng.integers(0, 3, (len(texts), 40)).astype(np.int32)
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = text
    drafts, is_found = find_drafts(jnp.asarray(history), jnp.array([len(text) for text in texts]), 5)
    expected = [searched(text, 5) for text in texts]
    assert is_found.tolist() == [draft is not None for draft in expected]
    assert [draft for draft, found in zip(drafts.tolist(), is_found, strict=True) if found] == list(
        filter(None, expected)
    )
    assert 10 < np.sum(is_found) < 190


def test_drafts_are_accepted_up_to_the_first_difference():
    sampled = np.array([[1, 2, 3, 9], [1, 2, 3, 4], [5, 2, 3, 9], [1, 5, 3, 9]]).T
    drafts = np.array([[1, 2, 3]] * 4).T
    assert num_accepted(jnp.asarray(sampled), jnp.asarray(drafts)).tolist() == [3, 3, 0, 1]


@pytest.mark.parametrize('temperature', [0, 0.5])
def test_drafts_do_not_change_the_text(plain, drafting, temperature):
    settings = {'sampling': Sampling(temperature=temperature), 'seed': 3, 'max_tokens': 40}
    before = drafting.state
    assert generate(drafting, PROMPTS, **settings) == generate(plain, PROMPTS, **settings)
    # Alone in the engine, a sample needs no draft of another one.
    for prompt in PROMPTS:
        assert generate(drafting, [prompt], **settings) == generate(plain, [prompt], **settings)
    after = drafting.state
    assert after.draft_tokens > before.draft_tokens
    if temperature == 0:
        assert after.accepted_tokens > before.accepted_tokens + 20
        # Without drafts, the calls need 39 passes for the three samples together, and for each alone.
        assert after.passes - before.passes < 4 * 39


def test_tokens_that_differ_from_the_draft_are_not_accepted(plain, monkeypatch):
    """Control for `test_drafts_do_not_change_the_text`."""
    monkeypatch.setattr(
        model_runner, 'num_accepted', lambda sampled_TB, drafts_KB: jnp.full(sampled_TB.shape[1], len(drafts_KB))
    )
    some = new_engine(load(FAMILY), share=False, all_rows=True, num_draft_tokens=NUM_DRAFT_TOKENS)
    assert generate(some, PROMPTS, max_tokens=40) != generate(plain, PROMPTS, max_tokens=40)


def test_the_distribution_of_texts_is_that_of_the_model(drafting):
    """Compares frequencies of all texts of three of the two likeliest tokens with the probabilities of the model."""

    def prompt_with(tokens):
        return [*([6, *tokens] * 5), 6]

    # A prompt that contains its own likeliest continuation, so that drafts are accepted.
    tokens = [0, 0, 0]
    for _ in range(20):
        prompt, before = prompt_with(tokens), tokens
        tokens = naive(FAMILY, prompt, max_tokens=3)
        if tokens == before:
            break
    assert tokens == before

    def probabilities(ids):
        """Returns the probabilities of the two likeliest next tokens."""
        logits = naive_logits(FAMILY, [*prompt, *ids])[-1]
        top = np.argsort(logits)[-2:]
        weights = np.exp(logits[top] - logits[top].max())
        return zip(top.tolist(), weights / weights.sum(), strict=True)

    expected = {(): 1.0}
    for _ in range(3):
        expected = {(*ids, token): p * q for ids, p in expected.items() for token, q in probabilities(ids)}
    start, num = drafting.state, 1024
    requests = [Request(tuple(prompt), 3, Sampling(top_k=2), seed=seed, num_samples=128) for seed in range(num // 128)]
    found = collections.Counter(
        tuple(completion.ids) for completions in drafting.complete(requests) for completion in completions
    )
    assert set(found) <= set(expected)
    differences = [(found[ids] - num * p) ** 2 / (num * p) for ids, p in expected.items()]
    # The statistic of a chi-squared test with 7 degrees of freedom exceeds 24.3 with probability 0.001.
    assert sum(differences) < 24.3
    assert drafting.state.accepted_tokens > start.accepted_tokens + 50
    assert drafting.state.draft_tokens - start.draft_tokens > drafting.state.accepted_tokens - start.accepted_tokens


def test_penalties_accept_no_drafts(plain, drafting):
    penalty = Sampling(temperature=0, presence_penalty=3.0)
    requests = [Request(tuple(prompt), 20, penalty) for prompt in PROMPTS]
    before = drafting.state.draft_tokens
    assert drafting.complete(requests) == plain.complete(requests)
    assert drafting.state.draft_tokens == before


def test_drafts_do_not_change_texts_with_a_grammar(plain, drafting):
    grammar = json_grammar({'type': 'array'})
    requests = [Request(tuple(prompt), 20, GREEDY, grammar=grammar) for prompt in PROMPTS]
    assert drafting.complete(requests) == plain.complete(requests)


def test_slots_know_their_text(drafting):
    prefix = list(range(30, 60))
    prompts = [[*prefix, 200], [*prefix, 201], [7]]
    requests = [Request(tuple(prompt), 5, GREEDY) for prompt in prompts]
    cached = drafting.state.cached_tokens
    texts = [[*prompt, *row[0].ids] for prompt, row in zip(prompts, drafting.complete(requests), strict=True)]
    assert drafting.state.cached_tokens > cached
    history = np.asarray(drafting._state.history_BS).tolist()
    assert all(any(row[: len(text)] == text for row in history) for text in texts)


def test_ring_caches_keep_what_rejected_drafts_overwrite():
    """The texts are longer than the caches of layers with a window."""
    texts = [
        generate(new_engine(load('windows'), all_rows=True, **settings), PROMPTS, max_tokens=50)
        for settings in ({}, {'num_draft_tokens': NUM_DRAFT_TOKENS})
    ]
    assert texts[0] == texts[1]


def test_text_ends_at_the_last_position(plain, drafting):
    prompt = [5, 6] * 45
    assert generate(drafting, [prompt], max_tokens=10) == generate(plain, [prompt], max_tokens=10)


def test_number_of_drafted_tokens_out_of_range():
    for num in (-1, 33):
        with pytest.raises(InputError, match=f'num_draft_tokens={num}: must be from 0 to 32'):
            Engine(load(FAMILY), num_draft_tokens=num)
