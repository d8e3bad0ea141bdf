"""Fits the constants of `maxlm.planning.estimate.roofline` to published throughputs and prints held-out errors.

The fit minimizes squares of the logarithm of predicted over measured time, so that a factor of 2 counts equally in both
directions. The total weight of a source is the square root of its number of points, so that no long table dominates.
Large errors count linearly (soft L1), because some published rows contain errors.

The fit covers the constants that the data can identify: matrix products for each chip, attention for GPUs, and overlap
for each platform. The constants in `FIXED` are assumed, because memory and links never dominate a published step.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.published import Published
from maxlm.planning.estimate.roofline import LIKE, Efficiency, step_time, transfer_times
from maxlm.planning.estimate.work import estimate_work

FIXED: dict[str, dict[str, float]] = {
    # Assumed values. The data only identifies the combination of links and overlap: links=0.8 fits equally well.
    'gpu': {'memory': 0.85, 'links': 0.55, 'network': 0.55, 'latency': 20e-6},
    # Assumed values. With sequences of 2048 tokens and wide models, the data cannot separate attention from products.
    'tpu': {'memory': 0.7, 'links': 0.8, 'network': 0.8, 'latency': 5e-6, 'attention': 0.6},
}
START = {'products': (0.7, 0.2, 0.98), 'attention': (0.4, 0.1, 0.9), 'overlap': (0.5, 0.0, 1.0)}
# Fitted constants of other implementations: additional memory traffic without fusion, and the efficiency of the
# attention kernel of early 2023 that MosaicML's table used.
NUISANCE = {'unfused': (1.6, 1.0, 6.0), 'old_attention': (0.3, 0.1, 0.9)}
OLD_ATTENTION = 'llm-foundry'


class Calibration(NamedTuple):
    """Fitted constants.

    Attributes:
        efficiencies: by chip; see `LIKE`.
        unfused: factor of memory traffic in implementations without fusion.
        old_attention: efficiency of an attention kernel of early 2023.
    """

    efficiencies: dict[str, Efficiency]
    unfused: float
    old_attention: float


class HeldOut(NamedTuple):
    """Absolute errors of the logarithm of time on points that were excluded from the fit.

    Attributes:
        median: median error.
        worst: largest error.
        by_source: mean signed error of each source; positive if the prediction is too slow.
    """

    median: float
    worst: float
    by_source: dict[str, float]


class _Parts(NamedTuple):
    """Seconds of one point, at an efficiency of 1 for fitted constants; `fixed` is always added."""

    chip: str
    products: float
    attention: float
    memory: float
    hideable: float
    waiting: float
    fixed: float
    is_fused: bool
    has_old_attention: bool


def calibrate(points: Sequence[Published]) -> Calibration:
    """Fits the constants of one platform to its points."""
    from scipy.optimize import least_squares

    (platform,) = {point.chip.platform for point in points}
    parts = [_parts(point) for point in points]
    chips = sorted({part.chip for part in parts})
    shared = ['overlap'] if platform == 'tpu' else ['attention', 'overlap', 'unfused', 'old_attention']
    bounds = [START['products']] * len(chips) + [{**START, **NUISANCE}[name] for name in shared]
    measured = np.log([point.seconds for point in points])
    numbers = collections.Counter(point.source for point in points)
    weights = np.array([numbers[point.source] ** -0.25 for point in points])
    arrays = _Arrays.of(parts, chips)

    def residuals(x: np.ndarray) -> Any:
        values = {
            **FIXED[platform],
            'unfused': 1.0,
            'old_attention': 1.0,
            **dict(zip(shared, x[len(chips) :], strict=True)),
        }
        return weights * (np.log(arrays.seconds(x[: len(chips)], values)) - measured)

    start, lower, upper = np.array(bounds).T
    found = least_squares(residuals, start, bounds=(lower, upper), loss='soft_l1', f_scale=0.1).x
    values = {**FIXED[platform], **dict(zip(shared, map(float, found[len(chips) :]), strict=True))}
    nuisance = {name: values.pop(name, 1.0) for name in NUISANCE}
    efficiencies = {
        chip: Efficiency(products=float(products), **values) for chip, products in zip(chips, found, strict=False)
    }
    return Calibration(efficiencies, **nuisance)


def predict(point: Published, calibration: Calibration) -> float:
    """Returns the predicted seconds of a step, corrected for the point's implementation."""
    work = estimate_work(point.config, point.chip.capability)
    efficiency = calibration.efficiencies[_chip(point)]
    if not point.is_fused:
        work = work._replace(memory_bytes=work.memory_bytes * calibration.unfused)
    if point.source == OLD_ATTENTION:
        efficiency = efficiency._replace(attention=calibration.old_attention)
    return step_time(
        work,
        point.chip,
        num_devices=point.num_devices,
        num_islands=point.num_islands,
        mesh_sizes=point.config.mesh.sizes,
        dtype=point.config.model.dtype,
        efficiency=efficiency,
    ).total


def errors(points: Sequence[Published], calibration: Calibration) -> np.ndarray:
    """Returns the logarithm of predicted over measured time of each point."""
    return np.array([np.log(predict(point, calibration) / point.seconds) for point in points])


def hold_out(points: Sequence[Published], groups: Sequence[Any]) -> HeldOut:
    """Computes the errors on each group of points when the fit excludes the group.

    A group is not held out if a chip or a constant would have no points without it.

    Args:
        points: points of one platform.
        groups: group of each point.
    """
    found: list[tuple[str, float]] = []
    for group in dict.fromkeys(groups):
        kept = [point for point, its in zip(points, groups, strict=True) if its != group]
        left = [point for point, its in zip(points, groups, strict=True) if its == group]
        known = {_chip(point) for point in kept}
        left = [point for point in left if _chip(point) in known]
        has_old = any(point.source == OLD_ATTENTION for point in kept)
        if not left or (left[0].source == OLD_ATTENTION and not has_old):
            continue
        calibration = calibrate(kept)
        found += zip([point.source for point in left], errors(left, calibration), strict=True)
    sizes = np.abs([error for _, error in found])
    by_source = {
        source: float(np.mean([error for its, error in found if its == source])) for source, _ in dict(found).items()
    }
    return HeldOut(float(np.median(sizes)), float(sizes.max()), by_source)


class _Arrays(NamedTuple):
    """`_Parts` of all points as arrays, which makes the fit fast."""

    chip: np.ndarray
    products: np.ndarray
    attention: np.ndarray
    memory: np.ndarray
    hideable: np.ndarray
    waiting: np.ndarray
    fixed: np.ndarray
    is_fused: np.ndarray
    has_old_attention: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[_Parts], chips: Sequence[str]) -> _Arrays:
        columns = [np.array(column) for column in zip(*(part[1:] for part in parts), strict=True)]
        return cls(np.array([chips.index(part.chip) for part in parts]), *columns)

    def seconds(self, products: np.ndarray, values: dict[str, Any]) -> np.ndarray:
        """Returns the seconds of all points as `step_time` computes them, without pipelines and offloading."""
        attention = np.where(self.has_old_attention, values['old_attention'], values['attention'])
        compute = self.products / products[self.chip] + self.attention / attention
        memory = self.memory * np.where(self.is_fused, 1.0, values['unfused'])
        hidden = values['overlap'] * np.minimum(self.hideable, compute + memory)
        return compute + memory + self.hideable + self.waiting - hidden + self.fixed


def _chip(point: Published) -> str:
    return LIKE.get(point.chip.name, point.chip.name)


def _parts(point: Published) -> _Parts:
    work, chip = estimate_work(point.config, point.chip.capability), point.chip
    one = Efficiency(**{'products': 1.0, 'attention': 1.0, **FIXED[chip.platform]})
    times = transfer_times(work, chip, one, point.num_devices, point.num_islands, point.config.mesh.sizes)
    return _Parts(
        chip=_chip(point),
        products=work.flops / (chip.tflops * 1e12),
        attention=work.attention_flops / (chip.tflops * 1e12),
        memory=work.memory_bytes / (chip.memory_bandwidth * one.memory),
        hideable=sum(time.seconds for time in times if time.can_hide),
        waiting=sum(time.seconds for time in times if not time.can_hide),
        fixed=one.per_step,
        is_fused=point.is_fused,
        has_old_attention=point.source == OLD_ATTENTION,
    )
