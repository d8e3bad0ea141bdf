"""Tests the engine with smear and the other options of the residual stream, which need the previous token."""

import jax.numpy as jnp
import pytest

from maxlm.inference import prepared_decoder
from maxlm.inference.engine import model_runner
from tests.inference.engines import CONTEXT, PROMPTS, generate, likeliest, load, new_engine

FAMILY = 'stream'
REPEATED = [5, 6] * 10


def assert_greedy(prompts, rows):
    assert rows == [likeliest(FAMILY, prompt, row) for prompt, row in zip(prompts, rows, strict=True)]


@pytest.fixture(scope='module')
def drafting():
    return new_engine(load(FAMILY), share=False, all_rows=True, num_draft_tokens=4)


def test_chunks_drafts_and_shared_prefixes_give_the_tokens_of_the_full_pass(drafting):
    prompts = [*PROMPTS, REPEATED]
    rows = generate(drafting, prompts)
    assert_greedy(prompts, rows)
    assert drafting.state.accepted_tokens > 0
    # The prefix of this prompt is copied from another slot.
    before = drafting.state.cached_tokens
    again = [[*PROMPTS[2], *rows[2][:5]]]
    assert_greedy(again, generate(drafting, again, max_tokens=5))
    assert drafting.state.cached_tokens > before
    assert max(map(len, prompts)) < CONTEXT


def test_a_lost_previous_token_is_noticed(monkeypatch):
    """Control for the previous test."""
    previous_ids = model_runner.previous_ids
    monkeypatch.setattr(
        model_runner, 'previous_ids', lambda tokens, before: previous_ids(tokens, jnp.zeros_like(before))
    )
    some = new_engine(load(FAMILY), share=False, all_rows=True)
    with pytest.raises(AssertionError):
        assert_greedy(PROMPTS, generate(some, PROMPTS))


def test_devices_share_rows_and_heads(monkeypatch):
    monkeypatch.setattr(prepared_decoder, 'uses_unstacked_layers', lambda config, layout: False)
    some = new_engine(load(FAMILY, 4, fsdp=2, tensor=2), share=False, all_rows=True)
    assert_greedy(PROMPTS, generate(some, PROMPTS))
