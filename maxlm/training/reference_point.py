"""Reference point of KTO: the KL divergence of the model from its reference, estimated once for a global batch."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxlm.config.schema import Config
from maxlm.parallel.layout import Layout
from maxlm.training.batch import Batch
from maxlm.training.forward import make_log_probs
from maxlm.training.gradients import split_micro_batches
from maxlm.training.losses.kto import mismatched_answers
from maxlm.training.reference import reference_params
from maxlm.training.state import Params


def make_reference_point(config: Config, layout: Layout) -> Callable[[Params, Params | None, Batch], Batch]:
    """Returns a function (parameters, `TrainState.reference`, batch) → batch with `reference_point`, float32 [B].

    The reference point is max(0, mean of log p(y'|x)/q(y'|x)) over the answers y' of `mismatched_answers`, where q is
    the reference (Ethayarajh et al. 2024, section 4.1). It has the same value in all rows. The mean is over the global
    batch, so it does not depend on the number of devices or micro-batches. With other losses, the function returns the
    batch unchanged.
    """
    if not config.has_reference_point:
        return lambda params, stored, batch: batch
    log_probs = make_log_probs(config, layout)

    def with_reference_point(params: Params, stored: Params | None, batch: Batch) -> Batch:
        reference = reference_params(config, params, stored)
        permuted, count = mismatched_answers(batch)

        def add(total: jax.Array, micro_batch: Batch) -> tuple[jax.Array, None]:
            of_model_BT, of_reference_BT = (
                log_probs(each, None, micro_batch, None).log_probs_BT for each in (params, reference)
            )
            # Select, because positions without a target may contain non-finite values.
            return total + jnp.where(micro_batch['weights'] > 0, of_model_BT - of_reference_BT, 0).sum(), None

        total, _ = jax.lax.scan(add, jnp.zeros(()), split_micro_batches(permuted, config.rounds, layout))
        point = jnp.maximum(total / jnp.maximum(count, 1), 0)
        return {**batch, 'reference_point': jnp.full(batch['tokens'].shape[0], point)}

    return with_reference_point
