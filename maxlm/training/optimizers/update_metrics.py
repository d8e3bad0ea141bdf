"""Metrics of an optimizer update: its size, and the size of the gradient relative to Adam's second moment."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlm.config.schema import Config
from maxlm.model.parameters import names
from maxlm.training.optimizers.parameter_groups import settings_of
from maxlm.training.optimizers.quantized_moments import Blocks, load_moment

# Names of the metrics.
UPDATE_METRICS = ('update_norm', 'second_moment_ratio')


def update_metrics(
    grads: optax.Updates, updates: optax.Updates, opt_state: Any, ok: jax.Array, config: Config
) -> dict[str, jax.Array]:
    """Returns `update_norm` and, if Adam trains any array, `second_moment_ratio`.

    `update_norm` is the global norm of the change of the parameters, or 0 if `ok` is False.

    `second_moment_ratio` is RMS_t of Wortsman et al. 2023, "Stable and Low-Precision Training for Large-Scale
    Vision-Language Models": √mean(g² / max(v, eps²)) over the elements of an array, with the gradient g after clipping
    and the bias-corrected second moment v, which contains g². The largest value of all arrays that Adam trains is
    returned. It is 1 at the first update, near 1 while gradients keep their size, and at most 1/√(1 - beta2) later.

    Args:
        grads: gradients after clipping.
        updates: changes of the parameters.
        opt_state: state of the optimizer after the update.
        ok: True if the update is applied.
        config: config of the run.
    """
    states = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    (adam,) = (node for node in states if isinstance(node, optax.ScaleByAdamState))
    moments = jax.tree.leaves(adam.nu, is_leaf=lambda node: isinstance(node, (optax.MaskedNode, Blocks)))
    square, ratios = jnp.zeros(()), []
    leaves = jax.tree.leaves_with_path(grads)
    for (path, grad), update, moment in zip(leaves, jax.tree.leaves(updates), moments, strict=True):
        if isinstance(moment, optax.MaskedNode):
            # Muon trains this array.
            square += jnp.sum(jnp.square(update))
            continue
        own = settings_of(config, names(path))
        second = load_moment(moment) / (1 - own.beta2**adam.count)
        ratio = jnp.square(grad) / jnp.maximum(second, own.eps**2)
        # One complex sum instead of two real ones: XLA for GPUs fuses one reduction with an update in place. For more,
        # it copies the moments or writes the update.
        sums = jnp.sum(jax.lax.complex(jnp.square(update), ratio))
        square += sums.real
        ratios.append(sums.imag / grad.size)
    metrics = {'update_norm': jnp.where(ok, jnp.sqrt(square), 0)}
    return {**metrics, 'second_moment_ratio': jnp.sqrt(jnp.stack(ratios).max())} if ratios else metrics
