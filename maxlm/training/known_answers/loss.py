"""Known answer of the cross-entropy of next tokens.

Shapes: B batch, T length, D dim, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema import Config
from maxlm.model.layers.softcap import softcap
from maxlm.parallel.partitioning import SINGLE_DEVICE
from maxlm.training.known_answers.answer import OTHER_VERSIONS, KnownAnswer, floats, normal, with_gradients
from maxlm.training.losses.cross_entropy import cross_entropy

# Largest number of logits: 0.5 GiB in float32, of which the formula needs a few copies.
MAX_LOGITS = 2**27


def loss_answer(config: Config, *, tokens: int, vocab_size: int) -> KnownAnswer:
    """Returns the cross-entropy of a row of at most `tokens` tokens, and its gradients.

    `vocab_size` is the part of the vocabulary on one device.
    """
    model = config.model
    D, V = model.dim, vocab_size
    T = max(1, min(tokens, MAX_LOGITS // V))
    rng = np.random.default_rng(0)
    hidden_BTD = normal(rng, (1, T, D), model.dtype)
    kernel_DV = rng.standard_normal((D, V), np.float32) * np.float32(D**-0.5)
    targets_BT = rng.integers(0, V, (1, T), np.int32)
    weights_BT = (rng.random((1, T)) < 0.9).astype(np.float32)
    settings: dict[str, Any] = {'z_loss': config.train.z_loss, 'logit_softcap': model.logit_softcap}

    def run(hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        def losses(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
            chunk = config.train.loss_chunk_tokens
            found = cross_entropy(hidden, kernel, targets, weights, partitioning=SINGLE_DEVICE, chunk=chunk, **settings)
            return found.objective

        return with_gradients(losses, jnp.ones(()), hidden, kernel)

    def exact(hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        formula = partial(_objective, targets_BT=targets, weights_BT=weights, **settings)
        return with_gradients(formula, jnp.ones(()), *floats(hidden, kernel.astype(hidden.dtype)))

    return KnownAnswer(
        'cross-entropy',
        f'{T:,} tokens × {D:,} × {V:,} token ids',
        run,
        exact,
        (hidden_BTD, kernel_DV, targets_BT, weights_BT),
        ('loss', 'gradient of the hidden states', 'gradient of the kernel'),
        model.dtype,
        OTHER_VERSIONS,
    )


def _objective(
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    *,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    z_loss: float,
    logit_softcap: float,
) -> jax.Array:
    logits_BTV = softcap(hidden_BTD @ kernel_DV, logit_softcap)
    log_z_BT = jnp.log(jnp.exp(logits_BTV - logits_BTV.max(-1, keepdims=True)).sum(-1)) + logits_BTV.max(-1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return (weights_BT * (log_z_BT - target_BT + z_loss * jnp.square(log_z_BT))).sum()
