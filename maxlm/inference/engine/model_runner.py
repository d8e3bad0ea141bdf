"""Prefill and decode steps of a model over cache slots.

Shapes: B slots, P prompts per call, T tokens of a row in a pass, D dim, V vocabulary, C reported top tokens, N tokens
generated per call, S positions, K drafted tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema import Config
from maxlm.inference.drafting.draft_model import DraftModel, DraftState
from maxlm.inference.drafting.prompt_lookup import find_drafts, num_accepted, run_if
from maxlm.inference.engine.requests import MAX_TOP_LOG_PROBS
from maxlm.inference.engine.score_positions import score_positions
from maxlm.inference.prepared_decoder import PreparedDecoder
from maxlm.inference.sampling import (
    Array,
    Rows,
    TokenMask,
    apply_forced,
    apply_mask,
    apply_penalties,
    has_penalty,
    log_prob,
    sample_rows,
    sampling_keys,
    top_log_probs,
)
from maxlm.model.layers.kv_cache import Caches
from maxlm.model.smear import previous_ids
from maxlm.parallel.layout import Layout
from maxlm.training.state import Params


class PendingPrompt(NamedTuple):
    """Seed and sample index of each row, from which its sampling keys are derived."""

    seed_B: Array
    sample_B: Array


class PreparedParams(NamedTuple):
    """Parameters of the model and of the draft model, if any, in the form of `ModelRunner.prepare`."""

    model: Params
    draft: Params | None


class State(NamedTuple):
    """State of all slots, on the devices.

    Attributes:
        caches: keys and values.
        previous_B: last token in the cache of each slot.
        token_B: next input token of each slot, not in the cache yet.
        length_B: number of tokens in the cache.
        in_prompt_BV: True where the prompt contains the token.
        counts_BV: number of occurrences in the continuation.
        history_BS: tokens of prompt and continuation, including `token_B`; without positions unless tokens are drafted.
        draft: state of the draft model; None = no such model.
    """

    caches: Caches
    previous_B: jax.Array
    token_B: jax.Array
    length_B: jax.Array
    in_prompt_BV: jax.Array
    counts_BV: jax.Array
    history_BS: jax.Array
    draft: DraftState | None


class SampledTokens(NamedTuple):
    """Tokens and log-probabilities of a call, by number in the call and row.

    Entries of tokens that were not requested are 0, as are the top tokens if no request needs them.
    """

    token_NB: jax.Array
    log_prob_NB: jax.Array
    top_ids_NBC: jax.Array
    top_log_probs_NBC: jax.Array


class DecodeCounts(NamedTuple):
    """Counts of a decode call, int32 scalars.

    Attributes:
        passes: forward passes.
        draft_tokens: drafted tokens, over all rows.
        accepted_tokens: drafted tokens that were equal to the sampled tokens.
    """

    passes: Array
    draft_tokens: Array
    accepted_tokens: Array


class _Decoding(NamedTuple):
    """State of the loop of a decode call. `done_B` is the number of tokens generated so far."""

    caches: Caches
    done_B: jax.Array
    previous_B: jax.Array
    token_B: jax.Array
    counts_BV: jax.Array
    history_BS: jax.Array
    draft: DraftState | None
    sampled: SampledTokens
    counts: DecodeCounts


class ModelRunner:
    """Prefill and decode steps of one model as functions of parameters and state. `CompiledFunctions` compiles them."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        *,
        num_ids: int,
        max_tokens: int,
        num_draft_tokens: int,
        draft: DraftModel | None,
    ):
        """Initializes the runner.

        Args:
            config: resolved config.
            layout: layout of the parameters.
            num_ids: number of ids that have a token and a row. A model may have additional padding ids without text.
            max_tokens: maximum number of tokens generated per slot in one call.
            num_draft_tokens: number of tokens drafted per pass; 0 = none.
            draft: model that drafts them; None = drafts from the preceding text.
        """
        self._decoder, self._draft = PreparedDecoder(config, layout), draft
        self.are_layers_unstacked = self._decoder.are_layers_unstacked
        self._num_ids, self._max_tokens, self._num_draft_tokens = num_ids, max_tokens, num_draft_tokens

    def prepare(self, params: Params, draft_params: Params | None) -> PreparedParams:
        """Converts parameters to the form that `prefill` and `decode` take."""
        return PreparedParams(self._decoder.prepare(params), self._draft and self._draft.prepare(draft_params))

    def copy_slot(self, state: State, source: jax.Array, slot: jax.Array) -> State:
        """Copies tokens, keys and values of one slot to another."""

        def copied(caches: Caches) -> Caches:
            return jax.tree.map(lambda x: x.at[:, slot].set(x[:, source]), caches)

        draft = state.draft and state.draft._replace(caches=copied(state.draft.caches))
        return state._replace(
            caches=copied(state.caches),
            history_BS=state.history_BS.at[slot].set(state.history_BS[source]),
            draft=draft,
        )

    def prefill(
        self,
        params: PreparedParams,
        state: State,
        tokens_PT: jax.Array,
        placement: jax.Array,
        in_prompt_PV: jax.Array,
        rows: Rows,
        seeds: PendingPrompt,
        mask: TokenMask,
        with_top: jax.Array,
    ) -> tuple[State, SampledTokens, jax.Array, jax.Array]:
        """Prefills chunks in one pass and samples the token after each.

        Also returns the sum of the hidden states of each chunk, float32 [P, D], and the hidden states [P, T, D].
        `placement` contains the slot, the position of the first token and the number of tokens of each chunk, and the
        token before it (or NO_TOKEN), int32 [4, P].
        """
        P, T = tokens_PT.shape
        slot_P, start_P, count_P, _ = placement
        positions_PT = start_P[:, None] + jnp.arange(T)[None, :]
        length_P = start_P + count_P
        decoder, hidden_PTD, caches = self._decoder.prefill(params.model, state.caches, tokens_PT, placement, length_P)
        draft = state.draft
        if self._draft is not None:
            assert draft is not None
            draft = self._draft.prefill(params.draft, draft, tokens_PT, placement)
        is_token_PT1 = (jnp.arange(T)[None, :] < count_P[:, None])[:, :, None]
        hidden_sum_PD = jnp.where(is_token_PT1, hidden_PTD.astype(jnp.float32), 0).sum(axis=1)
        last_P = jnp.maximum(count_P - 1, 0)
        hidden_P1D = jnp.take_along_axis(hidden_PTD, last_P[:, None, None], axis=1)
        counts_PV = jnp.zeros((P, self._num_ids), jnp.int32)
        arrays = rows, seeds, in_prompt_PV, counts_PV, mask, with_top, jnp.zeros_like(count_P)
        sampled = self._sample(decoder, hidden_P1D, length_P[:, None] - 1, *arrays)
        token_P = sampled.token_NB[0]
        counts_PV = counts_PV.at[jnp.arange(P), token_P].add(1)

        def scatter(x_B: jax.Array, new_P: jax.Array) -> jax.Array:
            return x_B.at[slot_P].set(new_P, mode='drop')

        history_BS = state.history_BS
        if self._num_draft_tokens:
            history_BS = history_BS.at[slot_P[:, None], positions_PT].set(tokens_PT, mode='drop')
            history_BS = history_BS.at[slot_P, length_P].set(token_P, mode='drop')
        state = State(
            caches,
            scatter(state.previous_B, jnp.take_along_axis(tokens_PT, last_P[:, None], axis=1)[:, 0]),
            scatter(state.token_B, token_P),
            scatter(state.length_B, length_P),
            scatter(state.in_prompt_BV, in_prompt_PV),
            scatter(state.counts_BV, counts_PV),
            history_BS,
            draft,
        )
        return state, sampled, hidden_sum_PD, hidden_PTD

    def score(
        self, params: PreparedParams, hidden_PTD: jax.Array, target_PT: jax.Array, with_top: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the result of `score_positions` for hidden states of `prefill`."""
        decoder, _ = self._decoder.build(params.model)
        num_top = min(MAX_TOP_LOG_PROBS, self._num_ids)
        return score_positions(decoder.logits, hidden_PTD, target_PT, with_top, num_ids=self._num_ids, num_top=num_top)

    def decode(
        self,
        params: PreparedParams,
        state: State,
        num_tokens_B: jax.Array,
        rows: Rows,
        seeds: PendingPrompt,
        mask: TokenMask,
        with_top: jax.Array,
    ) -> tuple[State, SampledTokens, jax.Array]:
        """Samples `num_tokens_B` tokens for each of the first slots, and returns the `DecodeCounts` as int32 [3].

        A pass generates one token per row, and one more for each drafted token that is accepted. Rows with penalties
        accept no drafts. The mask applies to all tokens that are not forced.
        """
        num, K = len(num_tokens_B), self._num_draft_tokens
        start_B, in_prompt_BV = state.length_B[:num], state.in_prompt_BV[:num]
        decoder, blocks = self._decoder.build(params.model)

        def run(decoding: _Decoding) -> _Decoding:
            if not K:
                return advance(decoding.token_B[:, None], jnp.zeros_like(num_tokens_B), decoding)
            length_B, remaining_B = start_B + decoding.done_B, num_tokens_B - decoding.done_B
            limit_B, is_drafted_B = jnp.minimum(remaining_B - 1, K), ~has_penalty(rows)
            if self._draft is None:
                drafts_BK, is_found_B = find_drafts(decoding.history_BS, length_B + 1, K)
                is_drafted_B &= is_found_B
            else:
                limit_B = jnp.minimum(limit_B, self._draft.context - length_B)
            num_drafted_B = jnp.where(is_drafted_B, jnp.maximum(limit_B, 0), 0)
            # A pass over drafts takes longer for all rows, and a call lasts until its slowest row is complete.
            num_active = (remaining_B > 0).sum()
            is_useful = ((num_drafted_B > 0).sum() * 2 >= num_active) & (num_drafted_B > 0).any()
            num_drafted_B = jnp.where(is_useful, num_drafted_B, 0)
            if self._draft is not None:
                draft, history_BS, done_B = decoding.draft, decoding.history_BS, decoding.done_B
                assert draft is not None
                # The last of K drafted tokens is not processed. Without drafts, the last token of the text is.
                end_B = length_B + jnp.where(remaining_B > 0, jnp.maximum(num_drafted_B, 1), 0)
                end_B = jnp.where(num_tokens_B > 0, end_B, 0)
                draft, history_BS = self._draft.propose(
                    params.draft, draft, history_BS, length_B, end_B, done_B, rows, seeds, mask
                )
                decoding = decoding._replace(draft=draft, history_BS=history_BS)
                places_BK = length_B[:, None] + 1 + jnp.arange(K)[None, :]
                drafts_BK = jnp.take_along_axis(history_BS, places_BK, axis=1, mode='clip')
            inputs_BT = jnp.concatenate([decoding.token_B[:, None], drafts_BK], axis=1)
            decoding = run_if(is_useful, partial(advance, inputs_BT, num_drafted_B), decoding)
            return run_if(~is_useful & (num_active > 0), partial(advance, inputs_BT[:, :1], num_drafted_B), decoding)

        def advance(inputs_BT: jax.Array, num_drafted_B: jax.Array, decoding: _Decoding) -> _Decoding:
            """Runs one pass over the last token of each row and its drafts."""
            T = inputs_BT.shape[1]
            remaining_B = num_tokens_B - decoding.done_B
            length_B = start_B + decoding.done_B
            # The stored position of an inactive slot may be out of range.
            positions_BT = jnp.where(remaining_B > 0, length_B, 0)[:, None] + jnp.arange(T)[None, :]
            hidden_BTD, caches, _ = decoder(
                inputs_BT,
                positions_BT=positions_BT,
                previous_BT=previous_ids(inputs_BT, decoding.previous_B),
                cache=decoding.caches,
                length_B=jnp.where(remaining_B > 0, length_B + jnp.minimum(T, remaining_B), 0),
                blocks=blocks,
            )
            arrays = rows, seeds, in_prompt_BV, decoding.counts_BV, mask, with_top, decoding.done_B
            sampled = self._sample(decoder, hidden_BTD, positions_BT, *arrays)
            accepted_B = jnp.minimum(num_accepted(sampled.token_NB, inputs_BT[:, 1:].T), num_drafted_B)
            new_B = jnp.minimum(1 + accepted_B, remaining_B)
            is_new_TB = jnp.arange(T)[:, None] < new_B[None, :]
            index_TB = jnp.where(is_new_TB, decoding.done_B[None, :] + jnp.arange(T)[:, None], self._max_tokens)
            row_1B = jnp.arange(num)[None, :]
            last_1B = jnp.maximum(new_B - 1, 0)[None, :]
            last_B = jnp.take_along_axis(sampled.token_NB, last_1B, axis=0)[0]
            previous_B = jnp.take_along_axis(inputs_BT.T, last_1B, axis=0)[0]
            history_BS, counts = decoding.history_BS, decoding.counts
            if K:
                new_position_TB = jnp.where(is_new_TB, positions_BT.T + 1, history_BS.shape[1])
                history_BS = history_BS.at[row_1B, new_position_TB].set(sampled.token_NB, mode='drop')
            return _Decoding(
                caches,
                decoding.done_B + new_B,
                jnp.where(new_B > 0, previous_B, decoding.previous_B),
                jnp.where(new_B > 0, last_B, decoding.token_B),
                decoding.counts_BV.at[row_1B, sampled.token_NB].add(is_new_TB),
                history_BS,
                decoding.draft,
                jax.tree.map(
                    lambda x_N, new_T: x_N.at[index_TB, row_1B].set(new_T, mode='drop'), decoding.sampled, sampled
                ),
                DecodeCounts(
                    counts.passes + 1,
                    counts.draft_tokens + num_drafted_B.sum(),
                    counts.accepted_tokens + accepted_B.sum(),
                ),
            )

        def has_work(decoding: _Decoding) -> jax.Array:
            is_running_B = decoding.done_B < num_tokens_B
            if self._draft is not None and decoding.draft is not None:
                # A prefill of the next tokens needs all of these in the cache of the draft model.
                is_running_B |= (num_tokens_B > 0) & self._draft.is_behind(decoding.draft, start_B + decoding.done_B)
            return is_running_B.any()

        zero = jnp.zeros((), jnp.int32)
        decoding = _Decoding(
            state.caches,
            jnp.zeros_like(num_tokens_B),
            state.previous_B[:num],
            state.token_B[:num],
            state.counts_BV[:num],
            state.history_BS[:num],
            state.draft,
            self._empty_samples(self._max_tokens, num),
            DecodeCounts(zero, zero, zero),
        )
        decoding = jax.lax.while_loop(has_work, run, decoding)
        state = State(
            decoding.caches,
            state.previous_B.at[:num].set(decoding.previous_B),
            state.token_B.at[:num].set(decoding.token_B),
            state.length_B.at[:num].add(num_tokens_B),
            state.in_prompt_BV,
            state.counts_BV.at[:num].set(decoding.counts_BV),
            state.history_BS.at[:num].set(decoding.history_BS),
            decoding.draft,
        )
        # One array, because the host reads each array separately.
        return state, decoding.sampled, jnp.stack(decoding.counts)

    def _sample(
        self,
        decoder: Any,
        hidden_BTD: jax.Array,
        position_BT: jax.Array,
        rows: Rows,
        seeds: PendingPrompt,
        in_prompt_BV: jax.Array,
        counts_BV: jax.Array,
        mask: TokenMask,
        with_top: jax.Array,
        done_B: jax.Array,
    ) -> SampledTokens:
        """Samples the token after each position, N = T. Penalties apply only to the first token of a row."""
        B, T = position_BT.shape
        logits_TBV = decoder.logits(hidden_BTD)[..., : self._num_ids].swapaxes(0, 1)
        first_BV = jax.lax.cond(
            has_penalty(rows).any(),
            lambda: apply_penalties(logits_TBV[0], rows, in_prompt_BV, counts_BV),
            lambda: logits_TBV[0],
        )
        # From here on, each position of each row is a row.
        allowed_BV = jnp.concatenate([first_BV, logits_TBV[1:].reshape(-1, self._num_ids)])
        allowed_BV = apply_mask(allowed_BV, mask._replace(words_BW=jnp.tile(mask.words_BW, (T, 1))))
        logits_BV = logits_TBV.reshape(-1, self._num_ids)
        rows, seeds = jax.tree.map(lambda x_B: jnp.tile(x_B, T), (rows, seeds))
        keys_B = sampling_keys(seeds.seed_B, seeds.sample_B, position_BT.T.reshape(-1))
        token_TB = sample_rows(allowed_BV, keys_B, rows).reshape(T, B)
        token_B = apply_forced(token_TB, mask.forced_BF, done_B).reshape(-1)
        _, _, no_ids_1BC, no_log_probs_1BC = self._empty_samples(1, len(token_B))
        ids_BC, log_probs_BC = jax.lax.cond(
            with_top,
            lambda: top_log_probs(logits_BV, no_ids_1BC.shape[-1]),
            lambda: (no_ids_1BC[0], no_log_probs_1BC[0]),
        )
        sampled = SampledTokens(token_B, log_prob(logits_BV, token_B), ids_BC, log_probs_BC)
        return jax.tree.map(lambda x_B: x_B.reshape(T, B, *x_B.shape[1:]), sampled)

    def _empty_samples(self, num_tokens: int, num_rows: int) -> SampledTokens:
        """Returns zeros in the shape of `num_tokens` tokens in each of `num_rows` rows."""
        top_shape = (num_tokens, num_rows, min(MAX_TOP_LOG_PROBS, self._num_ids))
        ids, log_probs = (partial(jnp.zeros, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
        return SampledTokens(
            ids((num_tokens, num_rows)), log_probs((num_tokens, num_rows)), ids(top_shape), log_probs(top_shape)
        )
