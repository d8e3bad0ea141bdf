"""Ring attention against attention on one device, its communication and computation.

Shapes: B batch, T length, N query heads, K key/value heads, H head dim.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from maxlm.model.attention import ring
from maxlm.model.attention.ring import ring_attention, zigzag
from tests.model.attention.masked import masked_attention

B, T, N, H = 2, 64, 4, 8


def inputs(num_kv_heads, dtype=jnp.float32, length=T):
    rng = np.random.default_rng(0)
    q, o = rng.normal(size=(2, B, length, N, H))
    k, v = rng.normal(size=(2, B, length, num_kv_heads, H))
    # Documents of various lengths, and padding (0) at the end.
    segments = np.sort(rng.integers(1, 6, size=(B, length)), axis=1)
    segments[:, -5:] = 0
    return tuple(x.astype(dtype) for x in (q, k, v, o)), segments.astype(np.int32)


def around(devices, window, *, parts=1, check_vma=False, order=None):
    """Returns a function of arrays in sequence order that reorders them, runs the ring and restores the order."""
    mesh = Mesh(np.array(jax.devices()[: parts * devices]).reshape(parts, devices), ('data', 'context'))
    assert set(mesh.axis_types) == {AxisType.Auto}
    spec = PartitionSpec('data', 'context')

    def run(q, k, v, segments):
        layout = zigzag(q.shape[1], devices) if order is None else order
        in_specs = (spec, spec, spec, None if segments is None else spec)
        run = jax.shard_map(
            lambda *shards: ring_attention(*shards, axis='context', window=window),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=spec,
            check_vma=check_vma,
        )
        return run(*(None if x is None else x[:, layout] for x in (q, k, v, segments)))[:, np.argsort(layout)]

    return run


def laid_out(devices):
    """Returns a function of reordered arrays that runs only the ring."""
    return jax.shard_map(
        lambda q, k, v: ring_attention(q, k, v, None, axis='context', window=0),
        mesh=Mesh(np.array(jax.devices()[:devices]), 'context'),
        in_specs=PartitionSpec(None, 'context'),
        out_specs=PartitionSpec(None, 'context'),
        check_vma=False,
    )


@jax.jit
def _on_one_device(q, k, v, do, mask):
    output, pull = jax.vjp(lambda q, k, v: masked_attention(q, k, v, mask), q, k, v)
    return output, *pull(do)


def on_one_device(window, arrays, segments):
    """Returns output and gradients. The mask is an argument, so that one program serves all tests."""
    behind = np.arange(T)[:, None] - np.arange(T)[None, :]
    mask = np.broadcast_to((behind >= 0) & (behind < (window or T)), (B, T, T))
    if segments is not None:
        segments = np.asarray(segments)
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    return _on_one_device(*arrays, mask)


def value_and_gradients(function):
    """Returns a program for the output, and for the gradients of q, k and v given a gradient of the output."""

    def run(q, k, v, do, segments):
        output, pull = jax.vjp(lambda q, k, v: function(q, k, v, segments), q, k, v)
        return output, *pull(do)

    return jax.jit(run)


@functools.cache
def compiled_ring(devices, window):
    return value_and_gradients(around(devices, window))


def largest_error(ours, theirs):
    """Returns the largest error of output and gradients, relative to the largest element of each."""
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(ours, theirs, strict=True)]
    assert all(np.isfinite(a).all() for a, _ in pairs)
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


# The cases cover each pair of values of the four settings.
@pytest.mark.parametrize(
    ('devices', 'num_kv_heads', 'isolated', 'window'),
    # The fixture `two_devices` covers (2, 2, True, 0).
    [(2, N, False, 11), (4, 2, False, 11), (4, N, True, 0), (8, 2, True, 11), (8, N, False, 0)],
)
def test_a_ring_equals_one_device(devices, num_kv_heads, isolated, window):
    arrays, segments = inputs(num_kv_heads)
    segments = segments if isolated else None
    ours = compiled_ring(devices, window)(*arrays, segments)
    assert largest_error(ours, on_one_device(window, arrays, segments)) <= 2e-6
    # Negative control.
    if window or not isolated:
        other = on_one_device(window + 1 if window else T - 1, arrays, segments)
    else:
        other = on_one_device(window, arrays, None)
    assert largest_error(ours, other) > 1e-4


@pytest.fixture(scope='module')
def two_devices():
    """Returns inputs and results of a ring of two devices."""
    arrays, segments = inputs(2)
    return arrays, segments, compiled_ring(2, 0)(*arrays, segments)


def test_a_ring_of_two_has_the_outputs_of_one_device(two_devices):
    arrays, segments, ours = two_devices
    assert largest_error(ours[:1], on_one_device(0, arrays, segments)[:1]) <= 2e-6


def test_a_ring_of_two_has_the_gradients_of_one_device(two_devices):
    arrays, segments, ours = two_devices
    assert largest_error(ours[1:], on_one_device(0, arrays, segments)[1:]) <= 2e-6


def test_documents_matter_to_a_ring_of_two(two_devices):
    """Negative control of the two previous tests."""
    arrays, _, ours = two_devices
    for found, other in zip(ours, on_one_device(0, arrays, None), strict=True):
        assert largest_error([found], [other]) > 1e-4


def test_the_batch_is_sharded_too():
    arrays, segments = inputs(2)
    ours = value_and_gradients(around(4, 0, parts=2))(*arrays, segments)
    assert largest_error(ours, on_one_device(0, arrays, segments)) <= 2e-6
    assert largest_error(ours, on_one_device(0, arrays, None)) > 1e-2


def test_bfloat16():
    arrays, segments = inputs(2, jnp.bfloat16)
    ours = compiled_ring(4, 0)(*arrays, segments)
    assert {x.dtype for x in ours} == {jnp.dtype('bfloat16')}
    wide = tuple(x.astype(jnp.float32) for x in arrays)
    # bfloat16 has 8 bits, so each rounding of results, weights and score gradients has a relative error of 2^-9.
    assert 1e-4 < largest_error(ours, on_one_device(0, wide, segments)) < 2e-2


def test_blocks_of_queries_change_nothing(monkeypatch):
    arrays, segments = inputs(2)
    monkeypatch.setattr(ring, 'QUERY_BLOCK', 4)
    # Also with JAX's check of varying mesh axes, which may fail in loops and branches.
    ours = value_and_gradients(around(2, 6, check_vma=True))(*arrays, segments)
    assert largest_error(ours, on_one_device(6, arrays, segments)) <= 2e-6
    assert largest_error(ours, on_one_device(5, arrays, segments)) > 1e-4


def test_a_ring_in_sequence_order_gives_another_result():
    arrays, _ = inputs(2)
    ours = value_and_gradients(around(4, 0, order=np.arange(T)))(*arrays, None)
    assert largest_error(ours, on_one_device(0, arrays, None)) > 1e-2


@pytest.mark.parametrize('devices', [1, 2, 4, 8])
def test_zigzag_gives_each_device_the_same_work(devices):
    order = zigzag(T, devices)
    np.testing.assert_array_equal(np.sort(order), np.arange(T))
    np.testing.assert_array_equal(order[np.argsort(order)], np.arange(T))

    def visible_pairs(order):
        return {int((part + 1).sum()) for part in np.split(order, devices)}

    assert len(visible_pairs(order)) == 1
    assert len(visible_pairs(np.arange(T))) == devices


def test_zigzag_names_an_indivisible_length():
    with pytest.raises(ValueError, match='length=60 must be a multiple of 16'):
        zigzag(60, 8)


def counted(jaxpr, times=1):
    """Returns the number of ring exchanges and of multiplications on one device, with loops counted by their length."""
    exchanges, products = 0, 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == 'ppermute':
            exchanges += times
        elif name == 'dot_general':
            (contracted, _), _ = equation.params['dimension_numbers']
            left = equation.invars[0].aval.shape
            products += times * equation.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
        inner = [getattr(x, 'jaxpr', x) for x in equation.params.values() if hasattr(x, 'eqns') or hasattr(x, 'jaxpr')]
        for sub in inner:
            more = counted(sub, times * equation.params.get('length', 1) if name == 'scan' else times)
            exchanges, products = exchanges + more[0], products + more[1]
    return exchanges, products


@pytest.mark.parametrize('devices', [2, 4, 8])
def test_only_neighbors_communicate_and_masked_pairs_are_not_computed(devices):
    (q, k, v, do), _ = inputs(2)

    forward = laid_out(devices)

    def backward(q, k, v, do):
        return jax.vjp(forward, q, k, v)[1](do)

    # Multiplications of q·k and weights·v on one device of a dense ring.
    dense = 2 * B * N * (T // devices) * T * H
    exchanges, products = counted(jax.make_jaxpr(forward)(q, k, v).jaxpr)
    assert exchanges == devices - 1
    # 2R + 1 of 4R pairs of chunks are computed; the diagonal ones are computed completely.
    assert products == dense * (2 * devices + 1) // (4 * devices)
    if devices == 8:
        assert products <= 0.55 * dense
    # The backward pass repeats the forward pass and exchanges keys again. It also exchanges gradients, which return to
    # their device. It has five products instead of two.
    both_exchanges, both_products = counted(jax.make_jaxpr(backward)(q, k, v, do).jaxpr)
    assert both_exchanges == (devices - 1) + (devices - 1) + devices
    assert 2 * both_products == 7 * products


def test_the_compiled_ring_exchanges_nothing_else():
    (q, k, v, do), _ = inputs(2)
    forward = laid_out(4)
    backward = jax.jit(lambda q, k, v, do: jax.vjp(forward, q, k, v)[1](do))
    text = backward.lower(q, k, v, do).compile().as_text()
    assert ' collective-permute' in text
    assert not any(f' {name}' in text for name in ('all-gather', 'all-to-all', 'all-reduce'))
    # Negative control: the search finds the collectives of reordering the sequence.
    text = jax.jit(around(4, 0)).lower(q, k, v, None).compile().as_text()
    assert any(f' {name}' in text for name in ('all-gather', 'all-to-all', 'all-reduce'))


def test_no_more_memory_for_more_devices():
    def temporary(devices):
        q, k, v, do = inputs(2, length=512 * devices)[0]

        def backward(q, k, v, do):
            return jax.vjp(laid_out(devices), q, k, v)[1](do)

        analysis = jax.jit(backward).lower(q, k, v, do).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporary(8) < 1.05 * temporary(4)


def test_a_row_that_is_fully_masked_in_a_pair_is_finite():
    # Each token is a document, so it only attends to itself, and the output is the value.
    (q, k, v, do), _ = inputs(N)
    alone = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    output, dq, dk, dv = compiled_ring(4, 0)(100 * q, k, v, do, alone)
    np.testing.assert_allclose(output, v, rtol=1e-6)
    np.testing.assert_allclose(dv, do, rtol=1e-6)
    # A weight of 1 has no gradient except for rounding. The comparison also fails for NaN.
    assert np.abs(dq).max() < 1e-4
    assert np.abs(dk).max() < 1e-2
    together = compiled_ring(4, 0)(100 * q, k, v, do, np.zeros((B, T), np.int32))[0]
    assert np.abs(together - v).max() > 0.1
