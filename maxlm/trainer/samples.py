"""What the model writes at evaluations: continuations of beginnings of validation documents, or of a user's own texts.

It runs where and as it is trained, with the parameters as they lie, on any mesh. For each token the whole text goes
through the model once more. A cache of keys and values would save little: the texts are short, and what a token costs
is mostly to bring the parameters together, which a cache does not spare.

Shapes: B batch, T length, D dim, V vocabulary.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlm.config.schema import Config
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.token_flags import is_document_start, is_target, token_ids
from maxlm.data.loader.dataset import TrainingData
from maxlm.data.loader.windows import Sequences
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.inference.sampling import draw_keys, sample
from maxlm.model.attention.ring import zigzag
from maxlm.model.blocks import BLOCKS
from maxlm.model.decoder import softcap
from maxlm.parallel.host_offload import to_device
from maxlm.parallel.layout import Layout
from maxlm.telemetry.metrics import CURSOR
from maxlm.training.state import Params, abstract_model
from maxlm.workdir.files import CHAT_TEMPLATE

TEMPERATURE = 0.8
# Always the same draws: what differs between two evaluations is the model.
SEED = 0
# Of a document, that the model is given.
PROMPT_TOKENS = 32
# Lengths that kernels like.
MULTIPLE = 128
# Windows that are looked through for each beginning of a document.
TRIES = 64


class Sample(NamedTuple):
    """What the model was given, and how it went on."""

    prompt: str
    text: str

    def __str__(self) -> str:
        """One line, shortened."""
        prompt, text = (' '.join(part.split()) for part in self)
        prompt = prompt if len(prompt) <= 40 else f'…{prompt[-40:]}'
        text = text if len(text) <= 120 else f'{text[:120]}…'
        return f'sample: {prompt} {CURSOR} {text}'


class Samples:
    """The samples of a run: the same prompts and the same random draws at every evaluation. Changes nothing."""

    def __init__(self, config: Config, corpus: TrainingData, layout: Layout):
        """
        Args:
            config: of the run, with `eval.num_samples` or `eval.sample_prompts`.
            corpus: with a validation split.
            layout: of the parameters.

        Raises:
            InputError: a prompt is longer than the model's context.
        """
        self._config, self._corpus, self._layout = config, corpus, layout
        self._tokenizer = Tokenizer.load(corpus.first.tokenizer_path)
        self._ends = {self._tokenizer.end_of_document}
        if corpus.first.tokenizer_path.with_name(CHAT_TEMPLATE).is_file():
            self._ends.add(ChatEncoder.load(corpus.first.tokenizer_path.parent).end_of_turn)
        self._prompts = [ids.tolist() for ids in self._tokenizer.encode_batch(config.eval.sample_prompts)]
        context = config.model.max_positions
        for prompt, text in zip(self._prompts, config.eval.sample_prompts, strict=True):
            if len(prompt) >= context:
                raise InputError(
                    f'eval.sample_prompts: {text[:40]!r}… has {len(prompt)} tokens, and the context of the model is '
                    f'{context}; give at most {context - 1}'
                )
        self._next_token: Callable[..., Any] | None = None

    def __call__(self, params: Params) -> list[Sample]:
        """Continues the prompts; of several processes all take part, and have the same result."""
        # Not before there is something to do: documents in a bucket may still be on their way.
        if not self._prompts:
            self._prompts = prompts(self._corpus, self._config.eval.num_samples)
        prompts_ = self._prompts
        longest = max(map(len, prompts_))
        num_tokens = min(self._config.eval.sample_max_tokens, self._config.model.max_positions - longest)
        B, T = self._rows(len(prompts_)), self._length(longest + num_tokens)
        if self._next_token is None:
            self._next_token = self._make(T)
        tokens = np.zeros((B, T), np.int32)
        lengths = np.ones(B, np.int32)
        for row, prompt in enumerate(prompts_):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        everywhere = self._layout.named()
        tokens_BT, length_B = (
            jax.make_array_from_callback(x.shape, everywhere, x.__getitem__) for x in (tokens, lengths)
        )
        for _ in range(num_tokens):
            tokens_BT, length_B = self._next_token(params, tokens_BT, length_B)
            # With many programs on their way, virtual devices of a CPU can wait for each other for ever.
            jax.block_until_ready(length_B)
        written = np.asarray(tokens_BT)
        return [
            Sample(
                self._tokenizer.decode(prompt),
                self._text(written[row, len(prompt) : len(prompt) + num_tokens].tolist()),
            )
            for row, prompt in enumerate(prompts_)
        ]

    def _text(self, ids: list[int]) -> str:
        stop = next((place for place, token in enumerate(ids) if token in self._ends), len(ids))
        return self._tokenizer.decode(ids[:stop])

    def _rows(self, num: int) -> int:
        """Rows are split over devices; a pipeline has as many micro-batches as stages."""
        parts = self._layout.num_shards('rows')
        return -(-num // parts) * parts

    def _length(self, needed: int) -> int:
        multiple = math.lcm(MULTIPLE, 2 * self._layout.num_shards('length'))
        rounded = -(-needed // multiple) * multiple
        window = self._config.data.seq_len
        # The length of training is one that every kernel and mesh takes.
        return window if needed <= window < rounded else rounded

    def _make(self, T: int) -> Callable[..., Any]:
        """(params, tokens_BT, length_B) → the same with one token more in each row; compiled once."""
        config, layout = self._config, self._layout
        graph, _ = nnx.split(abstract_model(config, layout))
        num_ids = self._tokenizer.vocab_size
        parts = layout.num_shards('length')
        # Where the length is split over devices, slot s has position order[s].
        order = np.asarray(zigzag(T, parts)) if parts > 1 else np.arange(T)
        slot_of = np.argsort(order)

        def next_token(params: Params, tokens_BT: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
            model = nnx.merge(
                graph, {name: tree if name == BLOCKS else to_device(tree) for name, tree in params.items()}
            )
            B = tokens_BT.shape[0]
            inputs_BT, positions_BT = (
                layout.constrain(x, ('batch', 'length'))
                for x in (tokens_BT[:, order], jnp.broadcast_to(jnp.asarray(order, jnp.int32), (B, T)))
            )
            hidden_BTD, _ = model(inputs_BT, positions_BT=positions_BT, micro_batches=layout.num_shards('layers'))
            last_B = jnp.asarray(slot_of)[length_B - 1]
            hidden_BD = jnp.take_along_axis(hidden_BTD, last_B[:, None, None], axis=1)[:, 0]
            kernel_DV = model.output_kernel().astype(hidden_BD.dtype)
            logits_BV = jnp.dot(hidden_BD, kernel_DV, preferred_element_type=jnp.float32)
            logits_BV = layout.constrain(softcap(logits_BV, config.model.logit_softcap), ('activation',) * 2)
            rows_B = jnp.arange(B)
            # As the engine draws the first sample of a request, so that `maxlm.generate --seed=0` gives the same text.
            keys_B = draw_keys(jnp.full(B, SEED, jnp.uint32), jnp.zeros(B, jnp.uint32), length_B - 1)
            chosen_B = sample(logits_BV[:, :num_ids], keys_B, TEMPERATURE)
            return tokens_BT.at[rows_B, length_B].set(chosen_B), length_B + 1

        # Every process reads the result.
        return jax.jit(next_token, out_shardings=layout.named())


def prompts(corpus: TrainingData, num: int) -> list[list[int]]:
    """Beginnings of so many validation documents, chosen by data.seed; all different, so fewer if there are fewer.

    Of conversations, all up to what the assistant says first. Where documents are so much longer than windows that none
    is found, what any window begins with.
    """
    parts = [source.windows('validation', corpus.data) for source in corpus.sources]
    firsts = np.cumsum([0, *map(len, parts)]).tolist()
    chosen = np.random.default_rng(corpus.data.seed).permutation(firsts[-1])[: TRIES * num].tolist()
    in_part = [bisect.bisect_right(firsts, place) - 1 for place in chosen]
    places = [(parts[part], place - firsts[part]) for part, place in zip(in_part, chosen, strict=True)]
    length = max(1, min(PROMPT_TOKENS, corpus.data.seq_len // 2))
    found, others = [], []
    for windows, number in places:
        if windows.marked:
            ids = _question(windows.stream(number), corpus.data.seq_len // 2)
        else:
            ids = _beginning(windows, number, length, corpus.first.end_of_document)
        if ids and ids not in found:
            found.append(ids)
        elif not ids:
            others.append((windows, number))
        if len(found) == num:
            return found
    for windows, number in others:
        ids = token_ids(windows.stream(number)[:length]).tolist()
        if len(found) < num and ids not in found:
            found.append(ids)
    return found


def _beginning(windows: Sequences, number: int, length: int, end: int) -> list[int]:
    """What the first document of so many tokens in a window begins with, of those that begin there; [] if none does."""
    stream = windows.stream(number)
    ends = np.flatnonzero(stream == end).tolist()
    pieces = list(zip([0, *(place + 1 for place in ends)], [*ends, len(stream)], strict=True))
    if number and windows.shard_of(number) == windows.shard_of(number - 1):
        # It has begun before.
        pieces = pieces[1:]
    for start, stop in pieces:
        if stop - start >= length:
            return stream[start : start + length].tolist()
    return []


def _question(stream: np.ndarray, length: int) -> list[int]:
    """What stands before the first tokens that are learned of a conversation that begins in a marked stream.

    The first one of at most so many tokens; [] if there is none.
    """
    firsts = np.flatnonzero(is_document_start(stream)).tolist()
    for start, stop in zip(firsts, [*firsts[1:], len(stream)], strict=True):
        learned = np.flatnonzero(is_target(stream[start:stop]))
        if len(learned) and 0 < learned[0] <= length:
            return token_ids(stream[start : start + learned[0]]).tolist()
    return []
