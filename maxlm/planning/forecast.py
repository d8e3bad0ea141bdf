"""Predicts memory and time of a config's step on a target, by formulas or from the compiled program."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.config.sections.model import Dtype
from maxlm.errors import InputError
from maxlm.model.parameters import model_parameters
from maxlm.parallel.layout import Layout
from maxlm.planning.compiled.memory import memory_of, overflow_of
from maxlm.planning.compiled.program import Program, read_program
from maxlm.planning.compiled.traffic import elementwise_bytes
from maxlm.planning.estimate.gpu_traffic import estimate_gpu_traffic
from maxlm.planning.estimate.memory import Memory, estimate_memory
from maxlm.planning.estimate.roofline import Mfu, StepTime, mfu, step_time
from maxlm.planning.estimate.work import Work, estimate_work
from maxlm.planning.machine import Machine
from maxlm.planning.targets import Target, compiling_for, target_layout
from maxlm.training.compile import AHEAD_OPTIONS, CompiledStep, compile_train_step
from maxlm.training.flops import GPU_KERNELS, attention_workspace
from maxlm.training.state import abstract_state

# Values of model.attention whose products are in a fused kernel.
FUSED_ATTENTION = (*GPU_KERNELS, 'splash')
# Memory of a process on a CPU with JAX, compiled programs and read buffers, and of TensorFlow, which writes the files
# of TensorBoard. Measured with a model of 135M parameters and Python 3.11.
PROCESS_BYTES = 900 * 2**20
TENSORBOARD_BYTES = 600 * 2**20
# Minimum fraction of the step that another dtype must save to be suggested.
WORTHWHILE = 0.1


class Forecast(NamedTuple):
    """Memory and time of one step of a resolved config on a target, per device.

    Attributes:
        config: resolved config.
        target: devices of the run.
        memory: bytes by kind.
        available: bytes of a device that a program may use.
        work: operations, memory traffic and transfers.
        time: seconds of a step by kind.
        program: contents of the compiled program. None for CPUs, whose devices share one memory, and for estimates.
        compiled: the compiled step. None for estimates.
        formula: work by formula, to compare it with the program. None for estimates.
    """

    config: Config
    target: Target
    memory: Memory
    available: int
    work: Work
    time: StepTime
    program: Program | None = None
    compiled: CompiledStep | None = None
    formula: Work | None = None

    @property
    def process(self) -> int:
        """Returns a device's share of the process's memory beside the arrays of the step, if the device is a CPU.

        Accelerators have a memory of their own, so it is 0 for them.
        """
        if self.target.chip.platform != 'cpu':
            return 0
        size = PROCESS_BYTES + (TENSORBOARD_BYTES if self.config.metrics.tensorboard else 0)
        if self.config.train.objective == 'grpo':
            # The program of the rollouts holds a copy of the matrices.
            size += model_parameters(self.config.model) * jnp.dtype(self.config.model.dtype).itemsize
        return size // self.target.num_devices

    @property
    def needed(self) -> int:
        return self.memory.total + self.process

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def tokens_per_second(self) -> float:
        return self.config.train.global_batch_size * self.config.data.seq_len / self.time.total

    @property
    def mfu(self) -> Mfu:
        """Returns the MFU with causal and with full attention counted; 0 if no peak is known."""
        target = self.target
        if not target.chip.tflops:
            return Mfu(0.0, 0.0)
        return mfu(
            self.config,
            self.config.data.seq_len,
            tokens_per_second=self.tokens_per_second,
            num_devices=target.num_devices,
            tflops=target.chip.peak(self.config.model.dtype).tflops,
        )


def estimate(config: Config, machine: Machine) -> Forecast:
    """Estimates a step without compiling it, in a few milliseconds.

    The first estimate of a model and a rematerialization policy takes about 0.2 s longer, to trace them.
    """
    chip = machine.target.chip
    work = estimate_work(config, chip.capability)
    if chip.platform == 'gpu':
        work = work._replace(memory_bytes=estimate_gpu_traffic(config))
    memory = estimate_memory(config, chip.platform, chip.capability)
    return Forecast(config, machine.target, memory, machine.available, work, _time(config, machine, work))


def faster_dtype(forecast: Forecast) -> tuple[str, float] | None:
    """Returns a 16-bit dtype in which the step of a float32 config is faster, with the estimated seconds of its step.

    Returns None for another dtype, for a CPU, and if the step is not at least `WORTHWHILE` shorter.
    """
    config, target = forecast.config, forecast.target
    chip = target.chip
    if config.model.dtype != 'float32' or chip.platform == 'cpu':
        return None
    dtypes: tuple[Dtype, ...] = ('bfloat16', 'float16')
    dtype = max(dtypes, key=lambda name: chip.peak(name).tflops)
    # Fused attention kernels need 16 bits.
    model = dataclasses.replace(config.model, dtype=dtype, attention='auto')
    changed = resolve(
        dataclasses.replace(config, model=model),
        platform=chip.platform,
        num_devices=target.num_devices,
        vocab_size=model.vocab_size,
        windows=1,
        capability=chip.capability,
    )
    machine = Machine(target, forecast.available)
    before, after = (estimate(each, machine).time.total for each in (config, changed))
    return (dtype, forecast.time.total * after / before) if after <= (1 - WORTHWHILE) * before else None


def compile_ahead(config: Config, machine: Machine) -> Forecast:
    """Compiles the step for a target whose devices need not be present; see `compile_for`.

    A config with state in the host memory of GPUs cannot be compiled this way. Returns the estimate instead.

    Raises:
        CompilerMissingError: no compiler for the target is installed.
        InputError: as `compile_for`.
    """
    if machine.target.chip.platform == 'gpu' and config.mesh.host_offload != 'none':
        # Mock GPUs have no host memory space, so the compiled program would differ from the real one.
        return estimate(config, machine)
    layout = target_layout(machine.target, config.mesh)
    chip = machine.target.chip
    with compiling_for(machine.target):
        forecast = compile_for(config, machine, layout, options=AHEAD_OPTIONS.get(chip.platform))
    # XLA asks cuDNN for the size of its workspace, which needs a GPU.
    memory, workspace = forecast.memory, attention_workspace(config, chip.capability)
    return forecast._replace(memory=memory._replace(temporary=memory.temporary + workspace))


def compile_for(
    config: Config,
    machine: Machine,
    layout: Layout,
    num_sources: int = 0,
    *,
    options: Mapping[str, Any] | None = None,
    holds: bool = False,
) -> Forecast:
    """Compiles the step and returns its memory, operations, memory traffic and transfers.

    The memory traffic of a TPU's program and the operations of attention kernels are counted by formula.

    `options` and `holds` are those of `compile_train_step`.

    If the compiler rejects the program for lack of memory, the result has the total that the compiler reports, and
    estimates for the rest.

    Raises:
        InputError: the compiler rejects the program for another reason.
    """
    abstract = abstract_state(config, layout)
    estimated = estimate(config, machine)
    try:
        compiled = compile_train_step(config, layout, abstract, num_sources, options=options, holds=holds)
    except jax.errors.JaxRuntimeError as error:
        overflow = overflow_of(error)
        if overflow is None:
            reason = str(error).strip().partition('\n')[0]
            raise InputError(
                f'the compiler for {machine.target.spec} rejected the step; change the config or the target: {reason}'
            ) from error
        return _overflowing(estimated, overflow.needed, overflow.available)
    program = None
    work = estimated.work
    if machine.target.chip.platform != 'cpu':
        platform = machine.target.chip.platform
        program = read_program(compiled.step.as_text() or '', config.mesh.sizes, platform=platform)
        if program.unknown_loops:
            warnings.warn(
                f'loops with an unknown trip count are counted as one iteration: {program.unknown_loops}', stacklevel=2
            )
        work = compiled_work(config, work, program)
    return estimated._replace(
        memory=memory_of(compiled, config, abstract, machine.target.chip.capability),
        work=work,
        time=_time(config, machine, work),
        program=program,
        compiled=compiled,
        formula=estimated.work,
    )


def compiled_work(config: Config, formula: Work, program: Program) -> Work:
    """Returns the work of a compiled program. The parts that cannot be counted in its text are those of the formula."""
    flops = program.flops
    if config.model.attention not in FUSED_ATTENTION or config.mesh.context > 1:
        # The products of attention are ordinary products of the program.
        flops = max(0.0, flops - formula.attention_flops)
    transfers = list(program.transfers)
    if config.model.num_experts:
        # The products of experts are partly in kernels, whose operations are unknown. The number of rows of a ragged
        # exchange depends on the data.
        flops = max(flops, formula.flops)
        if program.has_ragged_exchange:
            transfers += [each for each in formula.transfers if (each.kind, each.axes) == ('all-to-all', ('expert',))]
    memory_bytes = elementwise_bytes(program.traffic)
    # The program of a pipeline contains the idle iterations, which `Work` excludes.
    busy = 1 - formula.idle
    return formula._replace(
        flops=flops * busy,
        fp8_flops=min(formula.fp8_flops, flops * busy),
        memory_bytes=memory_bytes * busy if program.traffic else formula.memory_bytes,
        transfers=transfers,
    )


def _overflowing(estimated: Forecast, needed: int, available: int) -> Forecast:
    """Returns the estimate with the compiler's total; the difference is counted as temporary memory."""
    # The compiler knows nothing of the copy for replays and of the reward model of rollouts.
    outside = estimated.memory.replay + estimated.memory.reward_model
    known = estimated.memory.total - estimated.memory.temporary - outside
    rest = needed - known
    memory = estimated.memory._replace(temporary=max(0, rest), is_estimate=False)
    return estimated._replace(memory=memory, available=min(estimated.available, available))


def _time(config: Config, machine: Machine, work: Work) -> StepTime:
    target = machine.target
    return step_time(
        work,
        target.chip,
        num_devices=target.num_devices,
        num_islands=target.num_islands,
        mesh_sizes=config.mesh.sizes,
        dtype=config.model.dtype,
        efficiency=machine.efficiency,
    )
