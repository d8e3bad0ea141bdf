"""Which axes of the mesh a collective goes along, from the groups of devices that XLA writes.

A device's number in a compiled program is its place in the mesh, with the last axis counting fastest.
"""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

import numpy as np

_PAIR = re.compile(r'\{(\d+),(\d+)\}')
# The first shape is left out where it is told otherwise.
_IOTA = re.compile(r'(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?')
_MESH = re.compile(r'mesh\[([^\]]*)\](?:, device_ids=\((.*?)\)(?= \{))? \{([^}]*)\}')
# `'fsdp'`, or the part `:(before)size` of an axis.
_AXIS = re.compile(r"'?([^',:{}]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")


class Groups(NamedTuple):
    """The groups of a collective on a mesh."""

    # Along which a group's devices differ; empty where they are no whole axes.
    axes: tuple[str, ...]
    # Devices in a group; 1 = nothing is sent.
    size: int


@functools.lru_cache(maxsize=4096)
def find_groups(text: str, mesh: tuple[tuple[str, int], ...]) -> Groups:
    """The axes of `replica_groups`: `{{0,1},{2,3}}`, `[2,2]<=[4]T(…)` or `mesh['x'=2,…] {'x'}`.

    Args:
        text: what follows `replica_groups=`.
        mesh: names and sizes of the axes, the fastest last.

    Raises:
        ValueError: the text is none of the three, or is of other devices than the mesh's.
    """
    groups = _read_groups(text, math.prod(size for _, size in mesh))
    size = groups.shape[1]
    axes = _differing(groups, groups[:, :1], mesh)
    return Groups(axes if math.prod(dict(mesh)[axis] for axis in axes) == size else (), size)


@functools.lru_cache(maxsize=4096)
def find_pairs(text: str, mesh: tuple[tuple[str, int], ...]) -> Groups:
    """The axes along which `source_target_pairs` differ, `{{0,1},{1,0}}`; the size is that of the axes together."""
    pairs = np.array(_PAIR.findall(text), int).reshape(-1, 2)
    axes = _differing(pairs[:, 1:], pairs[:, :1], mesh)
    return Groups(axes, math.prod(dict(mesh)[axis] for axis in axes))


def _differing(devices: np.ndarray, others: np.ndarray, mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """The axes along which any device has another coordinate than its partner."""
    sizes = [size for _, size in mesh]
    pairs = zip(np.unravel_index(devices, sizes), np.unravel_index(others, sizes), strict=True)
    return tuple(name for (name, _), (a, b) in zip(mesh, pairs, strict=True) if (a != b).any())


def _read_groups(text: str, num_devices: int) -> np.ndarray:
    """[groups, devices in a group]."""
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
        raise ValueError(f'groups of devices that cannot be read: {text[:100]!r}')
    if not np.array_equal(np.sort(groups, axis=None), np.arange(num_devices)):
        raise ValueError(f'groups of other devices than the {num_devices} of the mesh: {text[:100]!r}')
    return groups


def _read_iota(found: re.Match[str]) -> np.ndarray:
    """`[shape]<=[dims]T(order)`: 0, 1, 2, … in the shape `dims`, its axes put into another order, then reshaped."""
    shape, dims, order = (tuple(map(int, part.split(','))) if part else None for part in found.groups())
    assert dims is not None
    return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape or -1)


def _read_mesh(axes: str, device_ids: str | None, along: str) -> np.ndarray:
    """A mesh of XLA's own, whose names need not be ours, and the axes or parts of axes that a group goes along."""
    sizes = {name.strip("' "): int(size) for name, size in (axis.split('=') for axis in axes.split(','))}
    devices = np.arange(math.prod(sizes.values()))
    if device_ids:
        iota = _IOTA.match(device_ids)
        devices = _read_iota(iota) if iota else np.array(re.findall(r'\d+', device_ids), int)
    shape: list[int] = []
    chosen: list[int] = []
    # An axis of which only parts are named is cut into those, from its slowest to its fastest.
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
