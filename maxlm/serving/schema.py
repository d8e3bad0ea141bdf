"""Request schema: OpenAI's parameters and some extensions of other servers.

An unsupported parameter that would change the response is rejected by name. Parameters without effect, such as `user`,
are accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from maxlm.inference.engine.requests import MAX_SAMPLES, MAX_STOPS, MAX_TOP_LOG_PROBS
from maxlm.serving.errors import ApiError, from_validation_error

MAX_SEED = 2**32 - 1
# Lower temperatures would overflow float32 logits.
MIN_TEMPERATURE = 1e-3
ROLES = ('system', 'developer', 'user', 'assistant')
_MAX_INT32 = 2**31 - 1
# Unsupported parameters → values that have no effect and are accepted.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
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
_UNSUPPORTED_IN_CHAT = {'echo': (None, False), 'suffix': (None,), 'prompt': (None,)}
_UNSUPPORTED_IN_COMPLETIONS = {'messages': (None,), 'max_completion_tokens': (None,), 'top_logprobs': (None,)}
_UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    'audio': (None,),
    'function_call': (None,),
    'tool_call_id': (None,),
    'tool_calls': (None, []),
}


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra='allow', allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(_Object):
    """Options of a stream."""

    include_usage: bool | None = None


class RequestBase(_Object):
    """Parameters of completion and chat requests. None means absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT32)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=_MAX_INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    # A text or a list of texts, validated by `stops`.
    stop: Any = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings.

        Raises:
            ApiError: `stop` is invalid.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(x, str) and x for x in stops):
            raise ApiError(
                400, f'stop: must be a string or at most {MAX_STOPS} strings, none of them empty', param='stop'
            )
        return tuple(stops)


class CompletionRequest(RequestBase):
    """The body of /v1/completions."""

    # A text, texts, token ids or lists of token ids, validated by `parse_prompts`.
    prompt: Any
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOG_PROBS)


class Message(_Object):
    """A message of a conversation."""

    role: str
    # A text or a list of text parts, validated by `message_text`.
    content: Any
    name: str | None = Field(None, max_length=200)


class ChatCompletionRequest(RequestBase):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOG_PROBS)


def parse_completion(body: bytes) -> CompletionRequest:
    """Parses a completion request. Raises ApiError if it is invalid or uses unsupported parameters."""
    try:
        request = CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise from_validation_error(error) from None
    # best_of equal to n has no effect.
    _reject_unsupported(request, _UNSUPPORTED | {'best_of': (None, request.n or 1)} | _UNSUPPORTED_IN_COMPLETIONS)
    _check_consistency(request)
    return request


def parse_chat(body: bytes, *, max_context: int) -> ChatCompletionRequest:
    """Parses a chat request. Raises ApiError if it is invalid or uses unsupported parameters."""
    try:
        request = ChatCompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise from_validation_error(error) from None
    # A template writes at least one token per message.
    _check_length('messages', request.messages, max_context)
    _reject_unsupported(request, _UNSUPPORTED | _UNSUPPORTED_IN_CHAT)
    _check_consistency(request)
    for index, message in enumerate(request.messages):
        _reject_unsupported(message, _UNSUPPORTED_IN_MESSAGES, f'messages[{index}].')
        if message.role not in ROLES:
            param = f'messages[{index}].role'
            raise ApiError(400, f'{param}={message.role!r}: must be one of {", ".join(ROLES)}', param=param)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, 'top_logprobs: requires logprobs=true', param='top_logprobs')
    if (
        None not in (request.max_tokens, request.max_completion_tokens)
        and request.max_tokens != request.max_completion_tokens
    ):
        raise ApiError(400, 'max_tokens and max_completion_tokens differ; send only one', param='max_tokens')
    return request


def parse_prompts(request: CompletionRequest, *, vocab_size: int, max_context: int) -> list[str] | list[list[int]]:
    """Returns the prompts: all texts or all lists of token ids.

    Their number is checked first, because there may be millions.

    Raises:
        ApiError: the prompts are invalid, too many or too long.
    """
    prompts = request.prompt
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, list) and prompts:
        if type(prompts[0]) is int:
            prompts = [prompts]
        if len(prompts) * (request.n or 1) > MAX_SAMPLES:
            raise ApiError(400, f'n: {len(prompts)} prompts × n exceeds {MAX_SAMPLES} choices', param='n')
        if all(isinstance(prompt, str) for prompt in prompts):
            return prompts
        longest = max((len(prompt) for prompt in prompts if isinstance(prompt, list)), default=0)
        if longest > max_context:
            raise ApiError(
                400,
                f'the context length is {max_context} tokens; the prompt has {longest}',
                param='prompt',
                code='context_length_exceeded',
            )
        if all(isinstance(prompt, list) and all(type(i) is int for i in prompt) for prompt in prompts):
            if all(0 <= i < vocab_size for prompt in prompts for i in prompt):
                return prompts
            raise ApiError(400, f'prompt: token ids must be from 0 to {vocab_size - 1}', param='prompt')
    raise ApiError(400, 'prompt: must be a string, strings, token ids, or lists of token ids', param='prompt')


def message_text(message: Message, message_index: int, *, max_parts: int) -> str:
    """Returns the text of a message.

    Raises:
        ApiError: the content is not text, or has too many parts.
    """
    param = f'messages[{message_index}].content'
    if isinstance(message.content, str):
        return message.content
    if not isinstance(message.content, list):
        raise ApiError(400, f'{param}: must be a string or a list of parts of type text', param=param)
    _check_length(param, message.content, max_parts)
    texts = []
    for index, part in enumerate(message.content):
        kind = part.get('type') if isinstance(part, dict) else None
        if kind != 'text' or not isinstance(part.get('text'), str):
            found = repr(kind)[:50] if isinstance(part, dict) else 'none'
            raise ApiError(
                400,
                f'{param}[{index}]: must be {{"type": "text", "text": "…"}}; found type {found}',
                param=f'{param}[{index}]',
            )
        texts.append(part['text'])
    return ''.join(texts)


def _reject_unsupported(fields: _Object, unsupported: dict[str, tuple[Any, ...]], prefix: str = '') -> None:
    for name, value in (fields.model_extra or {}).items():
        if name in unsupported and not any(value is accepted or value == accepted for accepted in unsupported[name]):
            param = f'{prefix}{name}'
            raise ApiError(400, f'{param}: is not supported; remove it', param=param, code='unsupported_parameter')


def _check_length(param: str, items: list[Any], max_length: int) -> None:
    if len(items) > max_length:
        raise ApiError(
            400,
            f'{param}: {len(items)} items exceed the context length of {max_length} tokens',
            param=param,
            code='context_length_exceeded',
        )


def _check_consistency(request: RequestBase) -> None:
    if request.temperature is not None and 0 < request.temperature < MIN_TEMPERATURE:
        raise ApiError(400, f'temperature: must be 0, or at least {MIN_TEMPERATURE}', param='temperature')
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, 'stream_options: requires stream=true', param='stream_options')
