"""Distillation: KL divergence of a student from its teacher, in chunks, together with the cross-entropy.

Hinton et al. 2015, "Distilling the Knowledge in a Neural Network".

Shapes: B batch, T length, D dim, V vocabulary, and those of `LogitChunks`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.sections.distill import DistillConfig
from maxlm.model.decoder import softcap, without_padding
from maxlm.parallel.partitioning import Partitioning
from maxlm.training.losses.chunked_logits import LogitChunks, sum_over_chunks
from maxlm.training.losses.cross_entropy import token_sums


class TeacherOutputs(NamedTuple):
    """Outputs of the teacher that the loss uses.

    Attributes:
        hidden_BTD: last hidden states, in the compute dtype. Their width may differ from the student's.
        kernel_DV: kernel of the head.
        logit_softcap: `model.logit_softcap` of its config.
    """

    hidden_BTD: jax.Array
    kernel_DV: jax.Array
    logit_softcap: float


class DistillationLosses(NamedTuple):
    """Sums over a batch, float32. Only `objective` has a gradient.

    Attributes:
        objective: the minimized sum, scalar.
        loss_B: Σ weight · cross-entropy of each row, in nats.
        log_z_squared_B: Σ weight · log² Z of each row; Z is the denominator of the softmax.
        divergence_B: Σ weight · temperature² · KL(teacher ‖ student) of each row, in nats.
    """

    objective: jax.Array
    loss_B: jax.Array
    log_z_squared_B: jax.Array
    divergence_B: jax.Array


def distillation(
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    teacher: TeacherOutputs,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    distill: DistillConfig,
    partitioning: Partitioning,
    chunk: int,
    z_loss: float = 0.0,
    logit_softcap: float = 0.0,
    row_groups: int = 1,
) -> DistillationLosses:
    """Computes the loss, differentiable with respect to the student's hidden states and kernel.

    With α = distill.weight and τ = distill.temperature, the objective sums over the positions

        weight · ((1 - α) · cross-entropy + z_loss · log² Z + α · τ² · KL(softmax(teacher / τ) ‖ softmax(student / τ)))

    The logits of student and teacher exist for one chunk at a time; see `cross_entropy` for the other arguments.

    Args:
        teacher: outputs of the teacher for the same tokens.
        distill: section `distill` of the config.
    """
    chunks = LogitChunks(hidden_BTD, partitioning=partitioning, chunk=chunk, row_groups=row_groups)
    vocab_size, shards = kernel_DV.shape[1], partitioning.num_shards('vocab')
    temperature, share = distill.temperature, distill.weight
    teacher_BTD, teacher_DV = map(jax.lax.stop_gradient, teacher[:2])
    teacher_RPDV = chunks.spread(teacher_DV)

    def losses(
        scores_RPNV: jax.Array, targets: jax.Array, weights: jax.Array, teacher_RPND: jax.Array
    ) -> tuple[jax.Array, Any]:
        student = softcap(scores_RPNV, logit_softcap)
        taught = softcap(chunks.logits(teacher_RPND, teacher_RPDV), teacher.logit_softcap)
        loss, log_z_squared = token_sums(without_padding(student, vocab_size), targets, weights)
        # Padding is masked after the division, because its logits are the smallest finite number.
        log_q, log_p = (
            jax.nn.log_softmax(without_padding(scores / temperature, vocab_size)) for scores in (student, taught)
        )
        k = min(distill.top_k, vocab_size)
        is_kept = largest(log_p, k, shards) if 0 < k < vocab_size else None
        divergence = weights * temperature**2 * kl_divergence(log_p, log_q, is_kept)
        objective = (1 - share) * loss + share * divergence
        return (objective + z_loss * log_z_squared if z_loss else objective).sum(), (loss, log_z_squared, divergence)

    inputs = (targets_BT, weights_BT, teacher_BTD)
    objective, sums = sum_over_chunks(losses, hidden_BTD, kernel_DV, inputs, chunks)
    return DistillationLosses(objective, *sums)


def kl_divergence(log_p: jax.Array, log_q: jax.Array, is_kept: jax.Array | None = None) -> jax.Array:
    """Returns KL(p ‖ q) over the last axis.

    Args:
        log_p: log-probabilities, finite.
        log_q: log-probabilities, finite.
        is_kept: tokens that count separately. All others count as one token with the sum of their probabilities. None:
            all tokens are kept.
    """
    terms = jnp.exp(log_p) * (log_p - log_q)
    if is_kept is None:
        return terms.sum(-1)
    smallest = jnp.finfo(log_p.dtype).min
    rest_p, rest_q = (jax.nn.logsumexp(jnp.where(is_kept, smallest, x), axis=-1) for x in (log_p, log_q))
    return jnp.where(is_kept, terms, 0).sum(-1) + jnp.exp(rest_p) * (rest_p - rest_q)


def largest(scores: jax.Array, k: int, shards: int) -> jax.Array:
    """Returns True at the k largest scores along the last axis, and at scores equal to the smallest of them.

    Each of the `shards` of the last axis finds its own candidates, so only k numbers per shard are communicated.
    """
    parts = scores.reshape(*scores.shape[:-1], shards, -1)
    candidates, _ = jax.lax.top_k(parts, min(k, parts.shape[-1]))
    threshold = jax.lax.top_k(candidates.reshape(*scores.shape[:-1], -1), k)[0][..., -1:]
    return scores >= threshold
