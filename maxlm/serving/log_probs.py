"""Log-probabilities of tokens, in the formats of OpenAI's chat API and legacy completions API."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.inference.detokenizer import TextStream
from maxlm.inference.engine.requests import Delta, GeneratedToken, PromptScores

# OpenAI's value for impossible tokens, because JSON has no infinity.
_MIN_LOG_PROB = -9999.0
_REPLACEMENT = '\ufffd'
_CACHE_SIZE = 65536


class Token(NamedTuple):
    """Text and bytes of a token. `bytes` is None for a partial character that has no byte value of its own."""

    text: str
    bytes: list[int] | None


class TokenDecoder:
    """Decodes single tokens and caches the results. Thread-safe.

    Attributes:
        tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.decode = functools.lru_cache(_CACHE_SIZE)(self._decode)

    def _decode(self, token_id: int) -> Token:
        tokenizer = self.tokenizer
        # Decode the token after itself: some tokenizers drop the leading space of the first token.
        text = tokenizer.decode([token_id, token_id])[len(tokenizer.decode([token_id])) :]
        if _REPLACEMENT not in text:
            return Token(text, list(text.encode()))
        return Token(text, [token_id] if tokenizer.kind == 'bytes' and token_id < 256 else None)


def chat_log_probs(token_decoder: TokenDecoder, tokens: Iterable[GeneratedToken]) -> dict[str, Any]:
    """Returns the log-probabilities of a chat completion."""

    def entry(token_id: int, log_prob: float) -> dict[str, Any]:
        token = token_decoder.decode(token_id)
        return {'token': token.text, 'logprob': _finite(log_prob), 'bytes': token.bytes}

    content = [
        {**entry(token.id, token.log_prob), 'top_logprobs': [entry(*one) for one in token.top]} for token in tokens
    ]
    return {'content': content, 'refusal': None}


class CompletionLogProbs:
    """Lists of tokens, log-probabilities and text offsets of one choice.

    As in vLLM, they include the end token that ended the choice, although it is not part of the text. A client that asks
    for one token after an echo therefore always finds it last.
    """

    def __init__(self, token_decoder: TokenDecoder, prompt: Sequence[int], echo: str):
        """Initializes the lists.

        Args:
            token_decoder: decoder of single tokens.
            prompt: token ids before the choice.
            echo: text that the choice begins with.
        """
        self._token_decoder, self._prompt, self._echo = token_decoder, prompt, echo
        self._text = TextStream(token_decoder.tokenizer, prompt, ())
        self._offset = len(echo)

    def fields(self, deltas: Iterable[Delta]) -> dict[str, list[Any]]:
        """Returns the lists for the tokens of new deltas, preceded by the prompt in the delta with its scores."""
        rows = [row for delta in deltas for row in self._rows(delta)]
        names = ('tokens', 'token_logprobs', 'top_logprobs', 'text_offset')
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}

    def _rows(self, delta: Delta) -> Iterator[tuple[str, float | None, dict[str, float] | None, int]]:
        if delta.prompt_scores is not None:
            yield from self._prompt_rows(delta.prompt_scores)
        for token in delta.tokens:
            yield self._row(token.id, token.log_prob, token.top, self._offset)
            self._offset += len(self._text.add(token.id))
        if delta.end_token is not None:
            end = delta.end_token
            yield self._row(end.id, end.log_prob, end.top, self._offset)

    def _prompt_rows(self, scores: PromptScores) -> Iterator[tuple[str, float | None, dict[str, float] | None, int]]:
        stream, offset = TextStream(self._token_decoder.tokenizer, (), ()), 0
        values = zip(
            scores.log_prob_T.tolist(), scores.top_ids_TC.tolist(), scores.top_log_probs_TC.tolist(), strict=True
        )
        for index, token_id in enumerate(self._prompt):
            # The text of an echo may be shorter than its decoded tokens, for example without a space at the beginning.
            place = min(offset, len(self._echo))
            if index:
                log_prob, top_ids, top_log_probs = next(values)
                yield self._row(token_id, log_prob, zip(top_ids, top_log_probs, strict=True), place)
            else:
                # Nothing precedes the first token.
                yield self._token_decoder.decode(token_id).text, None, None, place
            offset += len(stream.add(token_id))

    def _row(
        self, token_id: int, log_prob: float, top: Iterable[tuple[int, float]], offset: int
    ) -> tuple[str, float, dict[str, float], int]:
        """Returns the entries of a token. The most likely tokens include it, as in OpenAI's API."""
        text, likely = self._token_decoder.decode(token_id).text, dict[str, float]()
        for other_id, value in top:
            # Partial characters have the same text. The most likely one comes first.
            likely.setdefault(self._token_decoder.decode(other_id).text, _finite(value))
        likely.setdefault(text, _finite(log_prob))
        return text, _finite(log_prob), likely, offset


def _finite(log_prob: float) -> float:
    """Returns a log-probability as a number that JSON has."""
    return log_prob if math.isfinite(log_prob) else _MIN_LOG_PROB
