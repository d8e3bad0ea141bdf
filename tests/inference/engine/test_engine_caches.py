"""Tests that all cache layouts give the same tokens: blocked, ring, 8-bit, short and sharded caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.inference import prepared_decoder
from maxlm.inference.engine import compiled, slots
from maxlm.inference.engine.compiled import CompiledFunctions
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.requests import Request
from maxlm.model import prepared_kernels
from maxlm.model.attention import attention
from maxlm.model.layers import kv_cache as model_cache
from tests.inference.engines import (
    GREEDY,
    NUM_IDS,
    PROMPTS,
    embed,
    generate,
    likeliest,
    load,
    mean_hidden_state,
    new_engine,
    prompt_log_probs,
    score_prompts,
)

FAMILY = 'windows'
TOKENS = 25


@pytest.fixture(scope='module')
def plain():
    """Returns an engine of `FAMILY` in which layers with a window have ring caches of 64 slots.

    The longest text exceeds them.
    """
    return new_engine(load(FAMILY), all_rows=True)


@pytest.fixture(scope='module')
def expected(plain):
    rows = generate(plain, PROMPTS, max_tokens=TOKENS)
    assert rows == [likeliest(FAMILY, prompt, row) for prompt, row in zip(PROMPTS, rows, strict=True)]
    return rows


@pytest.fixture(scope='module')
def int8():
    """Returns an engine with 8-bit caches and its generated rows."""
    some = new_engine(load(FAMILY), all_rows=True, cache='int8')
    return some, generate(some, PROMPTS, max_tokens=TOKENS)


def test_layers_have_separate_arrays(plain):
    kernel_LFD = load(FAMILY).params['blocks']['feedforward']['down']['kernel']
    assert isinstance(plain._state.caches, list)
    assert kernel_LFD.shape[1] != kernel_LFD.shape[2]
    layers = [layer['feedforward']['down']['kernel'] for layer in plain._params.model['blocks']]
    np.testing.assert_array_equal(layers, np.swapaxes(kernel_LFD, 1, 2))
    np.testing.assert_array_equal(plain._params.model['head']['kernel'], load(FAMILY).params['head']['kernel'].T)


def test_layers_in_a_loop_share_arrays(monkeypatch):
    """Tests scanned layers, as on TPUs, where the compiler chooses the layout of kernels."""
    monkeypatch.setattr(prepared_decoder, 'uses_unstacked_layers', lambda config, layout: False)
    looped = new_engine(load(FAMILY), share=False)
    assert isinstance(looped._state.caches, dict)
    kernel_LFD = load(FAMILY).params['blocks']['feedforward']['down']['kernel']
    np.testing.assert_array_equal(looped._params.model['blocks']['feedforward']['down']['kernel'], kernel_LFD)


@pytest.mark.parametrize('cache', ['model', 'int8'])
def test_slots_in_use_are_read_in_parts(cache, expected, int8, monkeypatch):
    rows = expected if cache == 'model' else int8[1]
    monkeypatch.setattr(model_cache, 'MIN_BLOCK_SIZE', 16)
    some = new_engine(load(FAMILY), share=False, all_rows=True, cache=cache)
    # Some layers have ring caches, and the other layers have caches of the full length.
    found = {tuple(part.num_slots for part in parts) for parts in some._state.caches}
    assert found == {(16, 16, 32), (16, 16, 32, 36)}
    assert generate(some, PROMPTS, max_tokens=TOKENS) == rows


@pytest.mark.parametrize('cache', ['model', 'int8'])
def test_separate_layers_with_complete_caches_give_the_same(cache, expected, int8, monkeypatch):
    """Tests the form of GPUs: layers with joined kernels, and one cache of growing length for each."""
    rows = expected if cache == 'model' else int8[1]
    monkeypatch.setattr(compiled, 'uses_cache_blocks', lambda layout: False)
    monkeypatch.setattr(prepared_kernels, 'should_join', lambda decoder: True)
    monkeypatch.setattr(compiled, 'MIN_CACHE_LENGTH', 25)
    some = new_engine(load(FAMILY), share=False, all_rows=True, cache=cache)
    assert some._compiled.cache_lengths == [25, 100]
    assert {len(parts) for parts in some._state.caches} == {1}
    assert not any(layer['attention']['key'] for layer in some._params.model['blocks'])
    assert generate(some, PROMPTS, max_tokens=TOKENS) == rows
    assert {part.num_slots for (part,) in some._state.caches} == {64, 100}
    # Control: a cache that does not grow loses tokens.
    monkeypatch.setattr(slots.CacheLength, 'fit', lambda self, length, passes=0: 25)
    some._resize(25)
    assert generate(some, PROMPTS, max_tokens=TOKENS) != rows


ATTEND_CACHED = attention.attend_cached


def fewer_slots(q_BTNH, cache, places, mask_BTS, **settings):
    places = places._replace(end=jnp.maximum(places.end - 32, 0))
    return ATTEND_CACHED(q_BTNH, cache, places, mask_BTS, **settings)


def test_the_last_slots_in_use_matter(expected, monkeypatch):
    """Control for `test_slots_in_use_are_read_in_parts`."""
    monkeypatch.setattr(model_cache, 'MIN_BLOCK_SIZE', 16)
    monkeypatch.setattr(attention, 'attend_cached', fewer_slots)
    some = new_engine(load(FAMILY), share=False, all_rows=True)
    assert generate(some, PROMPTS, max_tokens=TOKENS) != expected


@pytest.mark.parametrize('cache', ['model', pytest.param('int8', marks=pytest.mark.nightly)])
def test_caches_grow_and_shrink_with_their_contents(cache, expected, int8, monkeypatch):
    """Tests scanned layers, as on TPUs, where every pass reads the complete caches."""
    rows = expected if cache == 'model' else int8[1]
    monkeypatch.setattr(prepared_decoder, 'uses_unstacked_layers', lambda config, layout: False)
    monkeypatch.setattr(compiled, 'MIN_CACHE_LENGTH', 25)
    monkeypatch.setattr(slots, 'SHRINK_AFTER_PASSES', 30)
    some = new_engine(load(FAMILY), share=False, all_rows=True, cache=cache)

    def cache_length():
        return some._state.caches[0].num_slots

    assert some._compiled.cache_lengths == [25, 100]
    assert cache_length() == 25
    assert generate(some, PROMPTS[:2], max_tokens=12) == [row[:12] for row in rows[:2]]
    assert cache_length() == 25
    # The second prompt outgrows the cache length and keeps its contents.
    assert generate(some, PROMPTS[1:2], max_tokens=25) == rows[1:2]
    assert cache_length() == 100
    assert some._state.caches[5].num_slots == 64
    assert generate(some, PROMPTS, max_tokens=25) == rows
    # The cache shrinks after some time, which also truncates the contents of idle slots.
    assert max(len(slot.content) for slot in some._slots) == 70 + 24
    assert generate(some, PROMPTS[:1] * 3, max_tokens=20) == [rows[0][:20]] * 3
    assert cache_length() == 100
    assert generate(some, PROMPTS[:1], max_tokens=20) == [rows[0][:20]]
    assert cache_length() == 25
    assert max(len(slot.content) for slot in some._slots) <= 25
    # Control: a cache that does not grow loses tokens.
    monkeypatch.setattr(slots.CacheLength, 'fit', lambda self, length, passes=0: 25)
    some._cache_length.size = 25
    assert generate(some, PROMPTS, max_tokens=25) != rows


@pytest.mark.parametrize('cache', ['model', 'int8'])
def test_a_cache_keeps_its_contents_when_its_length_changes(cache, monkeypatch):
    monkeypatch.setattr(prepared_decoder, 'uses_unstacked_layers', lambda config, layout: False)
    monkeypatch.setattr(compiled, 'MIN_CACHE_LENGTH', 25)
    model = load(FAMILY)
    made = CompiledFunctions(
        model.config, model.layout, num_ids=NUM_IDS, num_slots=2, max_context=100, int8=cache == 'int8', chunk=16
    )
    rng = np.random.default_rng(0)
    state = made.init_state()
    state = state._replace(caches=jax.tree.map(lambda x: rng.integers(1, 9, x.shape).astype(x.dtype), state.caches))
    before = jax.device_get(state.caches)
    assert {x.shape[3] for x in jax.tree.leaves(before)} == {25}
    grown = made.resize(state, 100).caches
    assert {window: cache.num_slots for window, cache in grown.items()} == {0: 100, 5: 64}
    for x, old in zip(jax.tree.leaves(grown), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(x[:, :, :, :25], old)
        assert not np.any(x[:, :, :, 25:])
    again = made.resize(state._replace(caches=grown), 25).caches
    jax.tree.map(np.testing.assert_array_equal, again, before)


def test_ring_caches_are_smaller_and_wrap_around(plain):
    without_ring = new_engine(load(FAMILY), share=False, chunk=100)
    assert plain._compiled.ring_slots() == {5: 64}
    assert without_ring._compiled.ring_slots() == {}
    assert plain.cache_bytes < 0.9 * without_ring.cache_bytes
    ring = new_engine(load(FAMILY), all_rows=True)
    prompt = PROMPTS[1]
    (row,) = generate(ring, [prompt], max_tokens=90)
    assert row == likeliest(FAMILY, prompt, row)
    # A ring that wrapped around no longer contains the shared prefix.
    again = [*prompt, *row[:20]]
    before = ring.state.cached_tokens
    assert generate(ring, [again], max_tokens=5) == [row[20:25]]
    assert ring.state.cached_tokens == before


def test_int8_halves_the_cache_and_changes_little(plain, int8):
    small, _ = int8
    # Here caches are float32, and a head of four dimensions has one scale of four bytes.
    assert small.cache_bytes == plain.cache_bytes // 2
    for prompt in (PROMPTS[2], [*PROMPTS[2], 3, 4, 5]):
        request = Request(tuple(prompt), 1, GREEDY, top_log_probs=5)
        ((found,),), ((exact,),) = small.complete([request]), plain.complete([request])
        found_top, expected_top = dict(found.tokens[0].top), dict(exact.tokens[0].top)
        common = found_top.keys() & expected_top.keys()
        assert len(common) >= 4
        differences = [abs(found_top[i] - expected_top[i]) for i in common]
        assert 0 < max(differences) < 0.3


def test_devices_share_the_work(monkeypatch):
    monkeypatch.setattr(model_cache, 'MIN_BLOCK_SIZE', 50)
    family = 'llama, grouped'
    some = new_engine(load(family, 8, data=2, fsdp=2, tensor=2), share=False)
    rows = generate(some, PROMPTS)
    assert rows == [likeliest(family, prompt, row) for prompt, row in zip(PROMPTS, rows, strict=True)]
    # Several prompts per call, some of them shorter than the chunk.
    for prompt, delta in zip(PROMPTS, embed(some, PROMPTS), strict=True):
        np.testing.assert_allclose(delta.embedding, mean_hidden_state(family, prompt), atol=1e-4)
    for prompt, (delta,) in zip(PROMPTS, score_prompts(some, PROMPTS), strict=True):
        expected = prompt_log_probs(family, prompt)[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(delta.prompt_scores.log_prob_T, expected, rtol=1e-4, atol=2e-4)
    # Each device has its share of 4 slots and 2 heads.
    keys = [cache.key_LBKSH for cache in some._state.caches[0]]
    assert [x.addressable_shards[0].data.shape[1:3] for x in keys] == [(1, 1)] * 2
    # The vocabulary of 1023 ids is padded once, not for every token.
    assert some._params.model['embedding'].addressable_shards[0].data.shape == (512, 8)


def test_a_mesh_that_splits_the_length_is_refused():
    with pytest.raises(InputError, match=r'mesh\.context=2: the key-value cache does not support'):
        Engine(load('llama, grouped', 2, context=2))
