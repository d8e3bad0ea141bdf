"""Current and projected cost of a run in hours and dollars, and the source of its price."""

from __future__ import annotations

import math

from maxlm.config.schema import Config
from maxlm.formatting import format_duration
from maxlm.hardware.chips import find_chip
from maxlm.hardware.prices import Price, has_price, price_per_hour

HOUR = 3600.0


def price_of(config: Config, device_kind: str) -> Price | None:
    """Returns the hourly price of a device: that of the config, or else the list price; None if there is no price."""
    if config.train.price_per_hour:
        return Price(config.train.price_per_hour, 'train.price_per_hour')
    chip = find_chip(device_kind)
    # A CPU has no list price.
    if chip is None or chip.platform == 'cpu' or not has_price(chip):
        return None
    return price_per_hour(chip)


def cost_metrics(
    seconds: float, dollars: float | None, *, dollars_per_hour: float, seconds_left: float
) -> dict[str, float]:
    """Returns the `cost/…` metrics and the remaining time.

    Args:
        seconds: duration of all attempts of the run so far, without the time between them.
        dollars: cost of all attempts; None if no price is known.
        dollars_per_hour: hourly price of all devices of the run.
        seconds_left: time until the end at the current throughput; nan = unknown.
    """
    metrics = {'cost/hours': seconds / HOUR}
    if math.isfinite(seconds_left):
        metrics['perf/eta_seconds'] = seconds_left
    if dollars is not None:
        metrics['cost/dollars'] = dollars
        if math.isfinite(seconds_left):
            metrics['cost/projected_dollars'] = dollars + seconds_left / HOUR * dollars_per_hour
    return metrics


def cost_text(metrics: dict[str, float]) -> str:
    """Formats the metrics for the end of a log line: `$1.23 of $45.60, 2 h 03 min left`."""
    parts = []
    if 'cost/dollars' in metrics:
        at_end = f' of ${metrics["cost/projected_dollars"]:,.2f}' if 'cost/projected_dollars' in metrics else ''
        parts.append(f'${metrics["cost/dollars"]:,.2f}{at_end}')
    if 'perf/eta_seconds' in metrics:
        parts.append(f'{format_duration(metrics["perf/eta_seconds"])} left')
    return ', '.join(parts)
