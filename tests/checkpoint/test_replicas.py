"""Replicas of arrays that differ are found, named, and not saved."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.checkpoint import restore
from maxlm.checkpoint.checksums import finish_checksums, start_checksums
from maxlm.checkpoint.item_metadata import named_leaves
from maxlm.checkpoint.manager import Checkpoints
from maxlm.checkpoint.replicas import replica_groups
from maxlm.checkpoint.restore import items_of
from maxlm.errors import EXIT_DEVICE, EXIT_PREEMPTED, DeviceError, exit_code
from maxlm.training.state import abstract_state
from tests.replicas import flip_bit
from tests.small import EXPERTS, small_config, small_layout, small_state

SHAPE = (8, 16)
AXES = ('a', 'b')


def placed(values, mesh_shape, spec, **memory):
    mesh = Mesh(np.array(jax.devices()[: np.prod(mesh_shape)]).reshape(mesh_shape), AXES)
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec), **memory))


def compare(**arrays):
    """Returns the error of a comparison, or None."""
    trees = {'params': arrays}
    try:
        finish_checksums(trees, start_checksums(trees), occasion='step 3 is not saved')
    except DeviceError as error:
        return error
    return None


@pytest.mark.parametrize('dtype', [np.float32, jnp.bfloat16, np.int8, np.uint8, np.int32])
@pytest.mark.parametrize('memory', ['device', 'pinned_host'])
def test_majority_names_the_device(dtype, memory):
    x = placed(np.ones(SHAPE, dtype), (4, 1), (), memory_kind=memory)
    assert compare(x=x, blocks={'y': x}) is None
    for device in range(4):
        error = compare(blocks={'y': flip_bit(x, device)}, x=x)
        assert str(error).startswith(f'wrong values in device {device} of '), error
        assert 'params.blocks.y differ from most replicas; step 3 is not saved; check the host' in str(error)
        assert error.processes == (0,)


def test_a_pair_is_named_without_a_culprit():
    x = placed(np.ones(SHAPE, np.float32), (2, 2), ('a',))
    # Each half of the array has two replicas: devices 0 and 1, and devices 2 and 3.
    assert replica_groups(x).tolist() == [[0, 1], [2, 3]]
    assert compare(x=x) is None
    error = compare(w=x, x=flip_bit(x, 2), y=flip_bit(x, 3))
    assert str(error).startswith('wrong values in one of devices 2, 3 of ')
    assert 'replicas of params.x and 1 more arrays differ' in str(error)


def test_wrong_devices_in_two_groups():
    x = placed(np.arange(128, dtype=np.float32).reshape(SHAPE), (2, 4), (None, 'a'))
    error = compare(x=flip_bit(flip_bit(x, 1), 6))
    assert str(error).startswith('wrong values in devices 1, 6 of ')


def test_arrays_without_replicas_are_not_compared():
    x = placed(np.ones(SHAPE, np.float32), (2, 4), (('a', 'b'),))
    assert replica_groups(x).shape == (8, 1)
    assert compare(x=flip_bit(x, 3)) is None
    # Negative control: the flip changes the checksum.
    sums = [
        finish_checksums(trees, start_checksums(trees)) for trees in ({'p': {'x': x}}, {'p': {'x': flip_bit(x, 3)}})
    ]
    assert sums[0] != sums[1]


@pytest.mark.parametrize('spec', [(), ('a',), ('b', 'a'), (None, ('b', 'a')), (('a', 'b'), None)])
def test_groups_are_the_devices_with_the_same_part(spec):
    x = placed(np.zeros(SHAPE, np.float32), (2, 4), spec)
    parts = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        parts.setdefault(str(index), set()).add(device.id)
    assert sorted(map(sorted, replica_groups(x).tolist())) == sorted(map(sorted, parts.values()))


def test_exit_codes():
    def fail(argv):
        raise DeviceError('wrong values\nin device 3', (1,))

    assert exit_code(fail, []) == EXIT_DEVICE
    assert [DeviceError('x', (1,)).code_of(process, 3) for process in range(3)] == [
        EXIT_PREEMPTED,
        EXIT_DEVICE,
        EXIT_PREEMPTED,
    ]
    assert [DeviceError('x').code_of(process, 2) for process in range(2)] == [EXIT_PREEMPTED] * 2
    assert DeviceError('x').code_of(0, 1) == EXIT_DEVICE


DATA = {'mesh__data': 8, 'mesh__fsdp': 1}
STAGES = {'mesh__stage': 2, 'mesh__fsdp': 2, 'mesh__data': 2, 'train__per_device_batch_size': 1}
LAYOUTS = {
    'data': {**DATA, 'optimizer__ema_decay': 0.9},
    'replica': {'mesh__replica': 2, 'mesh__fsdp': 4},
    'fsdp': {'mesh__fsdp': 8},
    'zero 1': {'mesh__fsdp': 8, 'mesh__zero_stage': 1},
    'tensor': {'mesh__tensor': 4, 'mesh__fsdp': 2},
    'stages': STAGES,
    'experts': {**EXPERTS, 'mesh__expert': 2, 'mesh__data': 2, 'mesh__fsdp': 2},
    'offload': {**DATA, 'mesh__host_offload': 'all'},
    'int8': {**DATA, 'optimizer__moment_dtype': 'int8', 'model__dim': 64},
}


def with_flip(tree, device):
    """Returns the tree with a flipped bit in its largest array with replicas, and the dotted path of this array."""
    leaves = named_leaves(tree)
    replicated = [name for name in leaves if replica_groups(leaves[name]).shape[1] > 1]
    largest = max(replicated, key=lambda name: leaves[name].nbytes)
    flipped = jax.tree.map(lambda leaf: flip_bit(leaf, device) if leaf is leaves[largest] else leaf, tree)
    return flipped, largest


@pytest.mark.parametrize('name', LAYOUTS)
def test_differences_are_found_on_each_mesh(name):
    config = small_config(8, **LAYOUTS[name])
    trees = items_of(small_state(config, small_layout(config)))
    started = start_checksums(trees)
    assert finish_checksums(trees, started, occasion='not saved') == finish_checksums(trees, started)
    for item, tree in trees.items():
        flipped, array = with_flip(tree, 5)
        wrong = {**trees, item: flipped}
        with pytest.raises(DeviceError, match=rf'{item}\.{re.escape(array)}.* differ.*; not saved') as caught:
            finish_checksums(wrong, {**started, **start_checksums({item: flipped})}, occasion='not saved')
        assert caught.value.processes == (0,)


def test_wrong_state_is_not_saved(tmp_path):
    config = small_config(8, **DATA)
    state = small_state(config, small_layout(config))
    params, _ = with_flip(state.params, 5)
    moments, _ = with_flip(state.opt_state, 5)
    with Checkpoints(tmp_path, max_to_keep=9) as checkpoints:
        assert checkpoints.save(1, state, {})
        for wrong in (state._replace(params=params), state._replace(opt_state=moments)):
            with pytest.raises(DeviceError, match=r'wrong values in device 5 of .*; step 2 is not saved'):
                checkpoints.save(2, wrong, {})
        assert checkpoints.wait() == 1
        # Negative control.
        assert checkpoints.save(2, state, {})
        assert checkpoints.wait() == 2


def test_comparison_can_be_disabled(tmp_path):
    config = small_config(8, **DATA)
    state = small_state(config, small_layout(config))
    state.params['embedding'] = flip_bit(state.params['embedding'], 5)
    with Checkpoints(tmp_path, max_to_keep=9, compare_replicas=False) as checkpoints:
        assert checkpoints.save(1, state, {})
        assert checkpoints.wait() == 1
        assert checkpoints.restore(1, abstract_state(config, small_layout(config)))


def test_a_replica_that_was_restored_wrongly_is_found(tmp_path, monkeypatch):
    config = small_config(8, **DATA)
    layout = small_layout(config)
    abstract = abstract_state(config, layout)
    with Checkpoints(tmp_path, max_to_keep=9) as checkpoints:
        checkpoints.save(1, small_state(config, layout), {})
        assert checkpoints.restore(1, abstract)
        read = restore.read_arrays
        flip = partial(jax.tree.map, lambda leaf: flip_bit(leaf, 7))
        monkeypatch.setattr(restore, 'read_arrays', lambda *args: flip(read(*args)))
        with pytest.raises(DeviceError, match=r'wrong values in device 7 of .*checkpoints/1 cannot be restored'):
            checkpoints.restore(1, abstract)
