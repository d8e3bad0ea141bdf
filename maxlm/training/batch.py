"""The arrays of a batch: names, dtypes, shapes and shardings.

Shapes: B batch, T length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from maxlm.config.schema import Config
from maxlm.parallel.layout import Layout

# tokens, targets, weights, segments, positions: [B, T] each; optional: sources [B]; for GRPO also GRPO_TYPES.
Batch = dict[str, jax.Array]
# The arrays of a batch, as `maxlm.data` produces them; each [B, T].
BATCH_TYPES = {
    'tokens': jnp.int32,
    'targets': jnp.int32,
    'weights': jnp.float32,
    'segments': jnp.int32,
    'positions': jnp.int32,
}
# Additional arrays of a batch of GRPO responses, each [B, T]; see `policy_sums`. `weights` are then the loss weights.
GRPO_TYPES = {'predicted': jnp.float32, 'advantages': jnp.float32, 'old_log_probs': jnp.float32}
# Array of a GRPO batch if `Config.has_proximal`, [B, T].
PROXIMAL = 'proximal_log_probs'
# Arrays of a GRPO batch of a model with a value head, [B, T]; see `Values`.
OLD_VALUES, RETURNS = 'old_values', 'returns'
# Arrays of the stored outputs of a teacher (distill.logits_dir), each [B, T, distill.top_k]; see `StoredOutputs`.
TEACHER_TYPES = {'teacher_ids': jnp.int32, 'teacher_log_probs': jnp.float32}
# Array of a batch of a reward model, [B, T]: 1 at the token of each answer whose score counts, else 0; see
# `maxlm.data.chat.scored_tokens`.
SCORED = 'scored'
# Optional scalar of a batch. If it is True, the step leaves the complete state unchanged.
HOLD = 'hold'


def batch_shapes(
    config: Config, layout: Layout, num_sources: int = 0, *, holds: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the abstract arrays of the global batch of a resolved config's step, with their shardings.

    The batch contains `sources` [B] if `num_sources` > 0, and HOLD, a replicated boolean scalar, if `holds` is True.
    """
    B, T = config.train.global_batch_size, config.data.seq_len
    kinds = dict(BATCH_TYPES)
    if config.train.objective == 'grpo':
        kinds |= GRPO_TYPES | ({PROXIMAL: jnp.float32} if config.has_proximal else {})
        kinds |= dict.fromkeys((OLD_VALUES, RETURNS), jnp.float32) if config.model.value_head else {}
    if config.train.objective == 'reward':
        kinds[SCORED] = jnp.float32
    shapes = {name: jax.ShapeDtypeStruct((B, T), kind, sharding=layout.batch) for name, kind in kinds.items()}
    if config.distill.logits_dir:
        stored = (B, T, config.distill.top_k)
        shapes |= {
            name: jax.ShapeDtypeStruct(stored, kind, sharding=layout.batch) for name, kind in TEACHER_TYPES.items()
        }
    if num_sources:
        shapes['sources'] = jax.ShapeDtypeStruct((B,), jnp.int32, sharding=layout.named('batch'))
    if holds:
        shapes[HOLD] = jax.ShapeDtypeStruct((), jnp.bool_, sharding=layout.named())
    return shapes
