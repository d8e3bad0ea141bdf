"""A trained model: generates text, answers, scores text and returns logits.

Shapes: T length, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlm.api.sampling_options import SamplingOptions
from maxlm.config.schema import Config
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.huggingface.export_model import MAX_SHARD_BYTES, export_model
from maxlm.inference.drafting.load_draft import load_draft
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.requests import Delta, Request
from maxlm.inference.load import load_model
from maxlm.inference.prompts import chat_prompt, text_prompt
from maxlm.inference.resolve_model import resolved_checkpoint
from maxlm.inference.sampling import Sampling
from maxlm.inference.scoring import LogprobScorer, windows
from maxlm.model.decoder import without_padding
from maxlm.model.layers.softcap import softcap
from maxlm.model.parameters import count_parameters
from maxlm.storage.paths import Kind, given_path
from maxlm.training.state import Params, abstract_model
from maxlm.workdir.step_dirs import with_step

# Number of prompts that are continued at the same time.
NUM_SLOTS = 8
# Inputs of `logits` are padded to a multiple of this length, which limits the number of compiled programs.
LENGTH_MULTIPLE = 64


class Model:
    """A trained model on one device, with its tokenizer.

    The first call of each method compiles, and later processes find its programs in the compilation cache
    (~/.cache/maxlm/programs). The environment variable JAX_COMPILATION_CACHE_DIR sets another directory, or none if it
    is empty. Generation holds a copy of the parameters in the compute dtype.

    Attributes:
        config: config of the run that trained the model, resolved for this device.
        tokenizer: tokenizer of the model.
        step: step of the checkpoint.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        step: int | str = '',
        quantize: str = '',
        draft_model: str | os.PathLike[str] = '',
        num_draft_tokens: int = 0,
    ):
        """Loads a model. `maxlm.load(checkpoint)` does the same.

        Args:
            checkpoint: a workdir (its newest step), `WORKDIR@STEP`, `WORKDIR@best`, or a directory in the format of
                Hugging Face. A workdir may be in a bucket.
            step: step of the workdir: a number, or `best` for the step with the lowest validation loss; '' = as
                `checkpoint` states.
            quantize: weight type (int8, int4 or fp8) to which the kernels are quantized in memory; '' = none. With
                w8a8 and w4a8, generation on a CPU also rounds the inputs of the kernels to 8 bits.
            draft_model: a small model with the same tokenizer that drafts tokens; see `load_draft`. '' = none.
            num_draft_tokens: number of tokens drafted per pass, by `draft_model` or from the preceding text; 0 = none,
                or 4 with `draft_model`.

        Raises:
            InputError: a model does not exist, cannot be read or cannot be quantized, or the draft model has another
                tokenizer.
        """
        stack = contextlib.ExitStack()
        # A model in the format of Hugging Face is imported into a temporary workdir.
        weakref.finalize(self, stack.close)
        name = given_path('checkpoint', checkpoint, Kind.EITHER)
        found = stack.enter_context(resolved_checkpoint(name if step == '' else f'{name}@{step}'))
        self._model = load_model(found, num_devices=1, quantize=quantize)
        # A run that is still training may write a newer step.
        self._checkpoint = with_step(found, self.step)
        self._draft = load_draft(os.fspath(draft_model), self._model)
        self._num_draft_tokens = num_draft_tokens
        self._engine: Engine | None = None
        self._scorer: LogprobScorer | None = None
        self._logits = jax.jit(self._forward)

    @property
    def config(self) -> Config:
        return self._model.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    @property
    def step(self) -> int:
        return self._model.step

    @property
    def params(self) -> Params:
        """Parameters: nested dict of arrays, those of blocks stacked over layers."""
        return self._model.params

    @property
    def module(self) -> nnx.Module:
        """Decoder, a Flax NNX module with the parameters: `hidden, _, _ = module(tokens)` for tokens [B, T]."""
        return self._decoder(self.params)

    @property
    def special_tokens(self) -> dict[str, Any]:
        """Tokens at the beginning and the end of a text, and the files and keys that name them."""
        return self.tokenizer.boundary_names

    def __repr__(self) -> str:
        """Returns a description with the checkpoint, its step, the size of the model and the special tokens."""
        model = self.config.model
        size = f'{count_parameters(model):,} parameters, context {model.max_positions:,}'
        tokens = ', '.join(f'{name}={value!r}' for name, value in self.special_tokens.items())
        return f'Model({self._checkpoint!r}: step {self.step:,}, {size}, {tokens})'

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 128,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        parse_special: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> str:
        """Returns a continuation of a text.

        Args:
            prompt: the text to continue.
            max_tokens: maximum number of tokens of the continuation.
            seed: seed of the samples.
            stop: string, or strings, that end the continuation and are not part of it.
            parse_special: encode names of special tokens in the prompt as their ids, e.g. in a rendered chat.
            **sampling: see `SamplingOptions`, for example `temperature=0` for the most likely tokens.

        Raises:
            InputError: an argument is out of range, or prompt and continuation exceed the context.
        """
        return ''.join(
            self.stream(prompt, max_tokens=max_tokens, seed=seed, stop=stop, parse_special=parse_special, **sampling)
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 128,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> str:
        """Returns the answer to a conversation, for models with a chat template.

        Args:
            messages: messages with `role` and `content`, the last of them from the user.
            max_tokens, seed, stop, **sampling: see `generate`.

        Raises:
            InputError: as `generate`; or the model has no chat template, or the template rejects the messages.
        """
        if isinstance(messages, str):
            raise InputError(
                f'messages={messages[:50]!r}: is a text; use generate, or [{{"role": "user", "content": "…"}}]'
            )
        return ''.join(self.stream(messages, max_tokens=max_tokens, seed=seed, stop=stop, **sampling))

    def stream(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 128,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        parse_special: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """Returns an iterator over the parts of a continuation or answer, as they are generated.

        Args:
            prompt: a text to continue, or messages to answer.
            max_tokens, seed, stop, parse_special, **sampling: see `generate`.

        Raises:
            InputError: as `generate` and `chat`.
        """
        if isinstance(prompt, str):
            ids = text_prompt(self.tokenizer, prompt, parse_special=parse_special)
        elif parse_special:
            raise InputError('parse_special: applies to texts, not to messages; remove it')
        else:
            ids = chat_prompt(self._model, prompt)
        names = [field.name for field in dataclasses.fields(Sampling)]
        unknown = sampling.keys() - {*names}
        if unknown:
            raise InputError(f'{min(unknown)!r} is not a sampling setting; use {", ".join(names)}')
        stops = tuple(([stop] if stop else []) if isinstance(stop, str) else stop)
        request = Request(tuple(ids), max_tokens, Sampling(**sampling), seed=seed, stops=stops)
        if self._engine is None:
            num_draft_tokens, draft = self._num_draft_tokens, self._draft
            self._engine = Engine(self._model, num_slots=NUM_SLOTS, num_draft_tokens=num_draft_tokens, draft=draft)
            # The engine owns the parameters.
            self._draft = None
        self._engine.check(request)
        return self._parts(self._engine, request)

    @staticmethod
    def _parts(engine: Engine, request: Request) -> Iterator[str]:
        deltas: deque[Delta] = deque()
        handle = engine.submit(request, deltas.append)
        try:
            is_done = False
            while not is_done:
                engine.step()
                while deltas:
                    delta = deltas.popleft()
                    is_done = delta.finish_reason is not None
                    if delta.text:
                        yield delta.text
        finally:
            # The caller may stop reading early.
            handle.cancel()

    def logits(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the logits of the token after each position, float32 [T, V].

        Args:
            tokens: token ids [T].

        Raises:
            InputError: there is no token, too many for the context, or an id is not in the vocabulary.
        """
        model = self.config.model
        ids = np.asarray(tokens)
        if ids.dtype.kind not in 'iu' and ids.size:
            raise InputError(f'tokens of type {ids.dtype}: must be integers')
        if ids.ndim != 1 or not 1 <= ids.size <= model.max_positions:
            raise InputError(f'tokens of shape {ids.shape}: must be a sequence of 1 to {model.max_positions} ids')
        low, high = int(np.min(ids)), int(np.max(ids))
        if not 0 <= low <= high < model.vocab_size:
            raise InputError(f'token ids must be from 0 to {model.vocab_size - 1}; found {low} to {high}')
        T = min(model.max_positions, -(-ids.size // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
        padded = np.zeros(T, np.int32)
        padded[: ids.size] = ids
        logits = self._logits(self._model.params, padded, np.int32(ids.size))
        return np.asarray(logits[: ids.size, : model.vocab_size])

    def _forward(self, params: Params, tokens_T: jax.Array, length: jax.Array) -> jax.Array:
        decoder = self._decoder(params)
        hidden_BTD, _, _ = decoder(tokens_T[None, :], length_B=length[None])
        kernel_DV = decoder.output_kernel().astype(hidden_BTD.dtype)
        logits_TV = jnp.dot(hidden_BTD[0], kernel_DV, preferred_element_type=jnp.float32)
        return without_padding(softcap(logits_TV, self.config.model.logit_softcap), self.config.model.vocab_size)

    def _decoder(self, params: Params) -> Any:
        graph, _ = nnx.split(abstract_model(self.config, self._model.layout))
        return nnx.merge(graph, params)

    def loss(self, text: str) -> float:
        """Returns the mean cross-entropy of the tokens of a text, in nats per token.

        A text may be longer than the context. The first token is predicted from the beginning of text if the tokenizer
        has such a token, and otherwise from the end of a document, as in training.

        Raises:
            InputError: the text has no tokens.
        """
        (encoded,) = self.tokenizer.encode_batch([text])
        ids = encoded.tolist()
        if not ids:
            raise InputError('the text is empty; provide at least one character')
        if self._scorer is None:
            self._scorer = LogprobScorer(self._model)
        requests = windows(ids, self.tokenizer.context_free_prefix, self._scorer.max_length)
        return -sum(score.log_prob for score in self._scorer.score(requests)) / len(ids)

    def save_pretrained(
        self, directory: str | os.PathLike[str], *, architecture: str = 'auto', dtype: str = 'auto'
    ) -> None:
        """Writes the model in the format of Hugging Face Transformers, as `maxlm hf export` does.

        Args:
            directory: directory to create.
            architecture: a model type of Transformers, or `auto`.
            dtype: type of the tensors: float32, bfloat16 or float16; `auto`: that of the imported model, or bfloat16.

        Raises:
            InputError: the directory exists, or no architecture of Transformers can express the model.
        """
        export_model(
            self._checkpoint,
            os.fspath(directory),
            architecture=architecture,
            dtype=dtype,
            max_shard_size=MAX_SHARD_BYTES,
            show=False,
        )


def load(
    checkpoint: str | os.PathLike[str],
    *,
    step: int | str = '',
    quantize: str = '',
    draft_model: str | os.PathLike[str] = '',
    num_draft_tokens: int = 0,
) -> Model:
    """Returns `Model(checkpoint, …)` with the same arguments."""
    return Model(checkpoint, step=step, quantize=quantize, draft_model=draft_model, num_draft_tokens=num_draft_tokens)
