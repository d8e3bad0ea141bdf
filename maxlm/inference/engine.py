"""Cached decoding of a batch of prompts, one token of every row at a time.

Shapes: B batch, T padded prompt length, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlm.errors import InputError
from maxlm.inference.load import LoadedModel
from maxlm.inference.sampling import Sampling, sample
from maxlm.model.decoder import Cache, init_cache
from maxlm.training.state import Params, abstract_model

# Prompts are padded to a multiple of this and caches sized likewise, so that few lengths are compiled.
BUCKET = 64


class Engine:
    """Continues prompts with one model. Compiles at the first use of a shape."""

    def __init__(self, model: LoadedModel):
        self._params = model.params
        self._config = model.config.model
        self._end, self._ends = model.tokenizer.end_of_document, model.ends
        graph, _ = nnx.split(abstract_model(model.config, model.layout))
        # A model may have more ids than its tokenizer, for a round number; they have no text.
        num_ids = model.tokenizer.vocab_size

        def forward(
            params: Params, tokens_BT: jax.Array, positions_BT: jax.Array, last_B: jax.Array, cache: Cache
        ) -> tuple[jax.Array, Cache]:
            decoder = nnx.merge(graph, params)
            length_B = jnp.take_along_axis(positions_BT, last_B[:, None], axis=1)[:, 0] + 1
            hidden_BTD, new_cache = decoder(tokens_BT, positions_BT=positions_BT, cache=cache, length_B=length_B)
            assert new_cache is not None
            hidden_B1D = jnp.take_along_axis(hidden_BTD, last_B[:, None, None], axis=1)
            return decoder.logits(hidden_B1D)[:, 0, :num_ids], new_cache

        def next_token(
            params: Params,
            tokens_BT: jax.Array,
            positions_BT: jax.Array,
            last_B: jax.Array,
            cache: Cache,
            keys_B: jax.Array,
            sampling: Sampling,
        ) -> tuple[jax.Array, Cache]:
            logits_BV, cache = forward(params, tokens_BT, positions_BT, last_B, cache)
            position_B = jnp.take_along_axis(positions_BT, last_B[:, None], axis=1)[:, 0]
            keys_B = jax.vmap(jax.random.fold_in)(keys_B, position_B)
            return sample(logits_BV, keys_B, sampling), cache

        self._next_token = jax.jit(next_token, static_argnames='sampling', donate_argnames='cache')

    def stream(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, sampling: Sampling, seed: int
    ) -> Iterator[np.ndarray]:
        """Yields the next token id of every row, int32 [B], up to `max_tokens` times.

        A row ends with an id of `LoadedModel.ends` and yields the end-of-document id from then on; when all have ended,
        the stream does. Row r draws with a key of its own, made of `seed`, r and the position, so the same call gives
        the same text again.

        Raises:
            InputError: a prompt is empty, or does not fit into the model's context with `max_tokens` more.
        """
        lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
        longest = max(map(len, prompts))
        self._check_lengths(min(map(len, prompts)), longest, max_tokens)
        B, T = len(prompts), _round_up(longest)
        tokens_BT = np.zeros((B, T), np.int32)
        for row, prompt in zip(tokens_BT, prompts, strict=True):
            row[: len(prompt)] = prompt
        keys_B = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(B))
        cache = init_cache(self._config, B, _round_up(longest + max_tokens))

        # The padding behind a prompt writes to slots that no query sees before a real token has taken them.
        positions_BT = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
        token_B, cache = self._next_token(
            self._params, tokens_BT, positions_BT, lengths_B - 1, cache, keys_B, sampling=sampling
        )
        ended_B = np.zeros(B, bool)
        first_B = np.zeros(B, np.int32)
        for index in range(max_tokens):
            chosen_B = np.where(ended_B, self._end, np.asarray(token_B))
            ended_B |= np.isin(chosen_B, self._ends)
            yield chosen_B
            if ended_B.all() or index == max_tokens - 1:
                return
            positions_B1 = (lengths_B + index)[:, None]
            token_B, cache = self._next_token(
                self._params, token_B[:, None], positions_B1, first_B, cache, keys_B, sampling=sampling
            )

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, sampling: Sampling, seed: int
    ) -> list[list[int]]:
        """The continuation of every prompt, without the id that ends it. Arguments and errors as in `stream`."""
        columns = list(self.stream(prompts, max_tokens=max_tokens, sampling=sampling, seed=seed))
        rows = np.stack(columns, axis=1).tolist()
        return [list(itertools.takewhile(lambda index: index not in self._ends, row)) for row in rows]

    def _check_lengths(self, shortest: int, longest: int, max_tokens: int) -> None:
        if max_tokens < 1:
            raise InputError(f'max_tokens={max_tokens}: must be at least 1')
        if shortest == 0:
            raise InputError('the prompt is empty; give at least one character to continue')
        context = self._config.max_positions
        if longest + max_tokens > context:
            raise InputError(
                f'max_tokens={max_tokens}: the prompt has {longest} tokens and the context of the model {context}; '
                f'at most {max(0, context - longest)} tokens can follow'
            )


def _round_up(length: int) -> int:
    return -(-length // BUCKET) * BUCKET
