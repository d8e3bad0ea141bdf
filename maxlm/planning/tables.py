"""Formats sweeps and budgets as text tables and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from maxlm.formatting import GIB, format_si
from maxlm.planning.budget import BudgetPlan, BudgetRow
from maxlm.planning.scaling import ScalingRow


def table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Formats a table of text, with the first column left-aligned and the rest right-aligned."""
    widths = [max(len(line[column]) for line in [header, *cells]) for column in range(len(header))]
    lines = []
    for line in [header, *cells]:
        first, *rest = line
        padded = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append('  '.join([first.ljust(widths[0]), *padded]).rstrip())
    return '\n'.join(lines)


SCALING_HEADER = (
    *('scaling', 'devices', 'parameters', 'batch', 'mesh', 'tokens/s'),
    *('s/step', 'MFU', 'efficiency', 'GiB', 'hours', '$'),
)


def scaling_cells(row: ScalingRow) -> list[str]:
    """Returns the formatted cells of a row."""
    start = [row.kind, f'{row.num_devices}', format_si(row.parameters), f'{row.global_batch}']
    if row.refusal:
        return [*start, *'-' * 8]
    memory = f'{row.memory_bytes / GIB:.1f}' + ('' if row.fits else ' (does not fit)')
    return [
        *start,
        row.mesh,
        format_si(row.tokens_per_second),
        f'{row.step_seconds:.3g}',
        f'{row.mfu:.0%}',
        f'{row.efficiency:.0%}',
        memory,
        f'{row.hours:,.1f}',
        '-' if row.dollars is None else f'{row.dollars:,.0f}',
    ]


def scaling_table(rows: Sequence[ScalingRow]) -> str:
    """Formats the rows as text, followed by the reasons of refused rows."""
    lines = [table(SCALING_HEADER, [scaling_cells(row) for row in rows])]
    lines += [f'{row.kind} on {row.num_devices}: {row.refusal}' for row in rows if row.refusal]
    return '\n'.join(lines)


BUDGET_HEADER = ('parameters', 'tokens', 'tokens/parameter', 'MFU', 'loss', '')


def budget_cells(row: BudgetRow, plan: BudgetPlan) -> list[str]:
    """Formats a model of the budget plan as the cells of a table row."""
    note = 'best' if row is plan.best else '' if row.fits else 'does not fit'
    ratio = f'{row.tokens / row.parameters:,.1f}'
    return [format_si(row.parameters), format_si(row.tokens), ratio, f'{row.mfu:.0%}', f'{row.loss:.3f}', note]


def budget_table(plan: BudgetPlan) -> str:
    """Formats the plan as text: its rows, the optimum and the law."""
    optimum, by_law = plan.optimum, plan.by_law
    return '\n'.join(
        [
            table(BUDGET_HEADER, [budget_cells(row, plan) for row in plan.rows]),
            f'best interpolated size: {format_si(optimum.parameters)} parameters on '
            f'{format_si(optimum.tokens)} tokens, loss {optimum.loss:.3f}',
            f'compute-optimal size at equal MFU: {format_si(by_law.parameters)} parameters on '
            f'{format_si(by_law.tokens)} tokens',
            f'scaling law: {plan.law.source}',
        ]
    )


def as_json(rows: Sequence[ScalingRow] | BudgetPlan) -> Any:
    """Returns a JSON-serializable object."""
    if isinstance(rows, BudgetPlan):
        return {
            'rows': [row._asdict() for row in rows.rows],
            'best': rows.best._asdict(),
            'optimum': rows.optimum._asdict(),
            'by_law': rows.by_law._asdict(),
            'law': dataclasses.asdict(rows.law),
        }
    return [row._asdict() for row in rows]
