"""Log-probabilities of given continuations, as required by benchmarks.

Requests are packed into rows as documents that cannot attend to each other, which avoids padding and limits the number
of compiled shapes. A prefix shared by several requests, such as a question or few-shot examples, is read once: these
requests form a tree in their row. Logits are computed only at scored positions, one chunk at a time.

Shapes: B batch, T length, D dim, V vocabulary, P scored positions per call.
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
from maxlm.inference.prefix_tree import MAX_TREE_TOKENS, FlattenedTree, flatten, insert
from maxlm.log import progress_bar
from maxlm.model.attention.ring import zigzag
from maxlm.model.blocks import BLOCKS
from maxlm.model.decoder import without_padding
from maxlm.model.layers.softcap import softcap
from maxlm.parallel.host_offload import to_device
from maxlm.training.state import Params, abstract_model

# A packed row is as long as its longest entry, at least the minimum, and a multiple supported by attention kernels.
MIN_ROW_TOKENS = 512
ROW_MULTIPLE = 128
# Tokens per batch. Larger batches do not improve CPU throughput.
BATCH_TOKENS, CPU_BATCH_TOKENS = 2**14, 2**12
# Numbers of positions per call whose logits are computed: the last call of a batch has the smallest number that fits.
# With one scored token per text, most of 1024 positions would be padding. The last number limits the memory.
LOGITS_SIZES = (128, 1024)
# Requests shorter than a row by this factor get shorter rows: attention cost is quadratic in the row length.
SHORT_ROW_FACTOR = 4


class ScoringRequest(NamedTuple):
    """A context and its continuation, each a non-empty sequence of token ids."""

    context: Sequence[int]
    continuation: Sequence[int]


class Likelihood(NamedTuple):
    """Score of a continuation.

    Attributes:
        log_prob: Σ log softmax(logits)[token] over the tokens of the continuation, in nats.
        is_greedy: True if every token is the most likely one.
    """

    log_prob: float
    is_greedy: bool


class _Sequence(NamedTuple):
    """A distinct token sequence and the indices of the requests that it scores."""

    tokens: tuple[int, ...]
    requests: list[int]


class LogprobScorer:
    """Scores continuations with one model on its mesh. Compiles once for each shape.

    Attributes:
        params: parameters of the model. They may be replaced by others of the same shapes.
        max_length: maximum number of input tokens.
    """

    def __init__(self, model: LoadedModel, *, batch_tokens: int = 0):
        """Initializes the scorer.

        Args:
            model: model to score with.
            batch_tokens: number of tokens per batch, at least one row; 0 = a default for the device.
        """
        self.params = model.params
        self._config, self._layout = model.config.model, model.layout
        self.max_length = self._config.max_positions
        self._on_cpu = jax.default_backend() == 'cpu'
        self._batch_tokens = batch_tokens or (CPU_BATCH_TOKENS if self._on_cpu else BATCH_TOKENS)
        # Dynamic RoPE scaling depends on the length of the complete text, so texts cannot be packed.
        self._is_one_per_row = self._config.rope_scaling == 'dynamic'
        layout, num_length_shards = self._layout, self._layout.num_shards('length')
        self._has_trees = not self._is_one_per_row and num_length_shards == layout.num_shards('layers') == 1
        graph, _ = nnx.split(abstract_model(model.config, layout))

        def build_decoder(params: Params) -> Any:
            # Blocks are transferred from host memory one at a time, all other parameters together.
            return nnx.merge(
                graph, {name: tree if name == BLOCKS else to_device(tree) for name, tree in params.items()}
            )

        def forward_trees(
            params: Params, tokens_BT: jax.Array, ends_BT: jax.Array, positions_BT: jax.Array, previous_BT: jax.Array
        ) -> jax.Array:
            arrays = (tokens_BT, ends_BT, positions_BT, previous_BT)
            tokens, ends, positions, previous = (layout.constrain(x, ('batch', 'length')) for x in arrays)
            decoder = build_decoder(params)
            return decoder(tokens, ends_BT=ends, positions_BT=positions, previous_BT=previous)[0]

        def forward(params: Params, tokens_BT: jax.Array, segments_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
            T = tokens_BT.shape[1]
            order = np.asarray(zigzag(T, num_length_shards)) if num_length_shards > 1 else np.arange(T)
            arrays = (
                layout.constrain(x[:, order], ('batch', 'length')) for x in (tokens_BT, segments_BT, positions_BT)
            )
            tokens, segments, positions = arrays
            hidden_BTD, _, _ = build_decoder(params)(
                tokens,
                segments_BT=segments,
                positions_BT=positions,
                length_B=(segments_BT > 0).sum(axis=1) if self._is_one_per_row else None,
                micro_batches=layout.num_shards('layers'),
            )
            return hidden_BTD[:, np.argsort(order)] if num_length_shards > 1 else hidden_BTD

        def score_tokens(
            params: Params, hidden_BTD: jax.Array, row_P: jax.Array, column_P: jax.Array, target_P: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            hidden_PD = layout.constrain(hidden_BTD[row_P, column_P], ('rows', 'activation'))
            kernel_DV = build_decoder(params).output_kernel().astype(hidden_PD.dtype)
            kernel_DV = layout.pad_vocabulary(kernel_DV, ('embed', 'vocab'))
            logits_PV = jnp.dot(hidden_PD, kernel_DV, preferred_element_type=jnp.float32)
            logits_PV = softcap(layout.constrain(logits_PV, ('rows', 'vocab')), self._config.logit_softcap)
            logits_PV = without_padding(logits_PV, self._config.vocab_size)
            is_target_PV = jnp.arange(logits_PV.shape[1])[None, :] == target_P[:, None]
            log_prob_P = jnp.where(is_target_PV, logits_PV, 0).sum(axis=1) - jax.nn.logsumexp(logits_PV, axis=1)
            return log_prob_P, jnp.argmax(logits_PV, axis=1) == target_P

        self._forward, self._forward_trees = jax.jit(forward), jax.jit(forward_trees)
        # Replicated, because every process reads all scores.
        self._score_tokens = jax.jit(score_tokens, out_shardings=layout.named())

    def score(self, requests: Sequence[ScoringRequest], *, show: bool = False) -> list[Likelihood]:
        """Returns the likelihood of each continuation. Contexts that do not fit are truncated on the left.

        Args:
            requests: requests, in any order.
            show: show a progress bar.

        Raises:
            InputError: a context or a continuation is empty, a continuation is longer than the model's context, or the
                model has no row for a token.
        """
        log_prob = np.zeros(len(requests))
        is_greedy = np.ones(len(requests), bool)
        pending: deque[tuple[Any, np.ndarray]] = deque()

        def collect() -> None:
            on_device, owner = pending.popleft()
            log_probs, greedy = jax.device_get(on_device)
            np.add.at(log_prob, owner, log_probs[: len(owner)].astype(np.float64))
            np.logical_and.at(is_greedy, owner, greedy[: len(owner)])

        sequences = self._unique_sequences(requests)
        token_lists = [sequence.tokens for sequence in sequences]
        trees = insert(token_lists, max_tokens=MAX_TREE_TOKENS if self._has_trees else 0)
        with progress_bar('score', total=len(requests), unit='request', show=show) as bar:
            for rows, T in self._batches([tree.size for tree in trees]):
                members = [[[sequences[index] for index in trees[number].texts] for number in row] for row in rows]
                flattened = [[flatten([sequence.tokens for sequence in tree]) for tree in row] for row in members]
                shares_prefix = any(len(tree) > 1 for row in members for tree in row)
                arrays = _batch_arrays(flattened, self._padded_rows(len(rows), T), T)
                tokens, segments, ends, positions, previous = map(self._to_devices, arrays)
                if shares_prefix:
                    hidden_BTD = self._forward_trees(self.params, tokens, ends, positions, previous)
                else:
                    hidden_BTD = self._forward(self.params, tokens, segments, positions)
                targets = _scored_tokens(members, flattened, requests)
                for first in range(0, len(targets), LOGITS_SIZES[-1]):
                    chunk = targets[first : first + LOGITS_SIZES[-1]]
                    padded = np.zeros((next(size for size in LOGITS_SIZES if size >= len(chunk)), 3), np.int32)
                    padded[: len(chunk)] = chunk[:, 1:]
                    pending.append(
                        (self._score_tokens(self.params, hidden_BTD, *map(self._to_devices, padded.T)), chunk[:, 0])
                    )
                    if self._on_cpu:
                        # With many programs in flight, the virtual devices of a CPU can deadlock.
                        jax.block_until_ready(pending[-1][0])
                # Keep one batch in the device queue while an older one is read.
                while len(pending) > 2 * max(1, len(targets) // LOGITS_SIZES[-1]):
                    collect()
                bar.update(sum(len(sequence.requests) for row in members for tree in row for sequence in tree))
            while pending:
                collect()
        return [Likelihood(float(p), bool(g)) for p, g in zip(log_prob, is_greedy, strict=True)]

    def _to_devices(self, x: np.ndarray) -> jax.Array:
        """Replicates an array to every device. Explicit, because implicit transfers are forbidden during a run."""
        return jax.make_array_from_callback(x.shape, self._layout.named(), x.__getitem__)

    def _unique_sequences(self, requests: Sequence[ScoringRequest]) -> list[_Sequence]:
        """Returns the distinct sequences of the requests."""
        by_tokens: dict[tuple[int, ...], list[int]] = {}
        for number, (context, continuation) in enumerate(requests):
            if not len(context) or not len(continuation):
                raise InputError(
                    f'request {number}: its {"continuation" if len(context) else "context"} must not be empty'
                )
            if len(continuation) > self.max_length:
                raise InputError(
                    f'request {number}: its continuation has {len(continuation)} tokens; it must have at most '
                    f'{self.max_length}, the context length of the model'
                )
            text = (*context, *continuation)[-(self.max_length + 1) :]
            # A tokenizer can have tokens without a row in the model.
            if (largest := max(text)) >= self._config.vocab_size:
                raise InputError(
                    f'request {number}: token id {largest} is not below model.vocab_size={self._config.vocab_size}; '
                    'use the tokenizer of the model'
                )
            by_tokens.setdefault(text[:-1], []).append(number)
        return [_Sequence(*pair) for pair in by_tokens.items()]

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[list[list[int]], int]]:
        """Yields rows of tree indices with their row length, longest rows first."""
        remaining = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        multiple = math.lcm(ROW_MULTIPLE, 2 * self._layout.num_shards('length'))
        while remaining:
            T = -(-max(MIN_ROW_TOKENS, lengths[remaining[0]]) // multiple) * multiple
            longer = [number for number in remaining if lengths[number] * SHORT_ROW_FACTOR > T]
            shorter = remaining[len(longer) :]
            # Use a shorter row length only if it fills at least one batch.
            if T <= MIN_ROW_TOKENS or sum(lengths[number] for number in shorter) < self._batch_tokens:
                longer, shorter = remaining, []
            rows = [[number] for number in longer] if self._is_one_per_row else pack(longer, lengths, T)
            step = self._round_rows(max(1, self._batch_tokens // T))
            for first in range(0, len(rows), step):
                yield rows[first : first + step], T
            remaining = shorter

    def _padded_rows(self, num_rows: int, T: int) -> int:
        """Returns the batch size for `num_rows` rows: a power of two or a full batch."""
        return self._round_rows(min(1 << (num_rows - 1).bit_length(), max(1, self._batch_tokens // T, num_rows)))

    def _round_rows(self, num_rows: int) -> int:
        """Rounds up to a multiple of the row shards, which include the microbatches of a pipeline."""
        num_shards = self._layout.num_shards('rows')
        return -(-num_rows // num_shards) * num_shards


def pack(numbers: Sequence[int], lengths: Sequence[int], T: int) -> list[list[int]]:
    """Packs items into rows of T tokens by best fit. `numbers` are their indices, sorted by descending length."""
    rows: list[list[int]] = []
    free_tokens: list[tuple[int, int]] = []
    for number in numbers:
        index = bisect.bisect_left(free_tokens, (lengths[number], 0))
        if index == len(free_tokens):
            rows.append([])
            free, row = T, len(rows) - 1
        else:
            free, row = free_tokens.pop(index)
        rows[row].append(number)
        bisect.insort(free_tokens, (free - lengths[number], row))
    return rows


def scored_indices(length: int, num: int) -> range:
    """Returns the positions that predict the last `num` tokens: the last `num` of `length` input tokens."""
    return range(length - num, length)


def windows(tokens: Sequence[int], prefix: Sequence[int], max_length: int) -> list[ScoringRequest]:
    """Splits a text of any length into requests that score each token once, with as much context as fits.

    The context of the first window is `prefix`, which is not scored. The last window extends backward to the full
    length. lm-eval splits texts in the same way for perplexity, with `context_len=1`.
    """
    # The last token of a window is not an input.
    first = min(max_length - len(prefix) + 1, len(tokens))
    requests = [ScoringRequest(prefix, tokens[:first])] if first else []
    for start in range(first, len(tokens), max_length):
        stop = min(start + max_length, len(tokens))
        requests.append(ScoringRequest(tokens[max(0, stop - max_length - 1) : start], tokens[start:stop]))
    return requests


def _batch_arrays(rows: Sequence[Sequence[FlattenedTree]], B: int, T: int) -> np.ndarray:
    """Returns tokens, tree numbers, ends, positions and previous tokens, int32 [5, B, T].

    A padding token attends only to itself.
    """
    arrays = np.zeros((5, B, T), np.int32)
    tokens, segments, ends, positions, previous = arrays
    ends[:] = np.arange(1, T + 1)
    for row, trees in enumerate(rows):
        start = 0
        for segment, tree in enumerate(trees, start=1):
            slot = row, slice(start, start + len(tree.tokens))
            tokens[slot], segments[slot], positions[slot] = tree.tokens, segment, tree.depths
            ends[slot], previous[slot] = tree.ends + start, tree.previous
            start += len(tree.tokens)
    return arrays


def _scored_tokens(
    rows: Sequence[Sequence[Sequence[_Sequence]]],
    flattened: Sequence[Sequence[FlattenedTree]],
    requests: Sequence[ScoringRequest],
) -> np.ndarray:
    """Returns (request, row, column, target) of each scored token, int32 [tokens, 4]."""
    targets = []
    for row, (trees, flattened_trees) in enumerate(zip(rows, flattened, strict=True)):
        start = 0
        for tree, flattened_tree in zip(trees, flattened_trees, strict=True):
            for sequence, path in zip(tree, flattened_tree.paths, strict=True):
                for number in sequence.requests:
                    continuation = requests[number].continuation
                    indices = scored_indices(len(sequence.tokens), len(continuation))
                    for index, target in zip(indices, continuation, strict=True):
                        targets.append((number, row, start + path[index], target))
            start += len(flattened_tree.tokens)
    return np.array(targets, np.int32)
