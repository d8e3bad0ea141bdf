"""Plans the phases of a recipe: hours, dollars and disk space, estimated without compilation."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from maxlm.api.plan import Plan, planned_data
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.formatting import format_bytes, format_duration
from maxlm.hardware.chips import find_chip
from maxlm.hardware.detect import read_hardware
from maxlm.log import logger
from maxlm.model.parameters import count_parameters
from maxlm.planning.cost import HOUR, num_saves
from maxlm.planning.estimate.state_bytes import checkpoint_bytes
from maxlm.planning.targets import parse_target
from maxlm.supervision.restarts import find_option

# Bytes of a parameter of an exported model, in bfloat16.
EXPORT_BYTES = 2
NOTES = (
    'Estimates for list prices, without compilation; maxlm plan compiles a phase. Not included: data preparation, the '
    'sampling of responses, and benchmarks. Disk space is that of checkpoints and exports.'
)


class PlannedPhase(NamedTuple):
    """Plan of one phase. Values are None if they are unknown.

    Attributes:
        number: number of the phase, from 1.
        name: command of the phase, with the config of a training.
        steps: number of training steps.
        hours: hours on the target.
        dollars: price of these hours.
        disk: bytes of the checkpoints and the exported model that are kept.
        note: reason why values are unknown, or the memory that the target lacks; '' = none.
    """

    number: int
    name: str
    steps: int | None = None
    hours: float | None = None
    dollars: float | None = None
    disk: int | None = None
    note: str = ''


def present_target() -> str:
    """Returns the target of this machine's GPUs for `Plan`, or '' if it has none that are known."""
    nvidia = read_hardware().nvidia
    chip = find_chip(nvidia.gpus[0].name) if nvidia and nvidia.gpus else None
    return f'{chip.name}:{len(nvidia.gpus)}' if nvidia and chip else ''


def plan_phases(
    phases: Sequence[Sequence[str] | None], configs: Sequence[Config | None], target: str
) -> list[PlannedPhase]:
    """Returns the plans of the phases that are not None.

    Args:
        phases: the words of each phase.
        configs: config of each training phase, else None.
        target: name of the hardware, as for `Plan`; '' = unknown, without hours and dollars.

    Raises:
        InputError: the target does not exist.
    """
    # No program runs on an accelerator, and initializing one would take it from the phases.
    jax.config.update('jax_platforms', 'cpu')
    if target:
        parse_target(target)
    planned = []
    for number, (phase, config) in enumerate(zip(phases, configs, strict=True), start=1):
        if phase is not None:
            verb, *arguments = phase
            what = (
                arguments[0]
                if verb == '-m'
                else find_option(arguments, '--config') or find_option(arguments, '--output')
            )
            name = f'{verb} {what}'.rstrip()
            planned.append(PlannedPhase(number, name) if config is None else _plan(number, name, config, target))
    return planned


def plan_text(planned: Sequence[PlannedPhase], target: str) -> str:
    """Returns a table of the plans with their sums."""
    rows = [('phase', '', 'steps', 'time', 'cost', 'disk')]
    rows += [
        (
            str(one.number),
            one.name,
            '-' if one.steps is None else f'{one.steps:,}',
            '-' if one.hours is None else format_duration(one.hours * HOUR),
            '-' if one.dollars is None else f'${one.dollars:,.0f}',
            '-' if one.disk is None else format_bytes(one.disk),
        )
        for one in planned
    ]
    hours, dollars, disk = (
        [value for one in planned if (value := getattr(one, name)) is not None] for name in ('hours', 'dollars', 'disk')
    )
    if len(planned) > 1:
        rows.append(
            (
                'all',
                '',
                '',
                format_duration(sum(hours) * HOUR) if hours else '-',
                f'${sum(dollars):,.0f}' if dollars else '-',
                format_bytes(sum(disk)) if disk else '-',
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        '  '.join(cell.ljust(width) if place < 2 else cell.rjust(width) for place, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    where = f'on {target}' if target else 'without hardware: add --target=h100:8 for times and prices'
    notes = [f'phase {one.number}: {one.note}' for one in planned if one.note]
    return '\n'.join([f'plan {where}', *lines, *notes, NOTES])


def _plan(number: int, name: str, config: Config, target: str) -> PlannedPhase:
    try:
        with _quiet():
            if not target:
                resolved = resolve(config, platform='cpu', num_devices=1, **planned_data(config, 0)._asdict())
                # A budget in hours or dollars needs a target.
                steps = None if config.by_budget else resolved.train.num_steps
                return PlannedPhase(number, name, steps, disk=_disk_bytes(resolved))
            plan = Plan(config, target, estimate=True)
            cost = plan.cost
    except InputError as error:
        return PlannedPhase(number, name, note=str(error))
    forecast = plan.forecast
    lack = f'needs {format_bytes(forecast.needed)} of {format_bytes(forecast.available)} per device'
    return PlannedPhase(
        number,
        name,
        cost.steps,
        cost.hours,
        cost.dollars,
        _disk_bytes(forecast.config),
        '' if plan.fits else f'does not fit {target}: {lack}',
    )


def _disk_bytes(config: Config) -> int:
    """Returns the bytes of a run at its end: the checkpoints that are kept, and the exported model."""
    size, rules = checkpoint_bytes(config), config.checkpoint
    kept = size * max(1, min(rules.max_to_keep + rules.keep_best, num_saves(config)))
    if rules.max_bytes:
        kept = min(kept, max(size, rules.max_bytes))
    return kept + (EXPORT_BYTES * count_parameters(config.model) if config.export.at_end else 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings about data that earlier phases write."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
