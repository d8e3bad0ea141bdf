"""Cost of a run so far and projected, in hours and dollars, and the source of its price."""

from __future__ import annotations

import math

from maxlm.config.schema import Config
from maxlm.formatting import format_duration
from maxlm.hardware.chips import find_chip
from maxlm.hardware.prices import Price, has_price, price_per_hour

HOUR = 3600.0


def price_of(config: Config, device_kind: str) -> Price | None:
    """Of one device for an hour: the config's, else that of the table of list prices; None where there is none."""
    if config.train.price_per_hour:
        return Price(config.train.price_per_hour, 'train.price_per_hour')
    chip = find_chip(device_kind)
    # The machine itself has no price there.
    if chip is None or chip.platform == 'cpu' or not has_price(chip):
        return None
    return price_per_hour(chip)


def cost_metrics(
    seconds: float, dollars: float | None, *, dollars_per_hour: float, seconds_left: float
) -> dict[str, float]:
    """The `cost/…` metrics.

    Args:
        seconds: of all attempts of the run so far, without the time between them.
        dollars: that they cost; None where no price is known.
        dollars_per_hour: of all devices of the run.
        seconds_left: until its end at the present pace; nan = not known.
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
    """Returns the metrics as the end of a log line: `$1.23 of $45.60, 2 h 03 min left`."""
    parts = []
    if 'cost/dollars' in metrics:
        at_end = f' of ${metrics["cost/projected_dollars"]:,.2f}' if 'cost/projected_dollars' in metrics else ''
        parts.append(f'${metrics["cost/dollars"]:,.2f}{at_end}')
    if 'perf/eta_seconds' in metrics:
        parts.append(f'{format_duration(metrics["perf/eta_seconds"])} left')
    return ', '.join(parts)
