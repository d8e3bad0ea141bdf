"""Determines the mesh axes of a collective from XLA's device groups.

The id of a device in a compiled program is its index in the mesh, with the last axis changing fastest.
"""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

import numpy as np

_PAIR = re.compile(r'\{(\d+),(\d+)\}')
# The first shape is omitted if it follows from the context.
_IOTA = re.compile(r'(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?')
_MESH = re.compile(r'mesh\[([^\]]*)\](?:, device_ids=\((.*?)\)(?= \{))? \{([^}]*)\}')
# Matches `'fsdp'`, or the part `:(before)size` of an axis.
_AXIS = re.compile(r"'?([^',:{}]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")


class Groups(NamedTuple):
    """The groups of a collective on a mesh.

    Attributes:
        axes: axes along which the devices of a group differ; empty if the groups do not span complete axes.
        size: number of devices in a group; 1: nothing is sent.
    """

    axes: tuple[str, ...]
    size: int


@functools.lru_cache(maxsize=4096)
def find_groups(text: str, mesh: tuple[tuple[str, int], ...]) -> Groups:
    """Returns the axes of `replica_groups`: `{{0,1},{2,3}}`, `[2,2]<=[4]T(…)` or `mesh['x'=2,…] {'x'}`.

    Args:
        text: the text after `replica_groups=`.
        mesh: names and sizes of the axes, the fastest last.

    Raises:
        ValueError: the text has none of the three formats, or its devices differ from the mesh's.
    """
    groups = _read_groups(text, math.prod(size for _, size in mesh))
    size = groups.shape[1]
    axes = _differing(groups, groups[:, :1], mesh)
    return Groups(axes if math.prod(dict(mesh)[axis] for axis in axes) == size else (), size)


@functools.lru_cache(maxsize=4096)
def find_pairs(text: str, mesh: tuple[tuple[str, int], ...]) -> Groups:
    """Returns the axes along which `source_target_pairs` (`{{0,1},{1,0}}`) differ, and the product of their sizes."""
    pairs = np.array(_PAIR.findall(text), int).reshape(-1, 2)
    axes = _differing(pairs[:, 1:], pairs[:, :1], mesh)
    return Groups(axes, math.prod(dict(mesh)[axis] for axis in axes))


def _differing(devices: np.ndarray, others: np.ndarray, mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Returns the axes along which any device has another coordinate than its partner."""
    sizes = [size for _, size in mesh]
    pairs = zip(np.unravel_index(devices, sizes), np.unravel_index(others, sizes), strict=True)
    return tuple(name for (name, _), (a, b) in zip(mesh, pairs, strict=True) if (a != b).any())


def _read_groups(text: str, num_devices: int) -> np.ndarray:
    """Returns the device ids, [groups, devices in a group]."""
    mesh, iota = _MESH.match(text), _IOTA.match(text)
    if mesh:
        groups = _read_mesh(*mesh.groups())
    elif iota:
        groups = _read_iota(iota)
    elif text.startswith('{}'):
        groups = np.arange(num_devices)[None]
    elif text.startswith('{{'):
        rows = text[2 : text.index('}}')].split('},{')
        groups = np.array([[int(device) for device in row.split(',')] for row in rows])
    else:
        raise ValueError(f'cannot parse replica groups; report them: {text[:100]!r}')
    if not np.array_equal(np.sort(groups, axis=None), np.arange(num_devices)):
        raise ValueError(
            f'replica groups do not match the {num_devices} devices of the mesh; '
            f'pass the mesh that the program was compiled for: {text[:100]!r}'
        )
    return groups


def _read_iota(found: re.Match[str]) -> np.ndarray:
    """Parses `[shape]<=[dims]T(order)`: 0, 1, 2, … in the shape `dims`, transposed by `order`, then reshaped."""
    shape, dims, order = (tuple(map(int, part.split(','))) if part else None for part in found.groups())
    assert dims is not None
    return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape or -1)


def _read_mesh(axes: str, device_ids: str | None, along: str) -> np.ndarray:
    """Parses XLA's own mesh, whose axis names may differ from ours, and the axes or sub-axes of a group."""
    sizes = {name.strip("' "): int(size) for name, size in (axis.split('=') for axis in axes.split(','))}
    devices = np.arange(math.prod(sizes.values()))
    if device_ids:
        iota = _IOTA.match(device_ids)
        devices = _read_iota(iota) if iota else np.array(re.findall(r'\d+', device_ids), int)
    shape: list[int] = []
    chosen: list[int] = []
    # If only sub-axes of an axis are named, the axis is split into them, from its slowest to its fastest.
    parts = [(name.strip(), int(before or 1), int(size or 0)) for name, before, size in _AXIS.findall(along)]
    for name, size in sizes.items():
        done = 1
        for _, before, part in sorted(part for part in parts if part[0] == name):
            shape += [before // done, part or size]
            chosen.append(len(shape) - 1)
            done = before * (part or size)
        shape.append(size // done)
    others = [axis for axis in range(len(shape)) if axis not in chosen]
    width = math.prod(shape[axis] for axis in chosen)
    return devices.reshape(shape).transpose([*others, *chosen]).reshape(-1, width)
