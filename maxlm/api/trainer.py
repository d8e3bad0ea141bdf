"""Trains runs in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence

from maxlm.api.config import to_config
from maxlm.api.run import Run
from maxlm.config.config_files import default_workdir
from maxlm.config.schema import Config
from maxlm.errors import EXIT_FAILED, InputError
from maxlm.rl.opening import open_rollouts
from maxlm.runtime.heartbeat import Heartbeats
from maxlm.runtime.initialize import initialize
from maxlm.storage.paths import given_path
from maxlm.telemetry.timeline import Timeline
from maxlm.trainer.batch_source import open_text
from maxlm.trainer.callbacks import Callback, check_callbacks
from maxlm.trainer.run import run


class TrainingFailedError(RuntimeError):
    """The loss or the gradients of a run are not finite or spike, despite rollbacks."""


class Trainer:
    """Trains a run, as `maxlm train` and, with `train.objective=grpo`, `maxlm grpo` do.

    Examples:
        >>> import maxlm
        >>> config = maxlm.Config.get('tiny', {'data.path': 'data/mine', 'train.num_steps': 20})
        >>> run = maxlm.Trainer(config, workdir='runs/mine').train()  # doctest: +SKIP
        >>> run.summary['train/loss']  # doctest: +SKIP
        5.51

    Attributes:
        workdir: directory or URL of the run.
    """

    def __init__(
        self,
        config: str | Config,
        *,
        workdir: str | os.PathLike[str] | None = None,
        resume: str = '',
        callbacks: Sequence[Callback] = (),
    ):
        """Describes a run. `train` starts it.

        Args:
            config: a config, or the name of one; see `Config.get`.
            workdir: directory or URL of the run, created if missing. A workdir with checkpoints is resumed. None =
                runs/NAME for the config NAME.
            resume: checkpoint (`WORKDIR` or `WORKDIR@STEP`) that a new run continues from.
            callbacks: functions that are called with (step, metrics) after each line of metrics.jsonl, by the process
                that writes it, and `StateCallback`s. A function that returns True stops the run, which first saves a
                checkpoint.

        Raises:
            InputError: the config, a path or a callback is not usable, or `workdir` is missing and the config has no
                name.
        """
        if workdir is None and not isinstance(config, str):
            raise InputError('workdir=None: the config has no name; set workdir, for example runs/first')
        check_callbacks(callbacks)
        self.workdir = default_workdir(str(config)) if workdir is None else given_path('workdir', workdir)
        self._resume = given_path('resume', resume) if resume else ''
        self._config, self._callbacks = to_config(config), callbacks

    def train(self) -> Run:
        """Trains from the newest checkpoint, or from the start, to the end of the run.

        Ctrl-C saves a checkpoint and returns the run, which a later call continues.

        Raises:
            InputError: the data or the workdir is not usable, or the run does not fit the devices.
            TrainingFailedError: the run diverged.
            WorkdirUnavailableError: the bucket of the workdir does not respond.
            DeviceError: a device computes wrong results.
        """
        initialize()
        timeline = Timeline(None)
        with Heartbeats() as heartbeats, timeline.track_compilation():
            code = run(
                self._config,
                open_rollouts if self._config.train.objective == 'grpo' else open_text,
                workdir=self.workdir,
                heartbeats=heartbeats,
                timeline=timeline,
                resume=self._resume,
                callbacks=self._callbacks,
            )
        result = Run(self.workdir)
        if code == EXIT_FAILED:
            raise TrainingFailedError(f'{self.workdir}: {result.events[-1].get("message", "the run failed")}')
        return result
