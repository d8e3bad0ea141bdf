"""Prefill and decode steps of a model over cache slots.

Shapes: B slots, P prompts that come in one call, T tokens of a chunk, V vocabulary, C reported top tokens,
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
    apply_penalties,
    has_penalty,
    log_prob,
    sample_rows,
    sampling_keys,
    top_log_probs,
)
from maxlm.model.blocks import BLOCKS
from maxlm.model.layers.kv_cache import Caches
from maxlm.model.layers.linear import transpose_kernel
from maxlm.parallel.layout import Layout
from maxlm.training.state import Params, abstract_model


class PendingPrompt(NamedTuple):
    """Seeds of the sampling keys, by row."""

    seed_B: Array
    sample_B: Array


class State(NamedTuple):
    """State of all slots, on the devices. A slot's next token is not in the cache yet."""

    caches: Caches
    token_B: jax.Array
    # Tokens in the cache.
    length_B: jax.Array
    in_prompt_BV: jax.Array
    # Occurrences in the continuation.
    counts_BV: jax.Array


class SampledTokens(NamedTuple):
    """Tokens of a call, by pass and row, with log-probabilities; of the likeliest where they were wanted, else zeros.

    Entries of passes that were not requested are 0.
    """

    token_NB: jax.Array
    log_prob_NB: jax.Array
    top_ids_NBC: jax.Array
    top_log_probs_NBC: jax.Array


class ModelRunner:
    """Steps of one model as functions of parameters and state, which `CompiledFunctions` compiles."""

    def __init__(self, config: Config, layout: Layout, *, num_ids: int, max_passes: int):
        """
        Args:
            config: resolved.
            layout: of the parameters.
            num_ids: of the tokenizer. A model may have more, for a round number; they have no text.
            most: tokens of a slot that one call draws, at most.
        """
        self._config = config.model
        self.are_layers_unstacked = uses_unstacked_layers(config)
        # A copy of what is not to be changed.
        decoder = nnx.merge(*nnx.split(abstract_model(config, layout)))
        # By path: axes of the input.
        self._transposed_axes = decoder.turn_kernels() if self.are_layers_unstacked else {}
        self._graph, abstract = nnx.split(decoder)
        self._abstract_blocks = nnx.to_pure_dict(abstract)[BLOCKS]
        self._num_ids, self._max_passes = num_ids, max_passes
        # One program: one for each shape of a parameter would take longer to compile.
        self._split_blocks = jax.jit(self._unstack)

    def prepare(self, params: Params) -> Params:
        """Parameters as the passes take them."""
        if not self.are_layers_unstacked:
            return params
        other_params = {name: tree for name, tree in params.items() if name != BLOCKS}
        other_params = jax.tree_util.tree_map_with_path(self._transpose, other_params)
        return {**other_params, BLOCKS: self._split_blocks(params[BLOCKS])}

    def copy_slot(self, state: State, source: jax.Array, slot: jax.Array) -> State:
        """Copies keys and values of one slot to another."""
        return state._replace(caches=jax.tree.map(lambda x: x.at[:, slot].set(x[:, source]), state.caches))

    def prefill(
        self,
        params: Params,
        state: State,
        tokens_PT: jax.Array,
        placement: jax.Array,
        in_prompt_PV: jax.Array,
        rows: Rows,
        seeds: PendingPrompt,
        with_top: jax.Array,
    ) -> tuple[State, SampledTokens]:
        """Prefills chunks in one pass and samples the token after each.

        `placement` holds slot, position of the first token and number of tokens of each chunk, int32 [3, P].
        """
        P, T = tokens_PT.shape
        slot_P, start_P, count_P = placement
        positions_PT = start_P[:, None] + jnp.arange(T)[None, :]
        length_P = start_P + count_P
        decoder, blocks = self._build_decoder(params)
        run = partial(decoder, tokens_PT, positions_BT=positions_PT, length_B=length_P, blocks=blocks)
        if P == 1:
            hidden_PTD, caches = run(cache=state.caches, first_row=slot_P[0])
        else:
            # Rows that are not beside each other.
            hidden_PTD, new_caches = run(cache=jax.tree.map(lambda x: x[:, slot_P], state.caches))
            caches = jax.tree.map(lambda x, new: x.at[:, slot_P].set(new, mode='drop'), state.caches, new_caches)
        last_P = jnp.maximum(count_P - 1, 0)
        hidden_P1D = jnp.take_along_axis(hidden_PTD, last_P[:, None, None], axis=1)
        counts_PV = jnp.zeros((P, self._num_ids), jnp.int32)
        keys_P = sampling_keys(seeds.seed_B, seeds.sample_B, length_P - 1)
        sampled = self._sample(decoder, hidden_P1D, keys_P, rows, in_prompt_PV, counts_PV, with_top)
        token_P = sampled.token_NB[0]
        counts_PV = counts_PV.at[jnp.arange(P), token_P].add(1)

        def scatter(x_B: jax.Array, new_P: jax.Array) -> jax.Array:
            return x_B.at[slot_P].set(new_P, mode='drop')

        state = State(
            caches,
            scatter(state.token_B, token_P),
            scatter(state.length_B, length_P),
            scatter(state.in_prompt_BV, in_prompt_PV),
            scatter(state.counts_BV, counts_PV),
        )
        return state, sampled

    def decode(
        self,
        params: Params,
        state: State,
        num_tokens_B: jax.Array,
        rows: Rows,
        seeds: PendingPrompt,
        with_top: jax.Array,
    ) -> tuple[State, SampledTokens]:
        """Samples `num_tokens_B` tokens for each of the first slots, in as many passes as the largest number."""
        num = len(num_tokens_B)
        start_B, in_prompt_BV = state.length_B[:num], state.in_prompt_BV[:num]
        decoder, blocks = self._build_decoder(params)

        def run(step: jax.Array, carry: Any) -> Any:
            caches, token_B, counts_BV, sampled_N = carry
            active_B = step < num_tokens_B
            length_B = start_B + step
            hidden_B1D, caches = decoder(
                token_B[:, None],
                # A slot that rests may be anywhere.
                positions_BT=jnp.where(active_B, length_B, 0)[:, None],
                cache=caches,
                length_B=jnp.where(active_B, length_B + 1, 0),
                blocks=blocks,
            )
            keys_B = sampling_keys(seeds.seed_B, seeds.sample_B, length_B)
            sampled = self._sample(decoder, hidden_B1D, keys_B, rows, in_prompt_BV, counts_BV, with_top)
            new_B = sampled.token_NB[0]
            return (
                caches,
                jnp.where(active_B, new_B, token_B),
                counts_BV.at[jnp.arange(num), new_B].add(active_B),
                jax.tree.map(
                    lambda x_N, x_1: jax.lax.dynamic_update_slice_in_dim(x_N, x_1, step, 0), sampled_N, sampled
                ),
            )

        init_carry = (
            state.caches,
            state.token_B[:num],
            state.counts_BV[:num],
            self._empty_samples(self._max_passes, num),
        )
        caches, token_B, counts_BV, sampled = jax.lax.fori_loop(0, num_tokens_B.max(), run, init_carry)
        state = State(
            caches,
            state.token_B.at[:num].set(token_B),
            state.length_B.at[:num].add(num_tokens_B),
            state.in_prompt_BV,
            state.counts_BV.at[:num].set(counts_BV),
        )
        return state, sampled

    def _transpose(self, path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return transpose_kernel(x, self._transposed_axes.get(tuple(entry.key for entry in path), 0))

    def _unstack(self, blocks: Params) -> list[Params]:
        """Parameters of each layer of a stack."""
        # With the name of what they are part of in their paths.
        stacks, tree = jax.tree_util.tree_flatten_with_path({BLOCKS: blocks})
        layers = zip(*([self._transpose(path, x) for x in x_L] for path, x_L in stacks), strict=True)
        return [jax.tree.unflatten(tree, layer)[BLOCKS] for layer in layers]

    def _build_decoder(self, params: Params) -> tuple[Any, Any]:
        """Returns the model and the parameters of its blocks where they are unstacked."""
        if not self.are_layers_unstacked:
            return nnx.merge(self._graph, params), None
        return nnx.merge(self._graph, {**params, BLOCKS: self._abstract_blocks}), params[BLOCKS]

    def _sample(
        self,
        decoder: Any,
        hidden_B1D: jax.Array,
        keys_B: jax.Array,
        rows: Rows,
        in_prompt_BV: jax.Array,
        counts_BV: jax.Array,
        with_top: jax.Array,
    ) -> SampledTokens:
        """Samples one token per row."""
        logits_BV = decoder.logits(hidden_B1D)[:, 0, : self._num_ids]
        penalized_BV = jax.lax.cond(
            has_penalty(rows),
            lambda: apply_penalties(logits_BV, rows, in_prompt_BV, counts_BV),
            lambda: logits_BV,
        )
        token_B = sample_rows(penalized_BV, keys_B, rows)
        _, _, no_ids_1BC, no_log_probs_1BC = self._empty_samples(1, len(token_B))
        ids_BC, log_probs_BC = jax.lax.cond(
            with_top,
            lambda: top_log_probs(logits_BV, no_ids_1BC.shape[-1]),
            lambda: (no_ids_1BC[0], no_log_probs_1BC[0]),
        )
        return SampledTokens(*(x[None] for x in (token_B, log_prob(logits_BV, token_B), ids_BC, log_probs_BC)))

    def _empty_samples(self, passes: int, num_rows: int) -> SampledTokens:
        """Returns zeros in the shape of `passes` passes over `num_rows` rows."""
        top_shape = (passes, num_rows, min(MAX_TOP_LOG_PROBS, self._num_ids))
        ids, log_probs = (partial(jnp.zeros, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
        return SampledTokens(
            ids((passes, num_rows)), log_probs((passes, num_rows)), ids(top_shape), log_probs(top_shape)
        )


def uses_unstacked_layers(config: Config) -> bool:
    """Returns whether layers have separate arrays and are unrolled.

    A CPU copies what a loop takes out of a stack. Other compilers do not, and short programs are compiled sooner.
    """
    return jax.default_backend() == 'cpu' and config.mesh.host_offload == 'none'
