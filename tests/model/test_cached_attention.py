"""Slots read in parts against all of them at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.model.cache import LayerCache, Places, init_caches
from maxlm.model.cached_attention import attend_cached
from tests.small import small_config

S, ROWS, H, K, N = 300, 3, 8, 2, 4


@pytest.mark.parametrize('int8', [False, True])
@pytest.mark.parametrize(('T', 'first_row', 'num'), [(1, 0, 3), (5, 1, 1), (5, 0, 2)])
def test_parts_are_as_all_slots(int8, T, first_row, num):
    config = small_config(model__num_heads=N, model__num_kv_heads=K, model__dim=N * H, model__num_layers=1).model
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(ROWS, S, K, H)), jnp.float32) for _ in range(2))
    q_BTNH = jnp.asarray(rng.normal(size=(num, T, N, H)), jnp.float32)
    # Of 128 + 128 + 44 slots 170 are in use; each query sees some of them, in both parts.
    mask_BTS = jnp.asarray(rng.random((num, T, S)) < 0.5).at[..., 170:].set(False)
    row = jnp.array(first_row) if first_row else 0

    def attend(end, *, apart):
        caches = init_caches(config, ROWS, S, int8=int8, apart=apart)
        parts = caches[0] if apart else [caches[0]]
        assert len(parts) == (3 if apart else 1)
        everywhere = Places(jnp.broadcast_to(jnp.arange(S), (ROWS, S)), jnp.array(S), 0)
        filled = LayerCache(parts, 0).write(everywhere, k, v)
        places = Places(jnp.zeros((num, T), int), jnp.array(end), row)
        return jax.jit(lambda q: attend_cached(q, filled, places, mask_BTS))(q_BTNH)

    expected = attend(170, apart=False)
    np.testing.assert_allclose(attend(170, apart=True), expected, rtol=1e-5, atol=1e-6)
    # Control: what is in a part that is not read matters.
    assert np.abs(attend(128, apart=True) - expected).max() > 1e-2
    # Where nothing is in use, nothing is made up.
    assert not np.any(attend(0, apart=True))


def test_parts_that_are_not_in_use_are_not_read():
    """What is there does not even reach a product."""
    config = small_config(model__num_heads=N, model__num_kv_heads=K, model__dim=N * H, model__num_layers=1).model
    (parts,) = init_caches(config, ROWS, S, apart=True)
    poisoned = [part._replace(value_LBKSH=jnp.full_like(part.value_LBKSH, jnp.nan)) for part in parts]
    mask_BTS = jnp.arange(S) < jnp.ones((ROWS, 1, 1), int)

    def attend(parts, end):
        places = Places(jnp.zeros((ROWS, 1), int), jnp.array(end), 0)
        return attend_cached(jnp.ones((ROWS, 1, N, H)), LayerCache(parts, 0), places, mask_BTS)

    assert np.isfinite(attend([parts[0], *poisoned[1:]], 128)).all()
    # Control: one more slot is one more part.
    assert np.isnan(attend([parts[0], *poisoned[1:]], 129)).all()
