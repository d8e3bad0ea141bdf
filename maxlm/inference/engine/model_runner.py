"""Prefill and decode steps of a model over cache slots.

Shapes: B slots, P prompts per call, T tokens of a row in a pass, D dim, V vocabulary, C reported top tokens, N tokens
generated per call, S positions, K drafted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlm.config.schema import Config
from maxlm.inference.engine.prompt_lookup import find_drafts, num_accepted, run_if
from maxlm.inference.engine.requests import MAX_TOP_LOG_PROBS
from maxlm.inference.engine.score_positions import score_positions
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
from maxlm.model.blocks import BLOCKS, STACKS
from maxlm.model.layers.kv_cache import Caches
from maxlm.model.prepared_kernels import convert, prepare_modules, uses_unstacked_layers
from maxlm.model.smear import previous_ids
from maxlm.parallel.layout import Layout
from maxlm.training.state import Params, abstract_model


class PendingPrompt(NamedTuple):
    """Seed and sample index of each row, from which its sampling keys are derived."""

    seed_B: Array
    sample_B: Array


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
    """

    caches: Caches
    previous_B: jax.Array
    token_B: jax.Array
    length_B: jax.Array
    in_prompt_BV: jax.Array
    counts_BV: jax.Array
    history_BS: jax.Array


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
    sampled: SampledTokens
    counts: DecodeCounts


class ModelRunner:
    """Prefill and decode steps of one model as functions of parameters and state. `CompiledFunctions` compiles them."""

    def __init__(self, config: Config, layout: Layout, *, num_ids: int, max_tokens: int, num_draft_tokens: int):
        """Initializes the runner.

        Args:
            config: resolved config.
            layout: layout of the parameters.
            num_ids: number of ids that have a token and a row. A model may have additional padding ids without text.
            max_tokens: maximum number of tokens generated per slot in one call.
            num_draft_tokens: number of tokens drafted per pass; 0 = none.
        """
        self._config, self._platform = config.model, layout.platform
        self.are_layers_unstacked = uses_unstacked_layers(config, layout)
        # A copy, because the cached abstract model must not be modified.
        decoder = nnx.merge(*nnx.split(abstract_model(config, layout)))
        self._form = prepare_modules(decoder) if self.are_layers_unstacked else None
        self._graph, abstract = nnx.split(decoder)
        self._abstract_blocks = {name: tree for name, tree in nnx.to_pure_dict(abstract).items() if name in STACKS}
        self._num_ids, self._max_tokens, self._num_draft_tokens = num_ids, max_tokens, num_draft_tokens

    def prepare(self, params: Params) -> Params:
        """Converts parameters to the form that `prefill` and `decode` take."""
        if self._form is None:
            return params
        others = convert({name: tree for name, tree in params.items() if name not in STACKS}, self._form)
        stacks = {name: params[name] for name in STACKS if name in params}
        if self._platform != 'cpu' or len(devices := jax.tree.leaves(stacks)[0].devices()) > 1:
            # One program for all parameters compiles faster than one program per shape.
            return {**others, BLOCKS: jax.jit(lambda stacks: list(self._unstack(stacks)))(stacks)}
        # NumPy copies the layers on a CPU without a program. Views would keep the stacks in memory.
        (device,) = devices

        def place(x: np.ndarray) -> jax.Array:
            return jax.device_put(np.array(x, order='C'), device)

        layers = self._unstack(jax.tree.map(np.asarray, stacks))
        return {**others, BLOCKS: [jax.tree.map(place, layer) for layer in layers]}

    def copy_slot(self, state: State, source: jax.Array, slot: jax.Array) -> State:
        """Copies tokens, keys and values of one slot to another."""
        return state._replace(
            caches=jax.tree.map(lambda x: x.at[:, slot].set(x[:, source]), state.caches),
            history_BS=state.history_BS.at[slot].set(state.history_BS[source]),
        )

    def prefill(
        self,
        params: Params,
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
        slot_P, start_P, count_P, before_P = placement
        positions_PT = start_P[:, None] + jnp.arange(T)[None, :]
        length_P = start_P + count_P
        decoder, blocks = self._build_decoder(params)
        previous_PT = previous_ids(tokens_PT, before_P)
        run = partial(
            decoder, tokens_PT, positions_BT=positions_PT, previous_BT=previous_PT, length_B=length_P, blocks=blocks
        )
        if P == 1:
            hidden_PTD, caches, _ = run(cache=state.caches, first_row=slot_P[0])
        else:
            # The slots are not contiguous, so their caches are gathered and scattered.
            hidden_PTD, new_caches, _ = run(cache=jax.tree.map(lambda x: x[:, slot_P], state.caches))
            caches = jax.tree.map(lambda x, new: x.at[:, slot_P].set(new, mode='drop'), state.caches, new_caches)
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
        )
        return state, sampled, hidden_sum_PD, hidden_PTD

    def score(
        self, params: Params, hidden_PTD: jax.Array, target_PT: jax.Array, with_top: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the result of `score_positions` for hidden states of `prefill`."""
        decoder, _ = self._build_decoder(params)
        num_top = min(MAX_TOP_LOG_PROBS, self._num_ids)
        return score_positions(decoder.logits, hidden_PTD, target_PT, with_top, num_ids=self._num_ids, num_top=num_top)

    def decode(
        self,
        params: Params,
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
        decoder, blocks = self._build_decoder(params)

        def run(decoding: _Decoding) -> _Decoding:
            if not K:
                return advance(decoding.token_B[:, None], jnp.zeros_like(num_tokens_B), decoding)
            drafts_BK, is_found_B = find_drafts(decoding.history_BS, start_B + decoding.done_B + 1, K)
            has_draft_B = is_found_B & ~has_penalty(rows)
            num_drafted_B = jnp.where(has_draft_B, num_tokens_B - decoding.done_B - 1, 0).clip(0, K)
            inputs_BT = jnp.concatenate([decoding.token_B[:, None], drafts_BK], axis=1)
            # A pass over drafts takes longer for all rows, and a call lasts until its slowest row is complete.
            num_active = (num_tokens_B > decoding.done_B).sum()
            is_useful = ((num_drafted_B > 0).sum() * 2 >= num_active) & (num_drafted_B > 0).any()
            num_drafted_B = jnp.where(is_useful, num_drafted_B, 0)
            decoding = run_if(is_useful, partial(advance, inputs_BT, num_drafted_B), decoding)
            return run_if(~is_useful, partial(advance, inputs_BT[:, :1], num_drafted_B), decoding)

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
            counts_BV, done_B = decoding.counts_BV, decoding.done_B
            sampled = self._sample(
                decoder, hidden_BTD, positions_BT, rows, seeds, in_prompt_BV, counts_BV, mask, with_top, done_B
            )
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
                S = history_BS.shape[1]
                new_position_TB = jnp.where(is_new_TB, positions_BT.T + 1, S)
                history_BS = history_BS.at[row_1B, new_position_TB].set(sampled.token_NB, mode='drop')
            return _Decoding(
                caches,
                decoding.done_B + new_B,
                jnp.where(new_B > 0, previous_B, decoding.previous_B),
                jnp.where(new_B > 0, last_B, decoding.token_B),
                decoding.counts_BV.at[row_1B, sampled.token_NB].add(is_new_TB),
                history_BS,
                jax.tree.map(
                    lambda x_N, new_T: x_N.at[index_TB, row_1B].set(new_T, mode='drop'), decoding.sampled, sampled
                ),
                DecodeCounts(
                    counts.passes + 1,
                    counts.draft_tokens + num_drafted_B.sum(),
                    counts.accepted_tokens + accepted_B.sum(),
                ),
            )

        zero = jnp.zeros((), jnp.int32)
        decoding = _Decoding(
            state.caches,
            jnp.zeros_like(num_tokens_B),
            state.previous_B[:num],
            state.token_B[:num],
            state.counts_BV[:num],
            state.history_BS[:num],
            self._empty_samples(self._max_tokens, num),
            DecodeCounts(zero, zero, zero),
        )
        decoding = jax.lax.while_loop(lambda decoding: (decoding.done_B < num_tokens_B).any(), run, decoding)
        state = State(
            decoding.caches,
            state.previous_B.at[:num].set(decoding.previous_B),
            state.token_B.at[:num].set(decoding.token_B),
            state.length_B.at[:num].add(num_tokens_B),
            state.in_prompt_BV,
            state.counts_BV.at[:num].set(decoding.counts_BV),
            state.history_BS.at[:num].set(decoding.history_BS),
        )
        # One array, because the host reads each array separately.
        return state, decoding.sampled, jnp.stack(decoding.counts)

    def _unstack(self, stacks: Params) -> Iterator[Params]:
        """Yields the parameters of each layer, in the order of the layers."""
        assert self._form is not None, 'stacked layers are used as they are'
        for name in STACKS:
            for layer in range(len(jax.tree.leaves(stacks[name])[0]) if name in stacks else 0):
                block = jax.tree.map(lambda x_L, layer=layer: x_L[layer], stacks[name])
                yield convert(block, self._form, (name,))

    def _build_decoder(self, params: Params) -> tuple[Any, Any]:
        """Returns the model, and the parameters of its blocks if they are unstacked."""
        if not self.are_layers_unstacked:
            return nnx.merge(self._graph, params), None
        return nnx.merge(self._graph, {**params, **self._abstract_blocks}), params[BLOCKS]

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
