"""Generates samples at evaluations: continuations of validation documents or of `eval.sample_prompts`.

Samples are generated on every training mesh, with the parameters in their training layout. Each token costs a forward
pass over the entire text, because meshes that shard the layers or the length have no KV cache. `maxlm.inference` does
not support these meshes.

Shapes: B batch, T length, D dim, V vocabulary.
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

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
from maxlm.inference.prompts import text_prompt
from maxlm.inference.sampling import sample, sampling_keys
from maxlm.model.attention.ring import zigzag
from maxlm.model.blocks import BLOCKS
from maxlm.model.layers.softcap import softcap
from maxlm.parallel.host_offload import to_device
from maxlm.parallel.layout import Layout
from maxlm.telemetry.metrics import CURSOR
from maxlm.training.state import Params, abstract_model
from maxlm.workdir.files import CHAT_TEMPLATE

TEMPERATURE = 0.8
# A fixed seed, so that samples of different evaluations differ only because of the model.
SEED = 0
# Number of tokens of a document that are used as the prompt.
PROMPT_TOKENS = 32
# Attention kernels need lengths that are multiples of this.
MULTIPLE = 128
# Number of windows searched for each prompt.
TRIES = 64


class Sample(NamedTuple):
    """A prompt and the model's continuation."""

    prompt: str
    text: str

    def __str__(self) -> str:
        """Returns one shortened line."""
        prompt, text = (' '.join(part.split()) for part in self)
        prompt = prompt if len(prompt) <= 40 else f'…{prompt[-40:]}'
        text = text if len(text) <= 120 else f'{text[:120]}…'
        return f'sample: {prompt} {CURSOR} {text}'


class Samples:
    """Generator of a run's samples, with the same prompts and random keys at every evaluation."""

    def __init__(self, config: Config, corpus: TrainingData, tokenizer: Tokenizer, layout: Layout):
        """Encodes the prompts of the config.

        Args:
            config: config of the run, with `eval.num_samples` or `eval.sample_prompts`.
            corpus: data with a validation split.
            tokenizer: tokenizer of the data.
            layout: layout of the parameters.

        Raises:
            InputError: a prompt is at least as long as the model's context.
        """
        self._config, self._corpus, self._tokenizer, self._layout = config, corpus, tokenizer, layout
        self._ends = {corpus.first.end_of_document, *self._tokenizer.boundaries.stops}
        if corpus.first.tokenizer_path.with_name(CHAT_TEMPLATE).is_file():
            self._ends.add(ChatEncoder.load(corpus.first.tokenizer_path.parent).end_of_turn)
        self._prompts = [text_prompt(self._tokenizer, text) for text in config.eval.sample_prompts]
        context = config.model.max_positions
        for prompt, text in zip(self._prompts, config.eval.sample_prompts, strict=True):
            if len(prompt) >= context:
                raise InputError(
                    f'eval.sample_prompts: {text[:40]!r}… has {len(prompt)} tokens, but the context length of the '
                    f'model is {context}; use at most {context - 1} tokens'
                )
        self._graph, _ = nnx.split(abstract_model(config, layout))
        # Every process reads the result.
        self._program = jax.jit(self._generate, static_argnames='num_tokens', out_shardings=layout.named())

    def __call__(self, params: Params) -> list[Sample]:
        """Returns a sample for each prompt. Every process must call it and gets the same result."""
        # Prompts are read at the first call, because documents in a bucket may not be downloaded earlier.
        if not self._prompts:
            self._prompts = prompts(self._corpus, self._config.eval.num_samples)
        prompts_ = self._prompts
        longest = max(map(len, prompts_))
        num_tokens = min(self._config.eval.sample_max_tokens, self._config.model.max_positions - longest)
        B, T = self._rows(len(prompts_)), self._length(longest + num_tokens)
        tokens = np.zeros((B, T), np.int32)
        lengths = np.ones(B, np.int32)
        for row, prompt in enumerate(prompts_):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        everywhere = self._layout.named()
        tokens_BT, length_B = (
            jax.make_array_from_callback(x.shape, everywhere, x.__getitem__) for x in (tokens, lengths)
        )
        written = np.asarray(self._program(params, tokens_BT, length_B, num_tokens=num_tokens))
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
        """Returns `num` rounded up to a multiple of the shards of rows, pipeline microbatches included."""
        parts = self._layout.num_shards('rows')
        return -(-num // parts) * parts

    def _length(self, needed: int) -> int:
        multiple = math.lcm(MULTIPLE, 2 * self._layout.num_shards('length'))
        rounded = -(-needed // multiple) * multiple
        seq_len = self._config.data.seq_len
        # All kernels and meshes of the run support the sequence length of training.
        return seq_len if needed <= seq_len < rounded else rounded

    def _generate(self, params: Params, tokens_BT: jax.Array, length_B: jax.Array, *, num_tokens: int) -> jax.Array:
        """Returns `tokens_BT` with `num_tokens` sampled tokens after the first `length_B` of each row."""
        layout, cap = self._layout, self._config.model.logit_softcap
        B, T = tokens_BT.shape
        params = {name: tree if name == BLOCKS else to_device(tree) for name, tree in params.items()}
        parts = layout.num_shards('length')
        # If the mesh shards the length, slot s contains position order[s].
        order = np.asarray(zigzag(T, parts)) if parts > 1 else np.arange(T)
        slot_of = jnp.asarray(np.argsort(order))

        def add_token(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            tokens_BT, length_B = state
            model = nnx.merge(self._graph, params)
            inputs_BT, positions_BT = (
                layout.constrain(x, ('batch', 'length'))
                for x in (tokens_BT[:, order], jnp.broadcast_to(jnp.asarray(order, jnp.int32), (B, T)))
            )
            hidden_BTD = model(inputs_BT, positions_BT=positions_BT, micro_batches=layout.num_shards('layers'))[0]
            hidden_BD = jnp.take_along_axis(hidden_BTD, slot_of[length_B - 1][:, None, None], axis=1)[:, 0]
            kernel_DV = model.output_kernel().astype(hidden_BD.dtype)
            logits_BV = jnp.dot(hidden_BD, kernel_DV, preferred_element_type=jnp.float32)
            logits_BV = layout.constrain(softcap(logits_BV, cap), ('activation',) * 2)
            # The keys equal those of the engine's first sample, so `maxlm generate --seed=0` generates the same text.
            keys_B = sampling_keys(jnp.full(B, SEED, jnp.uint32), jnp.zeros(B, jnp.uint32), length_B - 1)
            token_B = sample(logits_BV[:, : self._tokenizer.vocab_size], keys_B, TEMPERATURE)
            return tokens_BT.at[jnp.arange(B), length_B].set(token_B), length_B + 1

        return jax.lax.fori_loop(0, num_tokens, add_token, (tokens_BT, length_B))[0]


def prompts(corpus: TrainingData, num: int) -> list[list[int]]:
    """Returns at most `num` different beginnings of validation documents, chosen by `data.seed`.

    A conversation is cut before the first response of the assistant. If too few windows contain the start of a
    document, the beginnings of other windows are used.
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
    """Returns the first `length` tokens of the first document that starts in a window and is long enough, or []."""
    stream = windows.stream(number)
    ends = np.flatnonzero(stream == end).tolist()
    pieces = list(zip([0, *(place + 1 for place in ends)], [*ends, len(stream)], strict=True))
    if number and windows.shard_of(number) == windows.shard_of(number - 1):
        # The first piece continues a document of the previous window.
        pieces = pieces[1:]
    for start, stop in pieces:
        if stop - start >= length:
            return stream[start : start + length].tolist()
    return []


def _question(stream: np.ndarray, length: int) -> list[int]:
    """Returns the tokens before the first target of a conversation that starts in a marked stream.

    The result is the first with at most `length` tokens, or [] if there is none.
    """
    firsts = np.flatnonzero(is_document_start(stream)).tolist()
    for start, stop in zip(firsts, [*firsts[1:], len(stream)], strict=True):
        learned = np.flatnonzero(is_target(stream[start:stop]))
        if len(learned) and 0 < learned[0] <= length:
            return token_ids(stream[start : start + learned[0]]).tolist()
    return []
