"""TensorBoard tracker: writes scalars, samples and the config of a run to WORKDIR/tensorboard with CLU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlm.config.loading import flatten
from maxlm.config.schema import Config
from maxlm.errors import InputError


class TensorBoard:
    """Tracker for TensorBoard. Each segment of a run writes its own file, which replaces repeated steps."""

    def __init__(self, directory: Path, config: Config):
        """
        Raises:
            InputError: a required package is missing.
        """
        # CLU uses TensorFlow, which prints messages to stderr at import by default.
        os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
        os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
        try:
            from clu import metric_writers
        except ImportError as error:
            raise InputError(
                f'metrics.tensorboard=True requires clu and TensorFlow ({error}); install them, or set '
                'metrics.tensorboard=False'
            ) from error
        self._open_writer = lambda: metric_writers.AsyncWriter(metric_writers.SummaryWriter(str(directory)))
        self._directory = directory
        self._config = config
        self._writer: Any = None

    def begin(self, after_step: int, newest_step: int) -> None:
        """See `Tracker`."""
        self.close()
        if files := sorted(self._directory.glob('events.out.tfevents.*')):
            _purge_after(files[-1], after_step)
        self._writer = self._open_writer()
        self._writer.write_hparams(hparams(self._config))

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._writer.write_scalars(step, values)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """See `Tracker`."""
        # TensorBoard renders Markdown. Indented text is shown verbatim.
        self._writer.write_texts(
            step, {name: ''.join(f'    {line}\n' for line in text.split('\n')) for name, text in texts.items()}
        )

    def close(self) -> None:
        """See `Tracker`."""
        if self._writer:
            self._writer.close()
            self._writer = None


def hparams(config: Config) -> dict[str, bool | int | float | str]:
    """Returns the config as `section.key` → value, with tuples as text. TensorBoard can sort runs by it."""
    return {
        key: value if isinstance(value, bool | int | float | str) else repr(value)
        for key, value in flatten(config).items()
    }


def _purge_after(newest: Path, step: int) -> None:
    """Makes TensorBoard discard points after `step` in the files up to `newest`, because their steps are repeated."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.record_writer import RecordWriter

    start = Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
    # TensorBoard ignores the first start event that it sees, so write two.
    events = Event(file_version='brain.Event:2'), start, start
    # TensorBoard reads files in the order of their names.
    with newest.with_name(f'{newest.name}.on').open('wb') as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())
