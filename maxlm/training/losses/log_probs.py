"""Functions of the logits and the target of each token: log-probabilities, and losses of the user.

Their gradients depend on the gradient of the loss, so the backward pass recomputes the logits of each chunk.

Shapes: B batch, T length, D dim, V vocabulary, and those of `LogitChunks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.errors import InputError
from maxlm.model.decoder import without_padding
from maxlm.model.layers.softcap import softcap
from maxlm.parallel.partitioning import Partitioning
from maxlm.training.losses.chunked_logits import LogitChunks, scan_chunks

# (logits [..., V], targets [...]) → loss of each target [...].
TokenLoss = Callable[[jax.Array, jax.Array], jax.Array]


class TokenLogProbs(NamedTuple):
    """Log-probability and entropy of every position, float32. Positions outside of the loss are included.

    Attributes:
        log_probs_BT: log softmax(logits)[target].
        entropies_BT: entropy of the softmax in nats.
        values_BT: outputs of the value head; None without one.
    """

    log_probs_BT: jax.Array
    entropies_BT: jax.Array
    values_BT: jax.Array | None = None


def token_log_probs(
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    targets_BT: jax.Array,
    *,
    partitioning: Partitioning,
    chunk: int,
    logit_softcap: float = 0.0,
    row_groups: int = 1,
    has_entropy_gradient: bool = False,
) -> TokenLogProbs:
    """Returns the log-probability of every target, differentiable with respect to hidden states and kernel.

    The entropy is differentiable only with `has_entropy_gradient`. The other arguments are those of `cross_entropy`.
    """
    vocab_size = kernel_DV.shape[1]

    def log_probs(scores_RPNV: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = without_padding(softcap(scores_RPNV, logit_softcap), vocab_size)
        is_target = jax.lax.broadcasted_iota(targets.dtype, scores.shape, scores.ndim - 1) == targets[..., None]
        log_z = jax.nn.logsumexp(scores, axis=-1)
        entropy = log_z - (jnp.exp(scores - log_z[..., None]) * scores).sum(-1)
        return jnp.where(is_target, scores, 0).sum(-1) - log_z, entropy

    chunks = LogitChunks(hidden_BTD, partitioning=partitioning, chunk=chunk, row_groups=row_groups)
    num_differentiable = 2 if has_entropy_gradient else 1
    log_probs_BT, entropies_BT = _per_token(log_probs, chunks, hidden_BTD, kernel_DV, targets_BT, num_differentiable)
    return TokenLogProbs(log_probs_BT, entropies_BT if has_entropy_gradient else jax.lax.stop_gradient(entropies_BT))


def token_losses(
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    targets_BT: jax.Array,
    loss: TokenLoss,
    *,
    partitioning: Partitioning,
    chunk: int,
    logit_softcap: float = 0.0,
    row_groups: int = 1,
) -> jax.Array:
    """Returns the loss of every target [B, T], differentiable with respect to hidden states and kernel.

    Args:
        loss: function of logits [..., V] in float32 and targets [...] that returns losses [...].
        hidden_BTD, kernel_DV, targets_BT, partitioning, chunk, logit_softcap, row_groups: see `cross_entropy`.

    Raises:
        InputError: the shape of the losses is not that of the targets.
    """
    vocab_size = kernel_DV.shape[1]

    def losses(scores_RPNV: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = loss(softcap(scores_RPNV[..., :vocab_size], logit_softcap), targets)
        if jnp.shape(found) != targets.shape:
            raise InputError(
                f'train.loss returned an array of shape {jnp.shape(found)}; it must return one loss per target, '
                f'{targets.shape}'
            )
        found = found.astype(jnp.float32)
        return found, found

    chunks = LogitChunks(hidden_BTD, partitioning=partitioning, chunk=chunk, row_groups=row_groups)
    return _per_token(losses, chunks, hidden_BTD, kernel_DV, targets_BT)[0]


def _per_token(
    function: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    chunks: LogitChunks,
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    targets_BT: jax.Array,
    num_differentiable: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Returns the two results [B, T] of a function of (logits, targets) of a chunk.

    Only the first `num_differentiable` have a gradient, because each takes time in the backward pass.
    """
    vocab_size = kernel_DV.shape[1]

    @jax.custom_vjp
    def run(hidden_BTD: jax.Array, kernel_DV: jax.Array) -> tuple[jax.Array, jax.Array]:
        kernel_RPDV = chunks.spread(kernel_DV)

        def add(_: None, inputs: tuple[jax.Array, ...]) -> tuple[None, Any]:
            hidden, targets = inputs
            return None, function(chunks.logits(hidden, kernel_RPDV), targets)

        found = scan_chunks(add, None, (chunks.split(hidden_BTD), chunks.split(targets_BT)))[1]
        return chunks.join(found[0]), chunks.join(found[1])

    def forward(hidden_BTD: jax.Array, kernel_DV: jax.Array) -> tuple[Any, Any]:
        return run(hidden_BTD, kernel_DV), (hidden_BTD, kernel_DV)

    def backward(residuals: tuple[jax.Array, jax.Array], cotangents: Any) -> tuple[jax.Array, jax.Array]:
        hidden_BTD, kernel_DV = residuals
        kernel_RPDV = chunks.spread(kernel_DV)

        def add(kernel_gradient: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            hidden, targets, *cotangent = inputs
            scores = chunks.logits(hidden, kernel_RPDV)
            _, pull_back = jax.vjp(lambda x: function(x, targets)[:num_differentiable], scores)
            return chunks.add_gradient(kernel_gradient, hidden, kernel_RPDV, *pull_back(tuple(cotangent)))

        inputs = tuple(map(chunks.split, (hidden_BTD, targets_BT, *cotangents[:num_differentiable])))
        kernel_gradient, of_hidden = scan_chunks(add, chunks.no_gradient(kernel_RPDV), inputs)
        return chunks.join(of_hidden).astype(hidden_BTD.dtype), chunks.sum_gradient(kernel_gradient, vocab_size)

    run.defvjp(forward, backward)
    return run(hidden_BTD, kernel_DV)
