"""Results of a run: metrics, events and checkpoints of its workdir."""

from __future__ import annotations

import os
from typing import Any

from maxlm.api.model import Model
from maxlm.checkpoint.listing import CheckpointInfo, list_checkpoints
from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.storage.paths import given_path
from maxlm.telemetry.events import ENDS
from maxlm.telemetry.run_history import HistoryReader, RunHistory


class Run:
    """A run in its workdir, while it trains or afterwards. Every property reads the current files.

    Attributes:
        workdir: directory or URL of the run.
    """

    def __init__(self, workdir: str | os.PathLike[str]):
        """Opens a run.

        Raises:
            InputError: the directory is missing or contains no run.
        """
        self.workdir = given_path('workdir', workdir)
        self._reader = HistoryReader(self.workdir)
        if not self.history.has_started:
            raise InputError(f'{self.workdir}: no run has started here; choose a workdir of maxlm train')

    @property
    def history(self) -> RunHistory:
        """Everything that the run wrote about itself."""
        return self._reader.read()

    @property
    def config(self) -> Config | None:
        """Resolved config of the run; None if it cannot be read."""
        return self.history.config

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl, oldest first: a list that `pandas.DataFrame` accepts.

        Each line has `step`, `time` (seconds since 1970) and some of the metrics of docs/metrics.md.
        """
        return [dict(line) for line in self.history.metrics]

    @property
    def summary(self) -> dict[str, Any]:
        """Newest value of each metric."""
        return {name: value for line in self.metrics for name, value in line.items()}

    @property
    def events(self) -> list[dict[str, Any]]:
        """Lines of events.jsonl, oldest first, such as starts, evaluations and saves."""
        return [dict(line) for line in self.history.events]

    @property
    def outcome(self) -> str:
        """Kind of the last end of the run: `finished`, `preempted` or `failed`; '' while it trains."""
        ends = [event['kind'] for event in self.events if event.get('kind') in {*ENDS, 'started'}]
        return ends[-1] if ends and ends[-1] != 'started' else ''

    @property
    def checkpoints(self) -> list[CheckpointInfo]:
        """Complete checkpoints, oldest first, with their sizes and validation losses."""
        return list_checkpoints(self.workdir)

    def model(self, step: int | str = '', *, quantize: str = '') -> Model:
        """Loads the model of a checkpoint.

        Args:
            step: number of the step, or `best` for the step with the lowest validation loss; '' = the newest step.
            quantize: see `Model`.

        Raises:
            InputError: there is no such checkpoint.
        """
        return Model(self.workdir, step=step, quantize=quantize)

    def __repr__(self) -> str:
        """Returns a description with the state of the run, its last step and its newest losses."""
        summary = self.summary
        losses = [f'{name}={summary[name]:.4g}' for name in ('train/loss', 'eval/loss') if name in summary]
        step = [f'step {summary["step"]:,}'] if summary else []
        return f'Run({self.workdir!r}: {", ".join([self.outcome or "started", *step, *losses])})'
