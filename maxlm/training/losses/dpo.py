"""Preferences: the loss of pairs of answers of which one was chosen, as a pure function (DPO and IPO).

Rafailov et al. 2023, "Direct Preference Optimization"; Azar et al. 2023, "A General Theoretical Paradigm to Understand
Learning from Human Preferences".

Shapes: B batch, T length, P pairs that a row may have; 2 the answers of a pair, the chosen one first; S segments, C of
them at a time; X quantities that are summed up.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema_rl import DpoConfig

# Segments whose sums are made at the same time: more take more memory, C · T numbers for each row.
SEGMENTS_AT_ONCE = 64


class PreferenceTerms(NamedTuple):
    """Sums over the pairs of a batch, float32 scalars; only `objective` has a gradient."""

    # Σ loss.
    objective: jax.Array
    # How many.
    pairs: jax.Array
    # How many have a margin above 0. A model that is its reference has none.
    accuracy: jax.Array
    # Σ (reward of the chosen answer - reward of the rejected one).
    margin: jax.Array
    # Σ beta · (log-probability of the answer - the same by the reference); by ipo of their means over tokens.
    chosen_reward: jax.Array
    rejected_reward: jax.Array
    # Σ log-probability of the answer, in nats; by ipo its mean over tokens.
    chosen_log_prob: jax.Array
    rejected_log_prob: jax.Array


def preference_terms(
    log_probs_BT: jax.Array,
    reference_BT: jax.Array,
    weights_BT: jax.Array,
    segments_BT: jax.Array,
    dpo: DpoConfig,
) -> PreferenceTerms:
    """The loss of each pair, summed up.

    h is how much more than the reference the model prefers the chosen answer y⁺ to y⁻, and ε `label_smoothing`:

        h        = log p(y⁺)/r(y⁺) - log p(y⁻)/r(y⁻)
        sigmoid  = -(1 - ε) · log σ(beta · h) - ε · log σ(-beta · h)
        ipo      = (h - 1 / (2 · beta))²

    Log-probabilities of an answer are sums over its tokens, and by ipo means, as TRL's `DPOTrainer` has them after its
    authors' advice: a long answer would otherwise move h by its length. To both `rpo_alpha` times the mean
    cross-entropy of the chosen answer's tokens is added.

    Segments 2i + 1 and 2i + 2 of a row are pair i; there is one where both have weights. Rows know nothing of each
    other, so that only the sums at the end go over devices.

    Args:
        log_probs_BT: of the targets, by the model; where the weight is 0, anything.
        reference_BT: of the targets, by the reference.
        weights_BT: 1 at targets of answers, else 0.
        segments_BT: 1, 2, …, number of the document in its row; 0 in padding.
        dpo: with `beta`, `loss`, `label_smoothing` and `rpo_alpha`.
    """
    B, T = segments_BT.shape
    # A selection first: where nothing is predicted there may be anything.
    both = (log_probs_BT, jax.lax.stop_gradient(reference_BT))
    weighted = [jnp.where(weights_BT != 0, weights_BT * x_BT, 0) for x_BT in both]
    sums_XBS = _segment_sums(jnp.stack([*weighted, weights_BT]), segments_BT)
    pairs_per_row = -(-T // 2)
    sums_XBS = jnp.pad(sums_XBS, [(0, 0), (0, 0), (0, 2 * pairs_per_row - T)])
    log_probs_BP2, reference_BP2, counts_BP2 = sums_XBS.reshape(3, B, pairs_per_row, 2)
    # Weights that are not finite are there: they must show in the loss.
    is_pair_BP = (counts_BP2 != 0).all(-1)
    means_BP2 = log_probs_BP2 / jnp.where(counts_BP2 == 0, 1, counts_BP2)
    if dpo.loss_type == 'ipo':
        reference_BP2 = reference_BP2 / jnp.where(counts_BP2 == 0, 1, counts_BP2)
        log_probs_BP2 = means_BP2
    ratios_BP2 = log_probs_BP2 - reference_BP2
    preferred_BP = ratios_BP2[..., 0] - ratios_BP2[..., 1]
    if dpo.loss_type == 'ipo':
        loss_BP = jnp.square(preferred_BP - 1 / (2 * dpo.beta))
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


@jax.custom_vjp
def _segment_sums(x_XBT: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Sums over segments 1 … T of each row, [X, B, S] with S = T.

    Each is a sum over a selection, so always in the same order; `jax.ops.segment_sum` has none on a GPU. Its gradient
    is that of the segment, which each position looks up.
    """
    T = segments_BT.shape[1]
    C = min(T, SEGMENTS_AT_ONCE)

    def sums(first: jax.Array) -> jax.Array:
        is_in_BCT = segments_BT[:, None, :] == (first + jnp.arange(C))[None, :, None]
        return jnp.where(is_in_BCT, x_XBT[:, :, None, :], 0).sum(-1)

    found = jax.lax.map(sums, jnp.arange(1, T + 1, C))
    return jnp.moveaxis(found, 0, 2).reshape(*x_XBT.shape[:2], -1)[..., :T]


def _sums_forward(x_XBT: jax.Array, segments_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _segment_sums(x_XBT, segments_BT), segments_BT


def _sums_backward(segments_BT: jax.Array, cotangent_XBS: jax.Array) -> tuple[jax.Array, None]:
    of_padding_first = jnp.pad(cotangent_XBS, [(0, 0), (0, 0), (1, 0)])
    return jnp.take_along_axis(of_padding_first, segments_BT[None], axis=2), None


_segment_sums.defvjp(_sums_forward, _sums_backward)
