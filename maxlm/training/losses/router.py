"""Load-balancing loss, z-loss and metrics of the routers of a model with experts.

Shapes: B batch, T length, M micro-batches, L layers with experts.
"""

from __future__ import annotations

import jax

from maxlm.config.schema import TrainConfig
from maxlm.model.experts.router import RouterStats

# Name of the metric → field of `RouterStats`. The metrics are means over layers and tokens.
ROUTER_PARTS = {
    'load_balancing_loss': 'load_balancing_loss',
    'router_z_loss': 'z_loss',
    'router_entropy': 'entropy',
    'dropped_tokens': 'dropped',
}


def router_terms(
    router: RouterStats, weights_BT: jax.Array, config: TrainConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the losses of the routers, and the sums of their metrics.

    The statistics of each of the M micro-batches are weighted by its number of predicted tokens. The losses are thus
    means over the tokens of a step, as the cross-entropy is. Losses are summed over layers, and metrics averaged.
    """
    M = len(router.entropy)
    # Row r is in micro-batch r mod M.
    tokens_M = weights_BT.reshape(-1, M, weights_BT.shape[1]).sum(axis=(0, 2))

    def total(values_ML: jax.Array) -> jax.Array:
        return (tokens_M[:, None] * values_ML).sum()

    loss = config.load_balancing_loss * total(router.load_balancing_loss)
    loss += config.router_z_loss * total(router.z_loss)
    num_layers = router.entropy.shape[1]
    parts = {name: total(getattr(router, field)) / num_layers for name, field in ROUTER_PARTS.items()}
    return loss, jax.tree.map(jax.lax.stop_gradient, parts)
