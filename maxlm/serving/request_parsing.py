"""A request of the API → requests of the engine."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.jinja import ChatError
from maxlm.data.tokenizer.longest_token import longest_token
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.inference.engine.requests import Request
from maxlm.inference.prompts import infill_prompt
from maxlm.inference.sampling import Sampling
from maxlm.serving.engine_thread import EngineLike
from maxlm.serving.errors import ApiError, from_input
from maxlm.serving.schema import MAX_SEED, ChatCompletionRequest, CompletionRequest, RequestBase, prompts_of, text_of


class ServedModel(NamedTuple):
    """A model by the name that it is served under."""

    name: str
    step: int
    tokenizer: Tokenizer
    chat: ChatEncoder | None
    engine: EngineLike


class EngineRequests(NamedTuple):
    """Of one request: what the engine is asked, and the texts that come before each answer, '' for none."""

    requests: list[Request]
    echoes: list[str]


def ask_completions(asked: CompletionRequest, served: ServedModel, *, max_tokens: int) -> EngineRequests:
    """`max_tokens` is the server's limit, 0 = what the context leaves. Takes as long as the tokenizer.

    Raises:
        ApiError: a parameter is wrong, or the prompt does not fit.
    """
    if asked.echo and asked.logprobs is not None:
        raise ApiError(400, 'echo: prompts have no log-probabilities here; leave out one of the two', param='echo')
    tokenizer = served.tokenizer
    prompts = prompts_of(asked, vocab_size=tokenizer.vocab_size, max_context=served.engine.max_context)
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_size(prompt + (asked.suffix or ''), served, 'prompt')
    try:
        ids = [_ids(prompt, asked.suffix, tokenizer) for prompt in prompts]
    except InputError as error:
        raise ApiError(400, str(error), param='prompt' if asked.suffix is None else 'suffix') from error
    echoes = ['' for _ in ids]
    if asked.echo:
        echoes = [one if isinstance(one, str) else tokenizer.decode(one) for one in prompts]
    limit = asked.max_tokens
    requests = [
        _request(one, asked, served, limit=limit, most=max_tokens, top=asked.logprobs, param='prompt') for one in ids
    ]
    return EngineRequests(requests, echoes)


def parse_chat_request(asked: ChatCompletionRequest, served: ServedModel, *, max_tokens: int) -> EngineRequests:
    """As above, of a conversation.

    Raises:
        ApiError: the same, or the model has no chat template, or it does not take the conversation.
    """
    if served.chat is None:
        raise ApiError(
            400,
            f'the model {served.name} has no chat template: it continues texts; use /v1/completions',
            param='messages',
            code='no_chat_template',
        )
    messages = [
        {
            'role': message.role,
            'content': text_of(message, number, max_parts=served.engine.max_context),
            **({'name': message.name} if message.name else {}),
        }
        for number, message in enumerate(asked.messages)
    ]
    try:
        rendered = served.chat.render_prompt(messages)
        # Only now: a template may leave out much of what it gets.
        _check_size(rendered.text, served, 'messages')
        ids = served.chat.encode_rendered(rendered).tolist()
    except (ChatError, InputError) as error:
        raise ApiError(400, f'messages: {error}', param='messages') from error
    top = (asked.top_logprobs or 0) if asked.logprobs else None
    limit = asked.max_completion_tokens if asked.max_tokens is None else asked.max_tokens
    request = _request(ids, asked, served, limit=limit, most=max_tokens, top=top, param='messages')
    return EngineRequests([request], [''])


def _check_size(text: str, served: ServedModel, param: str) -> None:
    """Raises ApiError for a text that has more tokens than the context, before it is tokenized."""
    longest, size = longest_token(served.tokenizer), len(text.encode())
    if longest is not None and size > longest * served.engine.max_context:
        raise ApiError(
            400,
            f'the context has {served.engine.max_context} tokens; the prompt has {size} bytes, which are more',
            param=param,
            code='context_length_exceeded',
        )


def _ids(prompt: str | list[int], suffix: str | None, tokenizer: Tokenizer) -> list[int]:
    if suffix is not None:
        if not isinstance(prompt, str):
            raise InputError('suffix: the prompt must be a text')
        return infill_prompt(tokenizer, prompt, suffix)
    if isinstance(prompt, str):
        return tokenizer.encode_batch([prompt])[0].tolist()
    return prompt


def _request(
    ids: list[int],
    asked: RequestBase,
    served: ServedModel,
    *,
    limit: int | None,
    most: int,
    top: int | None,
    param: str,
) -> Request:
    left = served.engine.max_context - len(ids)
    if left < (limit or 1):
        told = '' if limit is None else f', and max_tokens={limit}'
        raise ApiError(
            400,
            f'the context has {served.engine.max_context} tokens; the prompt has {len(ids)}{told}',
            param=param,
            code='context_length_exceeded',
        )
    if limit is not None and most and limit > most:
        raise ApiError(400, f'max_tokens={limit}: at most {most} here', param='max_tokens')
    try:
        request = Request(
            prompt=tuple(ids),
            max_tokens=limit or min(left, most or left),
            sampling=_sampling(asked),
            seed=secrets.randbelow(MAX_SEED + 1) if asked.seed is None else asked.seed,
            num_samples=asked.n or 1,
            stops=asked.stops,
            top_log_probs=top,
            ignore_ends=bool(asked.ignore_eos),
        )
        served.engine.check(request)
    except InputError as error:
        raise from_input(error, param) from error
    return request


def _sampling(asked: RequestBase) -> Sampling:
    names = ('temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty', 'presence_penalty', 'frequency_penalty')
    return Sampling(**{name: value for name in names if (value := getattr(asked, name)) is not None})
