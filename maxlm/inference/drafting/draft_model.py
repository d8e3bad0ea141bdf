"""Drafts by a small model with the same tokens (speculative decoding, Leviathan et al. 2023, Chen et al. 2023).

The draft model samples a token with the same key as the model, which is the same Gumbel noise. Both therefore choose
the same token wherever their distributions are similar, and the token of the model is kept wherever they differ
("drafter-invariant speculative decoding", Daliri et al. 2025). Each token depends only on the logits of the model and
its key, so the text is the same as without drafts. Let d be the total variation distance of the distributions of model
and draft model. A draft is then accepted with probability at least (1 - d) / (1 + d).

Shapes: B slots, P prompts per call, T tokens of a chunk, S positions, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema import Config
from maxlm.inference.prepared_decoder import PreparedDecoder
from maxlm.inference.sampling import Array, Rows, TokenMask, apply_forced, apply_mask, sample_rows, sampling_keys
from maxlm.model.layers.kv_cache import Caches
from maxlm.model.smear import NO_TOKEN
from maxlm.parallel.layout import Layout
from maxlm.training.state import Params


class DraftState(NamedTuple):
    """State of the draft model in all slots.

    Attributes:
        caches: keys and values.
        length_B: number of tokens in the cache, of which the last may be rejected drafts, or tokens that a grammar
            dropped. The model has the length of each text.
    """

    caches: Caches
    length_B: jax.Array


class DraftModel:
    """Prefill and drafts as functions of parameters and state. Nothing that it computes changes a text.

    Attributes:
        context: maximum number of positions; later tokens are not drafted.
    """

    def __init__(self, config: Config, layout: Layout, *, num_ids: int):
        """Initializes the draft model.

        Args:
            config: resolved config.
            layout: layout of the parameters, on the devices of the model.
            num_ids: number of ids that the model samples from.
        """
        self.context = config.model.max_positions
        self._decoder = PreparedDecoder(config, layout)
        self._num_ids, self._vocab_size = num_ids, config.model.vocab_size
        self.prepare = self._decoder.prepare

    def prefill(self, params: Params, state: DraftState, tokens_PT: jax.Array, placement: jax.Array) -> DraftState:
        """Writes chunks of prompts to the caches; see `PreparedDecoder.prefill`."""
        slot_P, start_P, count_P, before_P = placement
        # The hidden states of positions beyond the context have no meaning, and are not written.
        length_P = jnp.minimum(start_P + count_P, self.context)
        placement = jnp.stack([slot_P, start_P, count_P, self._known(before_P)])
        _, _, caches = self._decoder.prefill(params, state.caches, self._known(tokens_PT), placement, length_P)
        return DraftState(caches, state.length_B.at[slot_P].set(length_P, mode='drop'))

    def propose(
        self,
        params: Params,
        state: DraftState,
        history_BS: jax.Array,
        length_B: jax.Array,
        end_B: jax.Array,
        done_B: jax.Array,
        rows: Rows,
        seeds: tuple[Array, Array],
        mask: TokenMask,
    ) -> tuple[DraftState, jax.Array]:
        """Writes drafts after the last token of each of the first slots into `history_BS`, one token per pass.

        Passes also process the tokens that are missing in the cache, so that it holds every text up to its last token.

        Args:
            params: parameters in the form of `prepare`.
            state: state of the draft model.
            history_BS: tokens of each text.
            length_B: position of the last token of each text.
            end_B: number of tokens to process in each row, of the text and then of drafts; 0 = none. No token after
                `context` is processed.
            done_B: number of tokens of the call that the text contains, as for `apply_forced`.
            rows: sampling settings. Penalties are ignored.
            seeds: seed and sample index of each row, uint32.
            mask: tokens that may follow, as for the model, which accepts no others.
        """
        decoder, blocks = self._decoder.build(params)
        num, S = history_BS.shape
        end_B = jnp.minimum(end_B, self.context)

        def token_at(position_B: jax.Array, history_BS: jax.Array) -> jax.Array:
            return self._known(jnp.take_along_axis(history_BS, jnp.maximum(position_B, 0)[:, None], axis=1))

        def run(carry: tuple[Caches, jax.Array, jax.Array]) -> tuple[Caches, jax.Array, jax.Array]:
            caches, processed_B, history_BS = carry
            is_behind_B = processed_B < end_B
            position_B = jnp.where(is_behind_B, processed_B, 0)
            hidden_B1D, caches, _ = decoder(
                token_at(position_B, history_BS),
                positions_BT=position_B[:, None],
                previous_BT=jnp.where(position_B[:, None] > 0, token_at(position_B - 1, history_BS), NO_TOKEN),
                cache=caches,
                length_B=jnp.where(is_behind_B, position_B + 1, 0),
                blocks=blocks,
            )
            logits_BV = decoder.logits(hidden_B1D)[:, 0, : self._num_ids]
            # A model with fewer rows than ids never drafts the others, and the noise has the shape of the model's.
            missing = self._num_ids - logits_BV.shape[1]
            logits_BV = jnp.pad(logits_BV, [(0, 0), (0, missing)], constant_values=-jnp.inf)
            token_B = sample_rows(apply_mask(logits_BV, mask), sampling_keys(*seeds, position_B), rows)
            done_before_B = done_B + jnp.maximum(position_B - length_B, 0)
            token_B = apply_forced(token_B[None], mask.forced_BF, done_before_B)[0]
            # Tokens of the text are not replaced.
            target_B = jnp.where(is_behind_B & (position_B >= length_B), position_B + 1, S)
            history_BS = history_BS.at[jnp.arange(num), target_B].set(token_B, mode='drop')
            return caches, processed_B + is_behind_B, history_BS

        # Positions of rejected drafts and of dropped tokens are not part of the text.
        first = (state.caches, jnp.minimum(state.length_B[:num], length_B), history_BS)
        caches, processed_B, history_BS = jax.lax.while_loop(lambda carry: (carry[1] < end_B).any(), run, first)
        return DraftState(caches, state.length_B.at[:num].set(processed_B)), history_BS

    def is_behind(self, state: DraftState, length_B: jax.Array) -> jax.Array:
        """Returns True for each of the first slots whose cache lacks any of the first `length_B` tokens, bool [B]."""
        return state.length_B[: len(length_B)] < jnp.minimum(length_B, self.context)

    def _known(self, tokens: jax.Array) -> jax.Array:
        """Replaces ids of the model's tokenizer for which the draft model has no row. NO_TOKEN is kept."""
        return jnp.minimum(tokens, self._vocab_size - 1)
