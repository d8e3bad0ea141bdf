"""Compiles the training step before a state or a batch exists."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.parallel.determinism import deterministic_options
from maxlm.parallel.layout import Layout
from maxlm.training.batch import batch_shapes
from maxlm.training.state import TrainState
from maxlm.training.step import make_train_step

# Disables windowed einsums, which split a product into steps that rotate pieces of an operand (Wang et al. 2023). Each
# step reads the operands again, and a small Llama on 16 chips of v4 used seven times the temporary memory.
WHOLE_PRODUCTS = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'}
# XLA options for all GPUs. Slices that XLA fuses with the kernels of a loop over the layers are read again: since jax
# 0.12, where this is the default, such a loop moved 1.2 times as much memory.
GPU_OPTIONS = {'xla_gpu_enable_dynamic_slice_fusion': False}
# XLA options for CPUs. Compilation takes three quarters of the time of the default level 3, and steps take as long.
CPU_OPTIONS = {'xla_backend_optimization_level': 2}
# XLA options by kind of device. benchmarks/tpu_overlap.py measures what each option hides. Other devices have none:
# their only way to hide gathers is to continue them within products. libtpu calls that unsafe except on v5e, and
# rejects it since 0.0.50. They hide gradient sums by windowed einsums.
DEVICE_OPTIONS: dict[str, dict[str, Any]] = {
    # By default, libtpu implements gathers as all-reduces.
    'TPU v4': {
        **WHOLE_PRODUCTS,
        'xla_tpu_prefer_async_allgather_to_allreduce': 'true',
        'xla_enable_async_all_gather': 'true',
    },
    # A product continues a gather or a gradient sum that was started earlier: MaxText's flags for "continuation
    # fusion". Sums of complete matrices are not combined at the end of a layer, where no computation is left to hide
    # them.
    'TPU v5 lite': {
        **WHOLE_PRODUCTS,
        'xla_enable_async_all_gather': 'true',
        'xla_enable_async_all_reduce': 'true',
        'xla_tpu_enable_async_collective_fusion': 'true',
        'xla_tpu_enable_async_collective_fusion_fuse_all_gather': 'true',
        'xla_tpu_enable_async_collective_fusion_fuse_all_reduce': 'true',
        'xla_tpu_enable_async_collective_fusion_multiple_steps': 'true',
        'xla_tpu_overlap_compute_collective_tc': 'true',
        'xla_jf_crs_combiner_threshold_in_bytes': str(4 * 2**20),
    },
}

# XLA options by platform for compiling without the devices. XLA for GPUs measures whether Triton or cuBLAS computes a
# product faster. Without a GPU it cannot measure, and uses Triton for all of them, whose fusions hide memory traffic.
AHEAD_OPTIONS: dict[str, dict[str, Any]] = {'gpu': {'xla_gpu_enable_triton_gemm': False}}


class CompiledStep(NamedTuple):
    """The compiled step: `step(state, batch) → (state, metrics)`. The input state is donated."""

    step: jax.stages.Compiled
    seconds: float

    def memory_bytes(self) -> dict[str, int] | None:
        """Returns the bytes per device by kind: `state` (state and batch), `temporary`, and `host` if used.

        Outputs reuse the buffers of the inputs. Returns None if the backend reports no memory.
        """
        analysis = self.step.memory_analysis()
        if analysis is None:
            return None
        memory = {'state': analysis.argument_size_in_bytes, 'temporary': analysis.temp_size_in_bytes}
        host = analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes
        return {**memory, 'host': host} if host else memory

    def total_bytes(self) -> int | None:
        """Returns the bytes that a device needs for the step, or None if the backend reports no memory.

        GPUs and CPUs allocate all temporary memory as one block of the reported size. On a TPU the reported size is up
        to a third larger than the memory in use at any time.
        There the peak, which includes the arguments, is returned.
        """
        memory = self.memory_bytes()
        if memory is None:
            return None
        total = memory['state'] + memory['temporary']
        analysis = self.step.memory_analysis()
        assert analysis is not None
        return analysis.peak_memory_in_bytes or total if self.platform == 'tpu' else total

    @property
    def platform(self) -> str:
        """Returns the platform of the devices: cpu, gpu or tpu."""
        sharding: Any = jax.tree.leaves(self.step.input_shardings)[0]
        platform: str = next(iter(sharding.device_set)).platform
        return platform


def device_options(device: Any) -> dict[str, Any]:
    """Returns the XLA options for a device, except those that the environment variable XLA_FLAGS sets."""
    of_platform: dict[str, dict[str, Any]] = {'cpu': CPU_OPTIONS, 'gpu': GPU_OPTIONS}
    options = of_platform.get(device.platform) or DEVICE_OPTIONS.get(device.device_kind, {})
    flags = os.environ.get('XLA_FLAGS', '')
    return {name: value for name, value in options.items() if name not in flags}


def compile_train_step(
    config: Config,
    layout: Layout,
    abstract: TrainState,
    num_sources: int = 0,
    *,
    options: Mapping[str, Any] | None = None,
    holds: bool = False,
) -> CompiledStep:
    """Lowers and compiles the step of a resolved config for the layout's devices; see `make_train_step`.

    `options` are XLA options that are added to those of the kind of device. Those of `deterministic_options` take
    precedence. `holds` is that of `batch_shapes`.

    Raises:
        InputError: JAX cannot compile the norm kernels for a GPU of another machine.
    """
    start = time.perf_counter()
    batch = batch_shapes(config, layout, num_sources, holds=holds)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step = jax.jit(
        make_train_step(config, layout, num_sources), donate_argnums=0, out_shardings=(shardings, layout.named())
    )
    compiled = _lower(step, config, abstract, batch).compile(
        compiler_options={
            **device_options(layout.mesh.devices.flat[0]),
            **(options or {}),
            **deterministic_options(config, layout.platform),
        }
    )
    return CompiledStep(compiled, time.perf_counter() - start)


def _lower(step: Any, config: Config, *arguments: Any) -> Any:
    try:
        return step.lower(*arguments)
    except RuntimeError as error:
        # Since release 0.11, JAX compiles Triton kernels when it lowers a program, and asks the GPU for its kind.
        keys = [f'model.{name}' for name in ('norm_kernel', 'fp8_kernel') if getattr(config.model, name) == 'pallas']
        if not keys or 'No supported GPU devices' not in str(error):
            raise
        chosen, remedy = (' and '.join(f'{key}={value}' for key in keys) for value in ('pallas', 'xla'))
        raise InputError(
            f'{chosen}: JAX {jax.__version__} compiles these kernels only on a machine with a GPU; set {remedy}, or '
            'estimate with maxlm plan --estimate'
        ) from None
