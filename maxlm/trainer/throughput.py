"""Training throughput and MFU: tokens per second, step time and pauses of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from maxlm.hardware.chips import Peak
from maxlm.training.flops import TokenFlops

# Names of metrics of pauses that differ from the name of the pause.
_METRICS = {'save': 'checkpoint_blocked'}


class Throughput:
    """Measures the time of steps, without evaluation, saving and compilation.

    A step is complete when its metrics have been read, so durations are those of the device, not of the dispatch.
    """

    def __init__(self, *, tokens_per_step: int, flops: TokenFlops, peak: Peak, num_devices: int):
        self._tokens_per_step = tokens_per_step
        self._flops = flops
        self._peak_flops = peak.tflops * 1e12 * num_devices
        self._is_peak_wrong = False
        self._mark = time.perf_counter()
        self._interval = _Sums()
        self._total = _Sums()
        # Seconds of the newest pause of each name.
        self.pauses: dict[str, float] = {}

    def start(self) -> None:
        """Starts the clock. It must be called before the first step."""
        self._mark = time.perf_counter()

    def change_flops(self, flops: TokenFlops) -> None:
        """Sets the FLOPs per token of subsequent steps, after a change of the sequence length."""
        self._flops = flops

    def step_done(self, data_wait: float) -> None:
        """Counts one completed step, whose batch took `data_wait` seconds to arrive."""
        now = time.perf_counter()
        for sums in (self._interval, self._total):
            sums.steps += 1
            sums.seconds += now - self._mark
            sums.data_wait += data_wait
            sums.causal_flops += self._tokens_per_step * self._flops.causal
            sums.full_flops += self._tokens_per_step * self._flops.full
        self._mark = now

    @contextlib.contextmanager
    def paused(self, what: str, *, name: str = '') -> Iterator[None]:
        """Excludes the time of a `with` block from the time of steps, and reports it as `perf/WHAT_seconds`.

        The time is stored in `pauses` under `name`, which defaults to `what`.
        """
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._mark += seconds
        self.pauses[name or what] = seconds
        for sums in (self._interval, self._total):
            sums.pauses[what] = sums.pauses.get(what, 0.0) + seconds

    @property
    def steps(self) -> int:
        """Returns the number of steps completed in this process."""
        return self._total.steps

    @property
    def seconds(self) -> float:
        """Returns the seconds of the steps completed in this process."""
        return self._total.seconds

    def read_interval(self) -> dict[str, float]:
        """Returns the `perf/…` metrics of the steps since the last call."""
        sums, self._interval = self._interval, _Sums()
        return self._metrics(sums)

    def read_total(self) -> dict[str, float]:
        """Returns the `perf/…` metrics of all steps of this process."""
        return self._metrics(self._total)

    def _metrics(self, sums: _Sums) -> dict[str, float]:
        if not sums.steps:
            return {}
        tokens_per_second = sums.steps * self._tokens_per_step / sums.seconds
        metrics = {
            'perf/tokens_per_second': tokens_per_second,
            'perf/step_time_seconds': sums.seconds / sums.steps,
            'perf/data_loading_seconds': sums.data_wait / sums.steps,
            **{f'perf/{_METRICS.get(what, what)}_seconds': seconds for what, seconds in sums.pauses.items()},
        }
        if self._peak_flops:
            mfu, mfu_full = (flops / sums.seconds / self._peak_flops for flops in (sums.causal_flops, sums.full_flops))
            # MFU above 1 means that the peak was measured on a busy machine or configured too low.
            self._is_peak_wrong |= max(mfu, mfu_full) > 1
            if not self._is_peak_wrong:
                metrics['perf/mfu'] = mfu
                metrics['perf/mfu_full'] = mfu_full
        return metrics


class _Sums:
    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.data_wait = 0.0
        self.causal_flops = 0.0
        self.full_flops = 0.0
        self.pauses: dict[str, float] = {}
