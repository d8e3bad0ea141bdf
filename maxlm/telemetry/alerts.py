"""Alerts: problems that require the attention of a person.

Each alert is logged immediately. A thread sends it to the configured channels: a file of JSON lines, a command or a
webhook. At most one alert of a kind is sent per minute. After the minute, the newest suppressed alert is sent with the
number of suppressed ones. Alerts never stop, delay or fail a run.

`PerformanceAlerts` sends alerts for values that stay beyond a threshold: accelerator utilization, MFU, throughput and
memory of the host.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from maxlm.config.sections.monitoring import AlertsConfig
from maxlm.errors import InputError
from maxlm.hardware.device_stats import Reading
from maxlm.log import logger
from maxlm.storage.regular_files import open_descriptor
from maxlm.telemetry.device_monitor import summarize

# Minimum time between two alerts of one kind.
INTERVAL_SECONDS = 60.0
SEND_SECONDS = 15.0
# Timeout for sending pending alerts at the end of a run.
CLOSE_SECONDS = 10.0
# Number of consecutive log lines or samples below a threshold until the alert.
NUM_CONSECUTIVE = 5
UTILIZATION, MFU, TOKENS_PER_SECOND = 'device/utilization_percent', 'perf/mfu', 'perf/tokens_per_second'
HOST_MEMORY = 'host/ram_percent'


@dataclasses.dataclass
class Alert:
    """One alert.

    Attributes:
        time: time in UTC, ISO 8601.
        run: name of the workdir.
        host: name of the host that sends it.
        kind: one word, such as `storage`. Alerts are rate-limited for each kind.
        message: one line.
        held_back: number of earlier alerts of this kind that were only logged.
    """

    time: str
    run: str
    host: str
    kind: str
    message: str
    held_back: int = 0

    def __str__(self) -> str:
        more = f' (and {self.held_back} earlier)' if self.held_back else ''
        return f'{self.run} on {self.host}: {self.kind}: {self.message}{more}'


class Alerts:
    """Sends alerts while the context is entered. All processes log alerts, and only process 0 sends them."""

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
            config: channels of the alerts.
            workdir: workdir of the run. Its name is the name of the run.
            process: index of this process.
            on_alert: called with kind and message of each alert, in the thread that calls `send`. It must not raise.
            interval_seconds: minimum time between two alerts of one kind.

        Raises:
            InputError: the environment variable of the webhook contains no URL.
        """
        self._run, self._host = workdir.resolve().name, socket.gethostname()
        self._on_alert = on_alert
        self._interval = interval_seconds
        # Name of a channel in messages → function that sends an alert to it.
        self._channels: dict[str, Callable[[Alert], None]] = {}
        if config.file and not process:
            self._channels['alerts.file'] = lambda alert: _append(workdir / Path(config.file).expanduser(), alert)
        if config.command and not process:
            self._channels['alerts.command'] = lambda alert: _run(config.command, alert)
        if config.webhook_env_var and not process:
            url = os.environ.get(config.webhook_env_var, '')
            if not url.startswith(('http://', 'https://')):
                raise InputError(
                    f'alerts.webhook_env_var={config.webhook_env_var}: this environment variable does not contain a '
                    'URL; set it to https://…'
                )
            self._channels['alerts.webhook_env_var'] = lambda alert: _post(url, alert)
        self._failing: set[str] = set()
        # The keys of both are kinds, so their size is bounded by the number of kinds.
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
        """Logs a warning and schedules it for sending. Returns immediately, and never raises."""
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
        """Returns the kinds that may be sent now."""
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
            # Log only the reason, because the error message may contain the secret URL.
            if channel not in self._failing:
                logger.warning(f'{channel}: failed to send an alert ({_reason(error)})')
            self._failing.add(channel)
        else:
            self._failing.discard(channel)


class Threshold:
    """Detects a metric that is beyond its threshold NUM_CONSECUTIVE times in a row.

    After a good value, the next such sequence is detected.
    """

    def __init__(
        self,
        metric: str,
        key: str,
        threshold: float,
        unit: str,
        text: Callable[[float], str],
        *,
        is_maximum: bool = False,
    ):
        """
        Args:
            metric: name of the metric.
            key: config key of the threshold.
            threshold: smallest good value, or the largest with `is_maximum`; 0 = none.
            unit: what is counted: `log lines` or `samples`.
            text: formats a value for messages.
            is_maximum: values above the threshold are detected, not those below it.
        """
        self._metric, self._key, self._threshold, self._unit, self._text = metric, key, threshold, unit, text
        self._is_maximum = is_maximum
        self._beyond: list[float] = []
        self._has_warned = False

    def observe(self, metrics: Mapping[str, float]) -> str:
        """Returns the message of an alert, or '' if there is no reason for one.

        Logs one warning if the metric is missing. The count then remains unchanged.
        """
        if not self._threshold:
            return ''
        value = metrics.get(self._metric)
        if value is None:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(f'{self._key} has no effect: this run has no {self._metric}')
            return ''
        # NaN is no reason for an alert.
        if not (value > self._threshold if self._is_maximum else value < self._threshold):
            self._beyond = []
            return ''
        # The list is full after an alert, until the value recovers.
        if len(self._beyond) == NUM_CONSECUTIVE:
            return ''
        self._beyond.append(value)
        if len(self._beyond) < NUM_CONSECUTIVE:
            return ''
        low, high = self._text(min(self._beyond)), self._text(max(self._beyond))
        return (
            f'{self._metric} was {low} to {high} for {NUM_CONSECUTIVE} {self._unit} in a row, '
            f'{"above" if self._is_maximum else "below"} {self._key}={self._threshold:g}'
        )


class PerformanceAlerts:
    """Alerts of a run for low utilization, MFU and throughput, and for a host whose memory is nearly full."""

    def __init__(self, config: AlertsConfig, send: Callable[[str, str], None], *, is_training: Callable[[], bool]):
        """
        Args:
            config: thresholds.
            send: called with kind and message of each alert, see `Alerts.send`.
            is_training: returns True while steps run, as opposed to compilation, evaluation and saving. Other samples
                are ignored. The metrics of log lines do not include these times.
        """
        self._send, self._is_training = send, is_training
        percent = '{:.0f}%'.format
        self._utilization = Threshold(UTILIZATION, 'alerts.min_utilization', config.min_utilization, 'samples', percent)
        self._host_memory = Threshold(
            HOST_MEMORY, 'alerts.max_host_memory', config.max_host_memory, 'samples', percent, is_maximum=True
        )
        self._log_lines = {
            'mfu': Threshold(MFU, 'alerts.min_mfu', config.min_mfu, 'log lines', '{:.3f}'.format),
            'throughput': Threshold(
                TOKENS_PER_SECOND,
                'alerts.min_tokens_per_second',
                config.min_tokens_per_second,
                'log lines',
                '{:,.0f}'.format,
            ),
        }

    def on_reading(self, reading: Reading) -> None:
        """Checks a sample of the device monitor, in its thread."""
        metrics = summarize(reading)
        # A save or an evaluation can need the memory as well.
        if message := self._host_memory.observe(metrics):
            self._send('host_memory', message)
        if self._is_training() and (message := self._utilization.observe(metrics)):
            self._send('utilization', message)

    def on_log_line(self, metrics: Mapping[str, float]) -> None:
        """Checks the metrics of a log line."""
        for kind, value in self._log_lines.items():
            if message := value.observe(metrics):
                self._send(kind, message)


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
    """Runs a shell command. The alert is passed as JSON on stdin and in environment variables, never in the command."""
    variables = {'MAXLM_ALERT_KIND': alert.kind, 'MAXLM_ALERT_MESSAGE': str(alert)}
    process = subprocess.Popen(
        ['/bin/sh', '-c', command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **variables},
        # A new session, so that all its processes can be killed together and Ctrl-C does not reach them.
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
    """Rejects redirects, which would turn the POST into a GET and silently lose the message."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, alert: Alert) -> None:
    """Posts the field `text`, which Slack, Mattermost, Google Chat and Teams all read."""
    body = json.dumps({'text': str(alert)}).encode()
    request = urllib.request.Request(url, data=body, headers={'Content-Type': 'application/json'})
    urllib.request.build_opener(_NoRedirects()).open(request, timeout=SEND_SECONDS).close()
