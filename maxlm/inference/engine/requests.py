"""Requests of the engine and their results."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from maxlm.errors import InputError
from maxlm.inference.sampling import Sampling

# An id that ends a text or a stop string came; the number of tokens is reached; the request was cancelled; the engine
# broke down.
FinishReason = Literal['stop', 'length', 'cancelled', 'failed']
MAX_SAMPLES = 128
MAX_TOP_LOG_PROBS = 20
MAX_STOPS = 16


class QueueFullError(Exception):
    """The queue of the engine is full."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Continuations of one prompt.

    Raises:
        InputError: a value is out of range. Whether the prompt fits is the engine's to say.
    """

    # Token ids, at least one.
    prompt: tuple[int, ...]
    # Tokens of each continuation, at most.
    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    # Sample i draws with (seed, i) and the position only: neither batch mates nor slots matter.
    seed: int = 0
    num_samples: int = 1
    # Texts before which a continuation is cut.
    stops: tuple[str, ...] = ()
    # None: no log-probabilities; 0: of the generated tokens; k: also of the k likeliest.
    top_log_probs: int | None = None
    # Go on behind an id that ends a text.
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError('the prompt is empty; give at least one character to continue')
        if self.max_tokens < 1:
            raise InputError(f'max_tokens={self.max_tokens}: must be at least 1')
        if not 0 <= self.seed < 2**32:
            raise InputError(f'seed={self.seed}: must be at least 0 and below 2³² = {2**32}')
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            raise InputError(f'num_samples={self.num_samples}: must be from 1 to {MAX_SAMPLES}')
        if len(self.stops) > MAX_STOPS or not all(self.stops):
            raise InputError(f'stops: give at most {MAX_STOPS} texts, none of them empty')
        if self.top_log_probs is not None and not 0 <= self.top_log_probs <= MAX_TOP_LOG_PROBS:
            raise InputError(f'top_log_probs={self.top_log_probs}: must be from 0 to {MAX_TOP_LOG_PROBS}')


class GeneratedToken(NamedTuple):
    """A token with its log-probability in nats: log softmax(logits) over the ids of the tokenizer, at temperature 1."""

    id: int
    # NaN where no log-probabilities were requested.
    log_prob: float
    # The likeliest tokens, the likeliest first: (id, log-probability).
    top: tuple[tuple[int, float], ...]


class Delta(NamedTuple):
    """New text and tokens of one sample of a request."""

    sample: int
    # Text that can be shown: what may be the start of a stop string, or of a character, is held back.
    text: str
    # Tokens that came since the last delta; the one that ended the text is not among them.
    tokens: tuple[GeneratedToken, ...]
    # Why there is no more; None: more comes.
    finish_reason: FinishReason | None


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
    """Queue lengths of the engine and counters since its start."""

    num_slots: int
    # Samples in slots.
    running: int
    # Samples that have no slot yet.
    waiting: int
    # Tokens of prompts: all, and those among them whose keys and values were there already.
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    # Passes of one token of every slot through the model.
    passes: int
