"""DPO loss, IPO loss and ORPO loss of preference pairs, as pure functions.

Rafailov et al. 2023, "Direct Preference Optimization"; Azar et al. 2023, "A General Theoretical Paradigm to Understand
Learning from Human Preferences"; Hong et al. 2024, "ORPO: Monolithic Preference Optimization without Reference Model".

Shapes: B batch, T length, P largest number of pairs in a row; 2 answers of a pair, chosen answer first; S segments,
C segments computed at the same time; X summed quantities.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.sections.posttraining import DpoConfig

# Smallest negative log-probability per token from which ORPO computes odds. The odds of a certain answer are infinite.
SMALLEST_NLL = 1e-6
# Segments whose sums are computed at the same time. The memory is C · T numbers per row.
SEGMENTS_AT_ONCE = 64


class PreferenceTerms(NamedTuple):
    """Sums over the pairs of a batch, float32 scalars. Only `objective` has a gradient.

    A reward is beta · (log-probability by the model - log-probability by the reference, if there is one). With ipo and
    orpo, log-probabilities are means over the tokens of an answer instead of sums.

    Attributes:
        objective: Σ loss.
        pairs: number of pairs.
        accuracy: number of pairs with a margin above 0; 0 if the model equals its reference.
        margin: Σ (reward of the chosen answer - reward of the rejected answer).
        chosen_reward: Σ reward of the chosen answer.
        rejected_reward: Σ reward of the rejected answer.
        chosen_log_prob: Σ log-probability of the chosen answer, in nats.
        rejected_log_prob: Σ log-probability of the rejected answer, in nats.
    """

    objective: jax.Array
    pairs: jax.Array
    accuracy: jax.Array
    margin: jax.Array
    chosen_reward: jax.Array
    rejected_reward: jax.Array
    chosen_log_prob: jax.Array
    rejected_log_prob: jax.Array


def preference_terms(
    log_probs_BT: jax.Array,
    reference_BT: jax.Array | None,
    weights_BT: jax.Array,
    segments_BT: jax.Array,
    dpo: DpoConfig,
) -> PreferenceTerms:
    """Computes the loss and metrics of the pairs of a batch, summed over pairs.

    h is the log-ratio by which the model, compared with its reference, prefers the chosen answer y⁺ to the rejected
    answer y⁻. ε is `label_smoothing`:

        h        = log p(y⁺)/r(y⁺) - log p(y⁻)/r(y⁻)
        sigmoid  = -(1 - ε) · log σ(beta · h) - ε · log σ(-beta · h)
        ipo      = (h - 1 / (2 · beta))²
        orpo     = -log p(y⁺) - beta · log σ(log odds(y⁺)/odds(y⁻)),  odds(y) = p(y) / (1 - p(y))

    The log-probability of an answer is the sum over its tokens. With ipo and orpo it is the mean, so that h does not
    depend on the length of an answer. TRL does the same, and the authors of IPO recommend it. The losses sigmoid and
    ipo add `rpo_alpha` times the mean cross-entropy of the chosen answer's tokens. With orpo there is no reference.

    Segments 2i + 1 and 2i + 2 of a row form pair i; the pair exists if both segments have nonzero weights. Rows are
    independent, so only the final sums are communicated between devices.

    Args:
        log_probs_BT: log-probabilities of the targets by the model; ignored where the weight is 0.
        reference_BT: log-probabilities of the targets by the reference; None with orpo.
        weights_BT: 1 at targets of answers, else 0.
        segments_BT: number of the document in its row, counted from 1; 0 in padding.
        dpo: section `dpo` of the config.
    """
    log_probs_BP2, reference_BP2, counts_BP2 = answer_sums(log_probs_BT, reference_BT, weights_BT, segments_BT)
    # A non-finite count is not 0, so non-finite weights show in the loss.
    is_pair_BP = (counts_BP2 != 0).all(-1)
    means_BP2 = log_probs_BP2 / jnp.where(counts_BP2 == 0, 1, counts_BP2)
    if dpo.loss_type in ('ipo', 'orpo'):
        reference_BP2 = reference_BP2 / jnp.where(counts_BP2 == 0, 1, counts_BP2)
        log_probs_BP2 = means_BP2
    ratios_BP2 = log_probs_BP2 - reference_BP2
    preferred_BP = ratios_BP2[..., 0] - ratios_BP2[..., 1]
    if dpo.loss_type == 'ipo':
        loss_BP = jnp.square(preferred_BP - 1 / (2 * dpo.beta))
    elif dpo.loss_type == 'orpo':
        log_odds_BP2 = means_BP2 - jax.nn.log1mexp(jnp.maximum(-means_BP2, SMALLEST_NLL))
        log_ratio_BP = log_odds_BP2[..., 0] - log_odds_BP2[..., 1]
        loss_BP = -means_BP2[..., 0] - dpo.beta * jax.nn.log_sigmoid(log_ratio_BP)
    else:
        right_BP, wrong_BP = (jax.nn.log_sigmoid(sign * dpo.beta * preferred_BP) for sign in (1, -1))
        loss_BP = -(1 - dpo.label_smoothing) * right_BP - dpo.label_smoothing * wrong_BP
    loss_BP = loss_BP - dpo.rpo_alpha * means_BP2[..., 0]

    def total(x_BP: jax.Array) -> jax.Array:
        return jnp.where(is_pair_BP, x_BP, 0).sum()

    sums = (
        jnp.ones_like(loss_BP),
        (preferred_BP > 0).astype(jnp.float32),
        dpo.beta * preferred_BP,
        *(dpo.beta * ratios_BP2[..., answer] for answer in (0, 1)),
        *(log_probs_BP2[..., answer] for answer in (0, 1)),
    )
    return PreferenceTerms(total(loss_BP), *(jax.lax.stop_gradient(total(x_BP)) for x_BP in sums))


def answer_sums(
    log_probs_BT: jax.Array, reference_BT: jax.Array | None, weights_BT: jax.Array, segments_BT: jax.Array
) -> jax.Array:
    """Returns the log-probability by the model, that by the reference, and the length of each answer, [3, B, P, 2].

    The arguments are those of `preference_terms`. The length of an answer that does not exist is 0.
    """
    # Select before multiplying: positions without a target may contain non-finite values.
    if reference_BT is None:
        reference_BT = jnp.zeros_like(log_probs_BT)
    both = (log_probs_BT, jax.lax.stop_gradient(reference_BT))
    weighted = [jnp.where(weights_BT != 0, weights_BT * x_BT, 0) for x_BT in both]
    return by_pair(segment_sums(jnp.stack([*weighted, weights_BT]), segments_BT))


def by_pair(sums_XBS: jax.Array) -> jax.Array:
    """Returns sums over segments as [X, B, P, 2]: segments 2i + 1 and 2i + 2 of a row are pair i."""
    X, B, S = sums_XBS.shape
    return jnp.pad(sums_XBS, [(0, 0), (0, 0), (0, S % 2)]).reshape(X, B, -1, 2)


@jax.custom_vjp
def segment_sums(x_XBT: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Returns the sums over segments 1 … T of each row, [X, B, S] with S = T.

    Each sum runs over a selection in a fixed order, so it is deterministic; `jax.ops.segment_sum` is not on a GPU. The
    gradient of a position is the gradient of its segment's sum.
    """
    T = segments_BT.shape[1]
    C = min(T, SEGMENTS_AT_ONCE)

    def sums(first: jax.Array) -> jax.Array:
        is_in_BCT = segments_BT[:, None, :] == (first + jnp.arange(C))[None, :, None]
        return jnp.where(is_in_BCT, x_XBT[:, :, None, :], 0).sum(-1)

    found = jax.lax.map(sums, jnp.arange(1, T + 1, C))
    return jnp.moveaxis(found, 0, 2).reshape(*x_XBT.shape[:2], -1)[..., :T]


def _sums_forward(x_XBT: jax.Array, segments_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return segment_sums(x_XBT, segments_BT), segments_BT


def _sums_backward(segments_BT: jax.Array, cotangent_XBS: jax.Array) -> tuple[jax.Array, None]:
    of_padding_first = jnp.pad(cotangent_XBS, [(0, 0), (0, 0), (1, 0)])
    return jnp.take_along_axis(of_padding_first, segments_BT[None], axis=2), None


segment_sums.defvjp(_sums_forward, _sums_backward)
