"""What a run reports: every metric's name and meaning in one table, and the files it goes to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.errors import InputError

FILE = 'metrics.jsonl'


class Metric(NamedTuple):
    """Unit and meaning of one name."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    'train/loss': Metric('nats/token', 'cross-entropy of the step, mean over its predicted tokens'),
    'train/best_loss': Metric('nats/token', 'lowest train/loss of the lines so far'),
    'train/perplexity': Metric('', 'exp(train/loss)'),
    'train/z_loss': Metric('nats/token', 'what train.z_loss adds to train/loss in what is differentiated'),
    'train/loss_scale': Metric('', 'what float16 multiplied the loss by in the step'),
    'train/learning_rate': Metric('', 'rate that the step used; those of other peaks are in proportion'),
    'train/grad_norm': Metric('', 'global norm of the gradient before clipping'),
    'train/param_norm': Metric('', 'global norm of the parameters after the step'),
    'train/tokens': Metric('tokens', 'positions of all batches so far'),
    'train/epoch': Metric('epochs', 'passes over the training split so far'),
    'train/skipped': Metric('steps', 'steps so far that changed nothing: loss or gradient spiked or was not finite'),
    'eval/loss': Metric('nats/token', 'cross-entropy on the validation split, mean over predicted tokens'),
    'eval/perplexity': Metric('', 'exp(eval/loss)'),
    # By source; * is its name.
    'train/loss/*': Metric('nats/token', 'train/loss over the tokens of one source'),
    'eval/loss/*': Metric('nats/token', 'eval/loss over the tokens of one source'),
    'data/share/*': Metric('', 'share of one source in all windows so far'),
    'data/epoch/*': Metric('epochs', 'passes over one source so far'),
    'data/window': Metric('tokens', 'length of the sequences of the step'),
    'perf/tokens_per_second': Metric('tokens/s', 'positions trained on, over the steps since the last line'),
    'perf/step_seconds': Metric('s', 'mean duration of a step on the device’s pace, since the last line'),
    'perf/data_wait_seconds': Metric('s', 'mean time that a step waited for its batch, since the last line'),
    'perf/eval_seconds': Metric('s', 'time that evaluation took, since the last line'),
    'perf/save_seconds': Metric('s', 'time that saving held up the steps, since the last line'),
    'perf/compile_seconds': Metric('s', 'time that programs of later steps took to compile, since the last line'),
    'perf/mfu': Metric('', 'share of the peak, counting causal attention'),
    'perf/mfu_full': Metric('', 'share of the peak, counting attention over the whole window'),
    'perf/device_memory_gib': Metric('GiB', 'largest memory in use on the first device so far, where it tells'),
}


class MetricWriter:
    """Appends to WORKDIR/metrics.jsonl, and through CLU to WORKDIR/tensorboard."""

    def __init__(self, workdir: Path, *, after_step: int, tensorboard: bool):
        """Lines behind `after_step` are dropped: their steps are about to be done again."""
        path = workdir / FILE
        _drop_lines_after(path, after_step)
        self._file = path.open('a', encoding='utf-8')
        self._tensorboard = _tensorboard_writer(workdir / 'tensorboard') if tensorboard else None

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """One line: `step`, `time` (seconds since 1970) and the values, of which those that are not finite are null.

        Names must stand in METRICS.
        """
        unknown = {name for name in values if name not in METRICS and _pattern(name) not in METRICS}
        assert not unknown, f'metrics without a row in METRICS: {unknown}'
        # JSON has no NaN; null is what every reader of it takes.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({'step': step, 'time': round(time, 3), **finite}) + '\n')
        self._file.flush()
        if self._tensorboard:
            self._tensorboard.write_scalars(step, values)

    def close(self) -> None:
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a torn last line (the writer was killed) is left out.

    Raises:
        InputError: another line is not JSON.
    """
    path = workdir / FILE
    if not path.exists():
        return []
    # A complete file ends with a newline, so the last piece is empty or torn; bytes, since it may end inside a letter.
    lines = path.read_bytes().split(b'\n')[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise InputError(f'{path}: a line is not JSON ({error}); mend or remove it') from error


def perplexity(loss: float) -> float:
    """exp(loss), bounded where a float ends, so that a hopeless loss is a large number and not an error."""
    return math.exp(min(loss, 700.0))


def lowest_loss(workdir: Path, *, up_to: int) -> float:
    """The lowest training loss that stands in metrics.jsonl up to a step; infinity where there is none."""
    losses = (line.get('train/loss') for line in read_metrics(workdir) if line['step'] <= up_to)
    return min((loss for loss in losses if loss is not None), default=math.inf)


def _pattern(name: str) -> str:
    """The row of a metric that is told by source: train/loss/web → train/loss/*."""
    return '/'.join([*name.split('/')[:2], '*'])


def _drop_lines_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [line for line in read_metrics(path.parent) if line['step'] <= step]
    temporary = path.with_suffix('.tmp')
    temporary.write_text(''.join(json.dumps(line) + '\n' for line in kept), encoding='utf-8')
    temporary.replace(path)


def _tensorboard_writer(directory: Path) -> Any:
    # TensorFlow, which CLU writes with, greets on stderr at import unless told not to.
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
    try:
        from clu import metric_writers
    except ImportError as error:
        raise InputError(
            f'metrics.tensorboard=True needs clu and TensorFlow ({error}); install them, or set it to false'
        ) from error
    return metric_writers.AsyncWriter(metric_writers.SummaryWriter(str(directory)))
