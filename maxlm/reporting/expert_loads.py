"""Heat maps of the loads of experts by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from maxlm.reporting.run_summary import ReportedRun

# Lower bounds of the levels of a heat map, as loads relative to the mean.
LEVELS = (0.0, 0.1, 0.5, 0.8, 1.25, 2.0, 4.0)
# An expert below this load has practically no tokens.
_UNUSED = LEVELS[1]


@dataclasses.dataclass(frozen=True)
class LoadMap:
    """Loads of the experts at one step, with layers as rows and experts as columns.

    Attributes:
        step: number of the step.
        num_layers, num_experts: size of the map.
        paths: SVG path of the cells of each level of LEVELS, in units of a cell.
        largest: largest load, relative to the mean.
        num_unused: number of experts that get practically no tokens, over all layers.
    """

    step: int
    num_layers: int
    num_experts: int
    paths: tuple[str, ...]
    largest: float
    num_unused: int


def load_maps(run: ReportedRun) -> list[LoadMap]:
    """Returns the heat maps of the first and the last line of expert_loads.jsonl, without invalid lines."""
    lines = [line for line in run.history.expert_loads if _is_valid(line)]
    return [_load_map(line) for line in (lines[:1] + lines[1:][-1:])]


def _is_valid(line: dict[str, Any]) -> bool:
    loads = line.get('loads')
    if type(line.get('step')) is not int or not isinstance(loads, list) or not loads:
        return False
    rows = all(isinstance(row, list) and row for row in loads)
    return rows and len({len(row) for row in loads}) == 1 and all(_is_load(load) for row in loads for load in row)


def _is_load(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0


def _load_map(line: dict[str, Any]) -> LoadMap:
    loads: Sequence[Sequence[float]] = line['loads']
    cells: list[list[str]] = [[] for _ in LEVELS]
    for y, row in enumerate(loads):
        for x, load in enumerate(row):
            level = max(index for index, bound in enumerate(LEVELS) if load >= bound)
            cells[level].append(f'M{x} {y}h1v1h-1z')
    flat = [load for row in loads for load in row]
    return LoadMap(
        step=line['step'],
        num_layers=len(loads),
        num_experts=len(loads[0]),
        paths=tuple(map(''.join, cells)),
        largest=max(flat),
        num_unused=sum(load < _UNUSED for load in flat),
    )
