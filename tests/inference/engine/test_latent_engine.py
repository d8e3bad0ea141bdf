"""Tests the engine with latent attention: its cache of latents, 8-bit codes, shared prefixes and sharded heads."""

import jax
import pytest

from maxlm.inference import prepared_decoder
from maxlm.inference.engine.requests import Request
from maxlm.model.attention import latent
from maxlm.model.layers import kv_cache
from tests.inference.engines import GREEDY, PROMPTS, generate, likeliest, load, new_engine
from tests.small import LATENT

FAMILY = 'latent'
WIDTH = LATENT['model__kv_lora_rank'] + LATENT['model__qk_rope_head_dim']


def assert_greedy(rows):
    assert rows == [likeliest(FAMILY, prompt, row) for prompt, row in zip(PROMPTS, rows, strict=True)]


def test_cached_latents_give_the_tokens_of_the_full_pass(monkeypatch):
    monkeypatch.setattr(kv_cache, 'MIN_BLOCK_SIZE', 32)
    some = new_engine(load(FAMILY), share=False, all_rows=True)
    rows = generate(some, PROMPTS)
    assert_greedy(rows)
    blocks = some._state.caches[0]
    assert len(blocks) > 1
    assert all(x.shape[2] == 1 for block in blocks for x in block if x is not None)
    assert sum(block.key_LBKSH.shape[-1] + block.value_LBKSH.shape[-1] for block in blocks) == len(blocks) * WIDTH
    # The shared prefix is copied from another slot.
    before = some.state.cached_tokens
    again = [*PROMPTS[2], *rows[2][:5]]
    assert generate(some, [again], max_tokens=5) == [rows[2][5:10]]
    assert some.state.cached_tokens > before


def test_a_wrong_scale_is_noticed(monkeypatch):
    """Control for the previous test."""
    attend = latent.attend_cached
    monkeypatch.setattr(
        latent, 'attend_cached', lambda *arrays, scale, **settings: attend(*arrays, scale=scale / 2, **settings)
    )
    some = new_engine(load(FAMILY), share=False, all_rows=True)
    with pytest.raises(AssertionError):
        assert_greedy(generate(some, PROMPTS))


def test_int8_latents_change_little():
    plain, small = (new_engine(load(FAMILY), all_rows=True, cache=cache) for cache in ('model', 'int8'))
    # A latent of 24 dims and a rotated key of 6 dims each have one scale of four bytes.
    assert small.cache_bytes * 4 * WIDTH == plain.cache_bytes * (WIDTH + 8)
    request = Request(tuple(PROMPTS[2]), 1, GREEDY, top_log_probs=5)
    ((found,),), ((expected,),) = small.complete([request]), plain.complete([request])
    found_top, expected_top = dict(found.tokens[0].top), dict(expected.tokens[0].top)
    differences = [abs(found_top[i] - expected_top[i]) for i in found_top.keys() & expected_top.keys()]
    assert len(differences) >= 4
    assert 0 < max(differences) < 0.3


def test_devices_share_heads_but_not_latents(monkeypatch):
    monkeypatch.setattr(prepared_decoder, 'uses_unstacked_layers', lambda config, layout: False)
    some = new_engine(load(FAMILY, 4, fsdp=2, tensor=2), share=False, all_rows=True)
    assert_greedy(generate(some, PROMPTS))
    shards = {x.addressable_shards[0].data.shape[2] for x in jax.tree.leaves(some._state.caches)}
    assert shards == {1}
