"""Opens the trackers, the device monitor and the profiler of a run. None of them affects the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax

from maxlm.config.schema import Config
from maxlm.config.sections.monitoring import ProfileConfig
from maxlm.hardware.device_stats import Accelerators, Reading, local_devices
from maxlm.log import logger
from maxlm.telemetry.device_monitor import DeviceReadings
from maxlm.telemetry.metrics import Tracker
from maxlm.telemetry.profiler import Profile
from maxlm.telemetry.tensorboard import TensorBoard
from maxlm.telemetry.wandb import WeightsAndBiases


class Trackers:
    """Trackers of a config, open until `stack` closes them.

    Attributes:
        trackers: trackers of metrics, in process 0 only.
        readings: device monitor of each process's host.
        profile: profiler of process 0.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        config: Config,
        *,
        workdir: Path,
        attempt: int,
        on_reading: Callable[[Reading], None],
    ):
        """
        Args:
            stack: closes the trackers.
            config: config of the run.
            workdir: workdir of the run.
            attempt: number of this attempt of the run, from 1.
            on_reading: see `DeviceReadings`.

        Raises:
            InputError: a package that a tracker requires is missing.
        """
        process = jax.process_index()
        self.trackers = [] if process else _open_trackers(config, workdir, stack)
        self.readings = stack.enter_context(
            DeviceReadings(
                workdir,
                interval_seconds=config.metrics.device_stats_interval_seconds,
                attempt=attempt,
                process=process,
                accelerators=Accelerators(local_devices()).read,
                on_reading=on_reading,
            )
        )
        # Only process 0, because all processes run the same program.
        self.profile = Profile(ProfileConfig() if process else config.profile, workdir)
        stack.callback(self.profile.close)


def _open_trackers(config: Config, workdir: Path, stack: contextlib.ExitStack) -> list[Tracker]:
    trackers: list[Tracker] = []
    if config.metrics.tensorboard:
        trackers.append(TensorBoard(workdir / 'tensorboard', config))
    if config.metrics.wandb:
        trackers.append(WeightsAndBiases(workdir, config))
    for tracker in trackers:
        stack.callback(_close, tracker)
    return trackers


def _close(tracker: Tracker) -> None:
    try:
        tracker.close()
    except Exception as error:
        logger.warning(f'{type(tracker).__name__}: failed to write the last data ({type(error).__name__}: {error})')
