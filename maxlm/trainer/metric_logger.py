"""Reports the metrics of a step while the device already runs the next step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from maxlm.config.schema import UNDECIDED_STEPS, Config
from maxlm.config.validation import MIN_SPIKE_WINDOW
from maxlm.data.loader.batch_rows import Changes, sequences_after
from maxlm.evaluation.samples import Sample
from maxlm.evaluation.validation import Evaluation
from maxlm.log import logger
from maxlm.telemetry.alerts import UTILIZATION
from maxlm.telemetry.cost import cost_text
from maxlm.telemetry.metrics import METRICS, MetricWriter, perplexity
from maxlm.trainer.source_metrics import SourceMetrics
from maxlm.trainer.throughput import Throughput
from maxlm.training.decisions.run_control import BadSteps
from maxlm.training.objectives import aux_names, largest_names
from maxlm.training.optimizers.update_metrics import UPDATE_METRICS


class _Pending(NamedTuple):
    step: int
    metrics: dict[str, jax.Array]
    data_wait: float
    batch_metrics: Callable[[], dict[str, float]]


@dataclasses.dataclass
class _Interval:
    """Steps since the previous line: the largest values, which are not finite if those of any step are not."""

    loss: float = -math.inf
    grad_norm: float = -math.inf
    skipped: int = 0

    def add(self, values: Mapping[str, Any]) -> None:
        # Unlike `max`, `np.maximum` returns NaN if either value is NaN.
        self.loss = float(np.maximum(self.loss, values['loss']))
        self.grad_norm = float(np.maximum(self.grad_norm, values['grad_norm']))
        self.skipped += bool(values['skipped'])


class MetricLogger:
    """Reads the metrics of a step one step late, and writes them to the log, the progress bar and the files.

    Reading step n waits for it. By then step n + 1 is in the device's queue, so the device never waits for Python.
    """

    def __init__(
        self,
        config: Config,
        *,
        throughput: Throughput,
        bar: tqdm,
        windows_per_epoch: int | None,
        sources: SourceMetrics,
        batch_sizes: Changes = (),
        warn: Callable[[str], None] = logger.warning,
        costs: Callable[[int, int | None], dict[str, float]] = lambda step, num_steps: {},
        devices: Callable[[], dict[str, float]] = dict,
        on_log_line: Callable[[dict[str, float]], None] = lambda metrics: None,
    ):
        """
        Args:
            config: config of the run.
            throughput: measures the durations of steps.
            bar: progress bar.
            windows_per_epoch: number of rows in an epoch; None if it is unknown.
            sources: metrics per data source.
            batch_sizes: sizes of the global batch so far.
            warn: called with a message for each skipped step.
            costs: returns cost metrics, see `RunRecorder.metrics`.
            devices: returns device metrics, see `DeviceReadings.metrics`.
            on_log_line: called with the `perf/…` metrics of each log line.
        """
        self._config = config
        self._writer: MetricWriter | None = None
        self._throughput = throughput
        self._bar = bar
        self._windows_per_epoch = windows_per_epoch
        self._sources, self._batch_sizes = sources, batch_sizes
        self._warn, self._costs, self._devices, self._on_log_line = warn, costs, devices, on_log_line
        self._pending: _Pending | None = None
        self._skipped = 0
        self._interval = _Interval()
        self._detects_spikes = False
        # The last completed step.
        self.step = 0
        self.best_loss = math.inf
        self.bad_steps = BadSteps()
        self.last_loss = math.nan
        # Scalar metrics of the last step by name.
        self.step_metrics: dict[str, float] = {}
        # True if the loss of the last step and the parameters after it are finite.
        self.is_finite = True
        self.validation_loss: float | None = None

    @property
    def running(self) -> jax.Array | None:
        """Returns a result of the last dispatched step; None if its metrics are already reported."""
        return self._pending.metrics['loss'] if self._pending else None

    def submit(
        self,
        step: int,
        metrics: dict[str, jax.Array],
        data_wait: float,
        batch_metrics: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """Registers the dispatched step number `step`, counted from 1, and reports the previous step.

        `batch_metrics` returns metrics of the batch; it is called only if the step is reported.
        """
        self.flush()
        self._pending = _Pending(step, metrics, data_wait, batch_metrics)

    def flush(self) -> None:
        """Waits for the last dispatched step and reports it."""
        if self._pending is None:
            return
        step, device_metrics, data_wait, batch_metrics = self._pending
        self._pending = None
        values: dict[str, Any] = jax.device_get(device_metrics)
        self.step = step
        self._throughput.step_done(data_wait)
        self._bar.update()
        self._count_skips(step, values)
        self._interval.add(values)
        if values.get('window_steps', 0) >= MIN_SPIKE_WINDOW and not self._detects_spikes:
            self._detects_spikes = True
            logger.info(f'step {step:>7}  the guard detects spikes from this step on (guard.spike_window)')
        names = {f'train/{name}': value for name, value in values.items()}
        self.step_metrics = {
            name: float(value) for name, value in names.items() if name in METRICS and not np.ndim(value)
        }
        self.last_loss = float(values['loss'])
        self.is_finite = math.isfinite(self.last_loss) and math.isfinite(values['param_norm'])
        if step % self._config.train.log_every == 0 or step == self._config.train.num_steps:
            self._report(step, values, batch_metrics())

    def evaluated(self, step: int, result: Evaluation) -> str:
        """Writes and logs the validation result after `step`; returns it as text."""
        self.validation_loss = result.loss
        by_source = self._sources.evaluation_metrics(result.source_losses, result.source_tokens)
        self._write(step, {**{f'eval/{name}': value for name, value in result.logged_metrics.items()}, **by_source})
        text = 'validation ' + '  '.join(
            f'{name.replace("_", " ")} {value:.4f}' for name, value in result.logged_metrics.items()
        )
        logger.info(f'step {step:>7}  {text}')
        return text

    def wrote(self, step: int, metrics: dict[str, float], text: str) -> None:
        """Writes and logs additional metrics of a step, such as rollouts before it or benchmarks after it."""
        self._write(step, metrics)
        logger.info(f'step {step:>7}  {text}')

    def sampled(self, step: int, samples: Sequence[Sample]) -> None:
        """Writes and logs the samples after `step`."""
        for sample in samples:
            logger.info(f'step {step:>7}  {sample}')
        if self._writer:
            self._writer.write_samples(step, time.time(), samples)

    def trained(self, step: int) -> tuple[int, float | None]:
        """Returns the token positions of the batches up to `step`, and the epochs; None if an epoch is unknown."""
        sequences = self._sequences(step)
        epochs = sequences / self._windows_per_epoch if self._windows_per_epoch else None
        return sequences * self._config.data.seq_len, epochs

    def log_sources(self, num_steps: int) -> None:
        """Logs how a run of `num_steps` steps uses each weighted source."""
        self._sources.log_start(self._sequences(num_steps))

    def change_config(self, config: Config) -> None:
        """Sets the config after the run has decided a new length or new learning rates."""
        self._config = config
        self._bar.total = config.train.num_steps
        self._bar.refresh()

    def begin(self, step: int, *, writer: MetricWriter | None, skipped: int, best_loss: float) -> None:
        """Continues from `step`. Steps dispatched earlier are not reported.

        Args:
            step: number of the last completed step.
            writer: writer of metrics; None in all processes except one.
            skipped: number of skipped steps until then.
            best_loss: lowest training loss until then.
        """
        self._pending = None
        self.step = step
        self._writer = writer
        self._skipped = skipped
        self._interval, self._detects_spikes = _Interval(), False
        self.best_loss = best_loss
        self.bad_steps = BadSteps()
        self._bar.n = step
        self._bar.refresh()

    def _count_skips(self, step: int, values: dict[str, Any]) -> None:
        if values.get('overflow', False):
            # The next step has a lower loss scale, so an overflow does not mean that the run diverges.
            self._skipped += 1
            logger.info(f'step {step:>7}  skipped: its gradient overflowed; the loss scale is halved')
            return
        if not values['skipped']:
            self.bad_steps = BadSteps()
            return
        first, _, in_a_row = self.bad_steps
        self.bad_steps = BadSteps(first or step, step, in_a_row + 1)
        self._skipped += 1
        why = 'its loss or gradient is not finite'
        if values.get('spike', False):
            why = f'loss {values["loss"]:.4f} or gradient norm {values["grad_norm"]:.3f} is far above recent values'
        self._warn(f'step {step:>7}  skipped: {why} ({self._skipped} skipped so far)')

    def _report(self, step: int, values: dict[str, Any], batch_metrics: dict[str, float]) -> None:
        sequences, (tokens, epochs) = self._sequences(step), self.trained(step)
        perf = self._throughput.read_interval()
        loss = float(values['loss'])
        # `min` returns the first argument if the second one is NaN.
        self.best_loss = min(self.best_loss, loss)
        memory = (jax.local_devices()[0].memory_stats() or {}).get('peak_bytes_in_use')
        if memory:
            perf['memory/peak_gib'] = memory / 2**30
        num_steps = self._config.train.num_steps
        costs = self._costs(step, None if num_steps == UNDECIDED_STEPS else num_steps)
        devices = self._devices()
        by_source: dict[str, float] = {}
        if 'source_loss' in values:
            by_source = self._sources.training_metrics(sequences, values['source_loss'], values['source_tokens'])
        experts: dict[str, float] = {}
        if 'expert_load' in values:
            load_LE = values['expert_load']
            relative_LE = load_LE / np.maximum(load_LE.mean(axis=1, keepdims=True), 1)
            experts['train/max_expert_load'] = float(relative_LE.max(axis=1).mean())
            if self._writer:
                self._writer.write_expert_loads(step, time.time(), relative_LE.tolist(), is_last=step == num_steps)
        self._write(
            step,
            {
                'train/loss': loss,
                'train/best_loss': self.best_loss,
                **({'train/perplexity': perplexity(loss)} if self._config.train.objective == 'next_token' else {}),
                **{
                    f'train/{name}': float(values[name])
                    for name in (*aux_names(self._config), *largest_names(self._config))
                },
                **experts,
                **({'train/loss_scale': float(values['loss_scale'])} if 'loss_scale' in values else {}),
                'train/learning_rate': float(values['learning_rate']),
                'train/loss_max': self._interval.loss,
                'train/grad_norm': float(values['grad_norm']),
                'train/grad_norm_max': self._interval.grad_norm,
                **{f'train/{name}': float(values[name]) for name in UPDATE_METRICS if name in values},
                'train/param_norm': float(values['param_norm']),
                'train/tokens': float(tokens),
                **({} if epochs is None else {'train/epoch': epochs}),
                'train/newly_skipped_steps': float(self._interval.skipped),
                'train/skipped_steps': float(self._skipped),
                'data/seq_len': float(self._config.context_at(step - 1)),
                **batch_metrics,
                **by_source,
                **perf,
                **costs,
                **devices,
            },
        )
        self._interval = _Interval()
        mfu = f'  MFU {perf["perf/mfu"]:.1%}' if 'perf/mfu' in perf else ''
        use = f'  device use {devices[UTILIZATION]:.0f}%' if UTILIZATION in devices else ''
        cost = f'  {text}' if (text := cost_text(costs)) else ''
        logger.info(
            f'step {step:>7}  loss {loss:.4f}  best {self.best_loss:.4f}  lr {values["learning_rate"]:.2e}  '
            f'grad norm {values["grad_norm"]:.3f}  {1 / perf["perf/step_time_seconds"]:.3g} steps/s  '
            f'{perf["perf/tokens_per_second"]:,.0f} tokens/s{mfu}{use}  '
            f'data wait {perf["perf/data_loading_seconds"] * 1e3:.1f} ms{cost}'
        )
        self._bar.set_postfix_str(f'loss {loss:.3f}{mfu}')
        self._on_log_line(perf)

    def _sequences(self, step: int) -> int:
        return sequences_after(step, self._config.train.global_batch_size, self._batch_sizes)

    def _write(self, step: int, values: dict[str, float]) -> None:
        if self._writer:
            self._writer.write(step, time.time(), values)
