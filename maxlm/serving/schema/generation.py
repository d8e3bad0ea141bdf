"""Schema of completion and chat requests: OpenAI's parameters and some extensions of other servers.

An unsupported parameter that would change the response is rejected by name. Parameters without effect, such as `user`,
are accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, ValidationError, WithJsonSchema

from maxlm.data.chat.template import RESERVED
from maxlm.inference.engine.requests import MAX_SAMPLES, MAX_STOPS, MAX_TOP_LOG_PROBS
from maxlm.serving.schema.base import OPTIONAL_TEXTS_SCHEMA, PROMPTS_SCHEMA, RequestObject, parse_prompts
from maxlm.serving.schema.errors import ApiError, from_validation_error
from maxlm.serving.schema.response_format import RESPONSE_FORMAT_SCHEMA
from maxlm.serving.schema.tools import CHOICE_SCHEMA, MAX_TOOLS, Tool

MAX_SEED = 2**32 - 1
# Lower temperatures would overflow float32 logits.
MIN_TEMPERATURE = 1e-3
# `function` is OpenAI's older name of `tool`.
ROLES = ('system', 'developer', 'user', 'assistant', 'tool', 'function')
_MAX_INT32 = 2**31 - 1
# Unsupported parameters → values that have no effect and are accepted.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    'allowed_token_ids': (None, []),
    'audio': (None,),
    'bad_words': (None, []),
    'best_of': (None,),
    'chat_template': (None,),
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
    'parse_special': (None, False),
    'prompt_logprobs': (None,),
    'reasoning_effort': (None, 'none'),
    'stop_token_ids': (None, []),
    'structured_outputs': (None,),
    'truncate_prompt_tokens': (None,),
    'use_beam_search': (None, False),
    'verbosity': (None, 'medium'),
    'web_search_options': (None,),
}
_UNSUPPORTED_IN_CHAT = {'echo': (None, False), 'suffix': (None,), 'prompt': (None,)}
_UNSUPPORTED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    'add_generation_prompt': (None, True),
    'chat_template_kwargs': (None, {}),
    'continue_final_message': (None, False),
    'messages': (None,),
    'max_completion_tokens': (None,),
    'top_logprobs': (None,),
    'tool_choice': (None, 'none', 'auto'),
    'tools': (None, []),
    'truncation': (None, 'disabled'),
}
_UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {'audio': (None,)}


class StreamOptions(RequestObject):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description='End the stream with a chunk that contains the usage.')


class RequestBase(RequestObject):
    """Parameters of completion and chat requests. None means absent."""

    model: str | None = Field(None, description='Name of the served model.')
    stream: bool | None = Field(None, description='Send the response as server-sent events.')
    stream_options: StreamOptions | None = Field(None, description='Options of a stream.')
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES, description='Number of choices per prompt. Default: 1.')
    max_tokens: int | None = Field(
        None, ge=1, le=_MAX_INT32, description='Maximum number of tokens of a choice. Default: the rest of the context.'
    )
    temperature: float | None = Field(
        None, ge=0, le=100, description='Divisor of the logits. 0: the most likely token. Default: 1.'
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description='Sample from the most likely tokens whose probabilities sum to this value.'
    )
    top_k: int | None = Field(
        None, ge=0, le=_MAX_INT32, description='Sample from this number of most likely tokens. 0: all.'
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description='Minimum probability of a token, relative to that of the most likely token.'
    )
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description='Penalty of tokens in the prompt and the choice. 1: none.'
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description='Amount subtracted from the logits of tokens that the choice contains.'
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description='Amount subtracted from the logits per occurrence of a token in the choice.'
    )
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description='Seed of the samples; only its low 32 bits are used. Default: random.'
    )
    # Validated by `stops`.
    stop: Annotated[Any, WithJsonSchema(OPTIONAL_TEXTS_SCHEMA)] = Field(
        None, description=f'A string or up to {MAX_STOPS} strings that end a choice and are not part of it.'
    )
    ignore_eos: bool | None = Field(None, description='Continue after an end token.')
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description='Reuse cached prefixes only of requests with the same salt, a secret of the client.',
    )
    # Validated by `response_schema`.
    response_format: Annotated[Any, WithJsonSchema(RESPONSE_FORMAT_SCHEMA)] = Field(
        None, description='Restrict each choice to a JSON object, or to JSON that follows a schema.'
    )

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


ADD_SPECIAL_TOKENS = 'Put the beginning of text, if the tokenizer adds one, before a text. Default: true.'


class CompletionRequest(RequestBase):
    """The body of /v1/completions."""

    # Validated by `parse_prompts`.
    prompt: Annotated[Any, WithJsonSchema(PROMPTS_SCHEMA)] = Field(
        description='A string, strings, token ids, or lists of token ids.'
    )
    suffix: str | None = Field(
        None, description='Text after the completion, for models trained with fill-in-the-middle.'
    )
    add_special_tokens: bool | None = Field(None, description=ADD_SPECIAL_TOKENS)
    echo: bool | None = Field(None, description='Begin each choice with its prompt.')
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=_MAX_INT32,
        description='Maximum number of tokens of a choice; 0 requires echo. Default: the rest of the context.',
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOG_PROBS,
        description='Return log-probabilities, and this number of most likely tokens. With echo, also of the prompt.',
    )
    parse_special: bool | None = Field(
        None,
        description='Encode names of special tokens in text prompts as their ids. Default: that of the server.',
    )


_PARTS_SCHEMA = {
    'type': 'array',
    'items': {
        'type': 'object',
        'properties': {'type': {'const': 'text'}, 'text': {'type': 'string'}},
        'required': ['type', 'text'],
    },
}


class Message(RequestObject):
    """A message of a conversation."""

    role: str = Field(description=f'One of {", ".join(ROLES)}.')
    # Content and calls are validated by `normalize_message`.
    content: Annotated[Any, WithJsonSchema({'anyOf': [{'type': 'string'}, _PARTS_SCHEMA, {'type': 'null'}]})] = Field(
        None, description='A text, or a list of parts of type text. May be absent in a message with tool calls.'
    )
    tool_calls: Annotated[Any, WithJsonSchema({'type': ['array', 'null'], 'items': {'type': 'object'}})] = Field(
        None, description='Tool calls of the assistant.'
    )
    tool_call_id: str | None = Field(None, max_length=200, description='In a message of role tool: id of its call.')
    name: str | None = Field(None, max_length=200, description='Name of the author, for chat templates that use it.')


class TemplateOptions(RequestObject):
    """Parameters of requests that render a conversation."""

    add_generation_prompt: bool | None = Field(
        None,
        description='End the prompt with the beginning of the response. Default: true, unless the last message is '
        'continued.',
    )
    continue_final_message: bool | None = Field(
        None, description='Continue the last message. Excludes add_generation_prompt.'
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description='Variables of the chat template, such as enable_thinking.'
    )


class ChatCompletionRequest(RequestBase, TemplateOptions):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, description='The conversation so far.')
    truncation: Literal['auto', 'disabled'] | None = Field(
        None,
        description='auto: drop the oldest turns of a conversation that does not fit the context; dropped_messages of '
        'the response is their number of messages. Default: disabled.',
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT32, description='Same as max_tokens.')
    logprobs: bool | None = Field(None, description='Return the log-probabilities of the tokens.')
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOG_PROBS, description='Number of most likely tokens to return. Requires logprobs.'
    )
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, description='Functions that the model may call.')
    # Validated by `call_options`.
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE_SCHEMA)] = Field(
        None, description='Whether the model may, must or must not call functions, or which one it must call.'
    )
    parallel_tool_calls: bool | None = Field(None, description='Allow several calls in one choice. Default: true.')


def parse_completion(body: bytes) -> CompletionRequest:
    """Parses a completion request. Raises ApiError if it is invalid or uses unsupported parameters."""
    try:
        request = CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise from_validation_error(error) from None
    # best_of equal to n has no effect.
    reject_unsupported(request, UNSUPPORTED | {'best_of': (None, request.n or 1)} | _UNSUPPORTED_IN_COMPLETIONS)
    _check_consistency(request)
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(
            400, 'max_tokens=0: requires echo=true, since the choices would be empty otherwise', param='max_tokens'
        )
    if request.suffix is not None and request.parse_special:
        raise ApiError(
            400,
            'parse_special: not supported with suffix; write the fill-in-the-middle tokens in the prompt',
            param='parse_special',
        )
    if request.suffix is not None and request.echo and request.logprobs is not None:
        raise ApiError(400, 'echo: not supported with suffix and logprobs; remove one of them', param='echo')
    return request


def parse_chat(body: bytes, *, max_context: int) -> ChatCompletionRequest:
    """Parses a chat request. Raises ApiError if it is invalid or uses unsupported parameters."""
    try:
        request = ChatCompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise from_validation_error(error) from None
    check_messages(request.messages, max_context=None if request.truncation == 'auto' else max_context)
    reject_unsupported(request, UNSUPPORTED | _UNSUPPORTED_IN_CHAT)
    check_template_options(request)
    _check_consistency(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, 'top_logprobs: requires logprobs=true', param='top_logprobs')
    if (
        None not in (request.max_tokens, request.max_completion_tokens)
        and request.max_tokens != request.max_completion_tokens
    ):
        raise ApiError(400, 'max_tokens and max_completion_tokens differ; send only one', param='max_tokens')
    return request


def check_messages(messages: list[Message], *, max_context: int | None) -> None:
    """Raises ApiError if a conversation has too many messages, an unknown role or an unsupported field."""
    if max_context is not None:
        # A template writes at least one token per message.
        _check_length('messages', messages, max_context)
    for index, message in enumerate(messages):
        reject_unsupported(message, _UNSUPPORTED_IN_MESSAGES, f'messages[{index}].')
        if message.role not in ROLES:
            param = f'messages[{index}].role'
            raise ApiError(400, f'{param}={message.role!r}: must be one of {", ".join(ROLES)}', param=param)


def check_template_options(request: TemplateOptions) -> None:
    """Raises ApiError if options of the chat template exclude each other, or a variable cannot be set."""
    if request.continue_final_message and request.add_generation_prompt:
        param = 'continue_final_message'
        raise ApiError(400, f'{param}: cannot be true together with add_generation_prompt; set one', param=param)
    if reserved := sorted(RESERVED & set(request.chat_template_kwargs or {})):
        param = f'chat_template_kwargs.{reserved[0]}'
        raise ApiError(400, f'{param}: cannot be set here; remove it', param='chat_template_kwargs')


def completion_prompts(request: CompletionRequest, *, vocab_size: int, max_context: int) -> list[str] | list[list[int]]:
    """Returns the prompts of a request: all texts or all lists of token ids.

    Raises:
        ApiError: the prompts are invalid, too many or too long.
    """
    max_prompts = MAX_SAMPLES // (request.n or 1)
    return parse_prompts(
        request.prompt, 'prompt', max_prompts=max_prompts, vocab_size=vocab_size, max_context=max_context
    )


def check_sizes(message: Message, message_index: int, *, max_parts: int) -> None:
    """Raises ApiError if a message has too many parts or tool calls."""
    if isinstance(message.content, list):
        _check_length(f'messages[{message_index}].content', message.content, max_parts)
    if isinstance(message.tool_calls, list) and len(message.tool_calls) > MAX_TOOLS:
        param = f'messages[{message_index}].tool_calls'
        raise ApiError(400, f'{param}: must have at most {MAX_TOOLS} calls', param=param)


def reject_unsupported(fields: RequestObject, unsupported: dict[str, tuple[Any, ...]], prefix: str = '') -> None:
    """Raises ApiError if a request has an unsupported field with an effect."""
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
