"""Weights & Biases tracker: uploads metrics, config and samples in a child process.

W&B waits for its servers, prompts, and installs exit hooks. So a child process runs it and reads the data from a pipe.
The run waits for it only for a few seconds at the end, after which the child continues alone. If the child fails, the
run logs one warning and continues.

A run keeps one ID (WORKDIR/wandb_id), so a resumed run continues the same curves. W&B's own step counter cannot go
back, so the x-axis of all curves is the metric `step`. Repeated steps of a killed attempt are not sent again, because
they have the same values. Steps repeated after a rollback have other values: they are sent and appended to the curves.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import json
import math
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from maxlm.config.schema import Config
from maxlm.config.serialization import as_dict
from maxlm.errors import InputError
from maxlm.installation import pip_install
from maxlm.log import logger
from maxlm.storage.atomic import atomic_write
from maxlm.workdir.files import WANDB_ID_FILE

# Time that the run waits for pending uploads, and time that the child continues after it.
CLOSE_SECONDS = 5.0
UPLOAD_SECONDS = 600
_CHILD = 'import sys; from maxlm.telemetry.wandb import upload; upload(sys.stdin)'
_AXIS = 'step'
# Last line of a run that was not killed.
_END = 'end\n'


class WeightsAndBiases:
    """Tracker for Weights & Biases."""

    def __init__(self, workdir: Path, config: Config, *, close_seconds: float = CLOSE_SECONDS):
        """
        Raises:
            InputError: the extra `wandb` is not installed.
        """
        if importlib.util.find_spec('wandb') is None:
            raise InputError(
                f'metrics.wandb={config.metrics.wandb} requires the extra wandb; run {pip_install("wandb")}, or '
                "set metrics.wandb=''"
            )
        self._mode, self._close_seconds = config.metrics.wandb, close_seconds
        run_id, self._is_resumed = _run_id(workdir / WANDB_ID_FILE)
        # Omits the alert channels, which are private.
        public_config = {name: keys for name, keys in as_dict(config).items() if name != 'alerts'}
        self._last_sent_step: int | None = None
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        # A file, because a pipe would have to be read continuously. It stays open for the child, and `_send` closes it.
        self._stderr: TextIO = tempfile.TemporaryFile('w+', encoding='utf-8', errors='replace')  # noqa: SIM115
        self._has_exited = False
        self._child = subprocess.Popen(
            [sys.executable, '-c', _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            text=True,
            # Ctrl-C must not reach the child.
            start_new_session=True,
            env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path), 'WANDB_SILENT': 'true'},
        )
        self._thread = threading.Thread(target=self._send, daemon=True, name='wandb')
        self._thread.start()
        self._queue.put(
            {
                'project': config.metrics.wandb_project,
                'name': workdir.resolve().name,
                'id': run_id,
                'mode': self._mode,
                'dir': str(workdir.resolve()),
                'config': public_config,
            }
        )

    def begin(self, after_step: int, newest_step: int) -> None:
        """See `Tracker`."""
        # A resumed attempt repeats steps that were sent. A rollback within an attempt repeats steps with other values.
        first = self._last_sent_step is None
        self._last_sent_step = newest_step if first and self._is_resumed else after_step

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._put(step, {'time': time, **finite})

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """See `Tracker`."""
        self._put(step, {'texts': dict(texts)})

    def close(self) -> None:
        """See `Tracker`."""
        self._queue.put(None)
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            logger.info(
                f'metrics.wandb={self._mode}: the remaining data is uploaded in the background after the run, for at '
                f'most {UPLOAD_SECONDS} s'
            )

    def _put(self, step: int, values: dict[str, Any]) -> None:
        assert self._last_sent_step is not None, 'begin comes first'
        if step > self._last_sent_step and not self._has_exited:
            self._queue.put({_AXIS: step, **values})

    def _send(self) -> None:
        child = self._child
        assert child.stdin is not None
        # BrokenPipeError means that the child has exited.
        with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
            while (values := self._queue.get()) is not None:
                pipe.write(json.dumps(values) + '\n')
                pipe.flush()
            pipe.write(_END)
        self._has_exited = True
        with self._stderr as stderr:
            if child.wait():
                stderr.seek(0)
                reason = stderr.read().strip().rpartition('\n')[2] or f'exit code {child.returncode}'
                logger.warning(f'metrics.wandb={self._mode}: {reason}; the run continues without W&B')


def upload(lines: TextIO) -> None:
    """Runs in the child: logs each line. The first line describes the run."""
    import wandb

    # SIGTERM is meant for the run, which still sends data.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Disables W&B's own features: capturing of output, system metrics, git and code.
    settings = wandb.Settings(console='off', silent=True, x_disable_stats=True, disable_git=True, save_code=False)
    try:
        run = wandb.init(**json.loads(lines.readline()), resume='allow', settings=settings)
        run.define_metric(_AXIS, hidden=True)
        run.define_metric('*', step_metric=_AXIS)
        killed = True
        for line in lines:
            if line == _END:
                killed = False
                break
            run.log(_to_wandb(json.loads(line)))
        signal.alarm(UPLOAD_SECONDS)
        run.finish(exit_code=int(killed))
    except Exception as error:
        # The parent logs the last line of stderr as the reason.
        print(f'{type(error).__name__}: {" ".join(str(error).split())[:300]}', file=sys.stderr, flush=True)
        # Skips W&B's exit hooks, which may wait for the network.
        os._exit(1)


def _to_wandb(values: dict[str, Any]) -> dict[str, Any]:
    import wandb

    def page(text: str) -> Any:
        return wandb.Html(f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>', inject=False)

    texts = values.pop('texts', {})
    return {**values, **{name: page(text) for name, text in texts.items()}}


def _run_id(path: Path) -> tuple[str, bool]:
    """Returns the W&B ID of the run, and True if it existed already."""
    try:
        return path.read_text(encoding='utf-8').strip(), True
    except FileNotFoundError:
        run_id = secrets.token_hex(4)
        atomic_write(path, run_id.encode() + b'\n')
        return run_id, False
