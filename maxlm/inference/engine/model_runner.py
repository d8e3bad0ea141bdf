"""What goes through the model: chunks of prompts into slots, and tokens behind them, some at a time.

Shapes: B slots, P prompts that come in one call, T tokens of a chunk, V vocabulary, C likeliest tokens that are told,
N passes of one call.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import Config
from maxlm.inference.engine.requests import MAX_TOP_LOG_PROBS
from maxlm.inference.sampling import (
    Array,
    Rows,
    draw_keys,
    has_penalty,
    log_prob,
    penalized,
    sample_rows,
    top_log_probs,
)
from maxlm.model.blocks import BLOCKS
from maxlm.model.layers.kv_cache import Caches
from maxlm.model.layers.linear import transpose_kernel
from maxlm.parallel.layout import Layout
from maxlm.training.state import Params, abstract_model


class PendingPrompt(NamedTuple):
    """What draws need to know besides sampling settings, by row."""

    seed_B: Array
    sample_B: Array


class State(NamedTuple):
    """Of all slots, on the devices. A slot's next token is not in the cache yet."""

    caches: Caches
    token_B: jax.Array
    # Tokens in the cache.
    length_B: jax.Array
    in_prompt_BV: jax.Array
    # Of the continuation.
    counts_BV: jax.Array


class SampledTokens(NamedTuple):
    """Tokens of a call, by pass and row, with log-probabilities; of the likeliest where they were wanted, else zeros.

    What passes that were not asked for would have drawn is 0.
    """

    token_NB: jax.Array
    log_prob_NB: jax.Array
    top_ids_NBC: jax.Array
    top_log_probs_NBC: jax.Array


class ModelRunner:
    """Of one model, as functions of parameters and state that `CompiledFunctions` compiles."""

    def __init__(self, config: Config, layout: Layout, *, num_ids: int, most: int):
        """
        Args:
            config: resolved.
            layout: of the parameters.
            num_ids: of the tokenizer. A model may have more, for a round number; they have no text.
            most: tokens of a slot that one call draws, at most.
        """
        self._config = config.model
        self.are_layers_apart = uses_unstacked_layers(config)
        # A copy of what is not to be changed.
        decoder = nnx.merge(*nnx.split(abstract_model(config, layout)))
        # By path: axes of the input.
        self._turned = decoder.turn_kernels() if self.are_layers_apart else {}
        self._graph, abstract = nnx.split(decoder)
        self._abstract_blocks = nnx.to_pure_dict(abstract)[BLOCKS]
        self._num_ids, self._most = num_ids, most
        # One program: one for each shape of a parameter would take longer to compile.
        self._split_blocks = jax.jit(self._layers_of)

    def prepare(self, params: Params) -> Params:
        """Parameters as the passes take them."""
        if not self.are_layers_apart:
            return params
        others = {name: part for name, part in params.items() if name != BLOCKS}
        others = jax.tree_util.tree_map_with_path(self._turn, others)
        return {**others, BLOCKS: self._split_blocks(params[BLOCKS])}

    def take_over(self, state: State, source: jax.Array, slot: jax.Array) -> State:
        """With keys and values of one slot in another, too."""
        return state._replace(caches=jax.tree.map(lambda x: x.at[:, slot].set(x[:, source]), state.caches))

    def prefill(
        self,
        params: Params,
        state: State,
        tokens_PT: jax.Array,
        place: jax.Array,
        in_prompt_PV: jax.Array,
        rows: Rows,
        rest: PendingPrompt,
        want_top: jax.Array,
    ) -> tuple[State, SampledTokens]:
        """Puts chunks into slots, and draws what follows each: one pass.

        `place` is the slot that a chunk goes to, the position of its first token, and the number of its tokens, int32
        [3, P].
        """
        P, T = tokens_PT.shape
        slot_P, start_P, count_P = place
        positions_PT = start_P[:, None] + jnp.arange(T)[None, :]
        length_P = start_P + count_P
        decoder, blocks = self._merged(params)
        run = partial(decoder, tokens_PT, positions_BT=positions_PT, length_B=length_P, blocks=blocks)
        if P == 1:
            hidden_PTD, caches = run(cache=state.caches, first_row=slot_P[0])
        else:
            # Rows that are not beside each other.
            hidden_PTD, taken = run(cache=jax.tree.map(lambda x: x[:, slot_P], state.caches))
            caches = jax.tree.map(lambda x, new: x.at[:, slot_P].set(new, mode='drop'), state.caches, taken)
        last_P = jnp.maximum(count_P - 1, 0)
        hidden_P1D = jnp.take_along_axis(hidden_PTD, last_P[:, None, None], axis=1)
        counts_PV = jnp.zeros((P, self._num_ids), jnp.int32)
        keys_P = draw_keys(rest.seed_B, rest.sample_B, length_P - 1)
        drawn = self._draw(decoder, hidden_P1D, keys_P, rows, in_prompt_PV, counts_PV, want_top)
        token_P = drawn.token_NB[0]
        counts_PV = counts_PV.at[jnp.arange(P), token_P].add(1)

        def put(x_B: jax.Array, new_P: jax.Array) -> jax.Array:
            return x_B.at[slot_P].set(new_P, mode='drop')

        state = State(
            caches,
            put(state.token_B, token_P),
            put(state.length_B, length_P),
            put(state.in_prompt_BV, in_prompt_PV),
            put(state.counts_BV, counts_PV),
        )
        return state, drawn

    def decode(
        self,
        params: Params,
        state: State,
        left_B: jax.Array,
        rows: Rows,
        rest: PendingPrompt,
        want_top: jax.Array,
    ) -> tuple[State, SampledTokens]:
        """Draws `left_B` tokens of each of the first slots, a pass through the model for each while any is left."""
        num = len(left_B)
        start_B, in_prompt_BV = state.length_B[:num], state.in_prompt_BV[:num]
        decoder, blocks = self._merged(params)

        def run(step: jax.Array, carry: Any) -> Any:
            caches, token_B, counts_BV, drawn_N = carry
            active_B = step < left_B
            length_B = start_B + step
            hidden_B1D, caches = decoder(
                token_B[:, None],
                # A slot that rests may be anywhere.
                positions_BT=jnp.where(active_B, length_B, 0)[:, None],
                cache=caches,
                length_B=jnp.where(active_B, length_B + 1, 0),
                blocks=blocks,
            )
            keys_B = draw_keys(rest.seed_B, rest.sample_B, length_B)
            drawn = self._draw(decoder, hidden_B1D, keys_B, rows, in_prompt_BV, counts_BV, want_top)
            new_B = drawn.token_NB[0]
            return (
                caches,
                jnp.where(active_B, new_B, token_B),
                counts_BV.at[jnp.arange(num), new_B].add(active_B),
                jax.tree.map(lambda x_N, x_1: jax.lax.dynamic_update_slice_in_dim(x_N, x_1, step, 0), drawn_N, drawn),
            )

        first = (state.caches, state.token_B[:num], state.counts_BV[:num], self._nothing(self._most, num))
        caches, token_B, counts_BV, drawn = jax.lax.fori_loop(0, left_B.max(), run, first)
        state = State(
            caches,
            state.token_B.at[:num].set(token_B),
            state.length_B.at[:num].add(left_B),
            state.in_prompt_BV,
            state.counts_BV.at[:num].set(counts_BV),
        )
        return state, drawn

    def _turn(self, path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return transpose_kernel(x, self._turned.get(tuple(entry.key for entry in path), 0))

    def _layers_of(self, blocks: Params) -> list[Params]:
        """Parameters of each layer of a stack."""
        # With the name of what they are part of in their paths.
        stacks, tree = jax.tree_util.tree_flatten_with_path({BLOCKS: blocks})
        layers = zip(*([self._turn(path, x) for x in x_L] for path, x_L in stacks), strict=True)
        return [jax.tree.unflatten(tree, layer)[BLOCKS] for layer in layers]

    def _merged(self, params: Params) -> tuple[Any, Any]:
        """The model, and the parameters of its blocks where they are apart."""
        if not self.are_layers_apart:
            return nnx.merge(self._graph, params), None
        return nnx.merge(self._graph, {**params, BLOCKS: self._abstract_blocks}), params[BLOCKS]

    def _draw(
        self,
        decoder: Any,
        hidden_B1D: jax.Array,
        keys_B: jax.Array,
        rows: Rows,
        in_prompt_BV: jax.Array,
        counts_BV: jax.Array,
        want_top: jax.Array,
    ) -> SampledTokens:
        """Of one pass."""
        logits_BV = decoder.logits(hidden_B1D)[:, 0, : self._num_ids]
        shaped_BV = jax.lax.cond(
            has_penalty(rows),
            lambda: penalized(logits_BV, rows, in_prompt_BV, counts_BV),
            lambda: logits_BV,
        )
        token_B = sample_rows(shaped_BV, keys_B, rows)
        _, _, no_ids_1BC, no_log_probs_1BC = self._nothing(1, len(token_B))
        ids_BC, log_probs_BC = jax.lax.cond(
            want_top,
            lambda: top_log_probs(logits_BV, no_ids_1BC.shape[-1]),
            lambda: (no_ids_1BC[0], no_log_probs_1BC[0]),
        )
        return SampledTokens(*(x[None] for x in (token_B, log_prob(logits_BV, token_B), ids_BC, log_probs_BC)))

    def _nothing(self, passes: int, num: int) -> SampledTokens:
        """What so many passes over so many rows draw, before they do."""
        tops = (passes, num, min(MAX_TOP_LOG_PROBS, self._num_ids))
        ids, log_probs = (partial(jnp.zeros, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
        return SampledTokens(ids((passes, num)), log_probs((passes, num)), ids(tops), log_probs(tops))


def uses_unstacked_layers(config: Config) -> bool:
    """Whether each layer has arrays of its own, and layers do not run in a loop.

    A CPU copies what a loop takes out of a stack. Other compilers do not, and short programs are compiled sooner.
    """
    return jax.default_backend() == 'cpu' and config.mesh.host_offload == 'none'
