"""Distillation: KL divergence of a student from its teacher, in chunks, together with the cross-entropy.

Hinton et al. 2015, "Distilling the Knowledge in a Neural Network".

Shapes: B batch, T length, D dim, V vocabulary, K stored tokens of a position, and those of `LogitChunks`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.sections.distill import DistillConfig
from maxlm.model.decoder import softcap, without_padding
from maxlm.parallel.partitioning import Partitioning
from maxlm.training.losses.chunked_logits import LogitChunks, scan_chunks, sum_over_chunks
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


class StoredOutputs(NamedTuple):
    """The most likely tokens of a teacher at distill.temperature, with the largest probability first.

    Attributes:
        ids_BTK: token ids.
        log_probs_BTK: log-probabilities, float32.
    """

    ids_BTK: jax.Array
    log_probs_BTK: jax.Array


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
    teacher: TeacherOutputs | StoredOutputs,
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
    temperature, fraction = distill.temperature, distill.weight
    taught: tuple[jax.Array, ...] = tuple(map(jax.lax.stop_gradient, teacher[:2]))
    stored = isinstance(teacher, StoredOutputs)
    teacher_RPDV = None if stored else chunks.spread(taught[1])
    teacher_softcap = teacher.logit_softcap if isinstance(teacher, TeacherOutputs) else 0.0
    k = min(distill.top_k, vocab_size)

    def tempered(scores: jax.Array) -> jax.Array:
        # Padding is masked after the division, because its logits are the smallest finite number.
        return jax.nn.log_softmax(without_padding(scores / temperature, vocab_size))

    def divergence(log_q: jax.Array, outputs: tuple[jax.Array, ...]) -> jax.Array:
        if teacher_RPDV is None:
            ids, log_probs = outputs
            return kl_divergence(*dense_distribution(ids, log_probs, log_q.shape[-1]), log_q)
        log_p = tempered(softcap(chunks.logits(outputs[0], teacher_RPDV), teacher_softcap))
        if not 0 < k < vocab_size:
            return kl_divergence(log_p, None, log_q)
        is_kept = largest(log_p, k, shards)
        smallest = jnp.finfo(log_p.dtype).min
        log_rest = jax.nn.logsumexp(jnp.where(is_kept, smallest, log_p), axis=-1)
        return kl_divergence(jnp.where(is_kept, log_p, smallest), log_rest, log_q)

    def losses(
        scores_RPNV: jax.Array, targets: jax.Array, weights: jax.Array, *outputs: jax.Array
    ) -> tuple[jax.Array, Any]:
        student = softcap(scores_RPNV, logit_softcap)
        loss, log_z_squared = token_sums(without_padding(student, vocab_size), targets, weights)
        found = weights * temperature**2 * divergence(tempered(student), outputs)
        objective = (1 - fraction) * loss + fraction * found
        return (objective + z_loss * log_z_squared if z_loss else objective).sum(), (loss, log_z_squared, found)

    inputs = (targets_BT, weights_BT, *((x[..., :k] for x in taught) if stored else taught[:1]))
    objective, sums = sum_over_chunks(losses, hidden_BTD, kernel_DV, inputs, chunks)
    return DistillationLosses(objective, *sums)


def kl_divergence(log_p: jax.Array, log_rest: jax.Array | None, log_q: jax.Array) -> jax.Array:
    """Returns KL(p ‖ q) over the last axis.

    Args:
        log_p: log-probabilities, finite.
        log_rest: log-probability of all tokens whose `log_p` is the smallest finite number. They count as one token.
            None: all tokens count separately.
        log_q: log-probabilities, finite.

    Examples:
        >>> p, q = jnp.array([0.5, 0.5]), jnp.array([0.25, 0.75])
        >>> [round(float(kl_divergence(jnp.log(p), None, jnp.log(other))), 3) for other in (p, q)]
        [0.0, 0.144]
    """
    divergence = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    if log_rest is None:
        return divergence
    smallest = jnp.finfo(log_p.dtype).min
    rest_q = jax.nn.logsumexp(jnp.where(log_p == smallest, log_q, smallest), axis=-1)
    return divergence + jnp.exp(log_rest) * (log_rest - rest_q)


def dense_distribution(ids: jax.Array, log_probs: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns `log_p` [..., V] and `log_rest` [...] of `kl_divergence` for K tokens and their log-probabilities."""
    smallest = jnp.finfo(log_probs.dtype).min
    log_p = jnp.full((*ids.shape[:-1], vocab_size), smallest, log_probs.dtype)
    log_p = jnp.put_along_axis(log_p, ids, log_probs, axis=-1, inplace=False)
    # Stored log-probabilities are rounded, so their sum may exceed 1.
    rest = jnp.clip(1 - jnp.exp(log_probs).sum(-1), jnp.finfo(log_probs.dtype).tiny, 1)
    return log_p, jnp.log(rest)


def top_k_log_probs(
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    *,
    k: int,
    temperature: float,
    partitioning: Partitioning,
    chunk: int,
    logit_softcap: float = 0.0,
) -> StoredOutputs:
    """Returns the k most likely tokens of each position, computed in chunks."""
    chunks, vocab_size = LogitChunks(hidden_BTD, partitioning=partitioning, chunk=chunk), kernel_DV.shape[1]
    kernel_RPDV = chunks.spread(kernel_DV)

    def add(_: None, inputs: tuple[jax.Array, ...]) -> tuple[None, Any]:
        scores = softcap(chunks.logits(inputs[0], kernel_RPDV), logit_softcap) / temperature
        log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(without_padding(scores, vocab_size)), k)
        return None, (ids, log_probs)

    _, found = scan_chunks(add, None, (chunks.split(hidden_BTD),))
    return StoredOutputs(*map(chunks.join, found))


def largest(scores: jax.Array, k: int, shards: int) -> jax.Array:
    """Returns True at the k largest scores along the last axis, and at scores equal to the smallest of them.

    Each of the `shards` of the last axis finds its own candidates, so only k numbers per shard are communicated.
    """
    parts = scores.reshape(*scores.shape[:-1], shards, -1)
    candidates, _ = jax.lax.top_k(parts, min(k, parts.shape[-1]))
    threshold = jax.lax.top_k(candidates.reshape(*scores.shape[:-1], -1), k)[0][..., -1:]
    return scores >= threshold
