"""The best model that a budget buys: how fast each size trains, and how loss falls with size and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxlm.errors import InputError
from maxlm.formatting import format_bytes, format_si
from maxlm.hardware.chips import Chip
from maxlm.hardware.prices import price_per_hour
from maxlm.planning.chinchilla import BESIROGLU, FLOPS_PER_PARAMETER_TOKEN, Allocation, Law, compute_optimal
from maxlm.planning.cost import DEFAULT_TERMS, PricingTerms, find_pace, tokens_for
from maxlm.planning.scaling import SizePoint

# Of a checkpoint, for each parameter: itself in float32, and two moments. Only what saving takes hangs on it.
CHECKPOINT_BYTES = {'float32': 12, 'bfloat16': 8, 'int8': 6}


class BudgetRow(NamedTuple):
    """One model trained for as long as a budget lasts."""

    parameters: int
    tokens: float
    # By the law, in nats per token.
    loss: float
    mfu: float
    fits: bool


class BudgetPlan(NamedTuple):
    """The best use of a budget."""

    rows: list[BudgetRow]
    # Of the rows that fit, that of least loss.
    best: BudgetRow
    # The same for sizes between the rows.
    optimum: Allocation
    # What the law alone says for as many operations as `best` has, as if every size ran at the same share of the peak.
    by_law: Allocation
    law: Law


def plan_budget(
    points: Sequence[SizePoint],
    chip: Chip,
    *,
    dollars: float | None = None,
    hours: float | None = None,
    law: Law = BESIROGLU,
    terms: PricingTerms = DEFAULT_TERMS,
    spot: bool = False,
) -> BudgetPlan:
    """The size and number of tokens of least loss for a budget, given how fast each size trains.

    Args:
        points: from `sweep_sizes`.
        chip: the kind of device.
        dollars: for all devices, or
        hours: of all of them together at the same time.
        law: of the loss.
        terms: of the rental.
        spot: all of it on machines that may be taken away, at their price.

    Raises:
        InputError: no size fits, or the budget is not usable.
    """
    price = (terms.spot_price if spot else terms.price) or 0.0
    if dollars is not None and not price:
        price = price_per_hour(chip, spot=spot).dollars
    rows = []
    for config, row in points:
        if row.refusal:
            continue
        state_bytes = row.parameters * CHECKPOINT_BYTES[config.optimizer.moment_dtype]
        pace = find_pace(config, row.step_seconds, chip, row.num_devices, state_bytes=state_bytes, terms=terms)
        tokens = tokens_for(config, pace, row.num_devices, dollars=dollars, hours=hours, price=price, spot=spot)
        rows.append(BudgetRow(row.parameters, tokens, law.loss(row.parameters, tokens), row.mfu, row.fits))
    usable = [row for row in rows if row.fits]
    if not usable:
        raise InputError(_nothing_fits(points, chip))
    best = min(usable, key=lambda row: row.loss)
    flops = FLOPS_PER_PARAMETER_TOKEN * best.parameters * best.tokens
    return BudgetPlan(rows, best, _between(usable, law), compute_optimal(flops, law), law)


def _nothing_fits(points: Sequence[SizePoint], chip: Chip) -> str:
    counted = [row for _, row in points if not row.refusal]
    if not counted:
        return f'none of the sizes can be laid out: {points[0].row.refusal}' if points else 'no sizes were given'
    least = min(counted, key=lambda row: row.memory_bytes)
    return (
        f'none of the sizes fits: the smallest, {format_si(least.parameters)}, needs '
        f'{format_bytes(least.memory_bytes)} of {format_bytes(chip.memory)}; take more devices, a smaller '
        'train.per_device_batch_size or model.remat_policy=full'
    )


def _between(rows: Sequence[BudgetRow], law: Law) -> Allocation:
    """The best size between the rows, if tokens change evenly on logarithmic axes from one to the next."""
    ordered = sorted(rows, key=lambda row: row.parameters)
    logs_N, logs_D = np.log([[row.parameters, row.tokens] for row in ordered]).T
    sizes = np.linspace(logs_N[0], logs_N[-1], 1001)
    tried = [
        (math.exp(size), math.exp(tokens)) for size, tokens in zip(sizes, np.interp(sizes, logs_N, logs_D), strict=True)
    ]
    return min((Allocation(size, tokens, law.loss(size, tokens)) for size, tokens in tried), key=lambda best: best.loss)
