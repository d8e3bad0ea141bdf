"""Responses to prompts, drawn where and as the model is trained, with the log-probability of each token.

One compiled program: prompts go through the model and leave their keys and values in a cache, samples of one prompt
share that, then tokens come one of every row at a time, until all rows have ended.

Shapes: P prompts in one run of the program, T padded prompt length, B rows, each of one sample, R tokens of a response
at most, D dim, V vocabulary, and those of a cache: L layers, S slots, K key/value heads, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.inference.cast_params import cast_params
from maxlm.inference.sampling import log_prob, sample
from maxlm.model.attention.chunked import QUERY_BLOCK
from maxlm.model.blocks import BLOCKS
from maxlm.model.layers.kv_cache import CACHE_AXES, Caches, init_caches
from maxlm.parallel.host_offload import to_device
from maxlm.parallel.layout import Layout
from maxlm.training.state import Params, abstract_model


class Responses(NamedTuple):
    """What was drawn; rows are the samples of the first prompt, then those of the second, …"""

    # int32, 0 behind the end.
    tokens_BR: np.ndarray
    # float32, in nats: log softmax(logits)[token] at temperature 1 over all ids of the model; 0 behind the end.
    log_probs_BR: np.ndarray
    # Tokens of each row, the one that ended it included.
    num_B: np.ndarray
    # Whether such a token came; else the response was cut off.
    ended_B: np.ndarray
    # Passes of one token of every row through the model, over all runs of the program.
    passes: int

    @property
    def drawn(self) -> int:
        """Tokens of all rows."""
        return int(self.num_B.sum())


class _Drawing(NamedTuple):
    """The state of a run of the program."""

    # Tokens that rows have which have not ended.
    num_columns: jax.Array
    token_B: jax.Array
    ended_B: jax.Array
    num_B: jax.Array
    tokens_BR: jax.Array
    log_probs_BR: jax.Array
    cache: Caches


class Sampler:
    """Draws responses from one model. Compiles at the first use of a number of rows."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        *,
        ends: Sequence[int],
        max_prompt: int,
        max_tokens: int,
        gather_once: bool = False,
    ):
        """
        Args:
            config: of the run, resolved.
            layout: of the parameters.
            ends: ids that end a response.
            max_prompt: tokens of a prompt, at most.
            max_tokens: tokens of a response, at most.
            gather_once: parameters that are split to save memory are brought together once for a run of the program,
                not for every token. Each device then holds all of them in the type of the computation.

        Raises:
            InputError: the mesh splits layers or length, or prompt and response do not fit into the model's context.
        """
        _check_mesh(layout)
        context = config.model.max_positions
        for name, value in {'max_prompt': max_prompt, 'max_tokens': max_tokens}.items():
            if value < 1:
                raise InputError(f'{name}={value}: must be at least 1')
        if max_prompt + max_tokens > context:
            raise InputError(
                f'max_tokens={max_tokens}: prompts have up to {max_prompt} tokens and the context of the model '
                f'{context}; at most {max(0, context - max_prompt)} tokens can follow'
            )
        self._config, self._layout = config, layout
        self._ends = tuple(ends)
        self._max_prompt, self._max_tokens = max_prompt, max_tokens
        self._gather_once = gather_once
        self._graph, _ = nnx.split(abstract_model(config, layout))
        # Every process reads the result.
        self._program = jax.jit(self._draw, static_argnames='group', out_shardings=layout.named())

    def __call__(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        first_row: int = 0,
        num_samples: int = 1,
        temperature: float = 1.0,
        rows_per_run: int = 0,
    ) -> Responses:
        """`num_samples` responses to each prompt.

        A row draws with a key of its own, made of `seed`, its number from `first_row` on, and the position. What it
        draws depends neither on the other rows nor on the mesh, but for rounding (with model.matmul_precision=fp8 rows
        do share scales). With model.rope_scaling=dynamic the cache keeps keys as they were rotated when they came, so
        that beyond the original context log-probabilities are not those of one pass over the whole text.

        Args:
            params: as they lie on the mesh.
            prompts: ids; the same for every process, each of which has all results.
            seed: of the draws.
            first_row: number of the first row.
            num_samples: responses to each prompt.
            temperature: logits are divided by it for the draw; 0 = always the likeliest token.
            rows_per_run: that are drawn at the same time, at most; 0 = all.

        Raises:
            InputError: a prompt is empty or too long, an argument is out of range, or fewer rows are wanted at a time
                than the devices that rows are split over.
        """
        self._check(prompts, num_samples, temperature, rows_per_run)
        group, P = plan_runs(
            len(prompts),
            num_samples,
            rows_per_run,
            shards=self._layout.num_shards('batch'),
            lengths=(self._max_prompt, self._max_tokens),
        )
        # A prompt goes through the model once for each group of its samples.
        filled = [prompt for prompt in prompts for _ in range(num_samples // group)]
        parts: list[list[np.ndarray]] = []
        passes = 0
        for start in range(0, len(filled), P):
            tokens, lengths = self._pad(filled[start : start + P], P)
            rows = self._layout.named('batch')
            numbers = np.array([seed, first_row + start * group]).astype(np.uint32)
            drawn = self._program(
                params,
                self._put(tokens, rows),
                self._put(lengths, rows),
                self._put(numbers),
                self._put(np.array(temperature, np.float32)),
                group=group,
            )
            *arrays, run_passes = jax.device_get(drawn)
            parts.append(arrays)
            passes += int(run_passes)
        B = len(prompts) * num_samples
        tokens_BR, log_probs_BR, num_B, ended_B = (np.concatenate(part)[:B] for part in zip(*parts, strict=True))
        return Responses(tokens_BR, log_probs_BR, num_B, ended_B, passes)

    def _draw(
        self,
        params: Params,
        tokens_PT: jax.Array,
        length_P: jax.Array,
        seed_and_first_row: jax.Array,
        temperature: jax.Array,
        *,
        group: int,
    ) -> tuple[jax.Array, ...]:
        """What `Responses` has, for `group` samples of each prompt; a prompt of length 0 is none."""
        R, B = self._max_tokens, length_P.size * group
        params = self._as_used(params)
        seed, first_row = seed_and_first_row
        row_keys_B = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(
            first_row + jnp.arange(B, dtype=jnp.uint32)
        )
        ends = jnp.asarray(self._ends, jnp.int32)

        def next_token(logits_BV: jax.Array, position_B: jax.Array) -> tuple[jax.Array, jax.Array]:
            """The token behind each position, and its log-probability."""
            keys_B = jax.vmap(jax.random.fold_in)(row_keys_B, position_B)
            token_B = sample(logits_BV, keys_B, temperature)
            return token_B, log_prob(logits_BV, token_B)

        def add(drawing: _Drawing, logits_BV: jax.Array) -> _Drawing:
            """With one token more in every row that has not ended."""
            position_B = length_B + drawing.num_columns - 1
            token_B, log_prob_B = next_token(logits_BV, position_B)
            going_B = ~drawing.ended_B
            return drawing._replace(
                num_columns=drawing.num_columns + 1,
                token_B=token_B,
                ended_B=drawing.ended_B | jnp.isin(token_B, ends),
                num_B=drawing.num_B + going_B,
                tokens_BR=drawing.tokens_BR.at[:, drawing.num_columns].set(jnp.where(going_B, token_B, 0)),
                log_probs_BR=drawing.log_probs_BR.at[:, drawing.num_columns].set(jnp.where(going_B, log_prob_B, 0)),
            )

        def is_open(drawing: _Drawing) -> jax.Array:
            return (drawing.num_columns < R) & ~drawing.ended_B.all()

        def advance(drawing: _Drawing) -> _Drawing:
            position_B = length_B + drawing.num_columns - 1
            hidden_B1D, cache = self._forward(
                params, drawing.token_B[:, None], position_B[:, None], drawing.cache, position_B + 1
            )
            return add(drawing._replace(cache=cache), self._logits(params, hidden_B1D))

        hidden_P1D, cache = self._prefill(params, tokens_PT, length_P)
        logits_PV = self._logits(params, hidden_P1D)
        length_B = jnp.maximum(jnp.repeat(length_P, group), 1)
        drawing = _Drawing(
            num_columns=jnp.zeros((), jnp.int32),
            token_B=jnp.zeros(B, jnp.int32),
            # What only fills the devices never starts.
            ended_B=jnp.repeat(length_P == 0, group),
            num_B=jnp.zeros(B, jnp.int32),
            tokens_BR=jnp.zeros((B, R), jnp.int32),
            log_probs_BR=jnp.zeros((B, R), jnp.float32),
            cache=self._shared(cache, group),
        )
        drawing = jax.lax.while_loop(is_open, advance, add(drawing, jnp.repeat(logits_PV, group, axis=0)))
        return drawing.tokens_BR, drawing.log_probs_BR, drawing.num_B, drawing.ended_B, drawing.num_columns - 1

    def _prefill(self, params: Params, tokens_PT: jax.Array, length_P: jax.Array) -> tuple[jax.Array, Caches]:
        """The hidden state behind each prompt's last token, [P, 1, D], and the cache with T slots."""
        P, T = tokens_PT.shape
        positions_PT = self._layout.constrain(jnp.broadcast_to(jnp.arange(T), (P, T)), ('batch', 'length'))
        cache = self._placed(init_caches(self._config.model, P, T))
        length_P = jnp.maximum(length_P, 1)
        hidden_PTD, cache = self._forward(params, tokens_PT, positions_PT, cache, length_P)
        return jnp.take_along_axis(hidden_PTD, length_P[:, None, None] - 1, axis=1), cache

    def _forward(
        self, params: Params, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Caches, length_B: jax.Array
    ) -> tuple[jax.Array, Caches]:
        decoder = nnx.merge(self._graph, params)
        hidden_BTD, new_cache = decoder(tokens_BT, positions_BT=positions_BT, cache=cache, length_B=length_B)
        assert new_cache is not None
        return hidden_BTD, self._placed(new_cache)

    def _logits(self, params: Params, hidden_B1D: jax.Array) -> jax.Array:
        logits_B1V: jax.Array = nnx.merge(self._graph, params).logits(hidden_B1D)
        return logits_B1V[:, 0]

    def _shared(self, cache: Caches, group: int) -> Caches:
        """The cache of so many samples of each prompt, with slots for their tokens."""

        def spread(x_LPKTH: jax.Array) -> jax.Array:
            more = max(0, self._max_prompt + self._max_tokens - x_LPKTH.shape[3])
            x_LPKSH = jnp.pad(x_LPKTH, [(0, 0), (0, 0), (0, 0), (0, more), (0, 0)])
            return jnp.repeat(x_LPKSH, group, axis=1)

        return self._placed(jax.tree.map(spread, cache))

    def _placed(self, cache: Caches) -> Caches:
        return jax.tree.map(lambda x: self._layout.constrain(x, CACHE_AXES[: x.ndim]), cache)

    def _as_used(self, params: Params) -> Params:
        """Made once for all tokens; blocks in host memory come a layer at a time."""
        params = {name: tree if name == BLOCKS else to_device(tree) for name, tree in params.items()}
        return cast_params(params, self._config, self._layout, gather=self._gather_once)

    def _pad(self, prompts: Sequence[Sequence[int]], P: int) -> tuple[np.ndarray, np.ndarray]:
        """[P, T] and [P]; rows behind the last prompt are empty."""
        T = self._max_prompt
        # Attention goes through longer prompts by whole blocks.
        if T > QUERY_BLOCK:
            T = min(-(-T // QUERY_BLOCK) * QUERY_BLOCK, self._config.model.max_positions)
        tokens, lengths = np.zeros((P, T), np.int32), np.zeros(P, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        return tokens, lengths

    def _put(self, x: np.ndarray, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
        """An explicit transfer of what every process has."""
        return jax.make_array_from_callback(x.shape, sharding or self._layout.named(), lambda index: x[index])

    def _check(self, prompts: Sequence[Sequence[int]], num_samples: int, temperature: float, rows_per_run: int) -> None:
        if not 0 <= temperature < math.inf:
            raise InputError(f'temperature={temperature}: must be at least 0')
        if num_samples < 1:
            raise InputError(f'num_samples={num_samples}: must be at least 1')
        if rows_per_run < 0:
            raise InputError(f'rows_per_run={rows_per_run}: must be at least 0 (0 = all)')
        shards = self._layout.num_shards('batch')
        if rows_per_run and rows_per_run < shards:
            raise InputError(f'rows_per_run={rows_per_run}: rows are split over {shards} devices, which need one each')
        if not prompts:
            raise InputError('there is no prompt; give at least one')
        for number, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self._max_prompt:
                raise InputError(
                    f'prompt {number} (from 0) has {len(prompt)} tokens; give it at least 1 and at most '
                    f'{self._max_prompt}'
                )
            V = self._config.model.vocab_size
            if min(prompt) < 0 or max(prompt) >= V:
                raise InputError(f'prompt {number} (from 0) has ids outside of 0 … {V - 1}, those of the model')


def _check_mesh(layout: Layout) -> None:
    for axis, what in {'stage': 'the layers', 'context': 'the length'}.items():
        if size := layout.mesh.shape[axis] - 1:
            raise InputError(
                f'mesh.{axis}={size + 1}: responses are drawn with a cache of keys and values, and there is none '
                f'where the mesh splits {what}; set it to 1'
            )


def plan_runs(
    num_prompts: int, num_samples: int, rows_per_run: int, *, shards: int, lengths: tuple[int, int]
) -> tuple[int, int]:
    """(samples that share the cache of one prompt, prompts in one run of the program).

    Prompts of a run divide over the `shards` devices of the batch, which empty ones fill. Where prompts are few, it is
    less work to take one through the model several times, each time for some of its samples. `lengths` are those of
    prompt and response, by which the work is counted.
    """

    def choices() -> Iterator[tuple[int, int, int]]:
        T, R = lengths
        for group in range(1, num_samples + 1):
            most = rows_per_run // group // shards if rows_per_run else num_prompts * num_samples
            if num_samples % group or not most:
                continue
            # In units of one prompt for every device.
            units = -(-num_prompts * (num_samples // group) // shards)
            runs = -(-units // most)
            P = -(-units // runs) * shards
            yield runs * P * (T + group * R), -group, P

    _, group, P = min(choices())
    return -group, P
