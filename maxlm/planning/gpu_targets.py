"""What XLA's compiler asks about a GPU that is not there.

Sources: the device descriptions that OpenXLA publishes (xla/backends/gpu/target_config/specs), in line with NVIDIA's
tuning guides for Ampere, Hopper and Blackwell (processors, shared memory, L2) and with the datasheets (clock). Memory
and its bandwidth are those of `maxlm.hardware.chips`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from maxlm.hardware.chips import Chip

# The cuDNN for which programs are made, as cuDNN numbers itself; what jax[cuda12] 0.10 and later bring is newer.
CUDNN_VERSION = 91000


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """The part of a GPU's description that differs between those below."""

    # As the driver names it; a device's `device_kind`.
    name: str
    # Major and minor compute capability.
    capability: tuple[int, int]
    # Streaming multiprocessors, and float32 lanes in each.
    cores: int
    lanes: int
    clock_ghz: float
    # Bytes of L2, of shared memory of a multiprocessor, and of what one block may ask for of it.
    l2_cache: int
    shared_per_core: int
    shared_per_block: int
    # NVLinks.
    links: int


def _ampere(name: str) -> GpuTarget:
    return GpuTarget(name, (8, 0), 108, 64, 1.41, 40 * 2**20, 164 * 2**10, 163 * 2**10, 12)


def _hopper(name: str) -> GpuTarget:
    return GpuTarget(name, (9, 0), 132, 128, 1.98, 50 * 2**20, 228 * 2**10, 227 * 2**10, 18)


# By the name of the chip.
GPU_TARGETS: dict[str, GpuTarget] = {
    'a100-40': _ampere('NVIDIA A100-SXM4-40GB'),
    'a100': _ampere('NVIDIA A100-SXM4-80GB'),
    'h100': _hopper('NVIDIA H100 80GB HBM3'),
    'h200': _hopper('NVIDIA H200'),
    'b200': GpuTarget('NVIDIA B200', (10, 0), 148, 128, 1.965, 132644864, 228 * 2**10, 227 * 2**10, 18),
}


def describe_gpu(chip: Chip) -> str:
    """The GpuTargetConfigProto of a chip in GPU_TARGETS, as text."""
    gpu = GPU_TARGETS[chip.name]
    major, minor = gpu.capability
    # Hopper's and Blackwell's matrix units are reached by instructions of this generation alone ("sm_90a").
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
  threads_per_core_limit: 2048
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


@contextlib.contextmanager
def mock_gpu_topology(gpu: GpuTarget) -> Iterator[None]:
    """While a program is lowered, JAX's cuDNN attention is told of this GPU and not of the devices that are there.

    It has no other way in: which layouts a GPU takes is asked of the first local GPU and the cuDNN that is loaded, and
    without a GPU the answer is an error. The two questions have the same names from JAX 0.10 to 0.12; a JAX without
    them fails here with an AttributeError.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention

    answers = {
        'check_compute_capability': lambda capability: gpu.capability >= _numbers(capability),
        'is_cuda_compute_capability_equal': lambda capability: gpu.capability == _numbers(capability),
        'check_cudnn_version': lambda: CUDNN_VERSION,
    }
    own = {name: getattr(cudnn_attention, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(cudnn_attention, name, answer)
        yield
    finally:
        for name, answer in own.items():
            setattr(cudnn_attention, name, answer)


def _numbers(capability: str) -> tuple[int, ...]:
    """9.0 → (9, 0)."""
    return tuple(map(int, capability.split('.')))
