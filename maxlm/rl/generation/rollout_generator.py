"""Generates responses with the log-probability of each token, on the mesh and with the parameters of training.

One compiled program prefills the prompts and shares each prompt's cache among its samples. It then decodes one token
per row at a time until every row has ended.

Shapes: P prompts per call, T padded prompt length, B rows (one sample each), R maximum response tokens, D dim,
V vocabulary, and for caches L layers, S slots, K key/value heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

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
from maxlm.model.layers.kv_cache import Caches, cache_axes, init_caches
from maxlm.model.smear import NO_TOKEN
from maxlm.parallel.determinism import deterministic_options
from maxlm.parallel.host_offload import to_device
from maxlm.parallel.layout import Layout
from maxlm.rl.generation.responses import Responses
from maxlm.rl.generation.rollout_shape import plan_runs
from maxlm.training.state import Params, abstract_model


class _Drawing(NamedTuple):
    """Loop state of decoding: number of tokens in rows that have not ended, the last two tokens of each row, …"""

    num_columns: jax.Array
    last_B2: jax.Array
    ended_B: jax.Array
    num_B: jax.Array
    tokens_BR: jax.Array
    log_probs_BR: jax.Array
    cache: Caches


class Sampler:
    """Generates responses with one model. Compiles once for each batch size."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        *,
        ends: Sequence[int],
        max_prompt: int,
        max_tokens: int,
        max_length: int = 0,
        gather_once: bool = False,
    ):
        """Initializes the sampler.

        Args:
            config: resolved config of the run.
            layout: layout of the parameters.
            ends: token ids that end a response.
            max_prompt: maximum number of prompt tokens.
            max_tokens: maximum number of response tokens.
            max_length: maximum number of tokens of prompt and response together, if all calls have limits that comply
                with it; 0 = `max_prompt` + `max_tokens`.
            gather_once: gather sharded parameters once per call instead of once per token. Each device then holds all
                parameters in the compute dtype.

        Raises:
            InputError: the mesh shards layers or sequence length, or prompt and response exceed the model's context.
        """
        _check_mesh(layout)
        context = config.model.max_positions
        for name, value in {'max_prompt': max_prompt, 'max_tokens': max_tokens}.items():
            if value < 1:
                raise InputError(f'{name}={value}: must be at least 1')
        self._max_length = max_length or max_prompt + max_tokens
        if self._max_length > context:
            raise InputError(
                f'max_tokens={max_tokens}: prompts have up to {max_prompt} tokens and the context length of the model '
                f'is {context}; {max(0, context - max_prompt)} tokens remain for the response; '
                'reduce max_tokens or shorten the prompts'
            )
        self._config, self._layout = config, layout
        self._ends = tuple(ends)
        self._max_prompt, self._max_tokens = max_prompt, max_tokens
        self._gather_once = gather_once
        # At ZeRO stage 1, the model does not gather its parameters.
        of_model = dataclasses.replace(layout, zero=1) if gather_once else layout
        self._graph, _ = nnx.split(abstract_model(config, of_model))
        # Replicated, because every process reads the result.
        self._program = jax.jit(
            self._draw,
            static_argnames='group',
            out_shardings=layout.named(),
            compiler_options=deterministic_options(config, layout.platform),
        )

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
        """Generates `num_samples` responses to each prompt.

        The key of a row is derived from `seed` and the row index, counted from `first_row`, and the key of a token
        also from its position. A sample is therefore independent of other rows and of the mesh, up to rounding.
        With model.matmul_precision=fp8, rows share scales.

        With model.rope_scaling=dynamic, cached keys are not rotated again. Beyond the original context,
        log-probabilities then differ from those of one forward pass over the complete text.

        Args:
            params: parameters, sharded on the mesh.
            prompts: token ids of each prompt. All processes pass the same prompts and receive all results.
            seed: seed of the samples.
            first_row: index of the first row.
            num_samples: number of responses per prompt.
            temperature: divisor of the logits for sampling; 0 = greedy.
            rows_per_run: maximum number of rows generated at the same time; 0 = all.

        Raises:
            InputError: a prompt is empty or too long, an argument is out of range, or `rows_per_run` is smaller than
                the number of devices that rows are sharded over.
        """
        self._check(prompts, num_samples, temperature, rows_per_run)
        group, P = plan_runs(
            len(prompts),
            num_samples,
            rows_per_run,
            shards=self._layout.num_shards('batch'),
            lengths=(self._max_prompt, self._max_tokens),
        )
        # A prompt is prefilled once for each group of its samples.
        filled = [prompt for prompt in prompts for _ in range(num_samples // group)]
        runs = [
            self._run(params, filled[start : start + P], P, (seed, first_row + start * group), temperature, group)
            for start in range(0, len(filled), P)
        ]
        return join_runs(runs, len(prompts) * num_samples)

    def _run(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        P: int,
        seed_and_first_row: tuple[int, int],
        temperature: float,
        group: int,
        *row_and_limit_2P: jax.Array,
    ) -> Any:
        """Runs the program and returns its result on the host."""
        tokens, lengths = self._pad(prompts, P)
        rows = self._layout.named('batch')
        return jax.device_get(
            self._program(
                params,
                self._put(tokens, rows),
                self._put(lengths, rows),
                self._put(np.array(seed_and_first_row).astype(np.uint32)),
                self._put(np.array(temperature, np.float32)),
                *row_and_limit_2P,
                group=group,
            )
        )

    def _draw(
        self,
        params: Params,
        tokens_PT: jax.Array,
        length_P: jax.Array,
        seed_and_first_row: jax.Array,
        temperature: jax.Array,
        row_and_limit_2P: jax.Array | None = None,
        *,
        group: int,
    ) -> tuple[jax.Array, ...]:
        """Returns the fields of `Responses` for `group` samples of each prompt; a prompt of length 0 is padding.

        With `row_and_limit_2P`, the row index and the maximum number of tokens of each prompt, `group` is 1.
        """
        R, B = self._max_tokens, length_P.size * group
        params = self._as_used(params)
        seed, first_row = seed_and_first_row
        row_B = jnp.arange(B, dtype=jnp.uint32) if row_and_limit_2P is None else row_and_limit_2P[0]
        row_keys_B = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(first_row + row_B)
        ends = jnp.asarray(self._ends, jnp.int32)

        def next_token(logits_BV: jax.Array, position_B: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Samples the token after each position and returns it with its log-probability."""
            keys_B = jax.vmap(jax.random.fold_in)(row_keys_B, position_B)
            token_B = sample(logits_BV, keys_B, temperature)
            return token_B, log_prob(logits_BV, token_B)

        def add(drawing: _Drawing, logits_BV: jax.Array) -> _Drawing:
            """Appends one token to every row that has not ended."""
            position_B = length_B + drawing.num_columns - 1
            token_B, log_prob_B = next_token(logits_BV, position_B)
            going_B = ~drawing.ended_B
            ended_B = drawing.ended_B | jnp.isin(token_B, ends)
            if row_and_limit_2P is not None:
                ended_B |= drawing.num_columns + 1 >= row_and_limit_2P[1].astype(jnp.int32)
            return drawing._replace(
                num_columns=drawing.num_columns + 1,
                last_B2=jnp.stack([drawing.last_B2[:, 1], token_B], axis=1),
                ended_B=ended_B,
                num_B=drawing.num_B + going_B,
                tokens_BR=drawing.tokens_BR.at[:, drawing.num_columns].set(jnp.where(going_B, token_B, 0)),
                log_probs_BR=drawing.log_probs_BR.at[:, drawing.num_columns].set(jnp.where(going_B, log_prob_B, 0)),
            )

        def is_open(drawing: _Drawing) -> jax.Array:
            return (drawing.num_columns < R) & ~drawing.ended_B.all()

        def advance(drawing: _Drawing) -> _Drawing:
            position_B = length_B + drawing.num_columns - 1
            if row_and_limit_2P is not None:
                # Rows that have ended would leave the cache.
                position_B = jnp.minimum(position_B, self._max_length - 1)
            inputs = (drawing.last_B2, position_B[:, None], drawing.cache, position_B + 1)
            hidden_B1D, cache = self._forward(params, *inputs)
            return add(drawing._replace(cache=cache), self._logits(params, hidden_B1D))

        hidden_P1D, cache = self._prefill(params, tokens_PT, length_P)
        logits_PV = self._logits(params, hidden_P1D)
        last_P1 = jnp.take_along_axis(tokens_PT, jnp.maximum(length_P, 1)[:, None] - 1, axis=1)
        length_B = jnp.maximum(jnp.repeat(length_P, group), 1)
        drawing = _Drawing(
            num_columns=jnp.zeros((), jnp.int32),
            last_B2=jnp.repeat(last_P1, group, axis=0).repeat(2, axis=1),
            # Padding rows start as ended.
            ended_B=jnp.repeat(length_P == 0, group),
            num_B=jnp.zeros(B, jnp.int32),
            tokens_BR=jnp.zeros((B, R), jnp.int32),
            log_probs_BR=jnp.zeros((B, R), jnp.float32),
            cache=self._shared(cache, group),
        )
        drawing = jax.lax.while_loop(is_open, advance, add(drawing, jnp.repeat(logits_PV, group, axis=0)))
        return drawing.tokens_BR, drawing.log_probs_BR, drawing.num_B, drawing.ended_B, drawing.num_columns - 1

    def _prefill(self, params: Params, tokens_PT: jax.Array, length_P: jax.Array) -> tuple[jax.Array, Caches]:
        """Returns the hidden state of each prompt's last token, [P, 1, D], and the cache with T slots."""
        P, T = tokens_PT.shape
        positions_PT = self._layout.constrain(jnp.broadcast_to(jnp.arange(T), (P, T)), ('batch', 'length'))
        cache = self._placed(init_caches(self._config.model, P, T))
        length_P = jnp.maximum(length_P, 1)
        inputs_PU = jnp.pad(tokens_PT, ((0, 0), (1, 0)), constant_values=NO_TOKEN)
        hidden_PTD, cache = self._forward(params, inputs_PU, positions_PT, cache, length_P)
        return jnp.take_along_axis(hidden_PTD, length_P[:, None, None] - 1, axis=1), cache

    def _forward(
        self, params: Params, tokens_BU: jax.Array, positions_BT: jax.Array, cache: Caches, length_B: jax.Array
    ) -> tuple[jax.Array, Caches]:
        """Returns the hidden states of all tokens but the first of each row, which is in the cache, and the cache."""
        decoder = partial(nnx.merge(self._graph, params), positions_BT=positions_BT, cache=cache, length_B=length_B)
        hidden_BTD, new_cache, _ = decoder(tokens_BU[:, 1:], previous_BT=tokens_BU[:, :-1])
        assert new_cache is not None
        return hidden_BTD, self._placed(new_cache)

    def _logits(self, params: Params, hidden_B1D: jax.Array) -> jax.Array:
        logits_B1V: jax.Array = nnx.merge(self._graph, params).logits(hidden_B1D)
        return logits_B1V[:, 0]

    def _shared(self, cache: Caches, group: int) -> Caches:
        """Repeats the cache for `group` samples of each prompt and adds slots for their tokens."""

        def spread(x_LPKTH: jax.Array) -> jax.Array:
            more = max(0, self._max_length - x_LPKTH.shape[3])
            x_LPKSH = jnp.pad(x_LPKTH, [(0, 0), (0, 0), (0, 0), (0, more), (0, 0)])
            return jnp.repeat(x_LPKSH, group, axis=1)

        return self._placed(jax.tree.map(spread, cache))

    def _placed(self, cache: Caches) -> Caches:
        axes = cache_axes(self._config.model)
        return jax.tree.map(lambda x: self._layout.constrain(x, axes[: x.ndim]), cache)

    def _as_used(self, params: Params) -> Params:
        """Casts parameters once for all tokens. Blocks in host memory are transferred one layer at a time."""
        params = {name: tree if name == BLOCKS else to_device(tree) for name, tree in params.items()}
        return cast_params(params, self._config, self._layout, gather=self._gather_once)

    def _pad(self, prompts: Sequence[Sequence[int]], P: int) -> tuple[np.ndarray, np.ndarray]:
        """Pads prompts to token ids [P, T] and lengths [P]; rows after the last prompt are empty."""
        T = self._max_prompt
        # Chunked attention needs a multiple of its block size.
        if T > QUERY_BLOCK:
            T = min(-(-T // QUERY_BLOCK) * QUERY_BLOCK, self._config.model.max_positions)
        tokens, lengths = np.zeros((P, T), np.int32), np.zeros(P, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        return tokens, lengths

    def _put(self, x: np.ndarray, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
        """Transfers a host array that all processes have. Explicit, because implicit transfers are forbidden."""
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
            raise InputError(f'rows_per_run={rows_per_run}: must be 0 or at least {shards}, one row per device')
        if not prompts:
            raise InputError('no prompts found; pass at least one')
        for number, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self._max_prompt:
                raise InputError(
                    f'prompt {number} (counting from 0) has {len(prompt)} tokens; must have 1 to {self._max_prompt}'
                )
            V = self._config.model.vocab_size
            if min(prompt) < 0 or max(prompt) >= V:
                raise InputError(f'prompt {number} (counting from 0): token ids must be from 0 to {V - 1}')


def join_runs(runs: Sequence[Any], num: int) -> Responses:
    """Returns the first `num` responses of the results of the program."""
    *parts, passes = zip(*runs, strict=True)
    tokens_BR, log_probs_BR, num_B, ended_B = (np.concatenate(part)[:num] for part in parts)
    return Responses(tokens_BR, log_probs_BR, num_B, ended_B, sum(map(int, passes)))


def _check_mesh(layout: Layout) -> None:
    for axis, what in {'stage': 'layers', 'context': 'sequence length'}.items():
        if size := layout.mesh.shape[axis] - 1:
            raise InputError(
                f'mesh.{axis}={size + 1}: rollouts need a key-value cache, which does not support a mesh that '
                f'shards the {what}; set it to 1'
            )
