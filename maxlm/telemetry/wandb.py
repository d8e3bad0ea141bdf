"""Weights & Biases: the same names, config and samples as in the workdir, by a process of its own.

W&B waits for its servers, prompts, and hooks itself into the end of a program. So a child process does all of it and
reads from a pipe what to log. The run never waits for it, but for a few seconds at its end, after which the child goes
on alone. Whatever becomes of the child, the run has one warning and goes on.

A run keeps one id (WORKDIR/wandb_id), so that a resumed run continues the same curves. W&B counts its own steps
and refuses to go back; here that count is left to it, and the axis of all curves is the metric `step`. Lines
of a killed attempt are not sent again, since the same steps give the same numbers. After a rollback they give
others: these are sent, and stand in the curves behind the old ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.storage.atomic import atomic_write
from maxlm.workdir.files import WANDB_ID_FILE

# For what is not uploaded yet when a run ends: so long the run waits, and so long the child goes on after it.
CLOSE_SECONDS = 5.0
UPLOAD_SECONDS = 600
_CHILD = 'import sys; from maxlm.telemetry.wandb import upload; upload(sys.stdin)'
_AXIS = 'step'
# The last line of a run that was not killed.
_END = 'end\n'


class WeightsAndBiases:
    """A `Tracker`."""

    def __init__(self, workdir: Path, config: Config, *, close_seconds: float = CLOSE_SECONDS):
        """
        Raises:
            InputError: the extra is not installed.
        """
        if importlib.util.find_spec('wandb') is None:
            raise InputError(
                f"metrics.wandb={config.metrics.wandb} needs the extra: pip install 'maxlm[wandb]', or set it to ''"
            )
        self._mode, self._close_seconds = config.metrics.wandb, close_seconds
        run_id, self._is_resumed = _run_id(workdir / WANDB_ID_FILE)
        # Where alerts go is nobody's business there.
        public_config = {name: keys for name, keys in dataclasses.asdict(config).items() if name != 'alerts'}
        self._last_sent_step: int | None = None
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        # A file and not a pipe, which would have to be read.
        self._stderr: TextIO = tempfile.TemporaryFile('w+', encoding='utf-8', errors='replace')  # noqa: SIM115
        self._has_exited = False
        self._child = subprocess.Popen(
            [sys.executable, '-c', _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            text=True,
            # Ctrl-C is not for it.
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
        # Of an earlier attempt; in the same one they are done again otherwise.
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
                f'metrics.wandb={self._mode}: what is left is uploaded after the run, in {UPLOAD_SECONDS} s at most'
            )

    def _put(self, step: int, values: dict[str, Any]) -> None:
        assert self._last_sent_step is not None, 'begin comes first'
        if step > self._last_sent_step and not self._has_exited:
            self._queue.put({_AXIS: step, **values})

    def _send(self) -> None:
        child = self._child
        assert child.stdin is not None
        # Broken: it has ended.
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
                logger.warning(f'metrics.wandb={self._mode}: {reason}; the run goes on without it')


def upload(lines: TextIO) -> None:
    """The child: logs what comes, the first line being about the run."""
    import wandb

    # Of the run, which has still something to say.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Nothing of what W&B does by itself: no capturing of output, no readings of the machine, no code.
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
        # The last line that it says is the reason.
        print(f'{type(error).__name__}: {" ".join(str(error).split())[:300]}', file=sys.stderr, flush=True)
        # Without W&B's own end, which may wait for the network.
        os._exit(1)


def _to_wandb(values: dict[str, Any]) -> dict[str, Any]:
    import wandb

    def page(text: str) -> Any:
        return wandb.Html(f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>', inject=False)

    texts = values.pop('texts', {})
    return {**values, **{name: page(text) for name, text in texts.items()}}


def _run_id(path: Path) -> tuple[str, bool]:
    """The run's id at W&B, and whether it had one already."""
    try:
        return path.read_text(encoding='utf-8').strip(), True
    except FileNotFoundError:
        run_id = secrets.token_hex(4)
        atomic_write(path, run_id.encode() + b'\n')
        return run_id, False
