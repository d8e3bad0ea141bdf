"""Scaling law of the loss, and compute-optimal allocation between parameters and tokens.

`L(N, D) = E + A / N^α + B / D^β`, for N parameters and D tokens, where training takes `C = 6 * N * D` operations
(Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models", approach 3). Of a model with experts, N counts
the parameters that a token uses, as C does.

The predicted loss holds for one data set and tokenizer. The split of a budget between N and D transfers to other text;
to predict losses, refit the law to your own runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxlm.errors import InputError
from maxlm.model.parameters import count_active_parameters
from maxlm.telemetry.metrics import read_metrics
from maxlm.workdir.files import read_config

FLOPS_PER_PARAMETER_TOKEN = 6
MIN_RUNS = 5
# Minimum ratio of largest to smallest size, and of longest to shortest run. A law fitted to a smaller range does not
# extrapolate to larger models.
MIN_SPAN = 3.0
# Minimum standard deviation of log N and log D across their main axis. If D = 20 · N in all runs, the effects of N and
# D cannot be separated.
MIN_SCATTER = 0.2
# Huber delta for the logarithm of the loss: Hoffmann et al. 2022, appendix D.3.
HUBER_DELTA = 1e-3
# Minimum singular value of the column-normalized Jacobian. Below it, the coefficients are not independent.
MIN_STRENGTH = 1e-6
# Bounds of the fit, for the exponents and for the logarithms of the three loss terms at the mean of the runs. A fit
# that ends on a bound has found no law.
EXPONENTS = (0.02, 2.0)
SMALLEST, LARGEST = -6.0, 4.0


@dataclasses.dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta


# The exponents come from the paper's source text. The paper rounds them to 0.34 and 0.28, which changes predictions for
# large models considerably.
HOFFMANN = Law(
    1.69, 406.4, 410.7, 0.3392, 0.2849, 'Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models"'
)
# Default law, refitted to runs read off the paper's plots because the original fit had not converged. It has smaller
# residuals, and agrees with the paper's two other approaches and with Chinchilla: about 20 tokens per parameter.
BESIROGLU = Law(
    1.8172, 482.01, 2085.43, 0.3478, 0.3658, 'Besiroglu et al. 2024, "Chinchilla Scaling: A Replication Attempt"'
)


class Allocation(NamedTuple):
    """Parameters and tokens chosen for a compute budget, and the predicted loss."""

    parameters: float
    tokens: float
    loss: float


class ScalingRun(NamedTuple):
    """Size, length and final loss of a finished run."""

    name: str
    parameters: float
    tokens: float
    loss: float


class Fit(NamedTuple):
    """A law fitted to the user's own runs.

    Attributes:
        law: the fitted law.
        runs: number of runs.
        error: root mean square of log(predicted loss / loss) over the runs.
        held_out_error: the same, with each run predicted by a fit to the other runs. None if there are too few runs.
        size_exponent: the optimal size grows as the budget's operations to this power.
        size_exponent_error: jackknife standard error of `size_exponent`. None if there are too few runs.
    """

    law: Law
    runs: int
    error: float
    held_out_error: float | None
    size_exponent: float
    size_exponent_error: float | None


def compute_optimal(flops: float, law: Law = BESIROGLU) -> Allocation:
    """Returns the size and length of least loss for `flops` operations (Hoffmann et al. 2022, equation 4)."""
    if not flops > 0:
        raise InputError(f'compute budget of {flops:g} FLOPs: must be positive; set a number above 0')
    total = law.alpha + law.beta
    scale = (law.alpha * law.A / (law.beta * law.B)) ** (1 / total)
    product = flops / FLOPS_PER_PARAMETER_TOKEN
    parameters, tokens = scale * product ** (law.beta / total), product ** (law.alpha / total) / scale
    return Allocation(parameters, tokens, law.loss(parameters, tokens))


def read_runs(workdirs: Sequence[Path]) -> list[ScalingRun]:
    """Reads finished runs, with their last eval/loss, or their final train/loss if any run has no eval/loss.

    Raises:
        InputError: a run is not finished, or the runs differ in their data or vocabulary.
    """
    lines = {path: read_metrics(path) for path in workdirs}
    configs = {path: read_config(path) for path in workdirs}
    for path in workdirs:
        if not any('train/loss' in line for line in lines[path]):
            raise InputError(f'{path}: metrics.jsonl has no train/loss; use workdirs of finished runs')
        done, num_steps = lines[path][-1]['step'], configs[path].train.num_steps
        if done < num_steps:
            # The learning rate has not decayed, so the loss is higher than that of a run of this length.
            raise InputError(f'{path}: stopped at step {done} of {num_steps}; finish the run, or omit it')
    compared: dict[str, dict[Path, object]] = {
        'model.vocab_size': {path: configs[path].model.vocab_size for path in workdirs},
        'data': {path: configs[path].data.sources or configs[path].data.path for path in workdirs},
        'data.sources_schedule': {path: configs[path].data.sources_schedule for path in workdirs},
    }
    for key, values in compared.items():
        if len(set(values.values())) > 1:
            first, other = workdirs[0], next(path for path in workdirs if values[path] != values[workdirs[0]])
            raise InputError(
                f'{first} has {key}={values[first]} and {other} has {values[other]}; losses can be compared only on '
                'the same data and vocabulary; use runs that share both'
            )
    evaluated = all(any(line.get('eval/loss') is not None for line in lines[path]) for path in workdirs)
    runs = []
    for path in workdirs:
        train = configs[path].train
        tokens = train.num_steps * train.global_batch_size * configs[path].data.seq_len
        loss = _last(lines[path], 'eval/loss') if evaluated else _end(lines[path], train.num_steps)
        if loss is None:
            raise InputError(f'{path}: the last losses are not finite; omit this run')
        runs.append(ScalingRun(str(path), count_active_parameters(configs[path].model), tokens, loss))
    return runs


def refit(runs: Sequence[ScalingRun]) -> Fit:
    """Fits a law to runs, by the least Huber loss of log L, as in Hoffmann et al. 2022, appendix D.3.

    Raises:
        InputError: there are too few runs, or they are too similar to separate the effects of size and length.
    """
    _check_spread(runs)
    law = _fit(runs)
    error = _rms([_log_ratio(law, run) for run in runs])
    if len(runs) == MIN_RUNS:
        return Fit(law, len(runs), error, None, _size_exponent(law), None)
    others = [_fit([other for other in runs if other is not run], near=law) for run in runs]
    held_out = _rms([_log_ratio(other, run) for other, run in zip(others, runs, strict=True)])
    spread = float(np.std([_size_exponent(other) for other in others])) * math.sqrt(len(runs) - 1)
    return Fit(law, len(runs), error, held_out, _size_exponent(law), spread)


def _size_exponent(law: Law) -> float:
    return law.beta / (law.alpha + law.beta)


def _last(lines: list[dict], name: str) -> float | None:
    return next(line[name] for line in reversed(lines) if line.get(name) is not None)


def _end(lines: list[dict], num_steps: int) -> float | None:
    """Returns the mean of train/loss over the last twentieth of the run, since the loss of one batch is too noisy."""
    losses = [line['train/loss'] for line in lines if line.get('train/loss') is not None]
    late = [
        line['train/loss'] for line in lines if line.get('train/loss') is not None and line['step'] > 0.95 * num_steps
    ]
    return float(np.mean(late)) if late else (losses[-1] if losses else None)


def _check_spread(runs: Sequence[ScalingRun]) -> None:
    if len(runs) < MIN_RUNS:
        raise InputError(f'{len(runs)} runs cannot determine five coefficients; use at least {MIN_RUNS} runs')
    for name, values in {
        'parameters': [run.parameters for run in runs],
        'tokens': [run.tokens for run in runs],
    }.items():
        span = max(values) / min(values)
        if span < MIN_SPAN or len({round(math.log(value), 1) for value in values}) < 3:
            raise InputError(
                f'the runs have {min(values):.3g} to {max(values):.3g} {name}; use runs with at least three '
                f'different numbers of {name} that span a factor of {MIN_SPAN:g}'
            )
    logs = np.log([[run.parameters, run.tokens] for run in runs])
    scatter = np.linalg.svd(logs - logs.mean(0), compute_uv=False)[-1] / math.sqrt(len(runs))
    if scatter < MIN_SCATTER:
        raise InputError(
            'tokens and parameters grow together in all runs, so their effects cannot be separated; add runs '
            'of the same size and a different length'
        )


def _fit(runs: Sequence[ScalingRun], near: Law | None = None) -> Law:
    """Returns the law of least Huber loss; with `near`, starts the search only from that law.

    The objective is the paper's. Least squares finds its minimum in tens of steps because it follows the curvature.
    L-BFGS needs thousands of steps in this narrow valley; the original fit stopped too early.
    """
    # Imported here because SciPy's optimizers import slowly. JAX depends on SciPy.
    from scipy import optimize

    logs_N, logs_D, logs_L = np.log([[run.parameters, run.tokens, run.loss] for run in runs]).T
    # N and D are divided by their geometric means, so that the coefficients have the magnitude of the loss.
    middle_N, middle_D = logs_N.mean(), logs_D.mean()
    x_N, x_D = logs_N - middle_N, logs_D - middle_D

    def parts(coefficients: np.ndarray) -> np.ndarray:
        a, b, e, alpha, beta = coefficients
        return np.exp(np.stack([a - alpha * x_N, b - beta * x_D, np.full_like(x_N, e)]))

    def residuals(coefficients: np.ndarray) -> np.ndarray:
        return np.log(parts(coefficients).sum(0)) - logs_L

    def slopes(coefficients: np.ndarray) -> np.ndarray:
        losses = parts(coefficients)
        fractions = losses / losses.sum(0)
        return np.stack([*fractions, -fractions[0] * x_N, -fractions[1] * x_D], axis=1)

    if near is None:
        starts = _starts(x_N, x_D, np.exp(-logs_L))
    else:
        a, b = math.log(near.A) - near.alpha * middle_N, math.log(near.B) - near.beta * middle_D
        starts = [[a, b, math.log(near.E), near.alpha, near.beta]]
    lower, upper = [SMALLEST] * 3 + [EXPONENTS[0]] * 2, [LARGEST] * 3 + [EXPONENTS[1]] * 2
    fits = [
        optimize.least_squares(
            residuals, np.clip(start, lower, upper), slopes, (lower, upper), loss='huber', f_scale=HUBER_DELTA,
            x_scale='jac', ftol=1e-12, xtol=1e-10, gtol=1e-14, max_nfev=300,
        )
        for start in starts
    ]  # fmt: skip
    best = min(fits, key=lambda fit: fit.cost)
    a, b, e, alpha, beta = best.x
    if near is None:
        _check_determined(slopes(best.x))
    # A fit that leaves out one run may end on a bound; the held-out error shows that.
    if near is None and _on_bound(best.x):
        raise InputError(
            f'{len(runs)} runs do not show how the loss depends on size and length (the best fit has exponents '
            f'{alpha:.2f} and {beta:.2f} and a floor of {math.exp(e):.2g}); add runs of more different sizes '
            'and lengths, each with its own best learning rate'
        )
    A, B = math.exp(a + alpha * middle_N), math.exp(b + beta * middle_D)
    return Law(math.exp(e), A, B, float(alpha), float(beta), f'fitted to {len(runs)} runs')


def _check_determined(slopes: np.ndarray) -> None:
    """Raises InputError if many laws fit the runs, e.g. two sizes crossed with two lengths plus one more run."""
    strengths = np.linalg.svd(slopes / np.linalg.norm(slopes, axis=0), compute_uv=False)
    if strengths[-1] < MIN_STRENGTH:
        raise InputError(
            'several laws fit these runs equally well; add runs that differ from all others in size and length'
        )


def _on_bound(coefficients: np.ndarray, margin: float = 0.01) -> bool:
    parts, exponents = coefficients[:3], coefficients[3:]
    return (
        min(parts) < SMALLEST + margin
        or max(parts) > LARGEST - margin
        or min(exponents) < EXPONENTS[0] + margin
        or max(exponents) > EXPONENTS[1] - margin
    )


def _starts(x_N: np.ndarray, x_D: np.ndarray, weights: np.ndarray) -> list[list[float]]:
    """Returns the best points of a grid of exponents, where the law is linear. Replaces the paper's 4,500 starts."""
    from scipy import optimize

    found = []
    for alpha in np.linspace(0.1, 1.0, 7):
        for beta in np.linspace(0.1, 1.0, 7):
            columns = np.stack([np.exp(-alpha * x_N), np.exp(-beta * x_D), np.ones_like(x_N)], axis=1)
            solution, distance = optimize.nnls(columns * weights[:, None], np.ones_like(x_N))
            found.append((distance, [*np.log(np.maximum(solution, 1e-2)), alpha, beta]))
    return [start for _, start in sorted(found)[:4]]


def _log_ratio(law: Law, run: ScalingRun) -> float:
    return math.log(law.loss(run.parameters, run.tokens) / run.loss)


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))
