"""Samples host and accelerator statistics in a background thread and writes WORKDIR/devices.jsonl.

A sample takes a few milliseconds of one core, which is far below 0.5 % of its time at one sample per 30 seconds. Failed
accelerator readings are omitted. A reading that hangs ends the sampling. Neither affects the run.
"""

from __future__ import annotations

import math
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from maxlm.formatting import GIB
from maxlm.hardware.device_stats import Reading
from maxlm.log import logger
from maxlm.storage.jsonl import JsonlWriter

# Timeout for the last sample at the end of a run.
CLOSE_SECONDS = 1.0


def file_name(process: int) -> str:
    """Returns the name of the file in the workdir that a process writes."""
    return f'devices-{process}.jsonl' if process else 'devices.jsonl'


class DeviceReadings:
    """Appends samples to the file at a fixed interval while the context is entered."""

    def __init__(
        self,
        workdir: Path,
        *,
        interval_seconds: float,
        attempt: int,
        process: int = 0,
        accelerators: Callable[[], list[Reading]] = list,
        on_reading: Callable[[Reading], None] = lambda reading: None,
    ):
        """
        Args:
            workdir: workdir of the run.
            interval_seconds: time between two samples; 0 = no samples.
            attempt: number of this attempt of the run, from 1.
            process: index of this process.
            accelerators: reads the accelerators, see `Accelerators.read`.
            on_reading: called with each sample, in the thread of the samples.
        """
        self._writer = JsonlWriter(workdir / file_name(process))
        self._interval_seconds = interval_seconds
        self._common_fields = {'life': attempt, 'process': process, 'host': socket.gethostname()}
        self._accelerators, self._on_reading = accelerators, on_reading
        self._host = Host(workdir)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name='devices')
        self._lock = threading.Lock()
        # Samples since the last call of `metrics`.
        self._recent: list[Reading] = []

    def __enter__(self) -> DeviceReadings:
        if self._interval_seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def metrics(self) -> dict[str, float]:
        """Returns the means of the samples since the last call, by metric name, or {} without samples."""
        with self._lock:
            recent, self._recent = self._recent, []
        summaries = [summarize(reading) for reading in recent]
        names = {name: None for metrics in summaries for name in metrics}
        return {name: _mean([metrics[name] for metrics in summaries if name in metrics]) for name in names}

    def _run(self) -> None:
        try:
            # CPU usage over a shorter time is not meaningful.
            if self._closing.wait(min(self._interval_seconds, 1.0)):
                return
            while True:
                reading = self._read()
                self._writer.write(reading)
                self._on_reading(reading)
                with self._lock:
                    self._recent.append(reading)
                if self._closing.wait(self._interval_seconds):
                    return
        # A failure must not affect the run.
        except Exception as error:
            logger.warning(f'device monitoring failed and is disabled ({type(error).__name__}: {error})')

    def _read(self) -> Reading:
        try:
            devices = self._accelerators()
        except Exception:
            devices = []
        return {'time': round(time.time(), 3), **self._common_fields, **self._host.read(), 'devices': devices}


class Host:
    """Statistics of this host and process. Usage and rates cover the time since the previous sample."""

    def __init__(self, workdir: Path):
        self._workdir = workdir
        self._process = psutil.Process()
        # The first call of each has no reference and returns 0.
        psutil.cpu_percent()
        self._process.cpu_percent()
        self._previous = time.monotonic(), _traffic()

    def read(self) -> Reading:
        """Returns the statistics of the host. Omits keys that it does not support."""
        memory = _try_read(psutil.virtual_memory)
        now, traffic = time.monotonic(), _traffic()
        (then, before), self._previous = self._previous, (now, traffic)
        disk = _try_read(lambda: shutil.disk_usage(self._workdir))
        reading = {
            'cpu_percent': _try_read(psutil.cpu_percent),
            'process_cpu_percent': _try_read(self._process.cpu_percent),
            'ram_bytes': memory and memory.total - memory.available,
            'ram_total_bytes': memory and memory.total,
            'process_ram_bytes': _try_read(lambda: self._process.memory_info().rss),
            'disk_free_bytes': disk and disk.free,
            **{
                f'{name}_bytes_per_second': round(max(0, count - before[name]) / max(now - then, 1e-3))
                for name, count in traffic.items()
                if name in before
            },
        }
        return {key: value for key, value in reading.items() if value is not None}


def summarize(reading: Reading) -> dict[str, float]:
    """Returns the metrics of a sample: mean usage and memory over devices, maximum temperature and total power."""
    devices = reading['devices']

    def of_devices(key: str, reduce: Callable[[list[float]], float]) -> float | None:
        values = [device[key] for device in devices if key in device]
        return reduce(values) if values else None

    def scaled(value: float | None, unit: float) -> float | None:
        return None if value is None else value / unit

    def of_host(part: str, total: str) -> float | None:
        return 100 * reading[part] / reading[total] if reading.get(total) and part in reading else None

    metrics = {
        'device/utilization_percent': of_devices('use_percent', _mean),
        'device/memory_gib': scaled(of_devices('memory_bytes', _mean), GIB),
        'device/temperature_c': of_devices('temperature_c', max),
        'device/power_w': of_devices('power_w', sum),
        'device/throttled': of_devices('throttled', lambda reasons: sum(map(bool, reasons))),
        'device/ecc_errors': of_devices('ecc_errors', sum),
        'host/cpu_percent': reading.get('cpu_percent'),
        'host/ram_gib': scaled(reading.get('ram_bytes'), GIB),
        'host/ram_percent': of_host('ram_bytes', 'ram_total_bytes'),
        'host/disk_free_gib': scaled(reading.get('disk_free_bytes'), GIB),
        'host/net_sent_mb': scaled(reading.get('net_sent_bytes_per_second'), 1e6),
        'host/net_received_mb': scaled(reading.get('net_received_bytes_per_second'), 1e6),
    }
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _traffic() -> dict[str, int]:
    """Returns the bytes transferred so far by disk and network, without the loopback interface."""
    disk = _try_read(psutil.disk_io_counters)
    cards = _try_read(lambda: psutil.net_io_counters(pernic=True)) or {}
    outside = [counters for name, counters in cards.items() if name != 'lo']
    return {
        **({'disk_read': disk.read_bytes, 'disk_write': disk.write_bytes} if disk else {}),
        **({'net_sent': sum(card.bytes_sent for card in outside)} if outside else {}),
        **({'net_received': sum(card.bytes_recv for card in outside)} if outside else {}),
    }


def _try_read(read: Callable[[], Any]) -> Any:
    """Calls `read`. Returns None if this host does not support the value."""
    try:
        return read()
    except (psutil.Error, OSError, RuntimeError, NotImplementedError):
        return None


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
