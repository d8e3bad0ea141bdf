"""The two programs of the engine, prefill and decode, over slots: compiled for a few shapes, never while serving.

Shapes: B slots, P prompts that come in one call, T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.inference.engine.model_runner import ModelRunner, PendingPrompt, SampledTokens, State
from maxlm.inference.sampling import Rows, Sampling, rows_of
from maxlm.model.layers.kv_cache import CACHE_AXES, Caches, init_caches, slots_by_window
from maxlm.parallel.layout import Layout
from maxlm.training.state import Params

# Sizes that are compiled grow by this factor: what is computed in vain against what is compiled.
GROWTH = 4
# Tokens of a prompt that come in one call, at least.
SMALLEST_CHUNK = 32
# Positions of a slot that there is room for, at least.
SMALLEST_ROOM = 256
# Rows of a decoding call, at least, where there is more than one: a product with fewer takes as long.
FEWEST_ROWS = 4
# Of rows and tokens on a CPU, where each takes its time.
CPU_GROWTH = 2
# Tokens of a slot that one call draws, at most.
MOST_PASSES = 8


class PrefillChunk(NamedTuple):
    """Tokens of a prompt, and where they go."""

    tokens: Sequence[int]
    # Position of the first.
    start: int
    # That has what is before.
    slot: int
    # The whole prompt, for penalties.
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    sample: int


class CompiledFunctions:
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
            max_context: positions of a slot, at most.
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
        self.rows = layout.num_shards('batch')
        if num_slots < 1 or num_slots % self.rows:
            raise InputError(f'num_slots={num_slots}: must be a multiple of the {self.rows} devices that have them')
        self._config, self._layout = config.model, layout
        self._passes = ModelRunner(config, layout, num_ids=num_ids, most=MOST_PASSES)
        self._num_ids = num_ids
        self.num_slots, self.max_context = num_slots, max_context
        self._int8 = int8
        self.chunk = min(chunk, max_context)
        growth = CPU_GROWTH if jax.default_backend() == 'cpu' else GROWTH
        # Positions of a slot that caches can have room for. All of it is read by every pass, but with layers apart.
        self.rooms = [max_context] if self._passes.are_layers_apart else _sizes(SMALLEST_ROOM, max_context)
        self.chunks = _sizes(min(SMALLEST_CHUNK, self.chunk), self.chunk, growth)
        # Rows of a decoding call are those of the first slots; where devices have rows of their own, all.
        self.row_counts = [num_slots] if self.rows > 1 else sorted({1, *_sizes(FEWEST_ROWS, num_slots, growth)})
        everywhere = layout.named()
        axes = jax.tree.map(lambda x: CACHE_AXES[: x.ndim], self._cache_shapes(max_context))
        cache_shardings = jax.tree.map(lambda names: layout.named(*names), axes, is_leaf=lambda x: type(x) is tuple)
        others: Any = [everywhere] * (len(State._fields) - 1)
        self._shardings = State(cache_shardings, *others)
        jit = partial(jax.jit, donate_argnames='state')
        self._prefill = jit(self._passes.prefill, out_shardings=(self._shardings, everywhere))
        self._take_over = jax.jit(self._passes.take_over, donate_argnames='state', out_shardings=self._shardings)
        self._resized = jax.jit(self._resize, static_argnames='num')
        self._decode = jit(self._passes.decode, out_shardings=(self._shardings, everywhere))

    def start(self) -> State:
        """Slots with nothing in them, and the least room."""

        def make() -> State:
            B, V = self.num_slots, self._num_ids
            caches, zeros = self._init_caches(self.rooms[0]), jnp.zeros(B, jnp.int32)
            return State(caches, zeros, zeros, jnp.zeros((B, V), bool), jnp.zeros((B, V), jnp.int32))

        return jax.jit(make, out_shardings=self._shardings)()

    def prepare(self, params: Params) -> Params:
        """Parameters as the programs take them."""
        return self._passes.prepare(params)

    def num_rows(self, highest: int) -> int:
        """Rows of the decoding call that has the slot `highest`."""
        return _fitting(self.row_counts, highest + 1)

    def put(self, tree: Any) -> Any:
        """Small arrays that every device needs."""
        return jax.device_put(tree, self._layout.named())

    def ring_slots(self) -> dict[int, int]:
        """Window → slots of the layers that see so far, where these are fewer than positions."""
        found = slots_by_window(self._cache_shapes(self.max_context), self._config).items()
        return {window: num for window, num in found if num < self.max_context}

    def cache_bytes(self) -> int:
        """Of all slots with the most room."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._cache_shapes(self.max_context)))

    def resize(self, state: State, room: int) -> State:
        """With room for so many positions of each slot; what is behind them is lost."""
        # One array after the other, so that there are never two of all.
        caches, tree = jax.tree.flatten(state.caches)
        for index, like in enumerate(jax.tree.leaves(self._cache_shapes(room))):
            if caches[index].shape != like.shape:
                caches[index] = self._resized(caches[index], num=like.shape[3])
        return state._replace(caches=jax.tree.unflatten(tree, caches))

    def take_over(self, state: State, source: int, slot: int) -> State:
        """With keys and values of one slot in another, too."""
        return self._take_over(state, np.int32(source), np.int32(slot))

    def prefill(
        self, params: Params, state: State, chunks: Sequence[PrefillChunk], *, want_top: bool
    ) -> tuple[State, SampledTokens]:
        """Puts up to `rows` chunks into their slots, which have room, and draws what follows each: row p of the result
        is chunk p.
        """
        P = self.rows
        assert 0 < len(chunks) <= P, len(chunks)
        longest = max(len(chunk.tokens) for chunk in chunks)
        T = _fitting(self.chunks, longest)
        tokens_PT = np.zeros((P, T), np.int32)
        in_prompt_PV = np.zeros((P, self._num_ids), bool)
        # What only fills the devices goes nowhere.
        place = np.full((3, P), self.num_slots, np.int32)
        place[1:] = 0
        for row, chunk in enumerate(chunks):
            tokens_PT[row, : len(chunk.tokens)] = chunk.tokens
            in_prompt_PV[row, [token for token in chunk.prompt if token < self._num_ids]] = True
            place[:, row] = chunk.slot, chunk.start, len(chunk.tokens)
        padding = P - len(chunks)
        rows = rows_of([chunk.sampling for chunk in chunks] + [Sampling()] * padding)
        rest = PendingPrompt(
            *(
                np.array([getattr(chunk, name) for chunk in chunks] + [0] * padding, np.uint32)
                for name in ('seed', 'sample')
            )
        )
        return self._prefill(params, state, tokens_PT, place, in_prompt_PV, rows, rest, want_top)

    def decode(
        self, params: Params, state: State, left: np.ndarray, rows: Rows, rest: PendingPrompt, *, want_top: bool
    ) -> tuple[State, SampledTokens]:
        """So many tokens for each of the first slots, which have room.

        `left` is int32, up to MOST_PASSES; it, `rows` and `rest` are of `num_rows` slots.
        """
        return self._decode(params, state, left, rows, rest, want_top)

    def shapes(self) -> Iterator[tuple[str, int, Callable[[Params, State], tuple[State, Any]]]]:
        """Every program that can be needed: its name, the room, and a call that compiles it and leaves slots empty."""

        def decode(num: int, params: Params, state: State) -> tuple[State, SampledTokens]:
            rest = PendingPrompt(np.zeros(num, np.uint32), np.zeros(num, np.uint32))
            rows, rest = self.put((rows_of([Sampling()] * num), rest))
            return self.decode(params, state, np.zeros(num, np.int32), rows, rest, want_top=False)

        def prefill(size: int, params: Params, state: State) -> tuple[State, SampledTokens]:
            chunk = PrefillChunk([0] * size, 0, self.num_slots, [], Sampling(), 0, 0)
            return self.prefill(params, state, [chunk], want_top=False)

        def take_over(params: Params, state: State) -> tuple[State, Any]:
            return self.take_over(state, 0, 0), None

        for room in self.rooms:
            yield f'take over {room}', room, take_over
            for num in self.row_counts:
                yield f'decode {num} × {room}', room, partial(decode, num)
            # Padding needs no room.
            largest = _fitting(self.chunks, min(room, self.chunk))
            for size in self.chunks:
                if size <= largest:
                    yield f'prefill {size} of {room}', room, partial(prefill, size)

    def _resize(self, x_LBKS: jax.Array, *, num: int) -> jax.Array:
        """An array of a cache with so many slots."""
        S = x_LBKS.shape[3]
        if num < S:
            x_LBKS = x_LBKS[:, :, :, :num]
        else:
            x_LBKS = jnp.pad(x_LBKS, [(0, num - S if axis == 3 else 0) for axis in range(x_LBKS.ndim)])
        return self._layout.constrain(x_LBKS, CACHE_AXES[: x_LBKS.ndim])

    def _cache_shapes(self, room: int) -> Caches:
        return jax.eval_shape(partial(self._init_caches, room))

    def _init_caches(self, room: int) -> Caches:
        return init_caches(
            self._config,
            self.num_slots,
            room,
            chunk=self.chunk,
            int8=self._int8,
            unstacked=self._passes.are_layers_apart,
        )


def _sizes(smallest: int, largest: int, growth: int = GROWTH) -> list[int]:
    """Growing by a factor; the last is the largest."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= growth
    return [*sizes, largest]


def _fitting(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
