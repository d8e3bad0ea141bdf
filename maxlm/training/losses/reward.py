"""Loss of reward models of pairs of answers, as a pure function.

Bradley & Terry 1952, "Rank Analysis of Incomplete Block Designs"; Stiennon et al. 2020, "Learning to summarize from
human feedback"; Eisenstein et al. 2023, "Helping or Herding? Reward Model Ensembles Mitigate but do not Eliminate
Reward Hacking".

Shapes: B batch, T length, S segments, P largest number of pairs in a row; 2 answers of a pair, chosen answer first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.sections.posttraining import RewardModelConfig
from maxlm.training.losses.dpo import by_pair, segment_sums


class RewardTerms(NamedTuple):
    """Sums over the pairs of a batch, float32 scalars. Only `objective` has a gradient.

    Attributes:
        objective: Σ loss.
        pairs: number of pairs.
        accuracy: number of pairs in which the chosen answer has the higher score.
        margin: Σ (score of the chosen answer - score of the rejected answer).
        chosen_score: Σ score of the chosen answer.
        rejected_score: Σ score of the rejected answer.
        mean_score: Σ mean of both scores.
    """

    objective: jax.Array
    pairs: jax.Array
    accuracy: jax.Array
    margin: jax.Array
    chosen_score: jax.Array
    rejected_score: jax.Array
    mean_score: jax.Array


def score_terms(
    scores_BT: jax.Array, scored_BT: jax.Array, segments_BT: jax.Array, config: RewardModelConfig
) -> RewardTerms:
    """Computes the loss and metrics of the pairs of a batch, summed over pairs.

    With the scores r⁺ of the chosen and r⁻ of the rejected answer and c = `center_rewards_coefficient`, the loss of a
    pair is

        -log σ(r⁺ - r⁻) + c · (r⁺ + r⁻)²

    Segments 2i + 1 and 2i + 2 of a row form pair i; the pair exists if both segments have a scored token.

    Args:
        scores_BT: score of the model at each token; ignored where `scored_BT` is 0.
        scored_BT: 1 at the token of each answer whose score counts, else 0.
        segments_BT: number of the document in its row, counted from 1; 0 in padding.
        config: section `reward_model` of the config.
    """
    selected_BT = jnp.where(scored_BT != 0, scores_BT, 0)
    scores_BP2, counts_BP2 = by_pair(segment_sums(jnp.stack([selected_BT, scored_BT]), segments_BT))
    # A non-finite count is not 0, so non-finite arrays show in the loss.
    is_pair_BP = (counts_BP2 != 0).all(-1)
    chosen_BP, rejected_BP = scores_BP2[..., 0], scores_BP2[..., 1]
    margin_BP, sum_BP = chosen_BP - rejected_BP, chosen_BP + rejected_BP
    loss_BP = -jax.nn.log_sigmoid(margin_BP) + config.center_rewards_coefficient * jnp.square(sum_BP)

    def total(x_BP: jax.Array) -> jax.Array:
        return jnp.where(is_pair_BP, x_BP, 0).sum()

    sums = (
        jnp.ones_like(loss_BP),
        (margin_BP > 0).astype(jnp.float32),
        margin_BP,
        chosen_BP,
        rejected_BP,
        sum_BP / 2,
    )
    return RewardTerms(total(loss_BP), *(jax.lax.stop_gradient(total(x_BP)) for x_BP in sums))
