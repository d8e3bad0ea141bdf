"""Explains where the time of a compiled GPU step goes: memory traffic by cause, products, attention and communication.

The times are those of the roofline model, so they add up to the time of the step.
"""

from __future__ import annotations

from typing import NamedTuple

from maxlm.planning.compiled.traffic import ATTENTION, PRODUCTS, Traffic, bytes_by_cause, elementwise_kernels
from maxlm.planning.estimate.roofline import Efficiency, efficiency_of
from maxlm.planning.forecast import Forecast

# Kernels that the table lists.
LARGEST = 10
# Fraction of a GPU's memory up to which XLA schedules a program without rematerializing on its own: 95 % of 80 %
# (`GetSchedulerMemoryLimit` in xla/service/gpu/gpu_hlo_schedule.cc).
SCHEDULER_FRACTION = 0.76
# A program with more than this multiple of the formula's operations computes products twice.
MAX_FLOPS = 1.03
# A program with more than this multiple of the formula's memory traffic gets a warning.
MAX_TRAFFIC = 1.3


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        name: cause of the work.
        amount: amount with its unit.
        seconds: seconds per step.
    """

    name: str
    amount: str
    seconds: float


def explain(forecast: Forecast, efficiency: Efficiency | None = None) -> str:
    """Returns a Markdown table of the step by cause, and one of the kernels with the most memory traffic.

    Raises:
        ValueError: the step is not a compiled GPU program.
    """
    program, chip = forecast.program, forecast.target.chip
    if program is None or not program.traffic:
        raise ValueError(f'the forecast for {forecast.target.spec} must be of a compiled GPU program')
    efficiency = efficiency or efficiency_of(chip)
    bandwidth = chip.memory_bandwidth * efficiency.memory
    time, work, kernels = forecast.time, forecast.work, elementwise_kernels(program.traffic)
    attention = work.attention_flops / (chip.peak(forecast.config.model.dtype).tflops * 1e12 * efficiency.attention)
    rows = [
        Row(cause, f'{_number(size / 1e9)} GB', size / bandwidth) for cause, size in bytes_by_cause(kernels).items()
    ]
    rows += [
        Row(PRODUCTS, f'{_number(work.flops / 1e12)} TFLOP', time.compute - attention),
        Row(ATTENTION, f'{_number(work.attention_flops / 1e12)} TFLOP', attention),
        Row('exposed communication', '', time.communication - time.hidden),
        Row('host, pipeline and fixed costs', '', time.host + time.idle + time.fixed),
    ]
    lines = ['| cause | amount | ms | share |', '|---|---:|---:|---:|']
    lines += [
        f'| {row.name} | {row.amount} | {_number(1e3 * row.seconds)} | {row.seconds / time.total:.1%} |' for row in rows
    ]
    lines += [f'| **step** | | {_number(1e3 * time.total)} | 100.0% |', '']
    return '\n'.join([*lines, *_largest(kernels, bandwidth)])


def _largest(kernels: list[Traffic], bandwidth: float) -> list[str]:
    largest = sorted(kernels, key=lambda kernel: -kernel.total)[:LARGEST]
    lines = ['| kernel | cause | executions | GB | ms |', '|---|---|---:|---:|---:|']
    return lines + [
        f'| {kernel.name} | {kernel.cause} | {kernel.executions:,.0f} | {_number(kernel.total / 1e9)} | '
        f'{_number(1e3 * kernel.total / bandwidth)} |'
        for kernel in largest
    ]


def _number(value: float) -> str:
    return f'{value:,.1f}' if value >= 10 else f'{value:.3g}'


def program_warnings(forecast: Forecast) -> list[str]:
    """Returns a line for each way in which the compiled program does more work than the formula expects."""
    program, formula, work, chip = forecast.program, forecast.formula, forecast.work, forecast.target.chip
    if program is None or formula is None:
        return []
    found = []
    if work.flops > MAX_FLOPS * formula.flops:
        found.append(
            f'the program computes {work.flops / formula.flops - 1:.0%} more operations in matrix products than the '
            'model needs with this model.remat_policy; try another model.remat_policy or model.scan_layers=false'
        )
    if program.rematerialized:
        found.append(
            f'XLA recomputes {program.rematerialized} instructions to save memory; lower train.per_device_batch_size'
        )
    if program.traffic and work.memory_bytes > MAX_TRAFFIC * formula.memory_bytes:
        found.append(
            f'the program moves {work.memory_bytes / 1e9:,.0f} GB of memory outside of products, the formula expects '
            f'{formula.memory_bytes / 1e9:,.0f} GB; --explain lists the causes'
        )
    if chip.platform == 'gpu' and forecast.fits and forecast.needed > SCHEDULER_FRACTION * chip.memory:
        found.append(
            f'the program needs more than {SCHEDULER_FRACTION:.0%} of the memory, above which XLA recomputes values; '
            'lower train.per_device_batch_size if the step is slower than planned'
        )
    return found
