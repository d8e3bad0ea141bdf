"""KTO loss and APO-zero loss of answers with labels, as pure functions.

Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization"; D'Oosterlinck et al. 2024, "Anchored
Preference Optimization and Contrastive Revisions in LLMs".

Shapes: B batch, T length, S segments, P largest number of pairs in a row; 2 answers of a pair, desirable answer first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.sections.posttraining import DpoConfig
from maxlm.training.losses.dpo import answer_sums, segment_sums


class AnswerTerms(NamedTuple):
    """Sums over the answers of a batch, float32 scalars. Only `objective` has a gradient.

    A reward is beta · (log-probability by the model - log-probability by the reference).

    Attributes:
        objective: Σ weight of the label · loss.
        answers: number of answers.
        desirable: number of desirable answers.
        undesirable: number of undesirable answers.
        accuracy: number of answers whose reward is on the side of the reference point that their label requires.
        chosen_reward: Σ reward of the desirable answers.
        rejected_reward: Σ reward of the undesirable answers.
        chosen_log_prob: Σ log-probability of the desirable answers, in nats.
        rejected_log_prob: Σ log-probability of the undesirable answers, in nats.
        reference_point: Σ reference point of the answers, in nats.
    """

    objective: jax.Array
    answers: jax.Array
    desirable: jax.Array
    undesirable: jax.Array
    accuracy: jax.Array
    chosen_reward: jax.Array
    rejected_reward: jax.Array
    chosen_log_prob: jax.Array
    rejected_log_prob: jax.Array
    reference_point: jax.Array


def answer_terms(
    log_probs_BT: jax.Array,
    reference_BT: jax.Array,
    weights_BT: jax.Array,
    segments_BT: jax.Array,
    reference_point_B: jax.Array | None,
    dpo: DpoConfig,
) -> AnswerTerms:
    """Computes the loss and metrics of the answers of a batch, summed over answers.

    Segment 2i + 1 of a row is a desirable answer and segment 2i + 2 an undesirable answer, if they have nonzero
    weights. With the reward r(y) = log p(y|x)/q(y|x), where q is the reference, and the reference point z:

        desirable answers      desirable_weight · (1 - σ(beta · (r - z)))
        undesirable answers    undesirable_weight · (1 - σ(beta · (z - r)))

    Args:
        log_probs_BT, reference_BT, weights_BT, segments_BT: see `preference_terms`.
        reference_point_B: z, the same for all rows, without gradient; None = 0, for APO-zero.
        dpo: section `dpo` of the config.
    """
    log_probs_BP2, reference_BP2, counts_BP2 = answer_sums(log_probs_BT, reference_BT, weights_BT, segments_BT)
    # A non-finite count is not 0, so non-finite weights show in the loss.
    is_answer_BP2 = counts_BP2 != 0
    ratios_BP2 = log_probs_BP2 - reference_BP2
    point_BP2 = jnp.zeros_like(ratios_BP2)
    if reference_point_B is not None:
        point_BP2 += reference_point_B[:, None, None]
    sign_112 = jnp.array([[[1.0, -1.0]]])
    gains_BP2 = sign_112 * (ratios_BP2 - point_BP2)
    label_weight_112 = jnp.array([[[dpo.desirable_weight, dpo.undesirable_weight]]])
    loss_BP2 = label_weight_112 * jax.nn.sigmoid(-dpo.beta * gains_BP2)

    def totals(x_BP2: jax.Array) -> jax.Array:
        return jnp.where(is_answer_BP2, x_BP2, 0).sum(axis=(0, 1))

    counts, rewards, log_probs = (
        jax.lax.stop_gradient(totals(x_BP2))
        for x_BP2 in (jnp.ones_like(ratios_BP2), dpo.beta * ratios_BP2, log_probs_BP2)
    )
    accuracy, point = (
        jax.lax.stop_gradient(totals(x_BP2).sum()) for x_BP2 in ((gains_BP2 > 0).astype(jnp.float32), point_BP2)
    )
    sums = [counts.sum(), *counts, accuracy, *rewards, *log_probs, point]
    return AnswerTerms(totals(loss_BP2).sum(), *sums)


def mismatched_answers(batch: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    """Permutes the answers among the prompts of each row. The reference point is estimated from these answers.

    In a row with n answers, prompt k precedes answer k + n // 2, modulo n. The total length does not change, and no row
    depends on another row. The two answers of a pair are never exchanged with each other: their weights are 0, as is
    the weight of an answer that is alone in its row.

    Args:
        batch: tokens, targets, weights, segments and positions, each [B, T]; see `window_batch`.

    Returns:
        The same arrays of the permuted rows, and the number of answers with nonzero weights.
    """
    tokens_BT, segments_BT = batch['tokens'], batch['segments']
    is_target_BT = batch['weights'] > 0
    T = tokens_BT.shape[1]
    targets_BT = is_target_BT.astype(jnp.float32)
    counts_BS = segment_sums(targets_BT[None], segments_BT)[0]
    n_B1 = (counts_BS > 0).sum(axis=1, keepdims=True)

    def of_token(x_BS: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jnp.pad(x_BS, [(0, 0), (1, 0)]), segments_BT, axis=1)

    has_answer_BT = of_token(counts_BS > 0)
    rank_BT = of_token(jnp.cumsum(counts_BS > 0, axis=1) - 1)
    # The target of a position is the next token, so an answer begins after its first target.
    earlier_BT = jnp.cumsum(targets_BT, axis=1) - targets_BT
    is_answer_BT = earlier_BT > of_token(jnp.cumsum(counts_BS, axis=1) - counts_BS)
    prompt_BT = jnp.where(is_answer_BT, (rank_BT - n_B1 // 2) % jnp.maximum(n_B1, 1), rank_BT)
    key_BT = jnp.where(has_answer_BT, 2 * prompt_BT + is_answer_BT, 2 * T)
    order_BT = jnp.argsort(key_BT, axis=1, stable=True)

    def ordered(x_BT: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x_BT, order_BT, axis=1)

    def shifted_left(x_BT: jax.Array) -> jax.Array:
        return jnp.pad(x_BT, [(0, 0), (0, 1)])[:, 1:]

    key_BT, tokens_BT = ordered(key_BT), ordered(tokens_BT)
    segments_BT = jnp.where(key_BT < 2 * T, key_BT // 2 + 1, 0)
    place_BT = jnp.broadcast_to(jnp.arange(T), key_BT.shape)
    is_first_BT = jnp.diff(segments_BT, axis=1, prepend=0) != 0
    first_BT = jax.lax.cummax(jnp.where(is_first_BT, place_BT, 0), axis=1)
    pair_BT = ordered((batch['segments'] - 1) // 2)
    is_other_BT = pair_BT != jnp.take_along_axis(pair_BT, first_BT, axis=1)
    is_predicted_BT = ordered(jnp.pad(is_target_BT, [(0, 0), (1, 0)])[:, :-1]) & is_other_BT & (segments_BT > 0)
    permuted = {
        'tokens': tokens_BT,
        'targets': shifted_left(tokens_BT),
        'weights': shifted_left(is_predicted_BT).astype(jnp.float32),
        'segments': segments_BT,
        'positions': jnp.where(segments_BT > 0, place_BT - first_BT, 0),
    }
    begins_BT = (key_BT % 2 == 1) & (jnp.diff(key_BT, axis=1, prepend=-1) != 0)
    return permuted, (begins_BT & is_other_BT).sum()
