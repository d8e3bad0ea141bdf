"""TensorBoard: scalars, samples and the config of a run, through CLU into WORKDIR/tensorboard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlm.config.loading import flatten
from maxlm.config.schema import Config
from maxlm.errors import InputError


class TensorBoard:
    """A `Tracker`. Every segment of a run writes a file of its own, in place of the steps that are done again."""

    def __init__(self, directory: Path, config: Config):
        """
        Raises:
            InputError: a package is missing that it is written with.
        """
        # TensorFlow, which CLU writes with, greets on stderr at import unless told not to.
        os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
        os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
        try:
            from clu import metric_writers
        except ImportError as error:
            raise InputError(
                f'metrics.tensorboard=True needs clu and TensorFlow ({error}); install them, or set it to false'
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
        # TensorBoard reads Markdown; indented text is shown as it is.
        self._writer.write_texts(
            step, {name: ''.join(f'    {line}\n' for line in text.split('\n')) for name, text in texts.items()}
        )

    def close(self) -> None:
        """See `Tracker`."""
        if self._writer:
            self._writer.close()
            self._writer = None


def hparams(config: Config) -> dict[str, bool | int | float | str]:
    """Returns the config as `section.key` → value, tuples as text, which TensorBoard can sort runs by."""
    return {
        key: value if isinstance(value, bool | int | float | str) else repr(value)
        for key, value in flatten(config).items()
    }


def _purge_after(newest: Path, step: int) -> None:
    """Has TensorBoard drop what the files up to the newest say of later steps: they are done again."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.record_writer import RecordWriter

    start = Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
    # The first start of all is no restart to it, and may be this one.
    events = Event(file_version='brain.Event:2'), start, start
    # Files are read in the order of their names.
    with newest.with_name(f'{newest.name}.on').open('wb') as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())
