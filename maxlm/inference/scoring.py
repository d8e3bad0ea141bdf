"""Log-probabilities of given continuations, as benchmarks ask for them.

Several requests share a row of the batch as documents that cannot see each other, so that nothing is filled up with
padding and few shapes are compiled. What requests begin with in common, such as a question before its answers or
examples before all questions, is read once: they are a tree in their row. Logits are made at scored positions only,
some at a time.

Shapes: B batch, T length, D dim, V vocabulary, P scored positions of one call.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlm.errors import InputError
from maxlm.inference.load import LoadedModel
from maxlm.inference.prefix_tree import LARGEST_TREE, FlattenedTree, flatten, insert
from maxlm.log import progress_bar
from maxlm.model.attention.ring import zigzag
from maxlm.model.blocks import BLOCKS
from maxlm.model.decoder import softcap, without_padding
from maxlm.parallel.host_offload import to_device
from maxlm.training.state import Params, abstract_model

# Rows that requests share are as long as the longest, and at least this; a multiple of what kernels like.
SHORTEST_ROW = 512
MULTIPLE = 128
# Tokens of a batch; a CPU gains nothing by more.
BATCH_TOKENS, CPU_BATCH_TOKENS = 2**14, 2**12
# Positions whose logits exist at the same time.
HEAD = 1024
# Requests so much shorter than a row get shorter rows: attention grows with the square of the length.
SHORTER = 4


class ScoringRequest(NamedTuple):
    """A continuation behind its context: token ids, at least one of each."""

    context: Sequence[int]
    continuation: Sequence[int]


class Likelihood(NamedTuple):
    """What a model makes of a continuation.

    log_prob: Σ log softmax(logits)[token] over its tokens, in nats. is_greedy: whether each is the likeliest.
    """

    log_prob: float
    is_greedy: bool


class _Reading(NamedTuple):
    """What the model reads, and the spans that are scored there."""

    tokens: tuple[int, ...]
    spans: list[int]


class LogprobScorer:
    """Scores spans with one model, on the mesh that it lies on. Compiles at the first use of a shape.

    Attributes:
        params: of the model; others of the same shapes may take their place.
        max_length: tokens that the model reads, at most.
    """

    def __init__(self, model: LoadedModel, *, batch_tokens: int = 0):
        """`batch_tokens` are read at a time, or one row; 0 = as many as suit the device."""
        self.params = model.params
        self._config, self._layout = model.config.model, model.layout
        self.max_length = self._config.max_positions
        self._on_cpu = jax.default_backend() == 'cpu'
        self._batch_tokens = batch_tokens or (CPU_BATCH_TOKENS if self._on_cpu else BATCH_TOKENS)
        # The rotation depends on the length of the whole text there.
        self._alone = self._config.rope_scaling == 'dynamic'
        layout, parts = self._layout, self._layout.num_shards('length')
        self._has_trees = not self._alone and parts == layout.num_shards('layers') == 1
        graph, _ = nnx.split(abstract_model(model.config, layout))

        def whole(params: Params) -> Any:
            # Blocks come from host memory one by one, the rest as a whole.
            return nnx.merge(
                graph, {name: tree if name == BLOCKS else to_device(tree) for name, tree in params.items()}
            )

        def read_trees(params: Params, tokens_BT: jax.Array, ends_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
            arrays = (layout.constrain(x, ('batch', 'length')) for x in (tokens_BT, ends_BT, positions_BT))
            tokens, ends, positions = arrays
            return whole(params)(tokens, ends_BT=ends, positions_BT=positions)[0]

        def read(params: Params, tokens_BT: jax.Array, segments_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
            T = tokens_BT.shape[1]
            order = np.asarray(zigzag(T, parts)) if parts > 1 else np.arange(T)
            arrays = (
                layout.constrain(x[:, order], ('batch', 'length')) for x in (tokens_BT, segments_BT, positions_BT)
            )
            tokens, segments, positions = arrays
            hidden_BTD, _ = whole(params)(
                tokens,
                segments_BT=segments,
                positions_BT=positions,
                length_B=(segments_BT > 0).sum(axis=1) if self._alone else None,
                micro_batches=layout.num_shards('layers'),
            )
            return hidden_BTD[:, np.argsort(order)] if parts > 1 else hidden_BTD

        def judge(
            params: Params, hidden_BTD: jax.Array, row_P: jax.Array, column_P: jax.Array, target_P: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            hidden_PD = layout.constrain(hidden_BTD[row_P, column_P], ('rows', 'activation'))
            kernel_DV = whole(params).output_kernel().astype(hidden_PD.dtype)
            kernel_DV = layout.pad_vocabulary(kernel_DV, ('embed', 'vocab'))
            logits_PV = jnp.dot(hidden_PD, kernel_DV, preferred_element_type=jnp.float32)
            logits_PV = softcap(layout.constrain(logits_PV, ('rows', 'vocab')), self._config.logit_softcap)
            logits_PV = without_padding(logits_PV, self._config.vocab_size)
            is_target_PV = jnp.arange(logits_PV.shape[1])[None, :] == target_P[:, None]
            log_prob_P = jnp.where(is_target_PV, logits_PV, 0).sum(axis=1) - jax.nn.logsumexp(logits_PV, axis=1)
            return log_prob_P, jnp.argmax(logits_PV, axis=1) == target_P

        self._read, self._read_trees = jax.jit(read), jax.jit(read_trees)
        # Of several processes each reads all of it.
        self._judge = jax.jit(judge, out_shardings=layout.named())

    def score(self, spans: Sequence[ScoringRequest], *, show: bool = False) -> list[Likelihood]:
        """The likelihood of each span. What does not fit into the context is cut off on the left.

        Args:
            spans: in any order.
            show: whether to show progress.

        Raises:
            InputError: a context or a continuation is empty, or a continuation is longer than the model's context.
        """
        log_prob = np.zeros(len(spans))
        is_greedy = np.ones(len(spans), bool)
        pending: deque[tuple[Any, np.ndarray]] = deque()

        def take() -> None:
            on_device, owner = pending.popleft()
            found, greedy = jax.device_get(on_device)
            np.add.at(log_prob, owner, found[: len(owner)].astype(np.float64))
            np.logical_and.at(is_greedy, owner, greedy[: len(owner)])

        readings = self._readings(spans)
        texts = [reading.tokens for reading in readings]
        trees = insert(texts, largest=LARGEST_TREE if self._has_trees else 0)
        with progress_bar(total=len(spans), initial=0, unit='request', show=show) as bar:
            for rows, T in self._batches([tree.size for tree in trees]):
                members = [[[readings[text] for text in trees[number].texts] for number in row] for row in rows]
                laid = [[flatten([reading.tokens for reading in tree]) for tree in row] for row in members]
                shares = any(len(tree) > 1 for row in members for tree in row)
                tokens, segments, ends, positions = _arrays(laid, self._num_rows(len(rows), T), T)
                read, seen = (self._read_trees, ends) if shares else (self._read, segments)
                hidden_BTD = read(self.params, *map(self._put, (tokens, seen, positions)))
                places = _places(members, laid, spans)
                for first in range(0, len(places), HEAD):
                    part = places[first : first + HEAD]
                    filled = np.zeros((HEAD, 3), np.int32)
                    filled[: len(part)] = part[:, 1:]
                    pending.append((self._judge(self.params, hidden_BTD, *map(self._put, filled.T)), part[:, 0]))
                    if self._on_cpu:
                        # With many programs on their way, virtual devices of a CPU can wait for each other for ever.
                        jax.block_until_ready(pending[-1][0])
                # One batch is always in the device's queue while an older one is read.
                while len(pending) > 2 * max(1, len(places) // HEAD):
                    take()
                bar.update(sum(len(reading.spans) for row in members for tree in row for reading in tree))
            while pending:
                take()
        return [Likelihood(float(p), bool(g)) for p, g in zip(log_prob, is_greedy, strict=True)]

    def _put(self, x: np.ndarray) -> jax.Array:
        """On every device, by an explicit transfer: a run forbids all others."""
        return jax.make_array_from_callback(x.shape, self._layout.named(), x.__getitem__)

    def _readings(self, spans: Sequence[ScoringRequest]) -> list[_Reading]:
        """What is to be read, the same text once."""
        by_tokens: dict[tuple[int, ...], list[int]] = {}
        for number, (context, continuation) in enumerate(spans):
            if not len(context) or not len(continuation):
                raise InputError(f'request {number} has no {"continuation" if len(context) else "context"} to score')
            if len(continuation) > self.max_length:
                raise InputError(
                    f'request {number}: its continuation has {len(continuation)} tokens, and the context of the model '
                    f'is {self.max_length}'
                )
            text = (*context, *continuation)[-(self.max_length + 1) :]
            by_tokens.setdefault(text[:-1], []).append(number)
        return [_Reading(*pair) for pair in by_tokens.items()]

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[list[list[int]], int]]:
        """Rows of numbers of trees, with their length: the largest first."""
        left = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        multiple = math.lcm(MULTIPLE, 2 * self._layout.num_shards('length'))
        while left:
            T = -(-max(SHORTEST_ROW, lengths[left[0]]) // multiple) * multiple
            longer = [number for number in left if lengths[number] * SHORTER > T]
            shorter = left[len(longer) :]
            # Another shape is worth it for a batch or more.
            if T <= SHORTEST_ROW or sum(lengths[number] for number in shorter) < self._batch_tokens:
                longer, shorter = left, []
            rows = [[number] for number in longer] if self._alone else pack(longer, lengths, T)
            step = self._round_rows(max(1, self._batch_tokens // T))
            for first in range(0, len(rows), step):
                yield rows[first : first + step], T
            left = shorter

    def _num_rows(self, rows: int, T: int) -> int:
        """Rows of the batch that so many are put into: a power of two or a full batch."""
        return self._round_rows(min(1 << (rows - 1).bit_length(), max(1, self._batch_tokens // T, rows)))

    def _round_rows(self, rows: int) -> int:
        """Rows are split over devices; a pipeline has as many micro-batches as stages."""
        parts = self._layout.num_shards('rows')
        return -(-rows // parts) * parts


def pack(numbers: Sequence[int], lengths: Sequence[int], T: int) -> list[list[int]]:
    """Numbers, of lengths that fall, put into rows of T tokens: each where it leaves the least room."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for number in numbers:
        place = bisect.bisect_left(room, (lengths[number], 0))
        if place == len(room):
            rows.append([])
            left, row = T, len(rows) - 1
        else:
            left, row = room.pop(place)
        rows[row].append(number)
        bisect.insort(room, (left - lengths[number], row))
    return rows


def scored_slots(length: int, num: int) -> range:
    """Of a text of `length` tokens that is read, those behind which `num` scored tokens come: the last."""
    return range(length - num, length)


def windows(tokens: Sequence[int], prefix: int, max_length: int) -> list[ScoringRequest]:
    """A text of any length as spans in which each token is scored once, behind as many as a window has room for.

    The first stands behind `prefix`; the last window reaches back so that it is full. As lm-eval cuts texts for
    perplexities with `context_len=1`.
    """
    first = min(max_length, len(tokens))
    spans = [ScoringRequest([prefix], tokens[:first])] if first else []
    for start in range(first, len(tokens), max_length):
        stop = min(start + max_length, len(tokens))
        spans.append(ScoringRequest(tokens[stop - max_length - 1 : start], tokens[start:stop]))
    return spans


def _arrays(rows: Sequence[Sequence[FlattenedTree]], B: int, T: int) -> np.ndarray:
    """Tokens, numbers of trees, ends and positions, int32 [4, B, T]; padding sees itself."""
    arrays = np.zeros((4, B, T), np.int32)
    tokens, segments, ends, positions = arrays
    ends[:] = np.arange(1, T + 1)
    for row, trees in enumerate(rows):
        start = 0
        for segment, tree in enumerate(trees, start=1):
            place = row, slice(start, start + len(tree.tokens))
            tokens[place], segments[place], positions[place] = tree.tokens, segment, tree.depths
            ends[place] = tree.ends + start
            start += len(tree.tokens)
    return arrays


def _places(
    rows: Sequence[Sequence[Sequence[_Reading]]],
    laid: Sequence[Sequence[FlattenedTree]],
    spans: Sequence[ScoringRequest],
) -> np.ndarray:
    """(span, row, column, target) of each scored token, int32 [tokens, 4]."""
    places = []
    for row, (trees, laid_trees) in enumerate(zip(rows, laid, strict=True)):
        start = 0
        for tree, laid_tree in zip(trees, laid_trees, strict=True):
            for reading, path in zip(tree, laid_tree.paths, strict=True):
                for number in reading.spans:
                    continuation = spans[number].continuation
                    slots = scored_slots(len(reading.tokens), len(continuation))
                    for slot, target in zip(slots, continuation, strict=True):
                        places.append((number, row, start + path[slot], target))
            start += len(laid_tree.tokens)
    return np.array(places, np.int32)
