"""Parses target names such as `h100:8`, and creates their devices for ahead-of-time compilation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import re
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from maxlm.config.schema import MeshConfig
from maxlm.errors import InputError, nearest
from maxlm.hardware.chips import CHIPS, Chip, host_memory
from maxlm.installation import pip_install
from maxlm.parallel.layout import Layout, make_layout, split_across_islands
from maxlm.planning.gpu_compiler import OPTION, add_compiler
from maxlm.planning.gpu_targets import GPU_TARGETS, describe_gpu, mock_gpu_topology

# Larger than any cluster or pod today. Limits the memory that a mistyped number can use.
MAX_DEVICES = 2**16


class CompilerMissingError(Exception):
    """No installed compiler supports the target, so only an estimate is possible. The message is one line."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices of one kind, in islands with fast links within: nodes of GPUs or slices of TPUs.

    Attributes:
        spec: the name as given.
        chip: kind of device. For a CPU only the memory is set; its speed must be measured.
        num_devices: number of devices.
        num_islands: number of islands.
        shape: torus of a TPU slice; otherwise (devices of a node, nodes).
    """

    spec: str
    chip: Chip
    num_devices: int
    num_islands: int
    shape: tuple[int, ...]


def _cubes(*pod: int) -> tuple[tuple[int, ...], ...]:
    """Returns the 3D slices of a pod: parts of a cube of 4×4×4 chips, or multiples of such cubes."""
    sides = (range(4, side + 1, 4) for side in pod)
    multiples = (shape for shape in itertools.product(*sides) if sorted(shape) == list(shape))
    return ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), *multiples)


_RECTANGLES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# The slices that exist, by chip (Google Cloud's pages on each TPU). libtpu also accepts other shapes, e.g. v5e:32x32,
# and aborts the process on some invalid ones, so only these are passed to it. It has no megacore for TPU7x, and v2 and
# v3 are too small for current models.
SLICES: dict[str, tuple[tuple[int, ...], ...]] = {
    'v4': _cubes(16, 16, 16),
    'v5e': _RECTANGLES,
    'v5p': _cubes(16, 20, 28),
    'v6e': _RECTANGLES,
}
# On these chips two cores form one JAX device, but libtpu reports two devices unless it is configured.
_MEGACORE = ('v4', 'v5p')
# In Google Cloud's names of slices, e.g. v4-32, the number counts cores for these chips and chips for all others.
_COUNTED_IN_CORES = ('v4', 'v5p')

# If several chips have the same name, the first is used.
_NAMES: dict[str, Chip] = {}
for _chip in CHIPS:
    if _chip.platform == 'gpu' or _chip.name in SLICES:
        _NAMES.setdefault(_chip.name, _chip)
_ALIASES = {'a100-80': 'a100', 'h100-sxm': 'h100'}


def parse_target(spec: str) -> Target:
    """Parses the name of a target.

    `h100:8` is GPUs of one node, `h100:8x4` four such nodes; `v4:2x2x4` is a slice of TPUs, `v5e:16x16*2` two slices;
    `cpu` is all virtual CPU devices of this process, `cpu:8` eight. Case does not matter.

    Raises:
        InputError: the chip, the number of devices or the shape does not exist. The message suggests similar ones.
    """
    name, colon, rest = spec.strip().lower().partition(':')
    name = _ALIASES.get(name, name)
    if name == 'cpu':
        return _parse_cpu(spec, rest if colon else str(len(jax.devices('cpu'))))
    if name not in _NAMES:
        raise InputError(f'target {spec!r}: {_closest_chip(name, rest)} (valid chips: {", ".join([*_NAMES, "cpu"])})')
    chip = _NAMES[name]
    return _parse_gpu(spec, chip, rest) if chip.platform == 'gpu' else _parse_tpu(spec, chip, rest)


def _parse_cpu(spec: str, rest: str) -> Target:
    count = int(rest) if re.fullmatch(r'\d{1,6}', rest, re.ASCII) else 0
    if not 1 <= count <= MAX_DEVICES:
        raise InputError(
            f'target {spec!r}: needs a number of virtual devices, e.g. cpu:8; use cpu for all devices of this process'
        )
    chip = Chip('cpu', 'cpu', 'cpu', 0.0, host_memory() // count, 0.0, count, 0.0, 0.0, 0.0)
    return Target(spec, chip, count, 1, (count, 1))


def _parse_gpu(spec: str, chip: Chip, rest: str) -> Target:
    found = re.fullmatch(r'(\d{1,6})(?:x(\d{1,6}))?', rest, re.ASCII)
    count, nodes = (int(found[1]), int(found[2] or 1)) if found else (0, 0)
    per_node = chip.per_node
    if count * nodes == 0:
        raise InputError(
            f'target {spec!r}: needs the number of GPUs, e.g. {chip.name}:{per_node}, or GPUs per node and nodes, '
            f'e.g. {chip.name}:{per_node}x4'
        )
    if count * nodes > MAX_DEVICES:
        raise InputError(
            f'target {spec!r}: {count * nodes} GPUs are too many; use at most {MAX_DEVICES}, '
            f'{chip.name}:{per_node}x{MAX_DEVICES // per_node}'
        )
    if count > per_node:
        total = count * nodes
        fewer, more = total // per_node, -(-total // per_node)
        closest = ' or '.join(_gpu_spec(chip, number) for number in dict.fromkeys((fewer, more)))
        raise InputError(f'target {spec!r}: a node has {per_node} GPUs; did you mean {closest}?')
    return Target(spec, chip, count * nodes, nodes, (count, nodes))


def _gpu_spec(chip: Chip, nodes: int) -> str:
    return f'{chip.name}:{chip.per_node}' + (f'x{nodes}' if nodes > 1 else '')


def _parse_tpu(spec: str, chip: Chip, rest: str) -> Target:
    found = re.fullmatch(r'(\d{1,6}(?:x\d{1,6})*)(?:\*(\d{1,6}))?', rest, re.ASCII)
    shape = tuple(map(int, found[1].split('x'))) if found else ()
    slices = int(found[2] or 1) if found else 1
    if shape not in SLICES[chip.name]:
        chips = math.prod(shape) if shape else 8
        closest = ', '.join(_closest_slices(chip.name, chips))
        if not shape:
            raise InputError(f'target {spec!r}: needs the shape of a slice, e.g. {closest}')
        raise InputError(f'target {spec!r}: {chip.name} has no slice of this shape; closest: {closest}')
    chips, text = math.prod(shape), f'{chip.name}:{"x".join(map(str, shape))}'
    if slices == 0:
        raise InputError(f'target {spec!r}: needs a number of slices, e.g. {text} or {text}*2')
    if slices > 1 and chips == 1:
        raise InputError(f'target {spec!r}: single-chip slices have no interconnect; closest: {chip.name}:2x2*{slices}')
    if chips * slices > MAX_DEVICES:
        raise InputError(f'target {spec!r}: {chips * slices} TPUs are too many; closest: {text}*{MAX_DEVICES // chips}')
    return Target(spec, chip, chips * slices, slices, shape)


def _closest_slices(name: str, chips: int, number: int = 3) -> list[str]:
    """Returns the slices with about `chips` chips, the most compact first among slices of equal size."""
    by_distance = sorted(
        SLICES[name], key=lambda shape: (abs(math.log(math.prod(shape) / max(chips, 1))), max(shape), shape)
    )
    return [f'{name}:{"x".join(map(str, shape))}' for shape in by_distance[:number]]


def _closest_chip(name: str, rest: str) -> str:
    """Returns a suggestion for an unknown chip name."""
    slice_name = re.fullmatch(r'(v4|v5p|v5litepod|v5e|v6e)-(\d{1,6})', name, re.ASCII)
    if slice_name:
        tpu, count = slice_name[1].replace('v5litepod', 'v5e'), int(slice_name[2])
        chips = count // 2 if tpu in _COUNTED_IN_CORES else count
        (closest,) = _closest_slices(tpu, chips, number=1)
        return f'TPUs are named by the shape of a slice; did you mean {closest}?'
    guess = nearest(name, [*_NAMES, 'cpu'])
    if not guess.startswith('did you mean'):
        return 'unknown chip'
    closest = guess.split("'")[1]
    if closest == 'cpu':
        return 'did you mean cpu?'
    try:
        return f'did you mean {parse_target(f"{closest}:{rest}").spec}?'
    except InputError:
        chip = _NAMES[closest]
        example = _gpu_spec(chip, 1) if chip.platform == 'gpu' else _closest_slices(closest, 8, number=1)[0]
        return f'did you mean {closest}, e.g. {example}?'


def target_devices(target: Target) -> list[Any]:
    """Returns devices of the target for `maxlm.parallel.layout.make_layout`; they need not be present.

    JAX itself should be restricted to the CPU (`jax_platforms`), because it initializes all other platforms when it
    starts. GPUs of several nodes are ordered by node. Unlike real ones, they have their node only in `process_index`
    and not in `slice_index`, so `make_layout` treats them as one island: use `target_layout`.

    Raises:
        CompilerMissingError: no compiler for the target is installed.
        InputError: the compiler rejects the target, or there are too few CPU devices.
    """
    if target.chip.platform == 'cpu':
        devices = jax.devices('cpu')
        if len(devices) < target.num_devices:
            raise InputError(
                f'target {target.spec!r}: this process has {len(devices)} CPU devices; start it with '
                f'XLA_FLAGS=--xla_force_host_platform_device_count={target.num_devices}'
            )
        return devices[: target.num_devices]
    check_compiler(target)
    try:
        return list(_topology_devices(target))
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition('\n')[0] or type(error).__name__
        raise InputError(f'target {target.spec!r}: the compiler failed: {reason}; use --estimate') from error


def check_compiler(target: Target) -> None:
    """Checks that a compiler for the target is installed, without starting it, and makes it importable.

    Raises:
        CompilerMissingError: no compiler for the target is installed, or it does not support the chip.
        InputError: as `add_compiler`.
    """
    name, platform = target.chip.name, target.chip.platform
    # A TPU machine sets this variable if libtpu was not installed by pip.
    if platform == 'tpu' and not os.environ.get('TPU_LIBRARY_PATH') and not _is_installed('libtpu'):
        raise CompilerMissingError(f'no compiler for {name} (libtpu) is installed; run {pip_install("tpu")}')
    if platform == 'gpu':
        if name not in GPU_TARGETS:
            raise CompilerMissingError(f'the GPU compiler does not support {name}; supported: {", ".join(GPU_TARGETS)}')
        if not (_is_installed('jax_cuda12_plugin') or _is_installed('jax_cuda13_plugin') or add_compiler()):
            raise CompilerMissingError(f'no compiler for {name} is installed; run maxlm plan {OPTION}')


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache
def _topology_devices(target: Target) -> tuple[Any, ...]:
    if target.chip.platform == 'gpu':
        per_node, nodes = target.shape
        return tuple(
            topologies.get_topology_desc(
                topology_name=target.chip.name,
                platform='cuda',
                target_config=describe_gpu(target.chip),
                # Slices, nodes of a slice, GPUs of a node.
                topology=f'1x{nodes}x{per_node}',
            ).devices
        )
    # There is no metadata server to query, and other processes of this machine may use libtpu.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', 'true')
    options: dict[str, Any] = {'chip_config_name': 'megacore'} if target.chip.name in _MEGACORE else {}
    if target.num_devices == 1:
        # libtpu before 0.0.50 assumes hosts of four chips for every slice.
        options['chips_per_host_bounds'] = (1, 1, 1)
    if target.num_islands > 1:
        options['num_slices'] = target.num_islands
    name = f'{target.chip.name}:{"x".join(map(str, target.shape))}'
    return tuple(topologies.get_topology_desc(topology_name=name, platform='tpu', **options).devices)


def target_layout(target: Target, mesh: MeshConfig) -> Layout:
    """Returns the layout of a resolved mesh on the target's devices, as `make_layout` does on the real machine.

    Raises:
        CompilerMissingError, InputError: as `target_devices` and `check_islands`.
    """
    check_islands(target, mesh)
    layout = make_layout(mesh, target_devices(target))
    if target.chip.platform != 'gpu' or target.num_islands == 1:
        return layout
    # `make_layout` treated the nodes as one island and ordered the GPUs by their ids.
    grid = layout.mesh.devices.flatten()[_positions_over_nodes(target, mesh)].reshape(layout.mesh.devices.shape)
    over_nodes = Mesh(grid, layout.mesh.axis_names, axis_types=layout.mesh.axis_types)
    return dataclasses.replace(layout, mesh=over_nodes)


def check_islands(target: Target, mesh: MeshConfig) -> None:
    """Rejects meshes whose axes the real machine could not split between nodes or slices.

    Raises:
        InputError: as `split_across_islands`.
    """
    split_across_islands(mesh.sizes, target.num_islands)


def _positions_over_nodes(target: Target, mesh: MeshConfig) -> np.ndarray:
    """Returns the ids of the GPUs in mesh order; each axis crosses nodes with the outer part of its index."""
    across = split_across_islands(mesh.sizes, target.num_islands)
    within = [size // factor for size, factor in zip(mesh.sizes.values(), across, strict=True)]
    numbers = np.arange(target.num_devices).reshape(*across, *within)
    # All node factors followed by all inner factors → node factor and inner factor of each axis.
    axes = [axis for pair in zip(range(len(across)), range(len(across), numbers.ndim), strict=True) for axis in pair]
    return numbers.transpose(axes).flatten()


def compiling_for(target: Target) -> AbstractContextManager[None]:
    """Makes JAX lower and compile cuDNN attention for the target, regardless of the local devices."""
    gpu = GPU_TARGETS.get(target.chip.name)
    return mock_gpu_topology(gpu) if gpu else contextlib.nullcontext()
