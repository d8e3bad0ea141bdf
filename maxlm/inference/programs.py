"""The two programs of the engine, prefill and decode, over slots: compiled for a few shapes, never while serving.

Shapes: B slots, P prompts that come in one call, T tokens of a chunk, S positions that are looked at, L layers,
V vocabulary, C likeliest tokens that are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlm.config.keys import Config
from maxlm.errors import InputError
from maxlm.inference.requests import MAX_TOP_LOG_PROBS
from maxlm.inference.sampling import (
    Array,
    Rows,
    Sampling,
    draw_keys,
    draw_rows,
    has_penalty,
    likeliest_log_probs,
    log_prob,
    penalized,
    rows_of,
)
from maxlm.model.blocks import BLOCKS
from maxlm.model.cache import CACHE_AXES, Caches, by_window, init_caches
from maxlm.training.sharding import Layout
from maxlm.training.state import Params, abstract_model

# Lengths that are compiled grow by this factor: what is computed in vain against what is compiled.
GROWTH = 4
# Tokens of a prompt that come in one call, at least.
SMALLEST_CHUNK = 32
# Positions that are looked at, at least.
SMALLEST_REACH = 256
# Rows of a decoding call, at least: a product with fewer takes as long.
FEWEST_ROWS = 4


class Rest(NamedTuple):
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


class Drawn(NamedTuple):
    """Tokens of a call, by row, with log-probabilities; of the likeliest where they were wanted, else zeros."""

    token_B: jax.Array
    log_prob_B: jax.Array
    top_ids_BC: jax.Array
    top_log_probs_BC: jax.Array


class Chunk(NamedTuple):
    """Tokens of a prompt, and where they go."""

    tokens: Sequence[int]
    # Position of the first.
    start: int
    slot: int
    # The slot that has what is before; its own or another.
    source: int
    # The whole prompt, for penalties.
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    sample: int


class Programs:
    """Compiled for one model and number of slots; holds no state."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        *,
        num_ids: int,
        num_slots: int,
        max_context: int,
        int8: bool,
        chunk: int,
    ):
        """
        Args:
            config: resolved.
            layout: of the parameters.
            num_ids: of the tokenizer. A model may have more, for a round number; they have no text.
            num_slots: a multiple of the devices that rows are split over.
            max_context: positions of a slot.
            int8: keep keys and values in 8 bits.
            chunk: tokens of a prompt in one call, at most.

        Raises:
            InputError: the mesh splits layers or length, or the slots do not divide over it.
        """
        for axis, what in {'stage': 'the layers', 'context': 'the length'}.items():
            if layout.mesh.shape[axis] > 1:
                raise InputError(
                    f'mesh.{axis}={layout.mesh.shape[axis]}: there is no cache where the mesh splits {what}; '
                    f'set it to 1'
                )
        self.rows = layout.parts('batch')
        if num_slots < 1 or num_slots % self.rows:
            raise InputError(f'num_slots={num_slots}: must be a multiple of the {self.rows} devices that have them')
        self._config, self._layout = config.model, layout
        self._graph, abstract = nnx.split(abstract_model(config, layout))
        self._abstract_blocks = nnx.to_pure_dict(abstract)[BLOCKS]
        self._apart = layers_apart(config)
        self._num_ids = num_ids
        self.num_slots, self.max_context = num_slots, max_context
        self._int8 = int8
        self.chunk = min(chunk, max_context)
        self.chunks = _sizes(min(SMALLEST_CHUNK, self.chunk), self.chunk)
        self.reaches = _sizes(min(SMALLEST_REACH, max_context), max_context)
        # Rows of a decoding call are those of the first slots; where devices have rows of their own, all.
        self.row_counts = [num_slots] if self.rows > 1 else _sizes(min(FEWEST_ROWS, num_slots), num_slots)
        everywhere = layout.named()
        axes = jax.tree.map(lambda x: CACHE_AXES[: x.ndim], jax.eval_shape(self._init_caches))
        cache_shardings = jax.tree.map(lambda names: layout.named(*names), axes, is_leaf=lambda x: type(x) is tuple)
        others: Any = [everywhere] * (len(State._fields) - 1)
        self._shardings = State(cache_shardings, *others)
        jit = partial(jax.jit, donate_argnames='state', static_argnames='reach')
        self._prefill = jit(self._prefill_chunks, out_shardings=(self._shardings, everywhere))
        self._decode = jit(self._decode_slots, out_shardings=(self._shardings, everywhere))

    def start(self) -> State:
        """Slots with nothing in them."""

        def make() -> State:
            B, V = self.num_slots, self._num_ids
            zeros = jnp.zeros(B, jnp.int32)
            return State(self._init_caches(), zeros, zeros, jnp.zeros((B, V), bool), jnp.zeros((B, V), jnp.int32))

        return jax.jit(make, out_shardings=self._shardings)()

    def prepare(self, params: Params) -> Params:
        """Parameters as the programs take them."""
        if not self._apart:
            return params
        num = self._config.num_layers
        split = jax.jit(lambda leaf: [leaf[layer] for layer in range(num)])
        leaves, tree = jax.tree.flatten(params[BLOCKS])
        layers = zip(*map(split, leaves), strict=True)
        return {**params, BLOCKS: [jax.tree.unflatten(tree, layer) for layer in layers]}

    def num_rows(self, highest: int) -> int:
        """Rows of the decoding call that has the slot `highest`."""
        return next(size for size in self.row_counts if size > highest)

    def put(self, tree: Any) -> Any:
        """Small arrays that every device needs."""
        return jax.device_put(tree, self._layout.named())

    def ring_slots(self) -> dict[int, int]:
        """Window → slots of the layers that see so far, where these are fewer than positions."""
        caches = jax.eval_shape(self._init_caches)
        found = by_window(caches, self._config).items()
        return {window: cache.num_slots for window, cache in found if cache.num_slots < self.max_context}

    def cache_bytes(self) -> int:
        """Of all slots."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(self._init_caches)))

    def prefill(self, params: Params, state: State, chunks: Sequence[Chunk], *, want_top: bool) -> tuple[State, Drawn]:
        """Puts up to `rows` chunks into their slots, and draws what follows each: row p of the result is chunk p."""
        P = self.rows
        assert 0 < len(chunks) <= P, len(chunks)
        longest = max(len(chunk.tokens) for chunk in chunks)
        T = next(size for size in self.chunks if size >= longest)
        reach = self._reach(max(T, *(chunk.start + len(chunk.tokens) for chunk in chunks)))
        tokens_PT = np.zeros((P, T), np.int32)
        in_prompt_PV = np.zeros((P, self._num_ids), bool)
        # What only fills the devices goes nowhere.
        place = np.full((4, P), self.num_slots, np.int32)
        place[1:] = 0
        for row, chunk in enumerate(chunks):
            tokens_PT[row, : len(chunk.tokens)] = chunk.tokens
            in_prompt_PV[row, [token for token in chunk.prompt if token < self._num_ids]] = True
            place[:, row] = chunk.slot, chunk.source, chunk.start, len(chunk.tokens)
        padding = P - len(chunks)
        rows = rows_of([chunk.sampling for chunk in chunks] + [Sampling()] * padding)
        rest = Rest(
            *(
                np.array([getattr(chunk, name) for chunk in chunks] + [0] * padding, np.uint32)
                for name in ('seed', 'sample')
            )
        )
        return self._prefill(params, state, tokens_PT, place, in_prompt_PV, rows, rest, want_top, reach=reach)

    def decode(
        self, params: Params, state: State, active: np.ndarray, rows: Rows, rest: Rest, *, longest: int, want_top: bool
    ) -> tuple[State, Drawn]:
        """One token for every active one of the first slots, none of which has more than `longest` positions then.

        `active` is bool; it, `rows` and `rest` are of `num_rows` slots.
        """
        return self._decode(params, state, active, rows, rest, want_top, reach=self._reach(longest))

    def shapes(self) -> Iterator[tuple[str, Callable[[Params, State], tuple[State, Drawn]]]]:
        """Every program that can be needed: its name, and a call that compiles it and leaves the slots empty."""

        def decode(num: int, reach: int, params: Params, state: State) -> tuple[State, Drawn]:
            rest = Rest(np.zeros(num, np.uint32), np.zeros(num, np.uint32))
            rows, rest = self.put((rows_of([Sampling()] * num), rest))
            return self.decode(params, state, np.zeros(num, bool), rows, rest, longest=reach, want_top=False)

        def prefill(size: int, reach: int, params: Params, state: State) -> tuple[State, Drawn]:
            chunk = Chunk([0] * size, reach - size, self.num_slots, 0, [], Sampling(), 0, 0)
            return self.prefill(params, state, [chunk], want_top=False)

        for reach in self.reaches:
            for num in self.row_counts:
                yield f'decode {num} × {reach}', partial(decode, num, reach)
            for size in self.chunks:
                if size <= reach:
                    yield f'prefill {size} of {reach}', partial(prefill, size, reach)

    def _reach(self, length: int) -> int:
        return next(size for size in self.reaches if size >= length)

    def _init_caches(self) -> Caches:
        return init_caches(
            self._config, self.num_slots, self.max_context, chunk=self.chunk, int8=self._int8, apart=self._apart
        )

    def _prefill_chunks(
        self,
        params: Params,
        state: State,
        tokens_PT: jax.Array,
        place: jax.Array,
        in_prompt_PV: jax.Array,
        rows: Rows,
        rest: Rest,
        want_top: jax.Array,
        *,
        reach: int,
    ) -> tuple[State, Drawn]:
        P, T = tokens_PT.shape
        slot_P, source_P, start_P, count_P = place
        positions_PT = start_P[:, None] + jnp.arange(T)
        length_P = start_P + count_P
        taken = jax.tree.map(lambda x: _rows_at(x, source_P, min(reach, x.shape[3])), state.caches)
        decoder, blocks = self._merged(params)
        hidden_PTD, caches = decoder(
            tokens_PT, positions_BT=positions_PT, cache=taken, length_B=length_P, blocks=blocks
        )
        last_P = jnp.maximum(count_P - 1, 0)
        hidden_P1D = jnp.take_along_axis(hidden_PTD, last_P[:, None, None], axis=1)
        counts_PV = jnp.zeros((P, self._num_ids), jnp.int32)
        keys_P = draw_keys(rest.seed_B, rest.sample_B, length_P - 1)
        drawn = self._draw(decoder, hidden_P1D, keys_P, rows, in_prompt_PV, counts_PV, want_top)
        counts_PV = counts_PV.at[jnp.arange(P), drawn.token_B].add(1)

        def put(x_B: jax.Array, new_P: jax.Array) -> jax.Array:
            return x_B.at[slot_P].set(new_P, mode='drop')

        state = State(
            jax.tree.map(lambda x, new: _put_rows(x, new, slot_P), state.caches, caches),
            put(state.token_B, drawn.token_B),
            put(state.length_B, length_P),
            put(state.in_prompt_BV, in_prompt_PV),
            put(state.counts_BV, counts_PV),
        )
        return state, drawn

    def _decode_slots(
        self,
        params: Params,
        state: State,
        active_B: jax.Array,
        rows: Rows,
        rest: Rest,
        want_top: jax.Array,
        *,
        reach: int,
    ) -> tuple[State, Drawn]:
        num = len(active_B)
        token_B, length_B, in_prompt_BV, counts_BV = (x[:num] for x in state[1:])
        decoder, blocks = self._merged(params)
        hidden_B1D, caches = decoder(
            token_B[:, None],
            # A slot that rests may be anywhere.
            positions_BT=jnp.where(active_B, length_B, 0)[:, None],
            cache=state.caches,
            num_slots=reach,
            length_B=jnp.where(active_B, length_B + 1, 0),
            blocks=blocks,
        )
        keys_B = draw_keys(rest.seed_B, rest.sample_B, length_B)
        drawn = self._draw(decoder, hidden_B1D, keys_B, rows, in_prompt_BV, counts_BV, want_top)
        assert caches is not None
        state = State(
            caches,
            state.token_B.at[:num].set(jnp.where(active_B, drawn.token_B, token_B)),
            state.length_B.at[:num].add(active_B),
            state.in_prompt_BV,
            state.counts_BV.at[jnp.arange(num), drawn.token_B].add(active_B),
        )
        return state, drawn

    def _merged(self, params: Params) -> tuple[Any, Any]:
        """The model, and the parameters of its blocks where they are apart."""
        if not self._apart:
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
    ) -> Drawn:
        logits_BV = decoder.logits(hidden_B1D)[:, 0, : self._num_ids]
        shaped_BV = jax.lax.cond(
            has_penalty(rows),
            lambda: penalized(logits_BV, rows, in_prompt_BV, counts_BV),
            lambda: logits_BV,
        )
        token_B = draw_rows(shaped_BV, keys_B, rows)
        num = min(MAX_TOP_LOG_PROBS, self._num_ids)
        shape = (len(token_B), num)
        ids_BC, log_probs_BC = jax.lax.cond(
            want_top,
            lambda: likeliest_log_probs(logits_BV, num),
            lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)),
        )
        return Drawn(token_B, log_prob(logits_BV, token_B), ids_BC, log_probs_BC)


def layers_apart(config: Config) -> bool:
    """Whether each layer has arrays of its own, and layers do not run in a loop.

    A CPU copies what a loop takes out of a stack. Other compilers do not, and short programs are compiled sooner.
    """
    return jax.default_backend() == 'cpu' and config.mesh.offload == 'none'


def _rows_at(x: jax.Array, source_P: jax.Array, num_slots: int) -> jax.Array:
    """The first slots of some rows of a cache's array."""
    x = x[:, :, :, :num_slots]
    if len(source_P) == 1:
        return jax.lax.dynamic_slice_in_dim(x, source_P[0], 1, axis=1)
    return x[:, source_P]


def _put_rows(x: jax.Array, new: jax.Array, slot_P: jax.Array) -> jax.Array:
    """The array with these first slots of some rows; rows that it does not have are left out."""
    if len(slot_P) == 1:
        # Beyond the last row it is the last: only empty slots are beside what warms up.
        zero = jnp.zeros_like(slot_P[0])
        return jax.lax.dynamic_update_slice(x, new, (zero, slot_P[0], *[zero] * (x.ndim - 2)))
    return x.at[:, slot_P, :, : new.shape[3]].set(new, mode='drop')


def _sizes(smallest: int, largest: int) -> list[int]:
    """Growing by GROWTH; the last is the largest."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= GROWTH
    return [*sizes, largest]
