"""One sample of a request, during and after generation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from maxlm.inference.detokenizer import TextStream
from maxlm.inference.engine.compiled import PrefillChunk
from maxlm.inference.engine.compiled_grammar import TokenMatcher
from maxlm.inference.engine.model_runner import SampledTokens
from maxlm.inference.engine.requests import (
    Completion,
    Delta,
    FinishReason,
    GeneratedToken,
    PromptScores,
    Request,
)
from maxlm.inference.engine.slots import Slot

# Minimum number of tokens of a pass over forced tokens: the pass of a few tokens takes as long as two passes of one.
MIN_JUMP = 3


@dataclasses.dataclass(eq=False)
class ActiveSequence:
    """One continuation of a request, from submission to end.

    Attributes:
        request: the request.
        number: index of the sample in the request.
        listener: callback that receives the deltas.
        text: incremental text.
        matcher: position in the grammar of the request, or None without a grammar.
        slot: cache slot, or None while waiting.
        num_dispatched: number of tokens dispatched to the devices.
        num_generated: number of tokens received.
        last_token: last token received.
        proposed: tokens received after `last_token` that count only if the grammar says so.
        is_rewound: True if the devices have read tokens that do not count.
        hidden_sums: for an embedding: sums of hidden states of prefilled chunks, [P, D], and the row of this sample.
        scores: if the prompt is scored: scores of prefilled chunks, the row of this sample and its number of tokens.
        is_cancelled: True if the client cancelled the request.
        finish_reason: reason for the end, or None while active.
    """

    request: Request
    number: int
    listener: Callable[[Delta], None]
    text: TextStream
    matcher: TokenMatcher | None = None
    slot: Slot | None = None
    num_dispatched: int = 0
    num_generated: int = 0
    last_token: int = 0
    proposed: Sequence[GeneratedToken] = ()
    is_rewound: bool = False
    hidden_sums: list[tuple[jax.Array, int]] = dataclasses.field(default_factory=list)
    scores: list[tuple[tuple[jax.Array, ...], int, int]] = dataclasses.field(default_factory=list)
    is_cancelled: bool = False
    finish_reason: FinishReason | None = None

    def append_tokens(self, tokens: Iterable[GeneratedToken], stop_token_ids: Container[int]) -> Delta:
        """Appends generated tokens, up to one that ends the sequence, and returns the delta.

        A request for an embedding ends here, with the mean of its hidden states. So does a request for 0 tokens.

        Args:
            tokens: generated tokens, in order.
            stop_token_ids: ids that end a text unless the request ignores them.
        """
        assert self.slot is not None, 'a sample that draws has a slot'
        if self.request.embed:
            total_D = np.sum([jax.device_get(sum_PD)[row] for sum_PD, row in self.hidden_sums], axis=0)
            return Delta(self.number, '', (), 'stop', total_D / np.float32(len(self.request.prompt)))
        return self._continued(tokens, stop_token_ids)._replace(prompt_scores=self._prompt_scores())

    def _continued(self, tokens: Iterable[GeneratedToken], stop_token_ids: Container[int]) -> Delta:
        assert self.slot is not None, 'a sample that draws has a slot'
        if not self.request.max_tokens:
            return Delta(self.number, '', (), 'length')
        new_tokens: list[GeneratedToken] = []
        text = ''
        for token in tokens:
            if self.num_generated:
                # The model has read the previous token to generate this one.
                self.slot.content.append(self.last_token)
            self.num_generated += 1
            if token.id in stop_token_ids and not self.request.ignore_eos:
                return Delta(self.number, text + self.text.finish(), tuple(new_tokens), 'stop', end_token=token)
            self.last_token = token.id
            new_tokens.append(token)
            text += self.text.add(token.id)
            if self.text.stopped:
                return Delta(self.number, text, tuple(new_tokens), 'stop')
            # `grammar_end` ends other texts, also at `max_tokens`, because only the grammar knows if they are complete.
            if self.matcher is None and self.num_generated == self.request.max_tokens:
                return Delta(self.number, text + self.text.finish(), tuple(new_tokens), 'length')
        return Delta(self.number, text, tuple(new_tokens), None)

    def receive(self, tokens: Sequence[GeneratedToken], stop_token_ids: Container[int]) -> Delta:
        """Appends the tokens of a call, and returns the delta.

        With a grammar, these are the forced tokens and one more. The others wait for `settle`.
        """
        if self.matcher is None:
            return self.append_tokens(tokens, stop_token_ids)
        num_forced = min(len(tokens), len(self.matcher.forced))
        delta = self.append_tokens(tokens[: num_forced + 1], stop_token_ids)
        self.matcher.forced, sampled = self.matcher.forced[num_forced:], tokens[num_forced:]
        if sampled and delta.finish_reason is None:
            self.proposed = sampled[1:]
            self.matcher.accept([token.id for token in sampled], is_truncated=self.request.sampling.is_truncated)
        return delta

    def settle(self, stop_token_ids: Container[int]) -> Delta | None:
        """Appends those of the `proposed` tokens that count, if the grammar has answered; drops the others."""
        if self.matcher is None or self.matcher.is_waiting or not self.proposed:
            return None
        num = self.matcher.num_accepted - 1
        accepted, dropped, self.proposed = self.proposed[:num], self.proposed[num:], ()
        self.num_dispatched -= len(dropped)
        self.is_rewound = bool(dropped)
        return self.append_tokens(accepted, stop_token_ids) if accepted else None

    @property
    def max_call_tokens(self) -> int:
        """Maximum number of tokens of the next decoding call."""
        left = self.request.max_tokens - self.num_dispatched
        if self.matcher is None:
            return left
        # Penalties count the preceding tokens, also those that turn out not to count.
        num_predicted = 0 if self.request.sampling.has_penalty else self.matcher.num_predicted
        return min(left, len(self.matcher.forced) + 1 + num_predicted)

    def dispatch(self, num_tokens: int) -> int:
        """Counts tokens of a call, and returns the number of positions that are written when it ends."""
        assert self.slot is not None, 'a sample that draws has a slot'
        self.num_dispatched += num_tokens
        length = len(self.request.prompt) + self.num_dispatched - 1
        self.slot.num_written = max(self.slot.num_written, length)
        return length

    def rewind(self) -> tuple[int, int, int, int]:
        """Returns slot, length, next input token and the token before it, for `CompiledFunctions.rewind`."""
        slot = self.slot
        assert slot is not None, 'a sample that draws has a slot'
        self.is_rewound = False
        return slot.number, len(slot.content), self.last_token, slot.content[-1]

    def jump(self, *, max_length: int, num_active: int) -> PrefillChunk | None:
        """Returns the last token and the tokens that the grammar forces as a chunk to prefill; None if it is no use.

        One pass then replaces one for each token. The pass serves only this sample, so it must give at least as many
        tokens as one for all `num_active` samples. Log-probabilities and penalties need the other passes.
        """
        request, matcher, slot = self.request, self.matcher, self.slot
        if matcher is None or slot is None or request.top_log_probs is not None or request.sampling.has_penalty:
            return None
        num = len(matcher.forced) + 1
        left = request.max_tokens - self.num_dispatched
        if not max(MIN_JUMP, num_active) <= num <= min(max_length, left):
            return None
        # The pass also restores the state on the devices.
        self.is_rewound = False
        text = (*slot.content, self.last_token, *matcher.forced)
        start = len(slot.content)
        return PrefillChunk(
            text[start:], start, slot.number, text, request.sampling, request.seed, self.number, matcher.mask
        )

    @property
    def can_decode(self) -> bool:
        """True if the sample is prefilled, needs more tokens, and has a mask if it needs one."""
        has_mask = self.matcher is None or self.matcher.mask is not None
        return 0 < self.num_dispatched < self.request.max_tokens and has_mask

    def grammar_end(self) -> tuple[FinishReason, str] | None:
        """Returns the reason for the end of the text and an error or '', or None if more tokens follow."""
        matcher = self.matcher
        if matcher is None or matcher.is_waiting:
            return None
        if matcher.is_complete:
            return 'stop', ''
        if self.num_generated == self.request.max_tokens:
            return 'length', ''
        return ('failed', matcher.failure) if matcher.failure else None

    @property
    def num_unfilled(self) -> int:
        """Number of tokens of the prompt that are not prefilled."""
        assert self.slot is not None, 'a sample that is filled has a slot'
        return len(self.request.prompt) - len(self.slot.content)

    def next_chunk(self, max_length: int) -> PrefillChunk:
        """Returns the next part of the prompt to prefill, of at most `max_length` tokens."""
        request, slot = self.request, self.slot
        assert slot is not None, 'a sample that is filled has a slot'
        start = len(slot.content)
        tokens = request.prompt[start : start + max_length]
        mask = None if self.matcher is None else self.matcher.mask
        return PrefillChunk(
            tokens, start, slot.number, request.prompt, request.sampling, request.seed, self.number, mask
        )

    @property
    def reusable_tokens(self) -> np.ndarray:
        """Tokens of the prompt whose keys and values may come from another slot.

        An embedding and scores need the hidden states of all tokens, which are not cached, so they reuse none.
        """
        needs_hidden_states = self.request.embed or self.request.score_prompt
        return np.array(() if needs_hidden_states else self.request.prompt, np.int32)

    def add_hidden_sum(self, sum_PD: jax.Array, row: int) -> None:
        """Keeps the sum of the hidden states of a prefilled chunk, if the request is for an embedding."""
        if self.request.embed:
            self.hidden_sums.append((sum_PD, row))

    def add_scores(self, scores: tuple[jax.Array, ...], row: int, num_tokens: int) -> None:
        """Keeps the scores of the first `num_tokens` tokens of a prefilled chunk, if the prompt is scored."""
        if self.request.score_prompt:
            self.scores.append((scores, row, num_tokens))

    def _prompt_scores(self) -> PromptScores | None:
        """Returns the scores of the complete prompt and releases those of its chunks; None if there are none."""
        if not self.scores:
            return None
        chunks = [[x[row, :num] for x in jax.device_get(arrays)] for arrays, row, num in self.scores]
        self.scores.clear()
        # Nothing is known about the token after the prompt.
        log_prob_T, ids_TC, log_probs_TC = (np.concatenate(parts)[:-1] for parts in zip(*chunks, strict=True))
        num_top = self.request.top_log_probs or 0
        return PromptScores(log_prob_T, ids_TC[:, :num_top], log_probs_TC[:, :num_top])


class PendingCall(NamedTuple):
    """A dispatched call whose result the host has not read.

    Attributes:
        sampled: its result.
        samples: row, sequence and number of sampled tokens.
        dispatched: time of the dispatch.
        num_tokens: number of tokens per row; 0 = prefill.
        counts: `DecodeCounts`; None = prefill.
        forced: forced tokens before the sampled one, if the only sample jumped over them.
    """

    sampled: SampledTokens
    samples: list[tuple[int, ActiveSequence, int]]
    dispatched: float
    num_tokens: int
    counts: jax.Array | None
    forced: Sequence[int] = ()

    def tokens(self, request: Request, arrays: Sequence[np.ndarray]) -> list[GeneratedToken]:
        """Returns the tokens of one row.

        Args:
            request: request of the row.
            arrays: token ids and log-probabilities, [N]; ids and log-probabilities of the most likely tokens, [N, C],
                if any request of the call needs them.
        """
        tokens = [GeneratedToken(token, math.nan, ()) for token in self.forced]
        num = request.top_log_probs or 0
        for token, log_prob, *top_values in zip(*(x.tolist() for x in arrays), strict=True):
            top = tuple(zip(*(values[:num] for values in top_values), strict=True)) if num else ()
            tokens.append(GeneratedToken(token, math.nan if request.top_log_probs is None else log_prob, top))
        return tokens


class RequestHandle:
    """Handle of a submitted request."""

    def __init__(self, samples: Sequence[ActiveSequence], wake: Callable[[], None]):
        """Initializes the handle. `wake` wakes the engine."""
        self._samples, self._wake = samples, wake

    def cancel(self) -> None:
        """Cancels the samples that have not ended, at the next step. Thread-safe."""
        for sample in self._samples:
            sample.is_cancelled = True
        self._wake()


class FinishedRequests:
    """Collects the deltas of all samples of several requests."""

    def __init__(self, num_samples: Sequence[int], on_done: Callable[[int], None] | None = None):
        """Initializes the collection.

        Args:
            num_samples: number of samples of each request.
            on_done: called with the index of each completed request.
        """
        self._deltas: list[list[list[Delta]]] = [[[] for _ in range(num)] for num in num_samples]
        self._on_done = on_done

    def add(self, number: int, delta: Delta) -> None:
        """Adds a delta of the request with this index."""
        samples = self._deltas[number]
        samples[delta.sample].append(delta)
        is_done = all(deltas and deltas[-1].finish_reason for deltas in samples)
        if self._on_done is not None and delta.finish_reason and is_done:
            self._on_done(number)

    def completions(self) -> list[list[Completion]]:
        """Returns the samples of each request, all of which have ended."""
        return [[_completion(deltas) for deltas in samples] for samples in self._deltas]


def _completion(deltas: Sequence[Delta]) -> Completion:
    finish_reason = deltas[-1].finish_reason
    assert finish_reason is not None, 'a sample ends before the engine has nothing to do'
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return Completion(''.join(delta.text for delta in deltas), tokens, finish_reason)
