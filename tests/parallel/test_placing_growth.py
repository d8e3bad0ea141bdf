"""Tests that each device receives only its own rows of a batch."""

import jax
import numpy as np

from maxlm.config.schema import MeshConfig
from maxlm.parallel.layout import make_layout

ROWS, LENGTH = 16, 8
BATCH = {name: np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH) for name in ('tokens', 'targets')}


def layout_of(devices):
    return make_layout(MeshConfig(fsdp=devices), jax.devices()[:devices])


def test_each_device_receives_only_its_rows():
    for devices in (1, 2, 8):
        layout = layout_of(devices)
        placed = layout.put_batch(BATCH, ROWS)
        for name, rows in BATCH.items():
            shards = placed[name].addressable_shards
            assert len({shard.device for shard in shards}) == devices
            assert {shard.data.nbytes for shard in shards} == {rows.nbytes // devices}
            np.testing.assert_array_equal(np.concatenate([np.asarray(shard.data) for shard in shards]), rows)
    # Control: if replicated, every device has all rows.
    replicated = jax.device_put(BATCH['tokens'], layout.named())
    assert {shard.data.nbytes for shard in replicated.addressable_shards} == {BATCH['tokens'].nbytes}


def test_placement_needs_no_implicit_transfers():
    with jax.transfer_guard('disallow'):
        layout_of(8).put_batch(BATCH, ROWS)
