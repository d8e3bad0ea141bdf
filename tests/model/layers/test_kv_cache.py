"""Cache slots: positions, visibility and 8-bit storage."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.model.layers.kv_cache import (
    CacheIndices,
    LayerCache,
    block_sizes,
    cache_indices_and_mask,
    init_caches,
    slots_by_window,
)
from tests.small import small_config


def test_layers_with_equal_windows_share_a_cache():
    config = small_config(model__num_layers=5, model__sliding_window=3, model__attention_pattern='SSL').model
    caches = init_caches(config, 2, 200, chunk=10)
    # A window needs slots for the window and ten new tokens, rounded up; layers without window have all positions.
    assert {window: cache.key_LBKSH.shape[0] for window, cache in caches.items()} == {0: 1, 3: 4}
    assert {window: cache.num_slots for window, cache in caches.items()} == {0: 200, 3: 64}
    assert {cache.num_slots for cache in init_caches(config, 2, 200).values()} == {200}


@pytest.mark.parametrize('window', [0, 5])
def test_a_ring_contains_the_window(window):
    """Compares with a list of positions that are written in sequence, in chunks with various padding."""
    S = 64 if window else 200
    config = small_config(model__sliding_window=window, model__attention_pattern='S' if window else 'L').model
    cache = init_caches(config, 1, 200, chunk=16)[window]
    assert cache.num_slots == S
    held = np.full(S, -1)
    start = 0
    run = jax.jit(functools.partial(cache_indices_and_mask, S, window=window))
    for count in [14, 1, 5, 14, 16, 1, 1, 14, 16, 14, 11, 1, 14, 7]:
        indices, mask = run(np.arange(start, start + 16)[None], np.array([start + count]))
        slots, mask = np.asarray(indices.slots_BT)[0], np.asarray(mask)[0]
        # Padding is written to no slot.
        assert np.all(slots[count:] == S)
        held[slots[:count]] = np.arange(start, start + count)
        for row, query in enumerate(range(start, start + count)):
            first = max(0, query - window + 1) if window else 0
            assert sorted(held[mask[row]]) == list(range(first, query + 1))
        start += count
    # The ring buffer has wrapped around.
    assert start > S or not window


def test_only_written_slots_are_visible():
    run = jax.jit(functools.partial(cache_indices_and_mask, 16, window=0))
    _, mask = run(np.array([[3], [9]]), np.array([4, 10]))
    assert mask.shape == (2, 1, 16)
    assert mask.sum(axis=(1, 2)).tolist() == [4, 10]
    # An idle row sees nothing.
    assert not run(np.zeros((2, 1), int), np.zeros(2, int))[1].any()


def test_8_bit_caches_store_written_values():
    config = small_config(model__num_kv_heads=2).model
    rng = np.random.default_rng(0)
    k, v = 3 * rng.standard_normal((2, 1, 4, 2, 8), np.float32)

    def written(k, v, int8):
        (cache,) = init_caches(config, 1, 9, int8=int8).values()
        indices = CacheIndices(jnp.array([[0, 1, 2, 9]]), jnp.array(9), 0)
        blocks = LayerCache([cache], jnp.array(1)).write(indices, k, v).blocks
        return [LayerCache(blocks, jnp.array(layer)).read(0, 0, 1) for layer in (1, 0)]

    run = jax.jit(lambda k, v: [written(k, v, int8) for int8 in (False, True)])
    (exact, other), (codes, _) = jax.device_get(run(k, v))
    # The head axis precedes the slot axis. Slot 9 does not exist, and the other layer is unchanged.
    np.testing.assert_array_equal(exact.key_BKSH[0, :, :3], np.swapaxes(k[0, :3], 0, 1))
    assert not np.any(exact.key_BKSH[0, :, 3:])
    assert not np.any(other.value_BKSH)
    for found, scale, expected in (
        (codes.key_BKSH, codes.key_scale_BKS, exact.key_BKSH),
        (codes.value_BKSH, codes.value_scale_BKS, exact.value_BKSH),
    ):
        assert found.dtype == jnp.int8
        error = np.abs(found * scale[..., None] - expected)[:, :, :3]
        largest = np.abs(expected).max(axis=-1, keepdims=True)[:, :, :3]
        assert np.all(error <= largest / 254 * 1.01)
        assert error.max() > 0


@pytest.mark.parametrize('unstacked', [False, True])
def test_fewer_rows_are_the_first(unstacked):
    config = small_config(model__num_kv_heads=2).model
    k = np.random.default_rng(0).standard_normal((2, 1, 2, 8), np.float32)

    @jax.jit
    def run(k):
        caches = init_caches(config, 3, 9, unstacked=unstacked)
        assert len(caches) == (2 if unstacked else 1)
        blocks, layer = (caches[1], 0) if unstacked else ([caches[0]], jnp.array(1))
        written = LayerCache(blocks, layer).write(CacheIndices(jnp.array([[4], [9]]), jnp.array(5), 0), k, 2 * k)
        return written.read(0, 0, 2), written.read(0, 0, 3)

    slots, all_slots = jax.device_get(run(k))
    assert slots.key_BKSH.shape == (2, 2, 9, 8)
    np.testing.assert_array_equal(slots.key_BKSH[0, :, 4], k[0, 0])
    np.testing.assert_array_equal(slots.value_BKSH[0, :, 4], 2 * k[0, 0])
    # The slot of the second row does not exist; no other slot changes.
    assert np.count_nonzero(all_slots.key_BKSH) == 16


def test_blocks_contain_all_slots():
    assert block_sizes(100) == [100]
    assert block_sizes(1000) == [128, 128, 256, 488]
    assert block_sizes(8192) == [128, 128, 256, 512, 1024, 2048, 2048, 2048]
    config = small_config(model__num_layers=2, model__sliding_window=3, model__attention_pattern='SL').model
    caches = init_caches(config, 2, 300, chunk=10, unstacked=True)
    assert [[part.num_slots for part in blocks] for blocks in caches] == [[64], [128, 128, 44]]
    assert slots_by_window(caches, config) == slots_by_window(init_caches(config, 2, 300, chunk=10), config)


@pytest.mark.parametrize(('first_row', 'num'), [(0, 3), (0, 2), (1, 1)])
def test_each_block_stores_its_own_slots(first_row, num):
    config = small_config(model__num_kv_heads=2).model
    # Slots at the boundaries of blocks; 300 is after the last slot.
    slots = np.array([[0, 127, 128, 255, 256, 299, 300]] * num)
    k = np.random.default_rng(0).standard_normal((*slots.shape, 2, 8), np.float32)

    @jax.jit
    def run(k):
        (blocks, _), (stacked,) = init_caches(config, 3, 300, unstacked=True), init_caches(config, 3, 300).values()
        indices = CacheIndices(jnp.asarray(slots), jnp.array(300), jnp.array(first_row) if first_row else 0)
        return [LayerCache(x, 0).write(indices, k, 2 * k).blocks for x in (blocks, [stacked])]

    split, together = jax.device_get(run(k))
    for name in ('key_LBKSH', 'value_LBKSH'):
        found = np.concatenate([getattr(part, name)[0] for part in split], axis=2)
        np.testing.assert_array_equal(found, getattr(together[0], name)[0])
        assert np.count_nonzero(found) == num * 6 * 2 * 8
