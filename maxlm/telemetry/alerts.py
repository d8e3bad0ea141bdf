"""Alerts: what a person should hear of although nobody looks at the log.

Each goes to the log at once and, by a thread, to what the config names: a file of JSON lines, a command, a webhook. Of
one kind at most one a minute goes out; of those between, the newest does when the minute is over, with their number.
Nothing here stops, delays or fails a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxlm.config.schema_logging import AlertsConfig
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.storage.regular_files import open_descriptor

# Between two alerts of one kind.
INTERVAL_SECONDS = 60.0
SEND_SECONDS = 15.0
# At the end of a run what is left goes out; whoever cannot take it in that time is not waited for.
CLOSE_SECONDS = 10.0


@dataclasses.dataclass
class Alert:
    """One alert.

    Attributes:
        time: of the day, UTC.
        run: name of the workdir.
        host: machine it comes from.
        kind: one word, e.g. `storage`; the pace of alerts is kept for each kind.
        message: one line.
        held_back: earlier ones of the kind that went to the log alone.
    """

    time: str
    run: str
    host: str
    kind: str
    message: str
    held_back: int = 0

    def __str__(self) -> str:
        more = f' (and {self.held_back} more before)' if self.held_back else ''
        return f'{self.run} on {self.host}: {self.kind}: {self.message}{more}'


class Alerts:
    """While entered, sends what `send` is given. Of several processes each logs, and the first alone sends."""

    def __init__(
        self,
        config: AlertsConfig,
        workdir: Path,
        *,
        process: int = 0,
        on_alert: Callable[[str, str], None] = lambda kind, message: None,
        interval_seconds: float = INTERVAL_SECONDS,
    ):
        """
        Args:
            config: where they go.
            workdir: of the run, which is called after it.
            process: number of this process.
            record: is told kind and message of each as well, from the thread that sends it. It must not raise.
            interval_seconds: between two alerts of one kind.

        Raises:
            InputError: the variable that is to hold the webhook's URL does not.
        """
        self._run, self._host = workdir.resolve().name, socket.gethostname()
        self._on_alert = on_alert
        self._interval = interval_seconds
        # The name of a place, for messages → what brings an alert there.
        self._channels: dict[str, Callable[[Alert], None]] = {}
        if config.file and not process:
            self._channels['alerts.file'] = lambda alert: _append(workdir / Path(config.file).expanduser(), alert)
        if config.command and not process:
            self._channels['alerts.command'] = lambda alert: _run(config.command, alert)
        if config.webhook_env_var and not process:
            url = os.environ.get(config.webhook_env_var, '')
            if not url.startswith(('http://', 'https://')):
                raise InputError(
                    f'alerts.webhook_env_var={config.webhook_env_var}: this environment variable holds no URL, https://…'
                )
            self._channels['alerts.webhook_env_var'] = lambda alert: _post(url, alert)
        self._failing: set[str] = set()
        # By kind; so there are never more than there are kinds.
        self._pending: dict[str, Alert] = {}
        self._last_sent: dict[str, float] = {}
        self._closing = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._deliver, daemon=True, name='alerts')

    def __enter__(self) -> Alerts:
        if self._channels:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._channels:
            self._thread.join(CLOSE_SECONDS)

    def send(self, kind: str, message: str) -> None:
        """Logs a warning and has it sent; returns at once, and never raises."""
        message = ' '.join(message.split())
        logger.warning(f'{kind}: {message}')
        self._on_alert(kind, message)
        if not self._channels:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
        with self._condition:
            before = self._pending.get(kind)
            held_back = before.held_back + 1 if before else 0
            self._pending[kind] = Alert(now, self._run, self._host, kind, message, held_back)
            self._condition.notify()

    def _deliver(self) -> None:
        while True:
            with self._condition:
                while not (ready := self._ready()):
                    if self._closing:
                        return
                    delays = [self._last_sent[kind] + self._interval - time.monotonic() for kind in self._pending]
                    self._condition.wait(min(delays, default=None))
                alerts = [self._pending.pop(kind) for kind in ready]
                self._last_sent |= dict.fromkeys(ready, time.monotonic())
            for alert in alerts:
                for channel, send in self._channels.items():
                    self._try(channel, send, alert)

    def _ready(self) -> list[str]:
        """The kinds that may go out now."""
        now = time.monotonic()
        return [
            kind
            for kind in self._pending
            if self._closing or now - self._last_sent.get(kind, -self._interval) >= self._interval
        ]

    def _try(self, channel: str, send: Callable[[Alert], None], alert: Alert) -> None:
        try:
            send(alert)
        except Exception as error:
            # The message of an error may hold the address that it was about, which is a secret.
            if channel not in self._failing:
                logger.warning(f'{channel}: an alert could not be sent ({_reason(error)})')
            self._failing.add(channel)
        else:
            self._failing.discard(channel)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f'HTTP {error.code}'
    if isinstance(error, subprocess.CalledProcessError):
        return f'exit code {error.returncode}'
    return type(error).__name__


def _append(path: Path, alert: Alert) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'a', encoding='utf-8', opener=open_descriptor) as file:
        file.write(json.dumps(dataclasses.asdict(alert)) + '\n')


def _run(command: str, alert: Alert) -> None:
    """Runs a line of shell; the alert comes as JSON on its input, its words in variables, never in the line itself."""
    words = {'MAXLM_ALERT_KIND': alert.kind, 'MAXLM_ALERT_MESSAGE': str(alert)}
    process = subprocess.Popen(
        ['/bin/sh', '-c', command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **words},
        # With a group of its own, all that it has started can be ended; and Ctrl-C is not for it.
        start_new_session=True,
    )
    try:
        with contextlib.suppress(BrokenPipeError):
            process.communicate(json.dumps(dataclasses.asdict(alert)).encode(), timeout=SEND_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, 'alerts.command')


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A message that is sent elsewhere as a question would be lost in silence."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, alert: Alert) -> None:
    """Posts the one field that Slack, Mattermost, Google Chat and Teams all read."""
    body = json.dumps({'text': str(alert)}).encode()
    request = urllib.request.Request(url, data=body, headers={'Content-Type': 'application/json'})
    urllib.request.build_opener(_NoRedirects()).open(request, timeout=SEND_SECONDS).close()
