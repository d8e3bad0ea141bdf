"""What the engine draws → OpenAI's objects, whole or in chunks."""

from __future__ import annotations

import functools
import itertools
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.inference.engine.requests import Delta, DrawnToken

# OpenAI's, for what is impossible: JSON has no infinity.
_IMPOSSIBLE = -9999.0
_REPLACEMENT = '\ufffd'
_KEPT_SPELLINGS = 65536


class Token(NamedTuple):
    """How a token is told: `bytes` None where it is a part of a character that cannot be told by itself."""

    text: str
    bytes: list[int] | None


class TokenSpelling:
    """Token ids by themselves."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.of = functools.lru_cache(_KEPT_SPELLINGS)(self._of)

    def _of(self, token_id: int) -> Token:
        tokenizer = self._tokenizer
        # Behind itself: some tokenizers drop the blank of a text's first token.
        text = tokenizer.decode([token_id, token_id])[len(tokenizer.decode([token_id])) :]
        if _REPLACEMENT not in text:
            return Token(text, list(text.encode()))
        return Token(text, [token_id] if tokenizer.kind == 'bytes' and token_id < 256 else None)


class ResponseBuilder:
    """The objects of one answer.

    Choice i of a request with n samples per prompt is sample i % n of prompt i // n.
    """

    def __init__(
        self, *, chat: bool, model: str, step: int, spelling: TokenSpelling, log_probs: bool, echoes: Sequence[str]
    ):
        """`echoes` has a text per choice that comes before its answer."""
        self.chat = chat
        self._spelling, self._log_probs, self._echoes = spelling, log_probs, echoes
        self._object = 'chat.completion' if chat else 'text_completion'
        self._head = {
            'id': f'{"chatcmpl" if chat else "cmpl"}-{uuid.uuid4().hex}',
            'created': int(time.time()),
            'model': model,
            'system_fingerprint': f'step-{step}',
        }
        # Characters of each choice's tokens so far, of which `text_offset` tells.
        self._offsets = [len(echo) for echo in echoes]

    def first(self) -> list[dict[str, Any]]:
        """The chunks of a stream before anything is drawn."""
        if self.chat:
            start = {'delta': {'role': 'assistant', 'content': ''}, 'logprobs': None, 'finish_reason': None}
            return [self._chunk([{'index': i, **start}]) for i in range(len(self._echoes))]
        return [
            self._chunk([{'index': i, 'text': echo, 'logprobs': None, 'finish_reason': None}])
            for i, echo in enumerate(self._echoes)
            if echo
        ]

    def chunk(self, choice: int, delta: Delta) -> dict[str, Any]:
        """The chunk of a stream for what is new."""
        text = {'delta': {'content': delta.text} if delta.text else {}} if self.chat else {'text': delta.text}
        log_probs = self._told(choice, delta.tokens)
        return self._chunk([{'index': choice, **text, 'logprobs': log_probs, 'finish_reason': delta.finish}])

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk of a stream, where it was asked for."""
        return self._chunk([]) | {'usage': usage}

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: dict[str, int]) -> dict[str, Any]:
        """The answer of all choices' deltas."""
        choices = []
        for index, (echo, found) in enumerate(zip(self._echoes, deltas, strict=True)):
            text = ''.join(delta.text for delta in found)
            said = (
                {'message': {'role': 'assistant', 'content': text, 'refusal': None}}
                if self.chat
                else {'text': echo + text}
            )
            tokens = tuple(itertools.chain.from_iterable(delta.tokens for delta in found))
            log_probs = self._told(index, tokens)
            choices.append({'index': index, **said, 'logprobs': log_probs, 'finish_reason': found[-1].finish})
        return {**self._head, 'object': self._object, 'choices': choices, 'usage': usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, 'object': f'{self._object}.chunk' if self.chat else self._object, 'choices': choices}

    def _told(self, choice: int, tokens: Sequence[DrawnToken]) -> dict[str, Any] | None:
        if not self._log_probs:
            return None
        return self._of_chat(tokens) if self.chat else self._of_completion(choice, tokens)

    def _of_chat(self, tokens: Sequence[DrawnToken]) -> dict[str, Any]:
        def told(token_id: int, log_prob: float) -> dict[str, Any]:
            token = self._spelling.of(token_id)
            return {'token': token.text, 'logprob': _finite(log_prob), 'bytes': token.bytes}

        content = [
            {**told(token.id, token.log_prob), 'top_logprobs': [told(*one) for one in token.top]} for token in tokens
        ]
        return {'content': content, 'refusal': None}

    def _of_completion(self, choice: int, tokens: Sequence[DrawnToken]) -> dict[str, Any]:
        texts = [self._spelling.of(token.id).text for token in tokens]
        offsets = list(itertools.accumulate(map(len, texts), initial=self._offsets[choice]))
        self._offsets[choice] = offsets.pop()
        top = [{self._spelling.of(i).text: _finite(value) for i, value in token.top} for token in tokens]
        return {
            'tokens': texts,
            'token_logprobs': [_finite(token.log_prob) for token in tokens],
            'top_logprobs': top,
            'text_offset': offsets,
        }


def usage(prompt_tokens: int, drawn_tokens: int) -> dict[str, int]:
    """What OpenAI calls the usage."""
    return {
        'prompt_tokens': prompt_tokens,
        'completion_tokens': drawn_tokens,
        'total_tokens': prompt_tokens + drawn_tokens,
    }


def _finite(log_prob: float) -> float:
    return log_prob if math.isfinite(log_prob) else _IMPOSSIBLE
