"""Log-probabilities of the targets per token, for losses that are not sums over tokens.

Their gradients depend on the gradient of the loss, so the backward pass recomputes the logits of each chunk.

Shapes: B batch, T length, D dim, V vocabulary, and those of `LogitChunks`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.model.decoder import softcap, without_padding
from maxlm.parallel.partitioning import Partitioning
from maxlm.training.losses.chunked_logits import LogitChunks, scan_chunks


class TokenLogProbs(NamedTuple):
    """Log-probability and entropy of every position, float32. Positions outside of the loss are included.

    Attributes:
        log_probs_BT: log softmax(logits)[target].
        entropies_BT: entropy of the softmax in nats, without gradient.
    """

    log_probs_BT: jax.Array
    entropies_BT: jax.Array


def token_log_probs(
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    targets_BT: jax.Array,
    *,
    partitioning: Partitioning,
    chunk: int,
    logit_softcap: float = 0.0,
    row_groups: int = 1,
) -> TokenLogProbs:
    """Returns the log-probability of every target, differentiable with respect to hidden states and kernel.

    The arguments are those of `cross_entropy`.
    """
    chunks = LogitChunks(hidden_BTD, partitioning=partitioning, chunk=chunk, row_groups=row_groups)
    vocab_size = kernel_DV.shape[1]

    def log_probs(scores_RPNV: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = without_padding(softcap(scores_RPNV, logit_softcap), vocab_size)
        is_target = jax.lax.broadcasted_iota(targets.dtype, scores.shape, scores.ndim - 1) == targets[..., None]
        log_z = jax.nn.logsumexp(scores, axis=-1)
        entropy = log_z - (jnp.exp(scores - log_z[..., None]) * scores).sum(-1)
        return jnp.where(is_target, scores, 0).sum(-1) - log_z, entropy

    @jax.custom_vjp
    def run(hidden_BTD: jax.Array, kernel_DV: jax.Array) -> tuple[jax.Array, jax.Array]:
        kernel_RPDV = chunks.spread(kernel_DV)

        def add(_: None, inputs: tuple[jax.Array, ...]) -> tuple[None, Any]:
            hidden, targets = inputs
            return None, log_probs(chunks.logits(hidden, kernel_RPDV), targets)

        found = scan_chunks(add, None, (chunks.split(hidden_BTD), chunks.split(targets_BT)))[1]
        return chunks.join(found[0]), chunks.join(found[1])

    def forward(hidden_BTD: jax.Array, kernel_DV: jax.Array) -> tuple[Any, Any]:
        return run(hidden_BTD, kernel_DV), (hidden_BTD, kernel_DV)

    def backward(residuals: tuple[jax.Array, jax.Array], cotangents: Any) -> tuple[jax.Array, jax.Array]:
        hidden_BTD, kernel_DV = residuals
        kernel_RPDV = chunks.spread(kernel_DV)

        def add(kernel_gradient: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            hidden, targets, cotangent = inputs
            scores = chunks.logits(hidden, kernel_RPDV)
            _, pull_back = jax.vjp(lambda x: log_probs(x, targets)[0], scores)
            return chunks.add_gradient(kernel_gradient, hidden, kernel_RPDV, *pull_back(cotangent))

        inputs = tuple(map(chunks.split, (hidden_BTD, targets_BT, cotangents[0])))
        kernel_gradient, of_hidden = scan_chunks(add, chunks.no_gradient(kernel_RPDV), inputs)
        return chunks.join(of_hidden).astype(hidden_BTD.dtype), chunks.sum_gradient(kernel_gradient, vocab_size)

    run.defvjp(forward, backward)
    log_probs_BT, entropies_BT = run(hidden_BTD, kernel_DV)
    return TokenLogProbs(log_probs_BT, jax.lax.stop_gradient(entropies_BT))
