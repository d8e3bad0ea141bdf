"""Placing a batch: each device gets its own rows and no more, by a call for all and not by one for each."""

import sys
from functools import partial

import jax
import numpy as np

from maxlm.config.keys import MeshConfig
from maxlm.training.sharding import make_layout

ROWS, LENGTH = 16, 8
BATCH = {name: np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH) for name in ('tokens', 'targets')}


def layout_of(devices):
    return make_layout(MeshConfig(fsdp=devices), jax.devices()[:devices])


def one_by_one(layout, batch):
    """Control: a transfer for each device and array."""
    parts = layout.batch.addressable_devices_indices_map((ROWS, LENGTH)).items()
    return {
        name: jax.make_array_from_single_device_arrays(
            rows.shape, layout.batch, [jax.device_put(rows[index], device) for device, index in parts]
        )
        for name, rows in batch.items()
    }


def calls(action):
    """Functions that are called, in Python and from it, once caches are filled."""
    counted = 0

    def count(_frame, event, _argument):
        nonlocal counted
        counted += event in ('call', 'c_call')

    least = []
    for _ in range(4):
        counted = 0
        sys.setprofile(count)
        try:
            action()
        finally:
            sys.setprofile(None)
        least.append(counted)
    # Collecting garbage now and then adds some.
    return min(least)


def test_calls_of_placing_grow_little_with_devices():
    alone, together = (calls(partial(layout_of(devices).put_batch, BATCH, ROWS)) for devices in (1, 8))
    for_each = calls(partial(one_by_one, layout_of(8), BATCH))
    assert together - alone < 20 * len(BATCH) * 7
    # Control: by far more with one transfer for each.
    assert for_each > 3 * together


def test_a_device_gets_its_part_only():
    for devices in (1, 2, 8):
        layout = layout_of(devices)
        placed = layout.put_batch(BATCH, ROWS)
        for name, rows in BATCH.items():
            shards = placed[name].addressable_shards
            assert len({shard.device for shard in shards}) == devices
            assert {shard.data.nbytes for shard in shards} == {rows.nbytes // devices}
            np.testing.assert_array_equal(np.concatenate([np.asarray(shard.data) for shard in shards]), rows)
    # Control: replicated, every device would have all.
    whole = jax.device_put(BATCH['tokens'], layout.named())
    assert {shard.data.nbytes for shard in whole.addressable_shards} == {BATCH['tokens'].nbytes}


def test_a_batch_is_placed_where_hidden_transfers_are_forbidden():
    with jax.transfer_guard('disallow'):
        layout_of(8).put_batch(BATCH, ROWS)
