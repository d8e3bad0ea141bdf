"""Requests of the engine and their results."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import numpy as np

from maxlm.errors import InputError
from maxlm.inference.engine.compiled_grammar import CompiledGrammar
from maxlm.inference.sampling import Sampling

# 'stop': end token or stop string; 'length': max_tokens reached; 'cancelled': request cancelled; 'failed': the grammar
# or the engine failed.
FinishReason = Literal['stop', 'length', 'cancelled', 'failed']
MAX_SAMPLES = 128
MAX_TOP_LOG_PROBS = 20
MAX_STOPS = 16


class QueueFullError(Exception):
    """Raised if the queue of the engine is full."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for continuations of one prompt, or for its embedding.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: maximum number of tokens per continuation; 0 with `embed`, at least 0 with `score_prompt`.
        sampling: sampling settings.
        seed: sample i uses only (seed, i) and the position, so results do not depend on slots or other requests.
        num_samples: number of continuations.
        stops: strings that end a continuation and are not part of it.
        top_log_probs: None = no log-probabilities; 0 = those of the generated tokens; k = also those of the k most
            likely tokens.
        ignore_eos: continue after an end token.
        grammar: grammar of the continuation in the format of llguidance, e.g. from
            `maxlm.inference.engine.grammar.json_grammar`; '' = any text. `Engine.prepare` compiles it. A continuation
            ends when its text is complete.
        embed: compute the embedding of the prompt, the mean of its last hidden states, instead of a continuation.
        score_prompt: also compute the log-probabilities of the prompt's tokens, and of `top_log_probs` tokens at each
            position.
        cache_salt: only requests with the same salt reuse cached prefixes of each other.

    Raises:
        InputError: a value is out of range. `Engine.check` verifies that the request fits into the context.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    seed: int = 0
    num_samples: int = 1
    stops: tuple[str, ...] = ()
    top_log_probs: int | None = None
    ignore_eos: bool = False
    grammar: str | CompiledGrammar = ''
    embed: bool = False
    score_prompt: bool = False
    cache_salt: str = ''

    def __post_init__(self) -> None:
        for name in ('max_tokens', 'seed', 'num_samples'):
            if not isinstance(value := getattr(self, name), int | np.integer):
                raise InputError(f'{name}={value!r}: must be an integer')
        if not self.prompt:
            raise InputError('the prompt is empty; provide at least one character')
        if self.embed:
            if self.max_tokens or self.num_samples != 1 or self.score_prompt:
                raise InputError('embed: requires max_tokens=0, num_samples=1 and no score_prompt')
        elif self.max_tokens < (0 if self.score_prompt else 1):
            raise InputError(f'max_tokens={self.max_tokens}: must be at least {0 if self.score_prompt else 1}')
        if self.grammar and (self.ignore_eos or self.embed):
            raise InputError('grammar: not supported with ignore_eos or embed; remove one of them')
        if not 0 <= self.seed < 2**32:
            raise InputError(f'seed={self.seed}: must be at least 0 and below 2³² = {2**32}')
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            raise InputError(f'num_samples={self.num_samples}: must be from 1 to {MAX_SAMPLES}')
        if len(self.stops) > MAX_STOPS or not all(self.stops):
            raise InputError(f'stops: must be at most {MAX_STOPS} non-empty strings')
        if self.top_log_probs is not None and not 0 <= self.top_log_probs <= MAX_TOP_LOG_PROBS:
            raise InputError(f'top_log_probs={self.top_log_probs}: must be from 0 to {MAX_TOP_LOG_PROBS}')

    def check(self, *, max_context: int, num_ids: int) -> None:
        """Raises InputError if the request does not fit into the context, or an id is not below `num_ids`."""
        prompt_length = len(self.prompt)
        if prompt_length + self.max_tokens > max_context:
            room = max_context - prompt_length
            remedy = f'use at most {room} tokens, or shorten the prompt' if room > 0 else 'shorten the prompt'
            raise InputError(
                f'max_tokens={self.max_tokens}: the prompt has {prompt_length} tokens and the context length is '
                f'{max_context}; {remedy}'
            )
        if not 0 <= min(self.prompt) <= max(self.prompt) < num_ids:
            raise InputError(f'token ids of the prompt must be from 0 to {num_ids - 1}')


class GeneratedToken(NamedTuple):
    """A generated token.

    Attributes:
        id: token id.
        log_prob: log softmax(logits) in nats over the ids of the tokenizer, at temperature 1; NaN if not requested.
        top: (id, log-probability) of the most likely tokens, in descending order.
    """

    id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


class PromptScores(NamedTuple):
    """Log-probabilities of the prompt's tokens, from its second one, in nats over all ids of the model.

    Entry i belongs to token i + 1. Shapes: T number of tokens of the prompt - 1, C reported top tokens.

    Attributes:
        log_prob_T: log softmax(logits)[token], float32.
        top_ids_TC: ids of the most likely tokens of the tokenizer, in descending order.
        top_log_probs_TC: their log-probabilities, float32.
    """

    log_prob_T: np.ndarray
    top_ids_TC: np.ndarray
    top_log_probs_TC: np.ndarray


class Delta(NamedTuple):
    """New text and tokens of one sample of a request.

    Attributes:
        sample: index of the sample.
        text: new text. An incomplete character or possible start of a stop string is withheld.
        tokens: new tokens, without an end token.
        finish_reason: reason for the end of the sample, or None if it continues.
        embedding: mean of the last hidden states of the prompt, float32 [D]; None unless requested.
        end_token: the end token that ended the sample, or None.
        prompt_scores: scores of the prompt, in the first delta; None unless requested.
        error: for finish reason `failed`, the reason if the grammar failed; '' if the engine failed.
    """

    sample: int
    text: str
    tokens: tuple[GeneratedToken, ...]
    finish_reason: FinishReason | None
    embedding: np.ndarray | None = None
    end_token: GeneratedToken | None = None
    prompt_scores: PromptScores | None = None
    error: str = ''


class Completion(NamedTuple):
    """One finished sample of a request."""

    text: str
    tokens: tuple[GeneratedToken, ...]
    finish_reason: FinishReason

    @property
    def ids(self) -> list[int]:
        """Token ids."""
        return [token.id for token in self.tokens]


class EngineState(NamedTuple):
    """Queue lengths of the engine and counters since its start.

    Attributes:
        num_slots: number of slots.
        running: number of samples in slots.
        waiting: number of samples without a slot.
        prompt_tokens: number of prompt tokens.
        cached_tokens: number of prompt tokens whose keys and values were cached.
        generated_tokens: number of generated tokens.
        passes: number of forward passes for decoding, each for all running samples.
        draft_tokens: number of drafted tokens, which include tokens that a grammar forces and one pass reads.
        accepted_tokens: number of drafted tokens that were equal to the sampled tokens.
    """

    num_slots: int
    running: int
    waiting: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    passes: int
    draft_tokens: int
    accepted_tokens: int
