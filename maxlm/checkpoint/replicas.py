"""Comparison of the replicas of arrays: devices that hold the same part of an array must hold the same bits.

Data parallelism updates each replica of a parameter with the same sum of gradients. A device that computes wrongly, or
whose memory changes, therefore differs from the other replicas until the run ends. Arrays that are sharded over all
devices have no replicas, so nothing is compared for them.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxlm.checkpoint.item_metadata import named_leaves
from maxlm.errors import DeviceError
from maxlm.runtime.barrier import ProcessGroup
from maxlm.storage.json_text import parse_json


class ReplicaDifference(NamedTuple):
    """Replicas that differ. Devices are positions in the mesh.

    Attributes:
        name: first array that differs, with its item: `params.embedding`.
        num_arrays: number of arrays that differ.
        wrong: devices that differ from the majority of their replicas.
        unknown: devices of replicas without a majority, such as the two replicas of a pair.
    """

    name: str
    num_arrays: int
    wrong: list[int]
    unknown: list[int]


def replica_groups(array: Any) -> np.ndarray:
    """Returns the devices that hold each part of an array: positions in the mesh, [parts, replicas]."""
    sharding = getattr(array, 'sharding', None)
    if not isinstance(sharding, NamedSharding):
        return np.zeros((1, 1), np.int32)
    mesh = sharding.mesh
    named = [(entry,) if isinstance(entry, str) else entry for entry in sharding.spec if entry is not None]
    used = [mesh.axis_names.index(name) for names in named for name in names]
    others = [axis for axis in range(len(mesh.axis_names)) if axis not in used]
    parts = np.prod([mesh.axis_sizes[axis] for axis in used], dtype=int)
    positions = np.arange(mesh.size, dtype=np.int32).reshape(mesh.axis_sizes)
    return positions.transpose(*used, *others).reshape(parts, -1)


def find_difference(trees: Mapping[str, Any], device_sums: Mapping[str, np.ndarray]) -> ReplicaDifference | None:
    """Compares the sums of the replicas of each array.

    Args:
        trees: item → its arrays.
        device_sums: result of `start_checksums`, on the host.
    """
    names: list[str] = []
    wrong: set[int] = set()
    unknown: set[int] = set()
    for item, tree in trees.items():
        leaves = named_leaves(tree)
        for place, name in enumerate(sorted(leaves)):
            groups = replica_groups(leaves[name])
            sums = device_sums[item][groups, place]
            different = np.flatnonzero((sums != sums[:, :1]).any(1))
            if different.size:
                names.append(f'{item}.{name}')
            for devices, values in zip(groups[different].tolist(), sums[different].tolist(), strict=True):
                value, count = Counter(values).most_common(1)[0]
                if 2 * count > len(values):
                    wrong |= {device for device, each in zip(devices, values, strict=True) if each != value}
                else:
                    unknown |= set(devices)
    return ReplicaDifference(names[0], len(names), sorted(wrong), sorted(unknown)) if names else None


def check_replicas(trees: Mapping[str, Any], device_sums: Mapping[str, np.ndarray], *, occasion: str) -> None:
    """Compares the replicas of all arrays. All processes call it together and come to the same result.

    Args:
        trees: item → its arrays.
        device_sums: result of `start_checksums`, on the host.
        occasion: end of the message, such as `step 40 is not saved`.

    Raises:
        DeviceError: replicas differ. The message names the devices, their hosts and the first array.
    """
    group = ProcessGroup()
    found = find_difference(trees, device_sums)
    # The sums passed through a collective, which may be what is wrong.
    text = group.broadcast_from_host0(json.dumps(found) if found else '')
    if not text:
        return
    difference = ReplicaDifference(*parse_json(text))
    hosts = group.gather(socket.gethostname())
    devices = _devices(trees)
    at_fault = _processes(devices, difference.wrong)
    if not at_fault and len(among := _processes(devices, difference.unknown)) == 1:
        at_fault = among
    text = f'{_describe(difference, devices, hosts)}; {occasion}; check the host with maxlm doctor, or use another one'
    raise DeviceError(text, at_fault)


def _devices(trees: Mapping[str, Any]) -> list[jax.Device]:
    shardings = (getattr(leaf, 'sharding', None) for leaf in jax.tree.leaves(dict(trees)))
    return next(list(each.mesh.devices.flat) for each in shardings if isinstance(each, NamedSharding))


def _processes(devices: list[jax.Device], positions: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted({devices[position].process_index for position in positions}))


def _describe(difference: ReplicaDifference, devices: list[jax.Device], hosts: list[str]) -> str:
    def text(positions: list[int]) -> str:
        parts = []
        for process in _processes(devices, positions):
            ids = [str(devices[at].id) for at in positions if devices[at].process_index == process]
            parts.append(f'device{"s" * (len(ids) > 1)} {", ".join(ids)} of {hosts[process]} (process {process})')
        return ' and '.join(parts)

    more = f' and {difference.num_arrays - 1} more arrays' if difference.num_arrays > 1 else ''
    arrays = f'{difference.name}{more}'
    if difference.wrong:
        return f'wrong values in {text(difference.wrong)}: {arrays} differ from most replicas'
    return f'wrong values in one of {text(difference.unknown)}: their replicas of {arrays} differ'
