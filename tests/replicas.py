"""Replicas with a flipped bit.

`python -m tests.replicas STEP ARGUMENTS…` runs `maxlm train`, where process 1 flips a bit of a parameter after STEP.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np

from maxlm.cli.runs import train
from maxlm.errors import exit_code
from maxlm.trainer.step_runner import StepRunner


def flip_bit(array: jax.Array, device: int) -> jax.Array:
    """Returns the array with a flipped bit in the shard of the device at this position of the mesh.

    Processes that do not have the device return the array unchanged.
    """

    def value(shard: Any) -> jax.Array:
        data = np.array(shard.data)
        if shard.device == array.sharding.mesh.devices.flat[device]:
            data.reshape(-1).view(np.uint8)[-1] ^= 1
        sharding = jax.sharding.SingleDeviceSharding(shard.device, memory_kind=array.sharding.memory_kind)
        return jax.device_put(data, sharding)

    shards = [value(shard) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def main(step: int, arguments: list[str]) -> int:
    """Trains with a flipped bit on the first device of process 1, or of the only process."""
    run_step = StepRunner.step

    def faulty(self: StepRunner, number: int, *args: Any, **options: Any) -> Any:
        state = run_step(self, number, *args, **options)
        if number == step and os.environ.get('MAXLM_PROCESS_ID', '1') == '1':
            embedding = state.params['embedding']
            devices = list(embedding.sharding.mesh.devices.flat)
            flipped = flip_bit(embedding, devices.index(jax.local_devices()[0]))
            state = state._replace(params={**state.params, 'embedding': flipped})
        return state

    with mock.patch.object(StepRunner, 'step', faulty):
        return exit_code(train.main, arguments)


if __name__ == '__main__':
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
