"""Estimates the cost of a run (hours, dollars, checkpoints) and the number of tokens that a budget buys.

All results follow from the time of one step. Terms and formulas for failures: Young 1974, "A First Order Approximation
to the Optimum Checkpoint Interval"; Daly 2006, "A Higher Order Estimate of the Optimum Checkpoint Interval for Restart
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
# A forward pass is a third of the work of a training step.
FORWARD_FRACTION = 1 / 3


@dataclasses.dataclass(frozen=True)
class PricingTerms:
    """Assumptions about the rental, which the user can override.

    Attributes:
        price: dollars per device-hour. None: the price of the built-in table.
        spot_price: dollars per device-hour of spot devices. None: the price of the built-in table.
        spot_share: fraction of the steps that run on spot devices in `Cost.dollars_spot`.
        preemption_hours: mean hours until one machine (a node of GPUs, a slice of a TPU) is preempted, which stops the
            run. An assumption: no provider guarantees a rate.
        restart_seconds: time from a preemption until steps continue: new machine, start, compilation, restore.
        write_bandwidth: bytes/s that one host writes to storage. An assumption: about the rate from a virtual machine
            to a bucket.
    """

    price: float | None = None
    spot_price: float | None = None
    spot_share: float = 1.0
    preemption_hours: float = 24.0
    restart_seconds: float = 600.0
    write_bandwidth: float = 1e9


DEFAULT_TERMS = PricingTerms()


class Cost(NamedTuple):
    """Cost of a complete run.

    Attributes:
        steps: number of optimizer steps.
        tokens: number of training tokens.
        hours: wall-clock hours on on-demand devices, including evaluation and saving.
        dollars: price of all devices for `hours`. None: no price is known.
        price: on-demand price per device-hour.
        hours_spot: hours with `PricingTerms.spot_share` of the steps on spot devices, including lost and repeated work.
            None: no spot price is known.
        dollars_spot: price of the run with spot devices.
        spot_price: spot price per device-hour.
        best_every_steps: save interval, in steps, that loses the least time to preemptions.
        checkpoint_bytes: size of one checkpoint: parameters and optimizer state.
        checkpoint_seconds: time to write one checkpoint.
        checkpoints_kept: number of checkpoints in storage at the end.
        storage_dollars_per_month: price of storing these checkpoints.
    """

    steps: int
    tokens: int
    hours: float
    dollars: float | None
    price: Price | None
    hours_spot: float | None
    dollars_spot: float | None
    spot_price: Price | None
    best_every_steps: int
    checkpoint_bytes: int
    checkpoint_seconds: float
    checkpoints_kept: int
    storage_dollars_per_month: float


class StepCost(NamedTuple):
    """Seconds per step, including the time spent outside of steps.

    Attributes:
        step: seconds of one step with its share of evaluation and of pauses for saving.
        spot_step: the same on machines that are preempted.
        write: seconds to write a checkpoint while steps continue.
        stop: seconds for which a checkpoint pauses the run.
        best_interval: seconds of work between two checkpoints that lose the least.
    """

    step: float
    spot_step: float
    write: float
    stop: float
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
    """Returns the cost of a resolved config's run.

    Args:
        config: resolved config.
        step_seconds: seconds of one optimizer step; with a context schedule, the mean over the run.
        chip: kind of device. Prices come from its table entry unless `terms` overrides them.
        num_devices: number of devices.
        state_bytes: bytes of one checkpoint, over all devices.
        num_machines: number of machines that are preempted separately: nodes, slices. None: nodes of GPUs; one slice of
            a TPU.
        terms: pricing terms.
    """
    num_steps = config.train.num_steps
    step_cost = estimate_step_cost(
        config, step_seconds, chip, num_devices, state_bytes=state_bytes, num_machines=num_machines, terms=terms
    )
    hours = num_steps * step_cost.step / HOUR
    price = Price(terms.price, 'given') if terms.price is not None else _listed(chip, spot=False)
    spot_price = Price(terms.spot_price, 'given') if terms.spot_price is not None else _listed(chip, spot=True)
    hours_spot = dollars_spot = None
    if spot_price is not None and (price is not None or terms.spot_share == 1):
        on_spot = terms.spot_share * num_steps * step_cost.spot_step / HOUR
        on_demand = (1 - terms.spot_share) * hours
        hours_spot = on_spot + on_demand
        dollars_spot = num_devices * (on_spot * spot_price.dollars + on_demand * (price.dollars if price else 0.0))
    kept = min(config.checkpoint.max_to_keep, num_saves(config))
    if limit := config.checkpoint.max_bytes:
        kept = min(kept, max(1, limit // state_bytes))
    return Cost(
        steps=num_steps,
        tokens=num_steps * _tokens_per_step(config),
        hours=hours,
        dollars=None if price is None else num_devices * hours * price.dollars,
        price=price,
        hours_spot=hours_spot,
        dollars_spot=dollars_spot,
        spot_price=spot_price,
        best_every_steps=max(1, round(step_cost.best_interval / step_seconds)),
        checkpoint_bytes=state_bytes,
        checkpoint_seconds=step_cost.write,
        checkpoints_kept=kept,
        storage_dollars_per_month=kept * state_bytes / GIB * STORAGE_PER_GIB_MONTH,
    )


def estimate_step_cost(
    config: Config,
    step_seconds: float,
    chip: Chip,
    num_devices: int,
    *,
    state_bytes: int,
    num_machines: int | None = None,
    terms: PricingTerms = DEFAULT_TERMS,
) -> StepCost:
    """Returns the seconds of a step including all overhead; arguments as in `estimate_cost`.

    The state is copied to host memory while the devices wait, and written to storage while steps continue. If writing
    takes longer than the work until the next checkpoint, the devices also wait for the rest.
    """
    assert step_seconds > 0, step_seconds
    assert 0 <= terms.spot_share <= 1, terms.spot_share
    nodes = -(-num_devices // chip.per_node)
    machines = num_machines or (nodes if chip.platform == 'gpu' else 1)
    copy = state_bytes / num_devices / chip.host_bandwidth
    write = state_bytes / nodes / terms.write_bandwidth
    every = config.checkpoint.save_interval_steps or config.train.num_steps
    steps = step_seconds * (1 + config.guard.replay_fraction)
    work = every * (steps + _evaluation_seconds(config, step_seconds))
    stop = copy + max(0.0, write - work)
    between = terms.preemption_hours * HOUR / machines
    return StepCost(
        step=(work + stop) / every,
        # A checkpoint whose write is interrupted is lost, so its seconds are lost with those of the restart.
        spot_step=preemption_overhead(work, stop, between, terms.restart_seconds + write) * work / every,
        write=write,
        stop=stop,
        best_interval=max(optimal_save_interval(copy, between), write),
    )


def preemption_overhead(work: float, stop: float, between: float, restart: float) -> float:
    """Returns wall time divided by useful time for a run that is interrupted at random (Daly 2006).

    Interruptions are equally likely at any time, also during a restart, and lose the work since the last checkpoint.

    Args:
        work: seconds of work between two checkpoints.
        stop: seconds for which a checkpoint pauses the run.
        between: mean seconds between two interruptions; infinite: none.
        restart: seconds from an interruption until work continues.
    """
    if math.isinf(between):
        return (work + stop) / work
    # Beyond these limits a run practically never reaches its next checkpoint.
    exponents = min((work + stop) / between, 500.0), min(restart / between, 200.0)
    return between / work * math.exp(exponents[1]) * math.expm1(exponents[0])


def optimal_save_interval(stop: float, between: float) -> float:
    """Returns the seconds of work between checkpoints that lose the least (Daly 2006; first term: Young 1974)."""
    if stop >= 2 * between:
        return between
    root = math.sqrt(stop / (2 * between))
    return math.sqrt(2 * stop * between) * (1 + root / 3 + root**2 / 9) - stop


def num_saves(config: Config) -> int:
    """Returns the number of checkpoints that a resolved config's run writes, including that of the last step."""
    every, steps = config.checkpoint.save_interval_steps, config.train.num_steps
    return -(-steps // every) if every else 1


def tokens_for(
    config: Config,
    step_cost: StepCost,
    num_devices: int,
    *,
    dollars: float | None = None,
    hours: float | None = None,
    price: float = 0.0,
) -> float:
    """Returns the number of tokens that a budget buys.

    Args:
        config: resolved config; its length is ignored.
        step_cost: seconds per step, from `estimate_step_cost`.
        num_devices: number of rented devices.
        dollars: budget in dollars. Give either `dollars` or `hours`.
        hours: wall-clock hours, with all devices running at the same time.
        price: dollars per device-hour; required for `dollars`.

    Raises:
        InputError: not exactly one budget is given, or it is not above 0.
    """
    if (dollars is None) == (hours is None):
        raise InputError('a budget is either dollars or hours; set exactly one of --dollars and --hours')
    for name, value in (('dollars', dollars), ('hours', hours)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f'a budget of {value:g} {name} is not positive; set a number above 0')
    if dollars is not None:
        if not price > 0:
            raise InputError(
                f'a budget of {dollars:g} dollars needs a price; set --price-per-hour, or a budget in hours'
            )
        hours = dollars / (price * num_devices)
    assert hours is not None
    return hours * HOUR / step_cost.step * _tokens_per_step(config)


def _listed(chip: Chip, *, spot: bool) -> Price | None:
    return price_per_hour(chip, spot=spot) if has_price(chip, spot=spot) else None


def _tokens_per_step(config: Config) -> int:
    return config.train.global_batch_size * config.data.seq_len


def _evaluation_seconds(config: Config, step_seconds: float) -> float:
    """Returns the evaluation seconds per step.

    num_batches=0, the complete split, is not counted, because its size depends on the data.
    """
    if not config.eval.interval:
        return 0.0
    return config.eval.num_batches * step_seconds * FORWARD_FRACTION / config.eval.interval
