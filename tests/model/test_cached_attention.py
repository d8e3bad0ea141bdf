"""Slots read in blocks against all of them at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.model import cached_attention
from maxlm.model.cache import LayerCache, Places, init_caches
from maxlm.model.cached_attention import attend_cached
from tests.small import small_config

S, ROWS, H, K, N = 128, 3, 8, 2, 4


@pytest.mark.parametrize('int8', [False, True])
@pytest.mark.parametrize(('T', 'first_row', 'num'), [(1, 0, 3), (5, 1, 1), (5, 0, 2)])
def test_blocks_are_as_all_slots(int8, T, first_row, num, monkeypatch):
    monkeypatch.setattr(cached_attention, 'BLOCKS', (32,))
    config = small_config(model__num_heads=N, model__num_kv_heads=K, model__dim=N * H, model__num_layers=1).model
    (cache,) = init_caches(config, ROWS, S, int8=int8, apart=True)
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(ROWS, S, K, H)), jnp.float32) for _ in range(2))
    everywhere = Places(jnp.broadcast_to(jnp.arange(S), (ROWS, S)), jnp.array(S), 0)
    filled = LayerCache(cache, 0).write(everywhere, k, v).cache
    q_BTNH = jnp.asarray(rng.normal(size=(num, T, N, H)), jnp.float32)
    # Of 128 slots 70 are in use; each query sees some of them, in each block.
    mask_BTS = jnp.asarray(rng.random((num, T, S)) < 0.5).at[..., 70:].set(False)
    row = jnp.array(first_row) if first_row else 0

    def attend(end, in_blocks):
        places = Places(jnp.zeros((num, T), int), end, row)
        return jax.jit(lambda q: attend_cached(q, LayerCache(filled, 0, in_blocks), places, mask_BTS))(q_BTNH)

    expected = attend(jnp.array(70), False)
    np.testing.assert_allclose(attend(jnp.array(70), True), expected, rtol=1e-5, atol=1e-6)
    # Control: what is in a block that is not read matters.
    assert np.abs(attend(jnp.array(64), True) - expected).max() > 1e-2
    # Where nothing is in use, nothing is made up.
    assert not np.any(attend(jnp.array(0), True))


def test_blocks_stay_small(monkeypatch):
    monkeypatch.setattr(cached_attention, 'BLOCK_BYTES', 64 * 2 * H * K * 4)
    config = small_config(model__num_heads=N, model__num_kv_heads=K, model__dim=N * H, model__num_layers=1).model
    sizes = []
    original = LayerCache.read_block
    monkeypatch.setattr(LayerCache, 'read_block', lambda self, *a: sizes.append(a[-1]) or original(self, *a))
    for rows, slots in ((1, 512), (2, 512), (4, 512), (1, 192), (1, 100)):
        (cache,) = init_caches(config, rows, slots, apart=True)
        places = Places(jnp.zeros((rows, 1), int), jnp.array(9), 0)
        mask = jnp.ones((rows, 1, cache.num_slots), bool)
        jax.eval_shape(
            lambda q, c=cache, p=places, m=mask: attend_cached(q, LayerCache(c, 0, True), p, m),
            jnp.zeros((rows, 1, N, H)),
        )
    # Two rows have half of the room, four as little as a block has; 100 slots are 128, one block.
    assert sizes == [128, 64, 64, 64]
