"""How XLA is set for virtual CPU devices in tests. Imports nothing: it is read before JAX starts."""

# Most of the tests' time went to LLVM, which made programs of a few kilobytes of data fast.
CHEAP_COMPILER = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'


def cpu_flags(devices: int) -> str:
    """XLA_FLAGS of a process with so many virtual devices."""
    return f'--xla_force_host_platform_device_count={devices} {CHEAP_COMPILER}'
