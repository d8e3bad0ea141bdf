"""Finds the model of least loss for a budget, from the speed of each size and a scaling law."""

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
from maxlm.planning.cost import DEFAULT_TERMS, PricingTerms, estimate_step_cost, tokens_for
from maxlm.planning.estimate.state_bytes import checkpoint_bytes
from maxlm.planning.scaling import SizePoint


class BudgetRow(NamedTuple):
    """One model size, trained until the budget is spent.

    Attributes:
        parameters: number of parameters that a token uses.
        tokens: number of training tokens.
        loss: loss predicted by the law, in nats per token.
        mfu: model FLOPs utilization.
        fits: whether the run fits into memory.
    """

    parameters: int
    tokens: float
    loss: float
    mfu: float
    fits: bool


class BudgetPlan(NamedTuple):
    """The best use of a budget.

    Attributes:
        rows: one row per size.
        best: the row of least loss among the rows that fit.
        optimum: the best size when sizes between the rows are allowed.
        by_law: the allocation that the law recommends for the operations of `best`, if every size had the same MFU.
        law: the scaling law.
    """

    rows: list[BudgetRow]
    best: BudgetRow
    optimum: Allocation
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
) -> BudgetPlan:
    """Returns the size and number of tokens of least loss for a budget, given the speed of each size.

    Args:
        points: sizes from `sweep_sizes`.
        chip: kind of device.
        dollars: budget for all devices. Give either `dollars` or `hours`.
        hours: wall-clock hours, with all devices running at the same time.
        law: scaling law of the loss.
        terms: pricing terms.

    Raises:
        InputError: no size fits, or the budget is invalid.
    """
    price = terms.price or 0.0
    if dollars is not None and not price:
        price = price_per_hour(chip).dollars
    rows = []
    for config, row in points:
        if row.refusal:
            continue
        state_bytes = checkpoint_bytes(config)
        step_cost = estimate_step_cost(
            config, row.step_seconds, chip, row.num_devices, state_bytes=state_bytes, terms=terms
        )
        tokens = tokens_for(config, step_cost, row.num_devices, dollars=dollars, hours=hours, price=price)
        active = row.active_parameters
        rows.append(BudgetRow(active, tokens, law.loss(active, tokens), row.mfu, row.fits))
    usable = [row for row in rows if row.fits]
    if not usable:
        raise InputError(_nothing_fits(points, chip))
    best = min(usable, key=lambda row: row.loss)
    flops = FLOPS_PER_PARAMETER_TOKEN * best.parameters * best.tokens
    return BudgetPlan(rows, best, _between(usable, law), compute_optimal(flops, law), law)


def _nothing_fits(points: Sequence[SizePoint], chip: Chip) -> str:
    counted = [row for _, row in points if not row.refusal]
    if not counted:
        return f'no size has a valid layout: {points[0].row.refusal}' if points else 'no model sizes to compare'
    least = min(counted, key=lambda row: row.memory_bytes)
    return (
        f'no size fits: the smallest ({format_si(least.parameters)} parameters) needs '
        f'{format_bytes(least.memory_bytes)} of {format_bytes(chip.memory)} per device; use more devices, a '
        'smaller train.per_device_batch_size or model.remat_policy=full'
    )


def _between(rows: Sequence[BudgetRow], law: Law) -> Allocation:
    """Returns the best size between the rows, interpolating tokens linearly on logarithmic axes."""
    ordered = sorted(rows, key=lambda row: row.parameters)
    logs_N, logs_D = np.log([[row.parameters, row.tokens] for row in ordered]).T
    sizes = np.linspace(logs_N[0], logs_N[-1], 1001)
    tried = [
        (math.exp(size), math.exp(tokens)) for size, tokens in zip(sizes, np.interp(sizes, logs_N, logs_D), strict=True)
    ]
    return min((Allocation(size, tokens, law.loss(size, tokens)) for size, tokens in tried), key=lambda best: best.loss)
