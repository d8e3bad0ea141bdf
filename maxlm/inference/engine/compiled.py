"""Compiled prefill and decode functions over cache slots, for a few shapes, all compiled before serving.

Shapes: B slots, P prompts per call, T tokens of a chunk, D dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.inference.drafting.draft_model import DraftModel, DraftState
from maxlm.inference.drafting.prompt_lookup import MAX_DRAFT_TOKENS
from maxlm.inference.engine.model_runner import ModelRunner, PendingPrompt, PreparedParams, SampledTokens, State
from maxlm.inference.engine.token_masks import stack_masks
from maxlm.inference.sampling import Rows, Sampling, TokenMask, stack_settings
from maxlm.inference.slot_caches import SlotCaches
from maxlm.model.smear import NO_TOKEN
from maxlm.parallel.layout import Layout
from maxlm.training.state import Params

# Growth factor of compiled sizes: a larger factor wastes more computation and compiles fewer programs.
GROWTH = 4
# Minimum number of prompt tokens per prefill call.
MIN_CHUNK = 32
# Minimum number of positions per slot.
MIN_CACHE_LENGTH = 256
# Minimum number of rows of a decode call with more than one row: smaller matmuls are not faster.
MIN_ROWS = 4
# Growth factor of rows on a CPU, and of the cache length on a GPU, where most bytes of a pass are keys and values.
CPU_GROWTH = GPU_LENGTH_GROWTH = 2
# Default number of tokens that a draft model drafts per pass.
MODEL_DRAFT_TOKENS = 4
# A call generates at most the tokens of this many passes that accept all drafted tokens.
MAX_PASSES = 8
# XLA options of decode calls by platform. By default, the host tests the condition of a loop after each round. With
# `WHILE`, all passes of a call are one CUDA graph, which XLA calls a command buffer. The others are XLA's defaults.
_IN_GRAPHS = ('FUSION', 'CUBLAS', 'CUBLASLT', 'CUSTOM_CALL', 'CUDNN', 'DYNAMIC_SLICE_FUSION', 'CONDITIONAL', 'WHILE')
DECODE_OPTIONS = {'gpu': {'xla_gpu_enable_command_buffer': ','.join(_IN_GRAPHS)}}


class PrefillChunk(NamedTuple):
    """A chunk of a prompt to prefill.

    Attributes:
        tokens: token ids of the chunk.
        start: position of the first token.
        slot: slot that holds the preceding tokens.
        prompt: token ids of the complete prompt, for penalties and the token before the chunk.
        sampling: sampling settings of the request.
        seed: seed of the request.
        sample: index of the sample in the request.
        mask: tokens that may follow the prompt, see `TokenMask`; None = all.
    """

    tokens: Sequence[int]
    start: int
    slot: int
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    sample: int
    mask: np.ndarray | None = None


class CompiledFunctions:
    """Compiled functions for one model and number of slots. Holds no state of slots.

    Attributes:
        pass_tokens: maximum number of tokens generated per slot in one pass.
        max_tokens: maximum number of tokens generated per slot in one call.
    """

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
        num_draft_tokens: int = 0,
        draft: Config | None = None,
    ):
        """Defines the compiled functions.

        Args:
            config: resolved config.
            layout: layout of the parameters.
            num_ids: number of ids that have a token and a row. A model may have additional padding ids without text.
            num_slots: number of slots, rounded up to a multiple of the devices that rows are sharded over.
            max_context: maximum number of positions per slot.
            int8: store keys and values in 8 bits.
            chunk: maximum number of prompt tokens per prefill call.
            num_draft_tokens: number of tokens drafted per decoding pass; 0 = none, or 4 with `draft`.
            draft: resolved config of the draft model, which has the same layout; None = drafts by prompt lookup.

        Raises:
            InputError: a number is out of range, or the mesh shards layers or sequence length.
        """
        for name, value in {'num_slots': num_slots, 'chunk': chunk}.items():
            if value < 1:
                raise InputError(f'{name}={value}: must be at least 1')
        if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InputError(f'num_draft_tokens={num_draft_tokens}: must be from 0 to {MAX_DRAFT_TOKENS}')
        for axis, what in {'stage': 'layers', 'context': 'sequence length'}.items():
            if layout.mesh.shape[axis] > 1:
                raise InputError(
                    f'mesh.{axis}={layout.mesh.shape[axis]}: the key-value cache does not support a mesh that shards '
                    f'the {what}; set it to 1'
                )
        self.num_row_shards = layout.num_shards('batch')
        num_slots = -(-num_slots // self.num_row_shards) * self.num_row_shards
        if draft is not None:
            num_draft_tokens = num_draft_tokens or MODEL_DRAFT_TOKENS
        self._layout = layout
        self._no_masks: dict[int, TokenMask] = {}
        self._rows: tuple[list[tuple[Sampling, int, int]], tuple[Rows, PendingPrompt]] | None = None
        self.pass_tokens = 1 + num_draft_tokens
        self.max_tokens = MAX_PASSES * self.pass_tokens
        self._runner = ModelRunner(
            config,
            layout,
            num_ids=num_ids,
            max_tokens=self.max_tokens,
            num_draft_tokens=num_draft_tokens,
            draft=None if draft is None else DraftModel(draft, layout, num_ids=num_ids),
        )
        self._num_ids, self._num_draft_tokens = num_ids, num_draft_tokens
        self.num_slots, self.max_context = num_slots, max_context
        self.chunk = min(chunk, max_context)
        is_cpu = layout.platform == 'cpu'
        # Every pass reads the full cache length, except with blocks of slots.
        has_blocks = self._runner.are_layers_unstacked and uses_cache_blocks(layout)
        caches_of = partial(
            SlotCaches,
            layout=layout,
            num_slots=num_slots,
            max_context=max_context,
            # A call may write tokens that are dropped later.
            chunk=max(self.chunk, self.max_tokens),
            int8=int8,
            unstacked=self._runner.are_layers_unstacked,
            in_blocks=has_blocks,
        )
        self._caches, self._draft_caches = caches_of(config.model), None if draft is None else caches_of(draft.model)
        growth = GPU_LENGTH_GROWTH if layout.platform == 'gpu' else GROWTH
        self.cache_lengths = [max_context] if has_blocks else _growing_sizes(MIN_CACHE_LENGTH, max_context, growth)
        self.chunk_sizes = _growing_sizes(min(MIN_CHUNK, self.chunk), self.chunk)
        # The time of a pass on a CPU is proportional to its tokens. Chunks of several rows have the same size.
        self._limits_padding = is_cpu and self.num_row_shards == 1
        # A decode call covers the first slots, or all slots if rows are sharded over devices.
        self.row_counts = (
            [num_slots]
            if self.num_row_shards > 1
            else sorted({1, *_growing_sizes(MIN_ROWS, num_slots, CPU_GROWTH if is_cpu else GROWTH)})
        )
        replicated = layout.named()
        fields: Any = [replicated] * (len(State._fields) - 2)
        drafts = None if self._draft_caches is None else DraftState(self._draft_caches.shardings(), fields[0])
        self._shardings = State(*[self._caches.shardings(), *fields, drafts])
        jit = partial(jax.jit, donate_argnames='state')
        hidden = layout.named('batch', 'length', 'activation')
        self._prefill = jit(self._runner.prefill, out_shardings=(self._shardings, replicated, replicated, hidden))
        self._score = jax.jit(self._runner.score, out_shardings=replicated)
        self._copy_slot = jax.jit(self._runner.copy_slot, donate_argnames='state', out_shardings=self._shardings)
        self._rewind = jax.jit(_rewind, out_shardings=replicated)
        self._decode = jit(
            self._runner.decode,
            out_shardings=(self._shardings, replicated, replicated),
            compiler_options=DECODE_OPTIONS.get(layout.platform),
        )

    def init_state(self) -> State:
        """Returns empty slots at the smallest cache length."""

        def init() -> State:
            B, V = self.num_slots, self._num_ids
            length, zeros = self.cache_lengths[0], jnp.zeros(B, jnp.int32)
            in_prompt_BV, counts_BV = jnp.zeros((B, V), bool), jnp.zeros((B, V), jnp.int32)
            history_BS = jnp.zeros((B, self.max_context if self._num_draft_tokens else 0), jnp.int32)
            draft = None if self._draft_caches is None else DraftState(self._draft_caches.init(length), zeros)
            return State(self._caches.init(length), zeros, zeros, zeros, in_prompt_BV, counts_BV, history_BS, draft)

        return jax.jit(init, out_shardings=self._shardings)()

    def prepare(self, params: Params, draft_params: Params | None = None) -> PreparedParams:
        """Converts parameters to the form that the compiled functions take."""
        return self._runner.prepare(params, draft_params)

    def chunk_length(self, num_tokens: int) -> int:
        """Returns the number of tokens of the next prefill call, if `num_tokens` tokens are to be prefilled.

        On a CPU, a chunk that would fill half of a size or less is split, so that padding at most doubles a call.
        """
        num_tokens = min(num_tokens, self.chunk)
        size = _smallest_fitting(self.chunk_sizes, num_tokens)
        if not self._limits_padding or 2 * num_tokens > size or size == self.chunk_sizes[0]:
            return num_tokens
        return max(smaller for smaller in self.chunk_sizes if smaller < size)

    def num_rows(self, highest_slot: int) -> int:
        """Returns the number of rows of the decode call that includes the slot `highest_slot`."""
        return _smallest_fitting(self.row_counts, highest_slot + 1)

    def to_devices(self, tree: Any) -> Any:
        """Replicates small arrays to every device."""
        return jax.device_put(tree, self._layout.named())

    def ring_slots(self) -> dict[int, int]:
        """Returns {window: number of slots} of the sliding-window layers whose cache is shorter than the context."""
        # The number depends on the window and on values that both models share.
        return dict(item for caches in self._all_caches for item in caches.ring_slots().items())

    def cache_bytes(self) -> int:
        """Returns the bytes of all slots at the largest cache length."""
        return sum(caches.num_bytes() for caches in self._all_caches)

    def resize(self, state: State, cache_length: int) -> State:
        """Returns the state with `cache_length` positions per slot; later positions are dropped."""
        draft = state.draft
        if self._draft_caches is not None and draft is not None:
            draft = draft._replace(caches=self._draft_caches.resize(draft.caches, cache_length))
        return state._replace(caches=self._caches.resize(state.caches, cache_length), draft=draft)

    def token_mask(self, masks: Sequence[np.ndarray | None], forced: Sequence[Sequence[int]] = ()) -> TokenMask:
        """Stacks the masks and forced tokens of rows, see `stack_masks`. Without any mask, nothing is transferred."""
        # All masks are on the devices, so that the same program is called.
        if any(mask is not None for mask in masks):
            return self.to_devices(stack_masks(masks, forced, num_ids=self._num_ids, max_forced=self.max_tokens))
        if len(masks) not in self._no_masks:
            no_masks = stack_masks(masks, (), num_ids=self._num_ids, max_forced=self.max_tokens)
            self._no_masks[len(masks)] = self.to_devices(no_masks)
        return self._no_masks[len(masks)]

    def sampling_rows(self, settings: list[tuple[Sampling, int, int]]) -> tuple[Rows, PendingPrompt]:
        """Returns the settings, seeds and sample indices of rows on the devices, transferred only if they changed."""
        if self._rows is None or self._rows[0] != settings:
            samplings, seeds, numbers = zip(*settings, strict=True)
            row_seeds = PendingPrompt(np.array(seeds, np.uint32), np.array(numbers, np.uint32))
            self._rows = settings, self.to_devices((stack_settings(samplings), row_seeds))
        return self._rows[1]

    def copy_slot(self, state: State, source: int, slot: int) -> State:
        """Copies keys and values of one slot to another."""
        return self._copy_slot(state, np.int32(source), np.int32(slot))

    def rewind(self, state: State, positions: Sequence[tuple[int, int, int, int]]) -> State:
        """Drops the last tokens of slots. A position is the slot, its length, the next input token and the last one."""
        position_4P = np.full((4, self.num_slots), self.num_slots, np.int32)
        for row, position in enumerate(positions):
            position_4P[:, row] = position
        length_B, token_B, previous_B = self._rewind((state.length_B, state.token_B, state.previous_B), position_4P)
        return state._replace(length_B=length_B, token_B=token_B, previous_B=previous_B)

    def prefill(
        self, params: PreparedParams, state: State, chunks: Sequence[PrefillChunk], *, with_top: bool
    ) -> tuple[State, SampledTokens, jax.Array, jax.Array]:
        """Prefills up to `num_row_shards` chunks and samples the token after each. Row p of the result is chunk p.

        Also returns the hidden states after the final norm: their sum over each chunk, float32 [P, D], and all of them,
        [P, T, D], for `score`.
        """
        P = self.num_row_shards
        assert 0 < len(chunks) <= P, len(chunks)
        max_length = max(len(chunk.tokens) for chunk in chunks)
        T = _smallest_fitting(self.chunk_sizes, max_length)
        tokens_PT = np.zeros((P, T), np.int32)
        in_prompt_PV = np.zeros((P, self._num_ids), bool)
        # Padding rows have an out-of-range slot, so they are not written.
        placement = np.full((4, P), self.num_slots, np.int32)
        placement[1:] = 0
        for row, chunk in enumerate(chunks):
            tokens_PT[row, : len(chunk.tokens)] = chunk.tokens
            in_prompt_PV[row, [token for token in chunk.prompt if token < self._num_ids]] = True
            before = chunk.prompt[chunk.start - 1] if chunk.start else NO_TOKEN
            placement[:, row] = chunk.slot, chunk.start, len(chunk.tokens), before
        padding = P - len(chunks)
        rows = stack_settings([chunk.sampling for chunk in chunks] + [Sampling()] * padding)
        seeds = PendingPrompt(
            *(
                np.array([getattr(chunk, name) for chunk in chunks] + [0] * padding, np.uint32)
                for name in ('seed', 'sample')
            )
        )
        mask = self.token_mask([chunk.mask for chunk in chunks] + [None] * padding)
        return self._prefill(params, state, tokens_PT, placement, in_prompt_PV, rows, seeds, mask, with_top)

    def score(
        self, params: PreparedParams, hidden_PTD: jax.Array, chunks: Sequence[PrefillChunk], *, with_top: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Scores the token after each token of prefilled chunks, see `score_positions`.

        The values after the last token of a prompt have no meaning.
        """
        target_PT = np.zeros(hidden_PTD.shape[:2], np.int32)
        for row, chunk in enumerate(chunks):
            targets = chunk.prompt[chunk.start + 1 : chunk.start + 1 + len(chunk.tokens)]
            target_PT[row, : len(targets)] = targets
        return self._score(params, hidden_PTD, target_PT, with_top)

    def decode(
        self,
        params: PreparedParams,
        state: State,
        num_tokens: np.ndarray,
        rows: Rows,
        seeds: PendingPrompt,
        mask: TokenMask,
        *,
        with_top: bool,
    ) -> tuple[State, SampledTokens, jax.Array]:
        """Generates `num_tokens` tokens for each of the first slots, and returns the `DecodeCounts` as int32 [3].

        `num_tokens` is int32, at most `max_tokens`. It, `rows`, `seeds` and `mask` have `num_rows` entries.
        """
        return self._decode(params, state, num_tokens, rows, seeds, mask, with_top)

    def compile_decode(self, params: PreparedParams, state: State, options: Mapping[str, Any]) -> jax.stages.Compiled:
        """Compiles `decode` for all slots, perhaps ahead of time, with additional XLA options.

        `params` and `state` have arrays or their shapes.
        """
        num = self.num_slots
        seeds = PendingPrompt(np.zeros(num, np.uint32), np.zeros(num, np.uint32))
        mask = stack_masks([None] * num, (), num_ids=self._num_ids, max_forced=self.max_tokens)
        rows = stack_settings([Sampling()] * num), seeds, mask
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._layout.named()),
            (params, state, np.zeros(num, np.int32), *rows, np.array(False)),
        )
        return self._decode.lower(*shapes).compile(dict(options))

    def warm_up_calls(self) -> Iterator[tuple[str, int, Callable[[PreparedParams, State], tuple[State, Any]]]]:
        """Yields name, cache length and a compiling call of every program. The calls leave slots empty."""

        def decode(num: int, params: PreparedParams, state: State) -> tuple[State, SampledTokens]:
            seeds = PendingPrompt(np.zeros(num, np.uint32), np.zeros(num, np.uint32))
            rows, seeds = self.to_devices((stack_settings([Sampling()] * num), seeds))
            mask = self.token_mask([None] * num)
            return self.decode(params, state, np.zeros(num, np.int32), rows, seeds, mask, with_top=False)[:2]

        def prefill(size: int, params: PreparedParams, state: State) -> tuple[State, Any]:
            chunk = PrefillChunk([0] * size, 0, self.num_slots, [], Sampling(), 0, 0)
            state, sampled, _, hidden_PTD = self.prefill(params, state, [chunk], with_top=False)
            return state, (sampled, self.score(params, hidden_PTD, [chunk], with_top=False))

        def copy_slot(params: PreparedParams, state: State) -> tuple[State, Any]:
            return self.copy_slot(state, 0, 0), None

        def rewind(params: PreparedParams, state: State) -> tuple[State, Any]:
            return self.rewind(state, []), None

        yield 'drop tokens', self.cache_lengths[0], rewind
        for cache_length in self.cache_lengths:
            yield f'copy slot (cache length {cache_length})', cache_length, copy_slot
            for num in self.row_counts:
                yield f'decode {num} slots (cache length {cache_length})', cache_length, partial(decode, num)
            # The largest chunk size that a prompt of this cache length can need.
            largest = _smallest_fitting(self.chunk_sizes, min(cache_length, self.chunk))
            for size in self.chunk_sizes:
                if size <= largest:
                    yield f'prefill {size} tokens (cache length {cache_length})', cache_length, partial(prefill, size)

    @property
    def _all_caches(self) -> list[SlotCaches]:
        return [self._caches, *([] if self._draft_caches is None else [self._draft_caches])]


def uses_cache_blocks(layout: Layout) -> bool:
    """Returns True if a pass decides for each block of slots whether to read it. A GPU would wait for each decision."""
    return layout.platform == 'cpu'


def _rewind(fields: tuple[jax.Array, ...], position_4P: jax.Array) -> tuple[jax.Array, ...]:
    """Sets the slots in the first row to the values of the others, in the order of the fields."""
    slot_P, *values_3P = position_4P
    return tuple(x_B.at[slot_P].set(new_P, mode='drop') for x_B, new_P in zip(fields, values_3P, strict=True))


def _growing_sizes(minimum: int, maximum: int, growth: int = GROWTH) -> list[int]:
    """Returns sizes that grow by a factor, ending with `maximum`."""
    sizes = []
    while minimum < maximum:
        sizes.append(minimum)
        minimum *= growth
    return [*sizes, maximum]


def _smallest_fitting(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
