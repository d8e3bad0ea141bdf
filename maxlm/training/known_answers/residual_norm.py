"""Known answer of the kernels that add a branch to the residual stream and normalize the sum.

Shapes: R rows, D width.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.norm import NormKind, normalize
from maxlm.model.layers.norm_kernels import Plan, add_and_normalize
from maxlm.parallel.partitioning import SINGLE_DEVICE
from maxlm.training.known_answers.answer import KnownAnswer, floats, normal

NAMES = (
    'sum',
    'normalized sum',
    'gradient of the stream',
    'gradient of the branch',
    'gradient of the scale',
    'gradient of the bias',
)


def residual_norm_answer(model: ModelConfig, rows: int) -> KnownAnswer:
    """Returns the addition and normalization over the width of the model, and its gradients."""
    rng, D = np.random.default_rng(0), model.dim
    arrays = [normal(rng, (rows, D), model.dtype) for _ in range(4)]
    is_centered = model.norm == 'layernorm'
    parameters = [rng.standard_normal(D, np.float32) for _ in range(2 if is_centered else 1)]
    plan = Plan(is_centered, model.norm_epsilon, True, SINGLE_DEVICE)

    def run(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return _with_gradients(lambda *arguments: add_and_normalize(*_with_bias(arguments), plan), *inputs)

    def formula(stream_RD: jax.Array, branch_RD: jax.Array, *parameters: jax.Array) -> tuple[jax.Array, ...]:
        sum_RD, kind = stream_RD + branch_RD, NormKind(is_centered, model.norm_epsilon)
        *_, scale_D, bias_D = _with_bias((sum_RD, sum_RD, *parameters))
        return sum_RD, normalize(sum_RD, scale_D, bias_D, kind)

    def exact(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return _with_gradients(formula, *floats(*inputs))

    return KnownAnswer(
        f'{model.norm} with addition (model.norm_kernel=pallas)',
        f'{rows:,} × {D:,}',
        run,
        exact,
        (*arrays, *parameters),
        NAMES[: 4 + len(parameters)],
        model.dtype,
        'set model.norm_kernel=xla',
    )


def _with_bias(arguments: tuple[Any, ...]) -> Any:
    return (*arguments, None)[:4]


def _with_gradients(function: Any, of_sum_RD: jax.Array, of_normed_RD: jax.Array, *inputs: jax.Array) -> Any:
    """Returns the sum and the normalized sum for some inputs, and the gradients of the inputs."""
    outputs, pull = jax.vjp(function, *inputs)
    return *outputs, *pull((of_sum_RD, of_normed_RD))
