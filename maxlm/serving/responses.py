"""Converts engine results to OpenAI's response objects and stream chunks."""

from __future__ import annotations

import functools
import itertools
import math
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from maxlm.data.tokenizer.byte_and_char import spelled_bytes
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.inference.detokenizer import TextStream
from maxlm.inference.engine.requests import Delta, GeneratedToken, PromptScores
from maxlm.inference.tool_calls import BEGIN, ToolCall, ToolCallParser

# OpenAI's value for impossible tokens, because JSON has no infinity.
_MIN_LOG_PROB = -9999.0
_REPLACEMENT = '\ufffd'
_CACHE_SIZE = 65536


class Token(NamedTuple):
    """Text and bytes of a token. `bytes` is None for a partial character that has no byte value of its own."""

    text: str
    bytes: list[int] | None

    @property
    def name(self) -> str:
        """The text, or for a partial character with known bytes `bytes:\\xe2\\x82`, as in OpenAI's API.

        Partial characters have the same text, and a client must not take one for another.
        """
        if self.bytes is None or _REPLACEMENT not in self.text:
            return self.text
        return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in self.bytes)


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
        decoded = tokenizer.decode([token_id])
        spelled = spelled_bytes(tokenizer.spelling(token_id))
        found = next((each for each in spelled if each.decode(errors='replace') == decoded), None)
        return Token(text, None if found is None else list(found))


def _chat_log_probs(token_decoder: TokenDecoder, tokens: Iterable[GeneratedToken]) -> dict[str, Any]:
    """Returns the log-probabilities of a chat completion."""

    def entry(token_id: int, log_prob: float) -> dict[str, Any]:
        token = token_decoder.decode(token_id)
        return {'token': token.text, 'logprob': _finite(log_prob), 'bytes': token.bytes}

    content = [
        {**entry(token.id, token.log_prob), 'top_logprobs': [entry(*one) for one in token.top]} for token in tokens
    ]
    return {'content': content, 'refusal': None}


class _CompletionLogProbs:
    """Lists of tokens, log-probabilities and text offsets of one choice.

    As in vLLM, they include the end token that ended the choice, although it is not part of the text. A client that
    requests one token after an echo therefore always finds it last.
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
        tokenizer = self._token_decoder.tokenizer
        beginning = tuple(tokenizer.beginning_of_document)
        # The beginning of text that precedes a text prompt is no part of its echo.
        is_hidden = tuple(self._prompt[: len(beginning)]) == beginning and not self._echo.startswith(
            tokenizer.decode(beginning)
        )
        num_hidden = len(beginning) if is_hidden else 0
        stream, offset = TextStream(tokenizer, (), ()), 0
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
                yield self._token_decoder.decode(token_id).name, None, None, place
            offset += len(stream.add(token_id)) if index >= num_hidden else 0

    def _row(
        self, token_id: int, log_prob: float, top: Iterable[tuple[int, float]], offset: int
    ) -> tuple[str, float, dict[str, float], int]:
        """Returns the entries of a token. The most likely tokens include it, as in OpenAI's API."""
        name, likely = self._token_decoder.decode(token_id).name, dict[str, float]()
        for other_id, value in top:
            # Partial characters without known bytes have the same name. The most likely one comes first.
            likely.setdefault(self._token_decoder.decode(other_id).name, _finite(value))
        likely.setdefault(name, _finite(log_prob))
        return name, _finite(log_prob), likely, offset


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
        prompts: Sequence[Sequence[int]] = (),
        has_tools: bool = False,
        requires_calls: bool = False,
        num_dropped: int | None = None,
        with_usage: bool = False,
    ):
        """Initializes the builder.

        Args:
            chat: build chat completions instead of completions.
            model: name of the model.
            step: step of the checkpoint.
            token_decoder: decoder of single tokens.
            with_log_probs: return log-probabilities.
            echoes: prefix text of each choice.
            prompts: token ids of the prompt of each choice. Required for log-probabilities of completions.
            has_tools: the text may contain tool calls.
            requires_calls: the text consists of tool calls only.
            num_dropped: number of messages that were dropped; None = the response does not contain it.
            with_usage: chunks have a usage, which is None except in the last one of a stream.
        """
        self.chat, self.with_usage = chat, with_usage
        self._token_decoder, self._with_log_probs, self._echoes = token_decoder, with_log_probs, echoes
        # True if responses may be large, because they have log-probabilities of the prompts.
        self.is_large = with_log_probs and any(echoes)
        self._object = 'chat.completion' if chat else 'text_completion'
        self._base_fields = {
            'id': f'{"chatcmpl" if chat else "cmpl"}-{uuid.uuid4().hex}',
            'created': int(time.time()),
            'model': model,
            'system_fingerprint': f'step-{step}',
            **({} if num_dropped is None else {'dropped_messages': num_dropped}),
        }
        self._requires_calls = requires_calls
        self._parsers = [ToolCallParser() for _ in echoes] if has_tools else None
        self._lists = [
            _CompletionLogProbs(token_decoder, prompt, echo)
            for prompt, echo in (zip(prompts, echoes, strict=True) if with_log_probs and not chat else ())
        ]

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks of a stream that precede all generated text."""
        if self.chat:
            start = {'delta': {'role': 'assistant', 'content': ''}, 'logprobs': None, 'finish_reason': None}
            return [self._chunk([{'index': i, **start}]) for i in range(len(self._echoes))]
        # With log-probabilities, an echo belongs to the delta that has those of the prompt.
        return [
            self._chunk([{'index': i, 'text': echo, 'logprobs': None, 'finish_reason': None}])
            for i, echo in enumerate(() if self._with_log_probs else self._echoes)
            if echo
        ]

    def chunk(self, choice: int, delta: Delta) -> dict[str, Any]:
        """Returns the stream chunk for one delta of a choice."""
        finish_reason: str | None = delta.finish_reason
        is_echo = self._with_log_probs and delta.prompt_scores is not None
        text: dict[str, Any] = {'text': (self._echoes[choice] if is_echo else '') + delta.text}
        if self.chat:
            content, calls, finish_reason = self._split(choice, delta.text, finish_reason)
            # The number of calls before this delta.
            first = self._parsers[choice].num_calls - len(calls) if self._parsers else 0
            numbered = [{'index': first + i, **call.fields} for i, call in enumerate(calls)]
            text = {'delta': ({'content': content} if content else {}) | ({'tool_calls': numbered} if calls else {})}
        log_probs = self._log_probs(choice, [delta])
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
            log_probs = self._log_probs(index, choice_deltas)
            choices.append({'index': index, **content, 'logprobs': log_probs, 'finish_reason': finish_reason})
        return {**self._base_fields, 'object': self._object, 'choices': choices, 'usage': usage}

    def _split(self, choice: int, text: str, finish_reason: str | None) -> tuple[str, list[ToolCall], str | None]:
        """Returns the content, the tool calls and the finish reason of a new text of a choice."""
        if self._parsers is None:
            return text, [], finish_reason
        parser = self._parsers[choice]
        # The grammar of tools excludes texts with an incomplete call, except if max_tokens or a stop string ends them.
        pieces = parser.feed(text, is_last=finish_reason is not None, allow_partial=True)
        if finish_reason == 'stop' and parser.num_calls and not parser.is_partial:
            finish_reason = 'tool_calls'
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        content = ''.join(piece for piece in pieces if isinstance(piece, str))
        # The text may end within the beginning of a call.
        is_beginning = self._requires_calls and BEGIN.startswith(content.strip())
        return '' if is_beginning else content, calls, finish_reason

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._base_fields,
            'object': f'{self._object}.chunk' if self.chat else self._object,
            'choices': choices,
            **({'usage': None} if self.with_usage else {}),
        }

    def _log_probs(self, choice: int, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        if not self._with_log_probs:
            return None
        if not self.chat:
            return self._lists[choice].fields(deltas)
        return _chat_log_probs(self._token_decoder, itertools.chain.from_iterable(delta.tokens for delta in deltas))


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Returns OpenAI's usage object."""
    return {
        'prompt_tokens': prompt_tokens,
        'completion_tokens': completion_tokens,
        'total_tokens': prompt_tokens + completion_tokens,
    }


def _finite(log_prob: float) -> float:
    """Returns a log-probability as a number that JSON has."""
    return log_prob if math.isfinite(log_prob) else _MIN_LOG_PROB
