"""How XLA is set for virtual CPU devices in tests. Imports nothing of JAX: it is read before that starts."""

import os
from importlib.metadata import version

# Most of the tests' time went to LLVM, which made programs of a few kilobytes of data fast.
CHEAP_COMPILER = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'
# Half of what was left went to the newer of two ways to write loops. Later releases have it alone, and no such flag.
if version('jaxlib').startswith('0.10.'):
    CHEAP_COMPILER += ' --xla_cpu_use_fusion_emitters=false'


def cpu_flags(devices: int) -> str:
    """XLA_FLAGS of a process with so many virtual devices."""
    return f'--xla_force_host_platform_device_count={devices} {CHEAP_COMPILER}'


def fast_environment() -> dict[str, str]:
    """Of a process with one device whose programs XLA makes fast, for models of real width."""
    return {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
