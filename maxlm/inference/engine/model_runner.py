"""Prefill and decode steps of a model over cache slots.

Shapes: B slots, P prompts per call, T tokens of a chunk, D dim, V vocabulary, C reported top tokens, N passes per call.
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
    TokenMask,
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
from maxlm.model.layers.linear import transpose_kernel
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
        token_B: next input token of each slot, not in the cache yet.
        length_B: number of tokens in the cache.
        in_prompt_BV: True where the prompt contains the token.
        counts_BV: number of occurrences in the continuation.
    """

    caches: Caches
    token_B: jax.Array
    length_B: jax.Array
    in_prompt_BV: jax.Array
    counts_BV: jax.Array


class SampledTokens(NamedTuple):
    """Tokens and log-probabilities of a call, by pass and row.

    Entries of passes that were not requested are 0, as are the top tokens if no request needs them.
    """

    token_NB: jax.Array
    log_prob_NB: jax.Array
    top_ids_NBC: jax.Array
    top_log_probs_NBC: jax.Array


class ModelRunner:
    """Prefill and decode steps of one model as functions of parameters and state. `CompiledFunctions` compiles them."""

    def __init__(self, config: Config, layout: Layout, *, num_ids: int, max_passes: int):
        """Initializes the runner.

        Args:
            config: resolved config.
            layout: layout of the parameters.
            num_ids: vocabulary size of the tokenizer. A model may have additional padding ids without text.
            max_passes: maximum number of tokens generated per slot in one call.
        """
        self._config = config.model
        self.are_layers_unstacked = uses_unstacked_layers(config)
        # A copy, because the cached abstract model must not be modified.
        decoder = nnx.merge(*nnx.split(abstract_model(config, layout)))
        # Parameter path → input axes of a transposed kernel.
        self._transposed_axes = decoder.mark_transposed_kernels() if self.are_layers_unstacked else {}
        self._graph, abstract = nnx.split(decoder)
        self._abstract_blocks = {name: tree for name, tree in nnx.to_pure_dict(abstract).items() if name in STACKS}
        self._num_ids, self._max_passes = num_ids, max_passes
        # One program for all parameters compiles faster than one program per shape.
        self._split_blocks = jax.jit(self._unstack)

    def prepare(self, params: Params) -> Params:
        """Converts parameters to the form that `prefill` and `decode` take."""
        if not self.are_layers_unstacked:
            return params
        other_params = {name: tree for name, tree in params.items() if name not in STACKS}
        other_params = jax.tree_util.tree_map_with_path(self._transpose, other_params)
        stacks = {name: params[name] for name in STACKS if name in params}
        return {**other_params, BLOCKS: self._split_blocks(stacks)}

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
        mask: TokenMask,
        with_top: jax.Array,
    ) -> tuple[State, SampledTokens, jax.Array]:
        """Prefills chunks in one pass, samples the token after each, and sums its hidden states, float32 [P, D].

        `placement` contains the slot, the position of the first token and the number of tokens of each chunk,
        int32 [3, P].
        """
        P, T = tokens_PT.shape
        slot_P, start_P, count_P = placement
        positions_PT = start_P[:, None] + jnp.arange(T)[None, :]
        length_P = start_P + count_P
        decoder, blocks = self._build_decoder(params)
        run = partial(decoder, tokens_PT, positions_BT=positions_PT, length_B=length_P, blocks=blocks)
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
        keys_P = sampling_keys(seeds.seed_B, seeds.sample_B, length_P - 1)
        sampled = self._sample(decoder, hidden_P1D, keys_P, rows, in_prompt_PV, counts_PV, mask, with_top)
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
        return state, sampled, hidden_sum_PD

    def decode(
        self,
        params: Params,
        state: State,
        num_tokens_B: jax.Array,
        rows: Rows,
        seeds: PendingPrompt,
        mask: TokenMask,
        with_top: jax.Array,
    ) -> tuple[State, SampledTokens]:
        """Samples `num_tokens_B` tokens for each of the first slots. The number of passes is the maximum.

        The mask applies to all of the passes, so a masked row must have only one.
        """
        num = len(num_tokens_B)
        start_B, in_prompt_BV = state.length_B[:num], state.in_prompt_BV[:num]
        decoder, blocks = self._build_decoder(params)

        def run(step: jax.Array, carry: Any) -> Any:
            caches, token_B, counts_BV, sampled_N = carry
            active_B = step < num_tokens_B
            length_B = start_B + step
            hidden_B1D, caches, _ = decoder(
                token_B[:, None],
                # The stored position of an inactive slot may be out of range.
                positions_BT=jnp.where(active_B, length_B, 0)[:, None],
                cache=caches,
                length_B=jnp.where(active_B, length_B + 1, 0),
                blocks=blocks,
            )
            keys_B = sampling_keys(seeds.seed_B, seeds.sample_B, length_B)
            sampled = self._sample(decoder, hidden_B1D, keys_B, rows, in_prompt_BV, counts_BV, mask, with_top)
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

    def _unstack(self, stacks: Params) -> list[Params]:
        """Splits stacked parameters into one tree per layer, in the order of the layers."""
        blocks = []
        for name in STACKS:
            if name in stacks:
                # The keys of `_transposed_axes` have the name of the stack.
                arrays, tree = jax.tree_util.tree_flatten_with_path({name: stacks[name]})
                layers = zip(*([self._transpose(path, x) for x in x_L] for path, x_L in arrays), strict=True)
                blocks += [jax.tree.unflatten(tree, layer)[name] for layer in layers]
        return blocks

    def _build_decoder(self, params: Params) -> tuple[Any, Any]:
        """Returns the model, and the parameters of its blocks if they are unstacked."""
        if not self.are_layers_unstacked:
            return nnx.merge(self._graph, params), None
        return nnx.merge(self._graph, {**params, **self._abstract_blocks}), params[BLOCKS]

    def _sample(
        self,
        decoder: Any,
        hidden_B1D: jax.Array,
        keys_B: jax.Array,
        rows: Rows,
        in_prompt_BV: jax.Array,
        counts_BV: jax.Array,
        mask: TokenMask,
        with_top: jax.Array,
    ) -> SampledTokens:
        """Samples one token per row."""
        logits_BV = decoder.logits(hidden_B1D)[:, 0, : self._num_ids]
        penalized_BV = jax.lax.cond(
            has_penalty(rows),
            lambda: apply_penalties(logits_BV, rows, in_prompt_BV, counts_BV),
            lambda: logits_BV,
        )
        token_B = sample_rows(apply_mask(penalized_BV, mask), keys_B, rows)
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
    """Returns True if layers have separate arrays and are unrolled.

    On a CPU, a loop copies each slice that it takes from a stack. Other compilers do not, and a loop compiles faster.
    """
    return jax.default_backend() == 'cpu' and config.mesh.host_offload == 'none'
