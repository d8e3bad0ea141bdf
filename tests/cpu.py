"""XLA flags for virtual CPU devices in tests. Does not import JAX, because flags must be set before."""

import os
from importlib.metadata import version

# Without these flags, most of the tests' time goes to LLVM, which optimizes programs for a few kilobytes of data.
CHEAP_COMPILER = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'
# Code generation in parts takes a sixth more CPU time, and the workers already use all cores.
CHEAP_COMPILER += ' --xla_cpu_parallel_codegen_split_count=1'
# Half of the remaining time goes to the newer loop emitters. Later releases have no other emitters and no such flag.
if version('jaxlib').startswith('0.10.'):
    CHEAP_COMPILER += ' --xla_cpu_use_fusion_emitters=false'


def cpu_flags(devices: int) -> str:
    """Returns XLA_FLAGS for a number of virtual devices."""
    return f'--xla_force_host_platform_device_count={devices} {CHEAP_COMPILER}'


def fast_environment() -> dict[str, str]:
    """Returns the environment of a process with one device and full XLA optimization, for models of real width."""
    return {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
