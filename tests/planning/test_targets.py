"""Tests the parsing of hardware names, suggestions in error messages, and devices that are not attached."""

import contextlib
import dataclasses
import functools
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention

from maxlm.config.schema import MESH_AXES, MeshConfig
from maxlm.errors import InputError
from maxlm.hardware.chips import CHIPS
from maxlm.installation import pip_install
from maxlm.parallel.layout import make_layout
from maxlm.planning import targets
from maxlm.planning.gpu_targets import GPU_TARGETS, describe_gpu
from maxlm.planning.targets import (
    MAX_DEVICES,
    SLICES,
    CompilerMissingError,
    Target,
    check_compiler,
    check_islands,
    compiling_for,
    parse_target,
    target_devices,
    target_layout,
)

CHIP_NAMES = [*dict.fromkeys(chip.name for chip in CHIPS if chip.platform == 'gpu'), *SLICES]
# The plugins as installed. Some tests below hide them.
HAS_CUDA = any(targets._is_installed(f'jax_cuda{version}_plugin') for version in (12, 13))


def mesh(**sizes):
    return MeshConfig(**{axis: sizes.get(axis, 1) for axis in MESH_AXES})


@pytest.mark.parametrize(
    ('spec', 'chip', 'islands', 'shape'),
    [
        ('h100:8', 'h100', 1, (8, 1)),
        ('h200:1', 'h200', 1, (1, 1)),
        ('A100:8', 'a100', 1, (8, 1)),
        ('a100-80:8', 'a100', 1, (8, 1)),
        ('a100-40:4', 'a100-40', 1, (4, 1)),
        (' b200:8 ', 'b200', 1, (8, 1)),
        ('H100:8X4', 'h100', 4, (8, 4)),
        ('h100:8x8192', 'h100', 8192, (8, 8192)),
        ('l4:1', 'l4', 1, (1, 1)),
        ('v4:2x2x4', 'v4', 1, (2, 2, 4)),
        ('v4:16x16x16', 'v4', 1, (16, 16, 16)),
        ('v5e:4x4', 'v5e', 1, (4, 4)),
        ('v5e:16x16*2', 'v5e', 2, (16, 16)),
        ('V5P:2x2x2', 'v5p', 1, (2, 2, 2)),
        ('v5p:16x20x28', 'v5p', 1, (16, 20, 28)),
        ('v6e:2x4', 'v6e', 1, (2, 4)),
        ('cpu:8', 'cpu', 1, (8, 1)),
        ('cpu:3', 'cpu', 1, (3, 1)),
    ],
)
def test_a_name_is_read(spec, chip, islands, shape):
    target = parse_target(spec)
    assert (target.spec, target.chip.name, target.num_islands, target.shape) == (spec, chip, islands, shape)
    gpu_or_cpu = target.chip.platform in ('gpu', 'cpu')
    assert target.num_devices == (math.prod(shape) if gpu_or_cpu else islands * math.prod(shape))
    # A target can be a dictionary key and differs from other targets.
    assert hash(target) == hash(parse_target(spec))
    assert target != dataclasses.replace(target, num_devices=target.num_devices + 1)


def test_cpu_uses_all_local_devices():
    target = parse_target('cpu')
    assert target.num_devices == len(jax.devices()) == 8
    assert target_devices(target) == jax.devices()
    assert target_devices(parse_target('cpu:3')) == jax.devices()[:3]
    assert target.chip.memory == pytest.approx(parse_target('cpu:4').chip.memory / 2, rel=1e-6)
    with pytest.raises(InputError, match=r'has 8 CPU devices.*device_count=16'):
        target_devices(parse_target('cpu:16'))


def test_every_chip_has_a_name():
    for name in CHIP_NAMES:
        example = 'x'.join(map(str, SLICES[name][0])) if name in SLICES else '8'
        assert parse_target(f'{name}:{example}').chip.name == name
    # If two chips share a name, the first in the table counts, whose kind libtpu reports.
    assert parse_target('v5e:4x4').chip.kind == 'TPU v5 lite'


def alternatives(message, spec):
    """Returns the names that an error message suggests."""
    text = message.replace(repr(spec), '')
    return re.findall(r'\b(?:[a-z]+[a-z0-9-]*:[0-9x*]+|cpu(?=\?))', text)


@pytest.mark.parametrize(
    ('spec', 'named'),
    [
        ('', []),
        (':8', []),
        ('tesla:8', []),
        ('v7x:2x2x2', []),
        ('v3:2x2', None),
        ('v2:', None),
        ('h10:8', ['h100:8']),
        ('h100s:8x2', ['h100:8x2']),
        ('h100:eight', ['h100:8', 'h100:8x4']),
        ('h101', ['h100:8']),
        ('cpus:8', ['cpu']),
        # Names of slices in Google Cloud.
        ('v4-32', ['v4:2x2x4']),
        ('v4-128', ['v4:4x4x4']),
        ('v5litepod-16', ['v5e:4x4']),
        ('v6e-8', ['v6e:2x4']),
        # Device counts that no node has.
        ('h100', ['h100:8', 'h100:8x4']),
        ('h100:', ['h100:8', 'h100:8x4']),
        ('h100:0', ['h100:8', 'h100:8x4']),
        ('h100:-8', ['h100:8', 'h100:8x4']),
        ('h100:8x0', ['h100:8', 'h100:8x4']),
        ('h100:8x', ['h100:8', 'h100:8x4']),
        ('h100:8x2x2', ['h100:8', 'h100:8x4']),
        ('h100:2*4', ['h100:8', 'h100:8x4']),
        ('h100:8.0', ['h100:8', 'h100:8x4']),
        ('h100:²', ['h100:8', 'h100:8x4']),
        ('h100:' + '9' * 5000, ['h100:8', 'h100:8x4']),
        ('h100:16', ['h100:8x2']),
        ('h100:12', ['h100:8', 'h100:8x2']),
        ('h100:9x3', ['h100:8x3', 'h100:8x4']),
        ('h100:16x4', ['h100:8x8']),
        ('h100:8x999999', ['h100:8x8192']),
        # Shapes that are not slices.
        ('v4', ['v4:2x2x2', 'v4:2x2x1', 'v4:2x2x4']),
        ('v4:2x4', ['v4:2x2x2', 'v4:2x2x1', 'v4:2x2x4']),
        ('v4:8', ['v4:2x2x2', 'v4:2x2x1', 'v4:2x2x4']),
        ('v4:4x2x2', ['v4:2x2x4', 'v4:2x2x2', 'v4:2x4x4']),
        ('v4:2x2x3', ['v4:2x2x4', 'v4:2x2x2', 'v4:2x4x4']),
        ('v5e:3x3', ['v5e:2x4', 'v5e:4x4', 'v5e:2x2']),
        ('v5e:0x0', ['v5e:1x1', 'v5e:2x2', 'v5e:2x4']),
        ('v5e:-2x2', ['v5e:2x4', 'v5e:2x2', 'v5e:4x4']),
        ('v5e:axb', ['v5e:2x4', 'v5e:2x2', 'v5e:4x4']),
        ('v5e:2x2x2', ['v5e:2x4', 'v5e:2x2', 'v5e:4x4']),
        ('v5e:32x32', ['v5e:16x16', 'v5e:8x16', 'v5e:8x8']),
        ('v6e:16x16*0', ['v6e:16x16', 'v6e:16x16*2']),
        ('v6e:16x16*', ['v6e:2x4', 'v6e:2x2', 'v6e:4x4']),
        ('v6e:1x1*4', ['v6e:2x2*4']),
        ('v6e:16x16*999', ['v6e:16x16*256']),
        ('cpu:0', ['cpu:8']),
        ('cpu:', ['cpu:8']),
        ('cpu:4x2', ['cpu:8']),
        ('cpu:999999', ['cpu:8']),
    ],
)
def test_errors_list_alternatives(spec, named):
    with pytest.raises(InputError) as caught:
        parse_target(spec)
    message = str(caught.value)
    assert repr(spec) in message
    assert '\n' not in message
    found = alternatives(message, spec)
    if named is not None:
        assert found == named
    for near in found:
        assert parse_target(near).num_devices <= MAX_DEVICES
    # An error in the name lists the chips.
    if spec.partition(':')[0] not in (*CHIP_NAMES, 'cpu'):
        assert f'chips: {", ".join(CHIP_NAMES)}, cpu)' in message


@pytest.mark.parametrize('name', SLICES)
def test_libtpu_accepts_each_slice(name):
    largest = max(SLICES[name], key=math.prod)
    for shape in {*[shape for shape in SLICES[name] if math.prod(shape) <= 512], largest}:
        target = parse_target(f'{name}:{"x".join(map(str, shape))}')
        devices = target_devices(target)
        assert len(devices) == target.num_devices == math.prod(shape)
        assert {device.platform for device in devices} == {'tpu'}
        # Figures in the table are for one device: one entire chip, not half of it.
        assert target.chip.kind in devices[0].device_kind


def test_topologies_that_libtpu_rejects_are_input_errors():
    invalid_slice = Target('v5e:3x3', parse_target('v5e:4x4').chip, 9, 1, (3, 3))
    with pytest.raises(InputError, match=r"^target 'v5e:3x3': the compiler failed: .*3x3"):
        target_devices(invalid_slice)


def test_slices_are_islands():
    target = parse_target('v5e:2x4*2')
    devices = target_devices(target)
    assert [device.slice_index for device in devices] == [0] * 8 + [1] * 8
    layout = target_layout(target, mesh(data=2, fsdp=8))
    by_slice = np.vectorize(lambda device: device.slice_index)(layout.mesh.devices).reshape(2, 8)
    assert by_slice.tolist() == [[0] * 8, [1] * 8]
    for refuse in (check_islands, target_layout):
        with pytest.raises(InputError, match=r'2 nodes or slices; .* mesh.data=2'):
            refuse(target, mesh(tensor=16))
    # Control: within one slice the axis is allowed.
    check_islands(parse_target('v5e:4x4'), mesh(tensor=16))


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Fake of a GPU of the compiler, with the attributes that a mesh reads."""

    id: int
    process_index: int
    slice_index: int
    platform: str = 'gpu'
    device_kind: str = 'NVIDIA H100 80GB HBM3'


def gpus(num_nodes, per_node=8, *, real):
    """Returns GPUs as the compiler reports them (all in slice 0), or real GPUs, whose slice is the node."""
    nodes = [node for node in range(num_nodes) for _ in range(per_node)]
    return [Gpu(number, node, node if real else 0) for number, node in enumerate(nodes)]


def ids(layout):
    return np.vectorize(lambda device: device.id)(layout.mesh.devices)


@pytest.mark.parametrize(
    ('num_nodes', 'sizes'),
    [
        (1, {'fsdp': 8}),
        (4, {'replica': 4, 'fsdp': 8}),
        (4, {'fsdp': 32}),
        (4, {'data': 2, 'fsdp': 16}),
        (4, {'data': 8, 'tensor': 4}),
        (2, {'stage': 2, 'fsdp': 2, 'context': 2, 'tensor': 2}),
        (2, {'context': 4, 'tensor': 4}),
        # Ordering by id alone would assign other axes to the nodes.
        (6, {'data': 4, 'fsdp': 12}),
    ],
)
def test_a_mesh_covers_nodes_as_on_real_gpus(monkeypatch, num_nodes, sizes):
    monkeypatch.setattr(targets, 'target_devices', lambda target: gpus(num_nodes, real=False))
    planned = target_layout(parse_target(f'h100:8x{num_nodes}'), mesh(**sizes))
    real = make_layout(mesh(**sizes), gpus(num_nodes, real=True))
    assert planned.mesh.shape == real.mesh.shape
    assert ids(planned).tolist() == ids(real).tolist()
    if num_nodes == 6:
        # Control: `make_layout` alone assigns devices differently.
        assert ids(make_layout(mesh(**sizes), gpus(6, real=False))).tolist() != ids(real).tolist()


def test_a_tensor_axis_does_not_leave_a_node():
    with pytest.raises(InputError, match=r'4 nodes or slices; .* mesh.data=4'):
        target_layout(parse_target('h100:8x4'), mesh(tensor=32))
    check_islands(parse_target('h100:8x4'), mesh(data=4, tensor=8))


@pytest.mark.parametrize(
    ('spec', 'modules', 'message'),
    [
        (
            'h100:8',
            ('jax_cuda12_plugin', 'jax_cuda13_plugin'),
            'no compiler for h100 is installed; run maxlm plan --install-compiler',
        ),
        ('v4:2x2x1', ('libtpu',), f'no compiler for v4 (libtpu) is installed; run {pip_install("tpu")}'),
    ],
)
def test_a_compiler_that_is_not_installed(monkeypatch, spec, modules, message):
    monkeypatch.delenv('TPU_LIBRARY_PATH', raising=False)
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    for ask in (check_compiler, target_devices, functools.partial(target_layout, mesh=mesh(data=4))):
        with pytest.raises(CompilerMissingError) as caught:
            ask(parse_target(spec))
        assert str(caught.value) == message
    # This is not an input error, since an estimate is still possible.
    assert not isinstance(caught.value, InputError)
    # The libtpu of a TPU machine is accepted as well.
    if spec == 'v4:2x2x1':
        monkeypatch.setenv('TPU_LIBRARY_PATH', '/lib/libtpu.so')
        check_compiler(parse_target(spec))


def test_chips_without_compiler_description():
    with pytest.raises(
        CompilerMissingError, match=r'^the GPU compiler does not support l4; supported: a100-40, a100, h'
    ):
        target_devices(parse_target('l4:1'))


@pytest.mark.parametrize('spec', [f'{name}:2x2' for name in GPU_TARGETS])
def test_absent_gpus(spec):
    """Compiles for GPUs that are not attached, if the CUDA plugin is installed.

    Otherwise the error names the package to install.
    """
    target = parse_target(spec)
    if not HAS_CUDA:
        with pytest.raises(CompilerMissingError, match='--install-compiler'):
            target_devices(target)
        return
    devices = target_devices(target)
    assert [device.process_index for device in devices] == [0, 0, 1, 1]
    assert {device.device_kind for device in devices} == {GPU_TARGETS[target.chip.name].name}
    layout = target_layout(target, mesh(data=2, fsdp=2))
    sharded = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=layout.named('batch'))
    with compiling_for(target):
        compiled = jax.jit(lambda x: (x.T @ x).sum(0), out_shardings=layout.named()).lower(sharded).compile()
    assert 'all-reduce' in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes == 64 * 64 * 2 // 4


@pytest.mark.parametrize('name', GPU_TARGETS)
def test_a_description_has_the_figures_of_the_chip(name):
    chip = parse_target(f'{name}:1').chip
    text = describe_gpu(chip)
    fields = dict(re.findall(r'(\w+): ("[^"]*"|[\w.]+)', text))
    assert int(fields['device_memory_size']) == chip.memory
    assert float(fields['memory_bandwidth']) == round(chip.memory_bandwidth)
    # The name identifies the chip, and not a related chip.
    assert next(known for known in CHIPS if known.kind in fields['name'].strip('"')) == chip
    assert text.count('{') == text.count('}')


@pytest.mark.parametrize(('spec', 'at_least_hopper'), [('a100:8', False), ('h100:8', True), ('b200:8', True)])
def test_cudnn_uses_the_capability_of_the_target(spec, at_least_hopper):
    own = [cudnn_attention.check_compute_capability, cudnn_attention.check_cudnn_version]
    query = jax.ShapeDtypeStruct((1, 64, 2, 192), jnp.bfloat16)

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation='cudnn')

    # Heads of 192 dimensions need Hopper or later.
    expected = contextlib.nullcontext() if at_least_hopper else pytest.raises(NotImplementedError, match='head dim')
    with compiling_for(parse_target(spec)):
        assert cudnn_attention.check_compute_capability('9.0') is at_least_hopper
        assert not cudnn_attention.is_cuda_compute_capability_equal('10.3')
        with expected:
            assert jax.eval_shape(attend, query, query, query).shape == query.shape
    # Afterwards, even after an error, the capability of this machine is reported again.
    assert [cudnn_attention.check_compute_capability, cudnn_attention.check_cudnn_version] == own
    with pytest.raises(KeyError), compiling_for(parse_target(spec)):
        raise KeyError
    assert [cudnn_attention.check_compute_capability, cudnn_attention.check_cudnn_version] == own
    # TPUs and chips without a description change nothing.
    for other in ('v4:2x2x1', 'l4:1'):
        with compiling_for(parse_target(other)):
            assert cudnn_attention.check_compute_capability is own[0]
