"""Attention over slots in blocks against attention over all slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.model.attention.decode import attend_cached
from maxlm.model.layers.kv_cache import CacheIndices, LayerCache, init_caches
from tests.small import small_config

S, ROWS, H, K, N = 300, 3, 8, 2, 4


def model_config():
    return small_config(model__num_heads=N, model__num_kv_heads=K, model__dim=N * H, model__num_layers=1).model


@pytest.mark.parametrize(
    ('int8', 'T', 'first_row', 'num', 'sinks'),
    [(False, 1, 0, 3, False), (True, 1, 0, 3, True), (True, 5, 1, 1, False), (False, 5, 0, 2, True)],
)
def test_blocks_equal_all_slots(int8, T, first_row, num, sinks):
    config, rng = model_config(), np.random.default_rng(0)
    k, v = rng.standard_normal((2, ROWS, S, K, H), np.float32)
    q_BTNH = rng.standard_normal((num, T, N, H), np.float32)
    sinks_N = rng.standard_normal(N, np.float32) if sinks else None
    # 170 of 128 + 128 + 44 slots are in use. Each query sees some of them in two blocks.
    mask_BTS = rng.random((num, T, S)) < 0.5
    mask_BTS[..., 170:] = False

    @jax.jit
    def attend(q_BTNH, end):
        """Computes attention with all slots as one array, and as blocks."""
        found = []
        for unstacked in (False, True):
            caches = init_caches(config, ROWS, S, int8=int8, unstacked=unstacked)
            blocks = caches[0] if unstacked else [caches[0]]
            assert len(blocks) == (3 if unstacked else 1)
            everywhere = CacheIndices(jnp.broadcast_to(jnp.arange(S), (ROWS, S)), jnp.array(S), 0)
            filled = LayerCache(blocks, 0).write(everywhere, k, v)
            row = jnp.array(first_row) if first_row else 0
            indices = CacheIndices(jnp.zeros((num, T), int), end, row)
            found.append(attend_cached(q_BTNH, filled, indices, jnp.asarray(mask_BTS), sinks_N=sinks_N))
        return found

    dense, found = attend(q_BTNH, 170)
    np.testing.assert_allclose(found, dense, rtol=1e-5, atol=1e-6)
    # Negative control: omitting a used block changes the result.
    assert np.abs(attend(q_BTNH, 128)[1] - dense).max() > 1e-2
    # If no slot is in use, the output is zero.
    assert not np.any(attend(q_BTNH, 0)[1])


def test_unused_blocks_are_not_read():
    """NaN values in unused blocks must not affect the result."""
    (blocks,) = init_caches(model_config(), ROWS, S, unstacked=True)
    poisoned = [part._replace(value_LBKSH=np.full(part.value_LBKSH.shape, np.nan, np.float32)) for part in blocks]
    mask_BTS = np.broadcast_to(np.arange(S) < 1, (ROWS, 1, S))

    @jax.jit
    def attend(blocks, end):
        indices = CacheIndices(jnp.zeros((ROWS, 1), int), end, 0)
        return attend_cached(jnp.ones((ROWS, 1, N, H)), LayerCache(blocks, 0), indices, jnp.asarray(mask_BTS))

    assert np.isfinite(attend([blocks[0], *poisoned[1:]], 128)).all()
    # Negative control: one more slot includes one more block.
    assert np.isnan(attend([blocks[0], *poisoned[1:]], 129)).all()
