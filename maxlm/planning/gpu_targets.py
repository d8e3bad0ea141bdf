"""Descriptions of GPUs for XLA's compiler, for machines without these GPUs.

Sources: the device descriptions that OpenXLA publishes (xla/backends/gpu/target_config/specs), which agree with
    NVIDIA's tuning guides for Ampere, Ada, Hopper and Blackwell (processors, shared memory, L2) and with the datasheets
    (clock). Memory and its bandwidth come from `maxlm.hardware.chips`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from maxlm.hardware.chips import Chip

# Version of cuDNN that programs are compiled for, in cuDNN's numbering. jax[cuda12] 0.10 and later install newer ones.
CUDNN_VERSION = 91000


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """Properties of a GPU that differ between the targets below.

    Attributes:
        name: name reported by the driver, equal to a device's `device_kind`.
        capability: major and minor compute capability.
        cores: number of streaming multiprocessors.
        lanes: float32 lanes of one multiprocessor.
        clock_ghz: clock rate in GHz.
        l2_cache: bytes of L2 cache.
        shared_per_core: bytes of shared memory of one multiprocessor.
        shared_per_block: bytes of shared memory that one block may request.
        links: number of NVLinks.
        threads_per_core: maximum number of threads of one multiprocessor.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    lanes: int
    clock_ghz: float
    l2_cache: int
    shared_per_core: int
    shared_per_block: int
    links: int
    threads_per_core: int = 2048


def _ampere(name: str) -> GpuTarget:
    return GpuTarget(name, (8, 0), 108, 64, 1.41, 40 * 2**20, 164 * 2**10, 163 * 2**10, 12)


def _hopper(name: str) -> GpuTarget:
    return GpuTarget(name, (9, 0), 132, 128, 1.98, 50 * 2**20, 228 * 2**10, 227 * 2**10, 18)


def _without_nvlink(name: str, capability: tuple[int, int], cores: int, clock_ghz: float, l2_mib: int) -> GpuTarget:
    shared = 100 * 2**10
    return GpuTarget(name, capability, cores, 128, clock_ghz, l2_mib * 2**20, shared, shared - 2**10, 0, 1536)


# Targets by the name of the chip.
GPU_TARGETS: dict[str, GpuTarget] = {
    'a100-40': _ampere('NVIDIA A100-SXM4-40GB'),
    'a100': _ampere('NVIDIA A100-SXM4-80GB'),
    'h100': _hopper('NVIDIA H100 80GB HBM3'),
    'h200': _hopper('NVIDIA H200'),
    'b200': GpuTarget('NVIDIA B200', (10, 0), 148, 128, 1.965, 132644864, 228 * 2**10, 227 * 2**10, 18),
    'l40s': _without_nvlink('NVIDIA L40S', (8, 9), 142, 2.52, 96),
    'rtx4090': _without_nvlink('NVIDIA GeForce RTX 4090', (8, 9), 128, 2.52, 72),
    'rtx3090': _without_nvlink('NVIDIA GeForce RTX 3090', (8, 6), 82, 1.695, 6),
    'rtx3080': _without_nvlink('NVIDIA GeForce RTX 3080', (8, 6), 68, 1.71, 5),
}


def describe_gpu(chip: Chip) -> str:
    """Returns the GpuTargetConfigProto of a chip in GPU_TARGETS, as text."""
    gpu = GPU_TARGETS[chip.name]
    major, minor = gpu.capability
    # The matrix units of Hopper and Blackwell need architecture-specific instructions ("sm_90a").
    accelerated = major >= 9
    features = 'ACCELERATED_FEATURES' if accelerated else 'NONE'
    cudnn_major, cudnn_minor = CUDNN_VERSION // 10000, CUDNN_VERSION // 100 % 100
    return f"""
gpu_device_info {{
  name: "{gpu.name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}{'a' * accelerated}"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.lanes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {chip.memory}
  memory_bandwidth: {chip.memory_bandwidth:.0f}
  l2_cache_size: {gpu.l2_cache}
  shared_memory_per_core: {gpu.shared_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_per_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: {gpu.threads_per_core}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  ecc_enabled: true
  pcie_bandwidth: {chip.host_bandwidth:.0f}
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "{cudnn_major}.{cudnn_minor}.0"
  device_interconnect_info {{ active_links: {gpu.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {cudnn_major} minor: {cudnn_minor} }}
device_description_str: "{gpu.name}"
"""


@dataclasses.dataclass(frozen=True)
class _Device:
    """The attributes of a JAX device that the kernels of Tokamax read."""

    device_kind: str
    compute_capability: str
    core_count: int
    platform: str = 'gpu'


@contextlib.contextmanager
def mock_gpu_topology(gpu: GpuTarget) -> Iterator[None]:
    """Makes JAX's cuDNN attention and the kernels of Tokamax lower for this GPU instead of for the local devices.

    Neither has a public option for this: they query the first local device and the loaded cuDNN for supported layouts,
    and raise an error without a GPU. The patched functions have the same names from JAX 0.10 to 0.12. In a JAX without
    them, this raises AttributeError.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
    from jax.extend import backend

    device = _Device(gpu.name, '.'.join(map(str, gpu.capability)), gpu.cores)
    answers: list[tuple[ModuleType, str, Callable[..., Any]]] = [
        (cudnn_attention, 'check_compute_capability', lambda capability: gpu.capability >= _numbers(capability)),
        (cudnn_attention, 'is_cuda_compute_capability_equal', lambda other: gpu.capability == _numbers(other)),
        (cudnn_attention, 'check_cudnn_version', lambda: CUDNN_VERSION),
        (backend, 'get_default_device', lambda: device),
    ]
    own = [(module, name, getattr(module, name)) for module, name, _ in answers]
    try:
        for module, name, answer in answers:
            setattr(module, name, answer)
        yield
    finally:
        for module, name, answer in own:
            setattr(module, name, answer)


def _numbers(capability: str) -> tuple[int, ...]:
    """Parses a compute capability: '9.0' → (9, 0)."""
    return tuple(map(int, capability.split('.')))
