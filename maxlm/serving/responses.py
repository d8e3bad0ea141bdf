"""Converts engine results to OpenAI's response objects and stream chunks."""

from __future__ import annotations

import functools
import itertools
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.inference.engine.requests import Delta, GeneratedToken
from maxlm.inference.tool_calls import ToolCall, ToolCallParser

# OpenAI's value for impossible tokens, because JSON has no infinity.
_MIN_LOG_PROB = -9999.0
_REPLACEMENT = '\ufffd'
_CACHE_SIZE = 65536


class Token(NamedTuple):
    """Text and bytes of a token. `bytes` is None for a partial character that has no byte value of its own."""

    text: str
    bytes: list[int] | None


class TokenDecoder:
    """Decodes single tokens and caches the results."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.decode = functools.lru_cache(_CACHE_SIZE)(self._decode)

    def _decode(self, token_id: int) -> Token:
        tokenizer = self._tokenizer
        # Decode the token after itself: some tokenizers drop the leading space of the first token.
        text = tokenizer.decode([token_id, token_id])[len(tokenizer.decode([token_id])) :]
        if _REPLACEMENT not in text:
            return Token(text, list(text.encode()))
        return Token(text, [token_id] if tokenizer.kind == 'bytes' and token_id < 256 else None)


class ResponseBuilder:
    """Builds the objects of one response.

    Choice i of a request with n samples per prompt is sample i % n of prompt i // n.
    """

    def __init__(
        self,
        *,
        chat: bool,
        model: str,
        step: int,
        token_decoder: TokenDecoder,
        with_log_probs: bool,
        echoes: Sequence[str],
        has_tools: bool = False,
    ):
        """Initializes the builder.

        Args:
            chat: build chat completions instead of completions.
            model: name of the model.
            step: step of the checkpoint.
            token_decoder: decoder of single tokens.
            with_log_probs: return log-probabilities.
            echoes: prefix text of each choice.
            has_tools: the text may contain tool calls.
        """
        self.chat = chat
        self._token_decoder, self._with_log_probs, self._echoes = token_decoder, with_log_probs, echoes
        self._object = 'chat.completion' if chat else 'text_completion'
        self._base_fields = {
            'id': f'{"chatcmpl" if chat else "cmpl"}-{uuid.uuid4().hex}',
            'created': int(time.time()),
            'model': model,
            'system_fingerprint': f'step-{step}',
        }
        self._parsers = [ToolCallParser() for _ in echoes] if has_tools else None
        # Number of characters of each choice so far, for `text_offset`.
        self._offsets = [len(echo) for echo in echoes]

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks of a stream that precede all generated text."""
        if self.chat:
            start = {'delta': {'role': 'assistant', 'content': ''}, 'logprobs': None, 'finish_reason': None}
            return [self._chunk([{'index': i, **start}]) for i in range(len(self._echoes))]
        return [
            self._chunk([{'index': i, 'text': echo, 'logprobs': None, 'finish_reason': None}])
            for i, echo in enumerate(self._echoes)
            if echo
        ]

    def chunk(self, choice: int, delta: Delta) -> dict[str, Any]:
        """Returns the stream chunk for one delta of a choice."""
        finish_reason: str | None = delta.finish_reason
        text: dict[str, Any] = {'text': delta.text}
        if self.chat:
            content, calls, finish_reason = self._split(choice, delta.text, finish_reason)
            # The number of calls before this delta.
            first = self._parsers[choice].num_calls - len(calls) if self._parsers else 0
            numbered = [{'index': first + i, **call.fields} for i, call in enumerate(calls)]
            text = {'delta': ({'content': content} if content else {}) | ({'tool_calls': numbered} if calls else {})}
        log_probs = self._log_probs(choice, delta.tokens)
        return self._chunk([{'index': choice, **text, 'logprobs': log_probs, 'finish_reason': finish_reason}])

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """Returns the usage chunk, the last one of a stream."""
        return self._chunk([]) | {'usage': usage}

    def response(self, deltas: Sequence[Sequence[Delta]], usage: dict[str, int]) -> dict[str, Any]:
        """Returns the response object for the deltas of all choices."""
        choices = []
        for index, (echo, choice_deltas) in enumerate(zip(self._echoes, deltas, strict=True)):
            text = ''.join(delta.text for delta in choice_deltas)
            finish_reason: str | None = choice_deltas[-1].finish_reason
            content: dict[str, Any] = {'text': echo + text}
            if self.chat:
                answer, calls, finish_reason = self._split(index, text, finish_reason)
                fields = {'tool_calls': [call.fields for call in calls]} if calls else {}
                # OpenAI's content is null if there are only calls.
                message = {'role': 'assistant', 'content': answer or (None if calls else ''), 'refusal': None}
                content = {'message': message | fields}
            tokens = tuple(itertools.chain.from_iterable(delta.tokens for delta in choice_deltas))
            log_probs = self._log_probs(index, tokens)
            choices.append({'index': index, **content, 'logprobs': log_probs, 'finish_reason': finish_reason})
        return {**self._base_fields, 'object': self._object, 'choices': choices, 'usage': usage}

    def _split(self, choice: int, text: str, finish_reason: str | None) -> tuple[str, list[ToolCall], str | None]:
        """Returns the content, the tool calls and the finish reason of a new text of a choice."""
        if self._parsers is None:
            return text, [], finish_reason
        parser = self._parsers[choice]
        pieces = parser.feed(text, is_last=finish_reason is not None)
        if finish_reason == 'stop' and parser.num_calls:
            finish_reason = 'tool_calls'
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        return ''.join(piece for piece in pieces if isinstance(piece, str)), calls, finish_reason

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._base_fields,
            'object': f'{self._object}.chunk' if self.chat else self._object,
            'choices': choices,
        }

    def _log_probs(self, choice: int, tokens: Sequence[GeneratedToken]) -> dict[str, Any] | None:
        if not self._with_log_probs:
            return None
        return self._chat_log_probs(tokens) if self.chat else self._completion_log_probs(choice, tokens)

    def _chat_log_probs(self, tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
        def entry(token_id: int, log_prob: float) -> dict[str, Any]:
            token = self._token_decoder.decode(token_id)
            return {'token': token.text, 'logprob': _finite(log_prob), 'bytes': token.bytes}

        content = [
            {**entry(token.id, token.log_prob), 'top_logprobs': [entry(*one) for one in token.top]} for token in tokens
        ]
        return {'content': content, 'refusal': None}

    def _completion_log_probs(self, choice: int, tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
        texts = [self._token_decoder.decode(token.id).text for token in tokens]
        offsets = list(itertools.accumulate(map(len, texts), initial=self._offsets[choice]))
        self._offsets[choice] = offsets.pop()
        top = [{self._token_decoder.decode(i).text: _finite(value) for i, value in token.top} for token in tokens]
        return {
            'tokens': texts,
            'token_logprobs': [_finite(token.log_prob) for token in tokens],
            'top_logprobs': top,
            'text_offset': offsets,
        }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Returns OpenAI's usage object."""
    return {
        'prompt_tokens': prompt_tokens,
        'completion_tokens': completion_tokens,
        'total_tokens': prompt_tokens + completion_tokens,
    }


def _finite(log_prob: float) -> float:
    return log_prob if math.isfinite(log_prob) else _MIN_LOG_PROB
