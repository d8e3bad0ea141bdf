"""TensorBoard tracker: writes scalars, samples and the config of a run to WORKDIR/tensorboard with CLU."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from maxlm.config.schema import Config
from maxlm.config.serialization import flatten
from maxlm.errors import InputError


class TensorBoard:
    """Tracker for TensorBoard. Each segment of a run writes its own file, which replaces repeated steps.

    A background thread imports TensorFlow and writes the files. The thread starts at the first write, because the
    import would delay the first step by seconds. A later call raises the errors of the thread. Each write is flushed,
    so that a killed run keeps its last steps.
    """

    def __init__(self, directory: Path, config: Config):
        """
        Raises:
            InputError: a required package is missing.
        """
        # CLU uses TensorFlow, which prints messages to stderr at import by default.
        os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
        os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
        for package in ('clu', 'tensorflow'):
            if find_spec(package) is None:
                raise InputError(
                    f'metrics.tensorboard=True requires clu and TensorFlow (no module named {package!r}); install '
                    'them, or set metrics.tensorboard=False'
                )
        self._directory = directory
        self._config = config
        # One worker, so that the calls are executed in their order.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix='tensorboard')
        self._calls: deque[Future[None]] = deque()
        self._after_step: int | None = None
        self._writer: Any = None

    def begin(self, after_step: int, newest_step: int) -> None:
        """See `Tracker`."""
        self.close()
        self._after_step = after_step

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._submit(lambda: self._writer.write_scalars(step, values))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """See `Tracker`."""
        blocks = {name: code_block(text) for name, text in texts.items()}
        self._submit(lambda: self._writer.write_texts(step, blocks))

    def close(self) -> None:
        """See `Tracker`."""
        self._after_step = None
        calls, self._calls = self._calls, deque()
        if calls or self._writer:
            calls.append(self._thread.submit(self._close_writer))
        # After an error, the writer is closed before the error is raised.
        wait(calls)
        for call in calls:
            call.result()

    def _submit(self, call: Callable[[], None]) -> None:
        if self._after_step is not None:
            self._calls.append(self._thread.submit(self._open_writer, self._after_step))
            self._after_step = None
        while self._calls and self._calls[0].done():
            self._calls.popleft().result()
        self._calls.append(self._thread.submit(self._write, call))

    def _write(self, call: Callable[[], None]) -> None:
        call()
        self._writer.flush()

    def _open_writer(self, after_step: int) -> None:
        if files := sorted(self._directory.glob('events.out.tfevents.*')):
            _purge_after(files[-1], after_step)
            _wait_for_next_second(files[-1])
        self._writer = _summary_writer(self._directory)
        self._writer.write_hparams(hparams(self._config))

    def _close_writer(self) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None


def _summary_writer(directory: Path) -> Any:
    """Returns CLU's writer, which writes scalars as `simple_value` instead of as tensors.

    TensorBoard shows both alike, but `EventAccumulator.Scalars`, `summary_iterator` and other readers from the time of
    TensorFlow 1 find only simple values.
    """
    import tensorflow as tf
    from clu import metric_writers
    from tensorboard.compat.proto.summary_pb2 import Summary

    class SimpleValueWriter(metric_writers.SummaryWriter):
        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            with self._summary_writer.as_default():
                tf.summary.experimental.write_raw_pb(Summary(value=values).SerializeToString(), step=step)

    return SimpleValueWriter(str(directory))


def code_block(text: str) -> str:
    """Returns a text as a code block, because TensorBoard renders Markdown and loads its images from other hosts."""
    # Markdown also ends a line at a carriage return.
    return ''.join(f'    {line}\n' for line in re.split(r'\r\n?|\n', text))


def hparams(config: Config) -> dict[str, bool | int | float | str]:
    """Returns the config as `section.key` → value, with tuples as text. TensorBoard can sort runs by it."""
    return {
        key: value if isinstance(value, bool | int | float | str) else repr(value)
        for key, value in flatten(config).items()
    }


def _wait_for_next_second(newest: Path) -> None:
    """Waits until a new file is named after `newest`.

    TensorBoard reads files in the order of their names, which begin with the time in seconds. The host, process and
    number that follow do not order the files of one second: 10 precedes 9.
    """
    if match := re.search(r'tfevents\.(\d{1,12})\.', newest.name):
        time.sleep(min(max(int(match[1]) + 1 - time.time(), 0), 1))


def _purge_after(newest: Path, step: int) -> None:
    """Makes TensorBoard discard points after `step` in the files up to `newest`, because their steps are repeated."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.record_writer import RecordWriter

    start = Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
    # TensorBoard ignores the first start event that it sees, so write two.
    events = Event(file_version='brain.Event:2'), start, start
    with newest.with_name(f'{newest.name}.on').open('wb') as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())
