"""Alerts for values beyond a threshold: counts, episodes, recovery, and phases that are ignored."""

import math
import threading

import pytest

from maxlm.config.sections.monitoring import AlertsConfig
from maxlm.telemetry.alerts import NUM_CONSECUTIVE, PerformanceAlerts
from maxlm.telemetry.device_monitor import DeviceReadings
from maxlm.telemetry.timeline import Timeline

LOW, GOOD = 0.2, 0.5


class Monitor:
    """Performance alerts that record what they send."""

    def __init__(self, is_training=lambda: True, **thresholds):
        self.sent = []
        self.alerts = PerformanceAlerts(
            AlertsConfig(**thresholds), lambda *alert: self.sent.append(alert), is_training=is_training
        )

    def log_lines(self, *values, metric='perf/mfu'):
        """Reports log lines and returns the number of alerts after each one."""
        counts = []
        for value in values:
            self.alerts.on_log_line({metric: value})
            counts.append(len(self.sent))
        return counts

    def reading(self, *percents):
        self.alerts.on_reading({'devices': [{'use_percent': percent} for percent in percents]})


def test_one_alert_per_episode_and_another_one_after_recovery():
    monitor = Monitor(min_mfu=0.4)
    assert NUM_CONSECUTIVE == 5
    assert monitor.log_lines(*[LOW] * 8) == [0, 0, 0, 0, 1, 1, 1, 1]
    kind, message = monitor.sent[0]
    assert kind == 'mfu'
    assert message == 'perf/mfu was 0.200 to 0.200 for 5 log lines in a row, below alerts.min_mfu=0.4'
    # The threshold itself is a good value.
    assert monitor.log_lines(0.4, *[LOW] * 5) == [1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    'values',
    [
        [LOW] * 4 + [GOOD] + [LOW] * 4,
        [GOOD, LOW] * 10,
        [LOW] * 4 + [math.nan] + [LOW] * 4,
    ],
)
def test_interrupted_sequences_send_nothing(values):
    monitor = Monitor(min_mfu=0.4)
    monitor.log_lines(*values)
    assert monitor.sent == []
    # Negative control: without the interruption.
    monitor.log_lines(*[LOW] * 5)
    assert len(monitor.sent) == 1


def test_thresholds_are_independent_and_off_by_default(caplog):
    off = Monitor()
    off.log_lines(*[0.0] * 9)
    off.log_lines(*[0.0] * 9, metric='perf/tokens_per_second')
    for _ in range(9):
        off.reading(0)
    assert off.sent == []
    assert not caplog.messages
    monitor = Monitor(min_tokens_per_second=1000.0, min_mfu=0.1)
    for value in (900, 800, 700, 600, 999.9):
        monitor.alerts.on_log_line({'perf/mfu': 0.3, 'perf/tokens_per_second': value})
    assert monitor.sent == [
        (
            'throughput',
            'perf/tokens_per_second was 600 to 1,000 for 5 log lines in a row, below alerts.min_tokens_per_second=1000',
        )
    ]


def test_utilization_is_the_mean_of_the_devices_while_steps_run():
    timeline = Timeline()
    timeline.started()
    monitor = Monitor(is_training=lambda: timeline.is_training, min_utilization=50.0)
    for phase in ('compile', 'evaluation', 'checkpoint', 'restore', 'rollout', 'other'):
        with timeline.phase('step'), timeline.phase(phase):
            for _ in range(9):
                monitor.reading(0)
    assert monitor.sent == []
    with timeline.phase('step'):
        for _ in range(9):
            monitor.reading(40, 60)
        for _ in range(4):
            monitor.reading(30, 60)
        # A pause does not reset the count, and waits for data count.
        with timeline.phase('evaluation'):
            monitor.reading(100, 100)
        assert monitor.sent == []
        with timeline.phase('data_wait'):
            monitor.reading(0, 10)
    assert monitor.sent == [
        (
            'utilization',
            'device/utilization_percent was 5% to 45% for 5 samples in a row, below alerts.min_utilization=50',
        )
    ]


def test_a_host_whose_memory_is_nearly_full():
    monitor = Monitor(is_training=lambda: False, max_host_memory=90.0)
    for used in (95, 95, 95, 95, 90, 91, 92, 93, 94, 95, 96):
        monitor.alerts.on_reading({'devices': [], 'ram_bytes': used * 10, 'ram_total_bytes': 1000})
    message = 'host/ram_percent was 91% to 95% for 5 samples in a row, above alerts.max_host_memory=90'
    assert monitor.sent == [('host_memory', message)]


def test_a_missing_metric_is_reported_once(caplog):
    monitor = Monitor(min_utilization=50.0, min_mfu=0.4)
    for _ in range(9):
        monitor.reading()
        monitor.alerts.on_log_line({'perf/tokens_per_second': 1.0})
    assert monitor.sent == []
    assert caplog.messages == [
        'alerts.min_utilization has no effect: this run has no device/utilization_percent',
        'alerts.min_mfu has no effect: this run has no perf/mfu',
    ]


def test_the_device_monitor_passes_its_samples(tmp_path):
    sent = threading.Event()
    alerts = PerformanceAlerts(
        AlertsConfig(min_utilization=50.0), lambda kind, message: sent.set(), is_training=lambda: True
    )
    idle = [{'use_percent': 3}]
    with DeviceReadings(
        tmp_path, interval_seconds=0.01, attempt=1, accelerators=lambda: idle, on_reading=alerts.on_reading
    ):
        assert sent.wait(30)
    assert len((tmp_path / 'devices.jsonl').read_text().splitlines()) >= NUM_CONSECUTIVE
