"""Reads the results of a run of `benchmarks.gpu_run` from its workdir."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxlm.telemetry.environment import versions
from maxlm.telemetry.goodput import read_goodput
from maxlm.telemetry.metrics import read_metrics

# Metrics of a step that must repeat after the run was resumed.
REPEATED = ('train/loss', 'train/grad_norm', 'train/param_norm')
SPEED = ('perf/mfu', 'perf/mfu_full', 'perf/tokens_per_second', 'perf/step_time_seconds', 'perf/data_loading_seconds')
# Lines of an attempt whose speed does not count, because the first steps are slower.
SLOW_LINES = 2


def compare_repeated(before: Sequence[dict[str, Any]], workdir: Path) -> dict[str, Any]:
    """Compares the lines of metrics of a killed attempt with those of the attempt that repeated its last steps.

    Args:
        before: lines when the first attempt was killed.
        workdir: workdir of the run, which dropped the repeated lines and wrote them again.

    Returns:
        The step of the last line before the kill, the step from which the run resumed, the number of repeated lines,
        the number of lines in which a value of REPEATED differs in any bit, and the largest difference of the loss.
    """
    first_step = read_goodput(workdir).attempts[1].start_step or 0
    after = {line['step']: line for line in read_metrics(workdir)}
    repeated = [line for line in before if line['step'] > first_step and 'train/loss' in line]
    pairs = [(line, after[line['step']]) for line in repeated if line['step'] in after]
    return {
        'killed_after_step': before[-1]['step'],
        'resumed_from_step': first_step,
        'repeated_lines': len(pairs),
        'different': sum(any(a[name] != b[name] for name in REPEATED) for a, b in pairs),
        'largest_loss_difference': max((abs(a['train/loss'] - b['train/loss']) for a, b in pairs), default=None),
    }


def results_of(workdir: Path) -> dict[str, Any]:
    """Returns the curve, the validation losses, and statistics of speed, time and devices of a run."""
    lines = read_metrics(workdir)
    goodput = read_goodput(workdir)
    began = goodput.attempts[0].start_time
    steps = [line for line in lines if 'train/loss' in line]
    resumed = goodput.attempts[-1].start_step or 0
    counted = [line for line in steps if line['step'] <= resumed][SLOW_LINES:]
    counted += [line for line in steps if line['step'] > resumed][SLOW_LINES:]
    return {
        'steps': steps[-1]['step'],
        'tokens': steps[-1]['train/tokens'],
        # Step, seconds since the start, loss.
        'curve': [[line['step'], line['time'] - began, line['train/loss']] for line in steps],
        'validation_curve': [[line['step'], line['eval/loss']] for line in lines if 'eval/loss' in line],
        'speed': {name: _median(counted, name) for name in SPEED},
        'skipped_steps': steps[-1]['train/skipped_steps'],
        'goodput': {
            'fraction': goodput.fraction,
            'seconds': goodput.totals,
            'attempts': [
                {'start_step': attempt.start_step, 'step': attempt.step, 'seconds': attempt.active_seconds}
                for attempt in goodput.attempts
            ],
        },
        'devices': _ranges(lines),
        'versions': versions(),
    }


def describe_export(directory: Path) -> dict[str, int]:
    """Returns the number of parameters and bytes in the safetensors files of an exported model."""
    from safetensors import safe_open

    parameters = num_bytes = 0
    for path in directory.glob('*.safetensors'):
        with safe_open(path, 'numpy') as file:
            names = file.keys()
            parameters += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        num_bytes += path.stat().st_size
    return {'parameters': parameters, 'bytes': num_bytes}


def _median(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if name in line]
    return statistics.median(values) if values else None


def _ranges(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the mean and the maximum of each metric of devices, memory and the host."""
    names = sorted({name for line in lines for name in line if name.startswith(('device/', 'memory/', 'host/'))})
    values = {name: [line[name] for line in lines if name in line] for name in names}
    return {name: {'mean': statistics.mean(found), 'max': max(found)} for name, found in values.items()}
