"""What a run costs: hours, dollars, checkpoints; and what a budget buys.

All of it follows from the time of one step. Words and formulas on failures: Young 1974, "A First Order Approximation to
the Optimum Checkpoint Interval"; Daly 2006, "A Higher Order Estimate of the Optimum Checkpoint Interval for Restart
Dumps".
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.formatting import GIB
from maxlm.hardware.chips import Chip
from maxlm.hardware.prices import STORAGE_PER_GIB_MONTH, Price, has_price, price_per_hour

HOUR = 3600.0
# A forward pass is a third of a training step's work.
FORWARD_SHARE = 1 / 3


@dataclasses.dataclass(frozen=True)
class PricingTerms:
    """What is assumed of the rental, for the user to correct. Dollars are per device-hour."""

    # None = the table's.
    price: float | None = None
    spot_price: float | None = None
    # Share of the steps that are done on spot devices in `dollars_spot`.
    spot_share: float = 1.0
    # Mean hours until one machine (a node of GPUs, a slice of a TPU) is taken away; the run then stops as a whole.
    # An assumption: no provider promises anything.
    preemption_hours: float = 24.0
    # From there until steps go on: another machine, start, compilation, restore.
    restart_seconds: float = 600.0
    # Bytes/s that one host writes to storage. An assumption: about what a virtual machine reaches to a bucket.
    write_bandwidth: float = 1e9


DEFAULT_TERMS = PricingTerms()


class Cost(NamedTuple):
    """A whole run."""

    steps: int
    tokens: int
    # On devices that stay, evaluation and saving included.
    hours: float
    # Of all devices for these hours; None = no price is known.
    dollars: float | None
    price: Price | None
    # The same run with `PricingTerms.spot_share` of its steps on spot devices, lost and repeated work included; None =
    # no spot price is known.
    hours_spot: float | None
    dollars_spot: float | None
    spot_price: Price | None
    # Steps between two checkpoints that would lose least time to preemptions.
    best_every_steps: int
    # Of one checkpoint: parameters and optimizer state; and what writing it takes.
    checkpoint_bytes: int
    checkpoint_seconds: float
    # Those that lie in storage at the end.
    checkpoints_kept: int
    storage_dollars_per_month: float


class StepCost(NamedTuple):
    """How fast a run goes, with all that is not a step."""

    # Seconds of one step with its share of evaluation and of stops for saving.
    step: float
    # The same on machines that are taken away now and then.
    spot_step: float
    # Of writing a checkpoint, beside the steps, and of the stop for it.
    write: float
    stop: float
    # Work between two checkpoints that loses least.
    best_interval: float


def estimate_cost(
    config: Config,
    step_seconds: float,
    chip: Chip,
    num_devices: int,
    *,
    state_bytes: int,
    num_machines: int | None = None,
    terms: PricingTerms = DEFAULT_TERMS,
) -> Cost:
    """The cost of a resolved config's run.

    Args:
        config: resolved.
        step_seconds: of one optimizer step; with a context schedule the mean over the run.
        chip: what is rented; prices are of its table entry unless `terms` has others.
        num_devices: how many.
        state_bytes: of one checkpoint, over all devices.
        num_machines: that are taken away one by one: nodes, slices. None = nodes of GPUs; one slice of a TPU.
        terms: of the rental.
    """
    num_steps = config.train.num_steps
    pace = find_pace(
        config, step_seconds, chip, num_devices, state_bytes=state_bytes, num_machines=num_machines, terms=terms
    )
    hours = num_steps * pace.step / HOUR
    price = Price(terms.price, 'given') if terms.price is not None else _listed(chip, spot=False)
    spot_price = Price(terms.spot_price, 'given') if terms.spot_price is not None else _listed(chip, spot=True)
    hours_spot = dollars_spot = None
    if spot_price is not None and (price is not None or terms.spot_share == 1):
        on_spot = terms.spot_share * num_steps * pace.spot_step / HOUR
        on_demand = (1 - terms.spot_share) * hours
        hours_spot = on_spot + on_demand
        dollars_spot = num_devices * (on_spot * spot_price.dollars + on_demand * (price.dollars if price else 0.0))
    kept = min(config.checkpoint.max_to_keep, num_saves(config))
    return Cost(
        steps=num_steps,
        tokens=num_steps * _tokens_per_step(config),
        hours=hours,
        dollars=None if price is None else num_devices * hours * price.dollars,
        price=price,
        hours_spot=hours_spot,
        dollars_spot=dollars_spot,
        spot_price=spot_price,
        best_every_steps=max(1, round(pace.best_interval / step_seconds)),
        checkpoint_bytes=state_bytes,
        checkpoint_seconds=pace.write,
        checkpoints_kept=kept,
        storage_dollars_per_month=kept * state_bytes / GIB * STORAGE_PER_GIB_MONTH,
    )


def find_pace(
    config: Config,
    step_seconds: float,
    chip: Chip,
    num_devices: int,
    *,
    state_bytes: int,
    num_machines: int | None = None,
    terms: PricingTerms = DEFAULT_TERMS,
) -> StepCost:
    """Seconds of a step with all that comes beside it; arguments as in `estimate_cost`.

    The state is copied to the hosts' memory while the devices wait, and written from there while they go on. Where that
    takes longer than the work until the next checkpoint, they wait for the rest too.
    """
    assert step_seconds > 0, step_seconds
    assert 0 <= terms.spot_share <= 1, terms.spot_share
    nodes = -(-num_devices // chip.per_node)
    machines = num_machines or (nodes if chip.platform == 'gpu' else 1)
    copy = state_bytes / num_devices / chip.host_bandwidth
    write = state_bytes / nodes / terms.write_bandwidth
    every = config.checkpoint.save_interval_steps or config.train.num_steps
    work = every * (step_seconds + _evaluation_seconds(config, step_seconds))
    stop = copy + max(0.0, write - work)
    between = terms.preemption_hours * HOUR / machines
    return StepCost(
        step=(work + stop) / every,
        # A checkpoint whose writing is cut short does not count: its seconds are lost with those of the restart.
        spot_step=preemption_overhead(work, stop, between, terms.restart_seconds + write) * work / every,
        write=write,
        stop=stop,
        best_interval=max(optimal_save_interval(copy, between), write),
    )


def preemption_overhead(work: float, stop: float, between: float, restart: float) -> float:
    """Wall time over useful time of a run that is interrupted now and then (Daly 2006).

    Interruptions come at any time alike and cost what was done since the last checkpoint, also while restarting.

    Args:
        work: seconds of work between two checkpoints.
        stop: seconds for which a checkpoint keeps the run from working.
        between: mean seconds between two interruptions; infinite = none.
        restart: seconds from an interruption until work goes on.
    """
    if math.isinf(between):
        return (work + stop) / work
    # Beyond this a run practically never comes to its next checkpoint.
    exponents = min((work + stop) / between, 500.0), min(restart / between, 200.0)
    return between / work * math.exp(exponents[1]) * math.expm1(exponents[0])


def optimal_save_interval(stop: float, between: float) -> float:
    """Seconds of work between two checkpoints that lose least (Daly 2006; its first term is Young's)."""
    if stop >= 2 * between:
        return between
    root = math.sqrt(stop / (2 * between))
    return math.sqrt(2 * stop * between) * (1 + root / 3 + root**2 / 9) - stop


def num_saves(config: Config) -> int:
    """Checkpoints that a resolved config's run writes, the one of its last step included."""
    every, steps = config.checkpoint.save_interval_steps, config.train.num_steps
    return -(-steps // every) if every else 1


def tokens_for(
    config: Config,
    pace: StepCost,
    num_devices: int,
    *,
    dollars: float | None = None,
    hours: float | None = None,
    price: float = 0.0,
    spot: bool = False,
) -> float:
    """Tokens that a budget buys at this pace.

    Args:
        config: resolved; its length does not matter.
        pace: from `find_pace`.
        num_devices: that are rented.
        dollars: the budget, or
        hours: on all devices together at the same time.
        price: per device-hour; needed for dollars.
        spot: on machines that are taken away now and then.

    Raises:
        InputError: not exactly one budget, or one that is not above 0.
    """
    if (dollars is None) == (hours is None):
        raise InputError('a budget is either dollars or hours; give exactly one of them')
    for name, value in (('dollars', dollars), ('hours', hours)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f'a budget of {value:g} {name} buys nothing; give a number above 0')
    if dollars is not None:
        if not price > 0:
            raise InputError(
                f'a budget of {dollars:g} dollars needs a price; give --price-per-hour, or a budget in hours'
            )
        hours = dollars / (price * num_devices)
    assert hours is not None
    return hours * HOUR / (pace.spot_step if spot else pace.step) * _tokens_per_step(config)


def _listed(chip: Chip, *, spot: bool) -> Price | None:
    return price_per_hour(chip, spot=spot) if has_price(chip, spot=spot) else None


def _tokens_per_step(config: Config) -> int:
    return config.train.global_batch_size * config.data.seq_len


def _evaluation_seconds(config: Config, step_seconds: float) -> float:
    """For each step. What num_batches=0, the whole split, takes depends on the data and is not counted."""
    if not config.eval.interval:
        return 0.0
    return config.eval.num_batches * step_seconds * FORWARD_SHARE / config.eval.interval
