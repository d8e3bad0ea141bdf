"""Known answer of the kernels that add a branch to the residual stream and normalize the sum.

Shapes: R rows, D width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.norm_kernels import FusedNorm, add_and_normalize
from maxlm.parallel.partitioning import SINGLE_DEVICE
from maxlm.training.known_answers.answer import KnownAnswer, floats, normal

INPUTS = ('stream', 'branch', 'scale', 'bias', 'bias of the branch')


def residual_norm_answer(model: ModelConfig, rows: int) -> KnownAnswer:
    """Returns the addition and normalization over the width of the model, and its gradients."""
    rng, D = np.random.default_rng(0), model.dim
    arrays = [normal(rng, (rows, D), model.dtype) for _ in range(4)]
    vectors = [rng.standard_normal(D, np.float32) for _ in range(3)]
    plan = FusedNorm(model.norm == 'layernorm', model.norm_epsilon, True, SINGLE_DEVICE)

    def run(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return _with_gradients(lambda *arguments: add_and_normalize(*arguments, plan), *inputs)

    def formula(
        stream_RD: jax.Array, branch_RD: jax.Array, scale_D: jax.Array, bias_D: jax.Array, branch_bias_D: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # The branch contains its bias already.
        branch_RD = branch_RD + (branch_bias_D - jax.lax.stop_gradient(branch_bias_D))[None]
        sum_RD = stream_RD + branch_RD
        x_RD = sum_RD - sum_RD.mean(-1, keepdims=True) if plan.is_centered else sum_RD
        mean_square_R1 = jnp.square(x_RD).mean(-1, keepdims=True)
        return sum_RD, x_RD / jnp.sqrt(mean_square_R1 + plan.epsilon) * scale_D[None] + bias_D[None]

    def exact(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return _with_gradients(formula, *floats(*inputs))

    kernel = f'{model.norm} of a sum (model.norm_kernel=pallas)'
    names = ('sum', 'normalized sum', *(f'gradient of the {name}' for name in INPUTS))
    inputs = (*arrays, *vectors)
    return KnownAnswer(kernel, f'{rows:,} × {D:,}', run, exact, inputs, names, model.dtype, 'set model.norm_kernel=xla')


def _with_gradients(
    function: Any, of_sum_RD: jax.Array, of_normed_RD: jax.Array, *inputs: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the sum and the normalized sum for some inputs, and the gradients of the inputs."""
    outputs, pull = jax.vjp(function, *inputs)
    return *outputs, *pull((of_sum_RD, of_normed_RD))
