"""What may stand in a request: OpenAI's parameters, and a few that other servers have besides.

A parameter that would change the answer and is not done here is refused by name. What changes nothing, such as `user`,
is taken and not read, as clients send it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from maxlm.inference.engine.requests import MAX_SAMPLES, MAX_STOPS, MAX_TOP_LOG_PROBS
from maxlm.serving.errors import ApiError, from_validation

MAX_SEED = 2**32 - 1
# Between 0 and this the logits would leave the range of float32.
MIN_TEMPERATURE = 1e-3
ROLES = ('system', 'developer', 'user', 'assistant')
_MANY = 2**31 - 1
# Parameters that are not done → the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    'add_generation_prompt': (None, True),
    'allowed_token_ids': (None, []),
    'audio': (None,),
    'bad_words': (None, []),
    'best_of': (None,),
    'chat_template': (None,),
    'chat_template_kwargs': (None, {}),
    'continue_final_message': (None, False),
    'documents': (None, []),
    'function_call': (None, 'none', 'auto'),
    'functions': (None, []),
    'guided_choice': (None,),
    'guided_grammar': (None,),
    'guided_json': (None,),
    'guided_regex': (None,),
    'length_penalty': (None, 1.0),
    'logit_bias': (None, {}),
    'logits_processors': (None, []),
    'min_tokens': (None, 0),
    'modalities': (None, ['text']),
    'prompt_logprobs': (None,),
    'reasoning_effort': (None, 'none'),
    'response_format': (None, {'type': 'text'}),
    'stop_token_ids': (None, []),
    'structured_outputs': (None,),
    'tool_choice': (None, 'none', 'auto'),
    'tools': (None, []),
    'truncate_prompt_tokens': (None,),
    'use_beam_search': (None, False),
    'verbosity': (None, 'medium'),
    'web_search_options': (None,),
}
_REFUSED_IN_CHAT = {'echo': (None, False), 'suffix': (None,), 'prompt': (None,)}
_REFUSED_IN_COMPLETIONS = {'messages': (None,), 'max_completion_tokens': (None,), 'top_logprobs': (None,)}
_REFUSED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    'audio': (None,),
    'function_call': (None,),
    'tool_call_id': (None,),
    'tool_calls': (None, []),
}


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra='allow', allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(_Object):
    """Of a stream."""

    include_usage: bool | None = None


class RequestBase(_Object):
    """What both kinds of requests have. None is as good as nothing."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(None, ge=1, le=_MANY)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=_MANY)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    # A text or a list of texts; see `stops`.
    stop: Any = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts to stop at.

        Raises:
            ApiError: it is none.
        """
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not isinstance(found, list) or len(found) > MAX_STOPS or not all(isinstance(x, str) and x for x in found):
            raise ApiError(400, f'stop: must be a text or up to {MAX_STOPS} texts, none of them empty', param='stop')
        return tuple(found)


class CompletionRequest(RequestBase):
    """The body of /v1/completions."""

    # A text, texts, ids or lists of ids; see `prompts`.
    prompt: Any
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOG_PROBS)


class Message(_Object):
    """One of a conversation."""

    role: str
    # A text, or parts of type text; see `text`.
    content: Any
    name: str | None = Field(None, max_length=200)


class ChatCompletionRequest(RequestBase):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MANY)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOG_PROBS)


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError when it is none, or asks for what is not done."""
    try:
        asked = CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None
    # As many as are given is what is drawn anyway.
    _refuse(asked, _REFUSED | {'best_of': (None, asked.n or 1)} | _REFUSED_IN_COMPLETIONS)
    _check(asked)
    return asked


def parse_chat(body: bytes, *, max_context: int) -> ChatCompletionRequest:
    """Raises ApiError when it is none, or asks for what is not done."""
    try:
        asked = ChatCompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None
    # A template writes at least a token for each.
    _check_number('messages', asked.messages, max_context)
    _refuse(asked, _REFUSED | _REFUSED_IN_CHAT)
    _check(asked)
    for number, message in enumerate(asked.messages):
        _refuse(message, _REFUSED_IN_MESSAGES, f'messages[{number}].')
        if message.role not in ROLES:
            param = f'messages[{number}].role'
            raise ApiError(400, f'{param}={message.role!r}: must be one of {", ".join(ROLES)}', param=param)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, 'top_logprobs: needs logprobs=true', param='top_logprobs')
    if None not in (asked.max_tokens, asked.max_completion_tokens) and asked.max_tokens != asked.max_completion_tokens:
        raise ApiError(400, 'max_tokens and max_completion_tokens differ; give one', param='max_tokens')
    return asked


def prompts_of(asked: CompletionRequest, *, vocab_size: int, max_context: int) -> list[str] | list[list[int]]:
    """The prompts, all texts or all ids. Their numbers are looked at first: there may be millions.

    Raises:
        ApiError: they are neither, or too many.
    """
    given = asked.prompt
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if type(given[0]) is int:
            given = [given]
        if len(given) * (asked.n or 1) > MAX_SAMPLES:
            raise ApiError(400, f'n: {len(given)} prompts × n are more than {MAX_SAMPLES} answers', param='n')
        if all(isinstance(one, str) for one in given):
            return given
        longest = max((len(one) for one in given if isinstance(one, list)), default=0)
        if longest > max_context:
            raise ApiError(
                400,
                f'the context has {max_context} tokens; the prompt has {longest}',
                param='prompt',
                code='context_length_exceeded',
            )
        if all(isinstance(one, list) and all(type(i) is int for i in one) for one in given):
            if all(0 <= i < vocab_size for one in given for i in one):
                return given
            raise ApiError(400, f'prompt: ids must be from 0 to {vocab_size - 1}', param='prompt')
    raise ApiError(400, 'prompt: must be a text, texts, token ids, or lists of token ids', param='prompt')


def text_of(message: Message, number: int, *, max_parts: int) -> str:
    """What a message says.

    Raises:
        ApiError: it is not text, or in too many parts.
    """
    param = f'messages[{number}].content'
    if isinstance(message.content, str):
        return message.content
    if not isinstance(message.content, list):
        raise ApiError(400, f'{param}: must be a text, or a list of parts of type text', param=param)
    _check_number(param, message.content, max_parts)
    texts = []
    for place, part in enumerate(message.content):
        kind = part.get('type') if isinstance(part, dict) else None
        if kind != 'text' or not isinstance(part.get('text'), str):
            told = repr(kind)[:50] if isinstance(part, dict) else 'none'
            raise ApiError(
                400,
                f'{param}[{place}]: must be {{"type": "text", "text": "…"}}; its type is {told}',
                param=f'{param}[{place}]',
            )
        texts.append(part['text'])
    return ''.join(texts)


def _refuse(given: _Object, refused: dict[str, tuple[Any, ...]], prefix: str = '') -> None:
    for name, value in (given.model_extra or {}).items():
        if name in refused and not any(value is one or value == one for one in refused[name]):
            param = f'{prefix}{name}'
            raise ApiError(400, f'{param}: is not done here; leave it out', param=param, code='unsupported_parameter')


def _check_number(param: str, items: list[Any], most: int) -> None:
    if len(items) > most:
        raise ApiError(
            400,
            f'{param}: {len(items)} are more than the {most} tokens of the context',
            param=param,
            code='context_length_exceeded',
        )


def _check(asked: RequestBase) -> None:
    if asked.temperature is not None and 0 < asked.temperature < MIN_TEMPERATURE:
        raise ApiError(400, f'temperature: must be 0, or at least {MIN_TEMPERATURE}', param='temperature')
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, 'stream_options: needs stream=true', param='stream_options')
