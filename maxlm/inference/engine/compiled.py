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
from maxlm.inference.sampling import Rows, Sampling, stack_settings
from maxlm.model.layers.kv_cache import CACHE_AXES, Caches, init_caches, slots_by_window
from maxlm.parallel.layout import Layout
from maxlm.training.state import Params

# Sizes that are compiled grow by this factor: what is computed in vain against what is compiled.
GROWTH = 4
# Tokens of a prompt that come in one call, at least.
MIN_CHUNK = 32
# Positions per slot, at least.
MIN_CACHE_LENGTH = 256
# Rows of a decoding call, at least, where there is more than one: a product with fewer takes as long.
MIN_ROWS = 4
# Growth of rows and tokens on a CPU.
CPU_GROWTH = 2
# Tokens of a slot that one call draws, at most.
MAX_PASSES = 8


class PrefillChunk(NamedTuple):
    """Tokens of a prompt, and where they go."""

    tokens: Sequence[int]
    # Position of the first.
    start: int
    # That has what is before.
    slot: int
    # All tokens of the prompt, for penalties.
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
        self.num_row_shards = layout.num_shards('batch')
        if num_slots < 1 or num_slots % self.num_row_shards:
            raise InputError(
                f'num_slots={num_slots}: must be a multiple of the {self.num_row_shards} devices that have them'
            )
        self._config, self._layout = config.model, layout
        self._runner = ModelRunner(config, layout, num_ids=num_ids, max_passes=MAX_PASSES)
        self._num_ids = num_ids
        self.num_slots, self.max_context = num_slots, max_context
        self._is_int8 = int8
        self.chunk = min(chunk, max_context)
        growth = CPU_GROWTH if jax.default_backend() == 'cpu' else GROWTH
        # Cache lengths. Every pass reads the full length, except with unstacked layers.
        self.cache_lengths = (
            [max_context] if self._runner.are_layers_unstacked else _growing_sizes(MIN_CACHE_LENGTH, max_context)
        )
        self.chunk_sizes = _growing_sizes(min(MIN_CHUNK, self.chunk), self.chunk, growth)
        # Rows of a decoding call are those of the first slots; where devices have rows of their own, all.
        self.row_counts = (
            [num_slots] if self.num_row_shards > 1 else sorted({1, *_growing_sizes(MIN_ROWS, num_slots, growth)})
        )
        replicated = layout.named()
        axes = jax.tree.map(lambda x: CACHE_AXES[: x.ndim], self._cache_shapes(max_context))
        cache_shardings = jax.tree.map(lambda names: layout.named(*names), axes, is_leaf=lambda x: type(x) is tuple)
        replicated_fields: Any = [replicated] * (len(State._fields) - 1)
        self._shardings = State(cache_shardings, *replicated_fields)
        jit = partial(jax.jit, donate_argnames='state')
        self._prefill = jit(self._runner.prefill, out_shardings=(self._shardings, replicated))
        self._copy_slot = jax.jit(self._runner.copy_slot, donate_argnames='state', out_shardings=self._shardings)
        self._resize_array = jax.jit(self._resize, static_argnames='num')
        self._decode = jit(self._runner.decode, out_shardings=(self._shardings, replicated))

    def init_state(self) -> State:
        """Returns empty slots at the smallest cache length."""

        def init() -> State:
            B, V = self.num_slots, self._num_ids
            caches, zeros = self._init_caches(self.cache_lengths[0]), jnp.zeros(B, jnp.int32)
            return State(caches, zeros, zeros, jnp.zeros((B, V), bool), jnp.zeros((B, V), jnp.int32))

        return jax.jit(init, out_shardings=self._shardings)()

    def prepare(self, params: Params) -> Params:
        """Parameters as the programs take them."""
        return self._runner.prepare(params)

    def num_rows(self, highest_slot: int) -> int:
        """Rows of the decoding call that has the slot `highest_slot`."""
        return _smallest_fitting(self.row_counts, highest_slot + 1)

    def to_devices(self, tree: Any) -> Any:
        """Replicates small arrays to every device."""
        return jax.device_put(tree, self._layout.named())

    def ring_slots(self) -> dict[int, int]:
        """Window → slots of the layers that see so far, where these are fewer than positions."""
        num_slots = slots_by_window(self._cache_shapes(self.max_context), self._config).items()
        return {window: num for window, num in num_slots if num < self.max_context}

    def cache_bytes(self) -> int:
        """Returns the bytes of all slots at the largest cache length."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._cache_shapes(self.max_context)))

    def resize(self, state: State, cache_length: int) -> State:
        """Returns the state with `cache_length` positions per slot; later positions are dropped."""
        # One array after the other, so that there are never two of all.
        caches, tree = jax.tree.flatten(state.caches)
        for index, like in enumerate(jax.tree.leaves(self._cache_shapes(cache_length))):
            if caches[index].shape != like.shape:
                caches[index] = self._resize_array(caches[index], num=like.shape[3])
        return state._replace(caches=jax.tree.unflatten(tree, caches))

    def copy_slot(self, state: State, source: int, slot: int) -> State:
        """Copies keys and values of one slot to another."""
        return self._copy_slot(state, np.int32(source), np.int32(slot))

    def prefill(
        self, params: Params, state: State, chunks: Sequence[PrefillChunk], *, with_top: bool
    ) -> tuple[State, SampledTokens]:
        """Prefills up to `num_row_shards` chunks and samples the token after each: row p of the result is chunk p."""
        P = self.num_row_shards
        assert 0 < len(chunks) <= P, len(chunks)
        max_length = max(len(chunk.tokens) for chunk in chunks)
        T = _smallest_fitting(self.chunk_sizes, max_length)
        tokens_PT = np.zeros((P, T), np.int32)
        in_prompt_PV = np.zeros((P, self._num_ids), bool)
        # Padding rows are written nowhere.
        placement = np.full((3, P), self.num_slots, np.int32)
        placement[1:] = 0
        for row, chunk in enumerate(chunks):
            tokens_PT[row, : len(chunk.tokens)] = chunk.tokens
            in_prompt_PV[row, [token for token in chunk.prompt if token < self._num_ids]] = True
            placement[:, row] = chunk.slot, chunk.start, len(chunk.tokens)
        padding = P - len(chunks)
        rows = stack_settings([chunk.sampling for chunk in chunks] + [Sampling()] * padding)
        seeds = PendingPrompt(
            *(
                np.array([getattr(chunk, name) for chunk in chunks] + [0] * padding, np.uint32)
                for name in ('seed', 'sample')
            )
        )
        return self._prefill(params, state, tokens_PT, placement, in_prompt_PV, rows, seeds, with_top)

    def decode(
        self, params: Params, state: State, num_tokens: np.ndarray, rows: Rows, seeds: PendingPrompt, *, with_top: bool
    ) -> tuple[State, SampledTokens]:
        """Generates `num_tokens` tokens for each of the first slots.

        `num_tokens` is int32, up to MOST_PASSES; it, `num_row_shards` and `seeds` are of `num_rows` slots.
        """
        return self._decode(params, state, num_tokens, rows, seeds, with_top)

    def warm_up_calls(self) -> Iterator[tuple[str, int, Callable[[Params, State], tuple[State, Any]]]]:
        """Yields name, cache length and a compiling call of every program; the calls leave slots empty."""

        def decode(num: int, params: Params, state: State) -> tuple[State, SampledTokens]:
            seeds = PendingPrompt(np.zeros(num, np.uint32), np.zeros(num, np.uint32))
            rows, seeds = self.to_devices((stack_settings([Sampling()] * num), seeds))
            return self.decode(params, state, np.zeros(num, np.int32), rows, seeds, with_top=False)

        def prefill(size: int, params: Params, state: State) -> tuple[State, SampledTokens]:
            chunk = PrefillChunk([0] * size, 0, self.num_slots, [], Sampling(), 0, 0)
            return self.prefill(params, state, [chunk], with_top=False)

        def copy_slot(params: Params, state: State) -> tuple[State, Any]:
            return self.copy_slot(state, 0, 0), None

        for cache_length in self.cache_lengths:
            yield f'take over {cache_length}', cache_length, copy_slot
            for num in self.row_counts:
                yield f'decode {num} × {cache_length}', cache_length, partial(decode, num)
            # Padding needs no room.
            largest = _smallest_fitting(self.chunk_sizes, min(cache_length, self.chunk))
            for size in self.chunk_sizes:
                if size <= largest:
                    yield f'prefill {size} of {cache_length}', cache_length, partial(prefill, size)

    def _resize(self, x_LBKS: jax.Array, *, num: int) -> jax.Array:
        """Returns a cache array with `num` positions."""
        S = x_LBKS.shape[3]
        if num < S:
            x_LBKS = x_LBKS[:, :, :, :num]
        else:
            x_LBKS = jnp.pad(x_LBKS, [(0, num - S if axis == 3 else 0) for axis in range(x_LBKS.ndim)])
        return self._layout.constrain(x_LBKS, CACHE_AXES[: x_LBKS.ndim])

    def _cache_shapes(self, cache_length: int) -> Caches:
        return jax.eval_shape(partial(self._init_caches, cache_length))

    def _init_caches(self, cache_length: int) -> Caches:
        return init_caches(
            self._config,
            self.num_slots,
            cache_length,
            chunk=self.chunk,
            int8=self._is_int8,
            unstacked=self._runner.are_layers_unstacked,
        )


def _growing_sizes(minimum: int, maximum: int, growth: int = GROWTH) -> list[int]:
    """Growing by a factor; the last is the largest."""
    sizes = []
    while minimum < maximum:
        sizes.append(minimum)
        minimum *= growth
    return [*sizes, maximum]


def _smallest_fitting(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
