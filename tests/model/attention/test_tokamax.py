"""Attention of Tokamax: its masks give the attention of the other kernels, within documents and windows."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.installation import pip_install
from maxlm.model.attention.chunked import attend_blockwise
from maxlm.model.attention.kernels import AttentionInputs, tokamax
from maxlm.model.attention.tokamax import attend_tokamax, first_keys
from maxlm.parallel.layout import make_layout
from maxlm.parallel.partitioning import SINGLE_DEVICE
from tests.model.attention.test_attention import reference
from tests.small import small_config

T, SEGMENTS = 16, np.array([[5] * 16, [1, 2, 2, 2, 2, 2, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0]], np.int32)


@pytest.fixture(scope='module')
def arrays():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, T, heads, 8), np.float32) for heads in (4, 2, 2)]


def sees(window, has_documents=True):
    """Returns the mask [B, T, S]."""
    behind = np.arange(T)[:, None] - np.arange(T)[None]
    mask = (behind >= 0) & (behind < (window or T))
    return mask & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) if has_documents else np.stack([mask, mask])


@pytest.mark.parametrize('window', [0, 4])
@pytest.mark.parametrize('has_documents', [True, False])
def test_first_keys_are_those_of_the_mask(window, has_documents):
    first = first_keys(jnp.asarray(SEGMENTS) if has_documents else None, T, window)
    expected = sees(window, has_documents).argmax(-1)
    if not window and not has_documents:
        assert first is None
        assert not expected.any()
    else:
        np.testing.assert_array_equal(np.broadcast_to(first, (2, T)), expected)


@pytest.mark.parametrize(('window', 'softcap'), [(0, 0.0), (4, 0.0), (4, 2.0)])
def test_values_and_gradients_equal_those_of_xla(arrays, window, softcap):
    settings = {'window': window, 'softcap': softcap}

    def run(attend, **more):
        def loss(q, k, v):
            out = attend(q, k, v, jnp.asarray(SEGMENTS), **settings, **more)
            return jnp.sin(out).sum(), out

        # Tokamax broadcasts arrays of different ranks.
        with jax.numpy_rank_promotion('allow'):
            return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)

    found = run(attend_tokamax, platform='cpu')
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(run(attend_blockwise)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)
    if not softcap:
        np.testing.assert_allclose(found[0][1], reference(*arrays, sees(window)), atol=1e-5)
        # Negative control: a window that is longer by one.
        assert not np.allclose(found[0][1], reference(*arrays, sees(window + 1)), atol=1e-3)


@pytest.mark.parametrize('segments', [SEGMENTS, None], ids=['documents', 'one document'])
def test_every_device_has_its_rows_and_heads(arrays, segments):
    config = small_config(num_devices=4, mesh__fsdp=2, mesh__tensor=2)
    layout = make_layout(config.mesh, jax.devices()[:4])

    def run(rows, partitioning):
        with jax.numpy_rank_promotion('allow'):
            return jax.jit(lambda *arrays: tokamax(AttentionInputs(*arrays, None, rows), 4, partitioning))(*arrays)

    found, expected = run(segments, layout), reference(*arrays, sees(4, segments is not None))
    np.testing.assert_allclose(found, run(segments, SINGLE_DEVICE), atol=1e-6)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # Each of the four devices has one row and two heads.
    assert {shard.data.shape for shard in found.addressable_shards} == {(1, T, 2, 8)}
    # Negative control: rows in another order.
    assert segments is None or not np.allclose(run(segments[::-1], layout), expected, atol=1e-3)


def test_a_missing_package_is_named(arrays, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tokamax._src.ops.attention', None)
    with pytest.raises(InputError, match=r'model.attention=tokamax: the package tokamax is not installed') as info:
        attend_tokamax(*arrays, None, window=0, platform='cpu')
    assert pip_install('experts') in str(info.value)
