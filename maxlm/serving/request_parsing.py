"""Converts API requests to engine requests."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.jinja import ChatError
from maxlm.data.documents.messages import MessageError, normalize_message
from maxlm.data.tokenizer.longest_token import longest_token
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.inference.engine.grammar import json_grammar
from maxlm.inference.engine.requests import Request
from maxlm.inference.fit_conversation import answer_length, fit_conversation
from maxlm.inference.prompts import infill_prompt, text_prompt
from maxlm.inference.sampling import Sampling
from maxlm.inference.tool_calls import BEGIN
from maxlm.serving.engine_thread import EngineLike
from maxlm.serving.schema.errors import ApiError, from_input_error
from maxlm.serving.schema.generation import (
    MAX_SEED,
    ChatCompletionRequest,
    CompletionRequest,
    Message,
    RequestBase,
    TemplateOptions,
    check_sizes,
    completion_prompts,
)
from maxlm.serving.schema.response_format import PARAM as RESPONSE_FORMAT
from maxlm.serving.schema.response_format import response_schema
from maxlm.serving.schema.tools import call_options

# Maximum number of log-probabilities of prompts in one response, which has about 30 bytes for each.
MAX_PROMPT_SCORES = 2**20


class ModelDetails(NamedTuple):
    """Properties of a model that /v1/models and the chat page show.

    Attributes:
        num_parameters: number of parameters.
        dim: number of dimensions of the hidden states.
        dtype: dtype of computation.
        weight_quantization: format of the kernels; float = not quantized.
        kv_cache_dtype: dtype of keys and values.
    """

    num_parameters: int
    dim: int
    dtype: str
    weight_quantization: str
    kv_cache_dtype: str


class ServedModel(NamedTuple):
    """A model and the name under which it is served.

    With `parse_special`, names of special tokens in text prompts become their ids, unless a request says otherwise.
    Without `share_prefixes`, requests reuse cached prefixes only of requests with the same `cache_salt`.
    """

    name: str
    step: int
    tokenizer: Tokenizer
    chat: ChatEncoder | None
    engine: EngineLike
    details: ModelDetails
    parse_special: bool = False
    share_prefixes: bool = True

    def cache_salt(self, salt: str | None = None) -> str:
        """Returns the salt of an engine request for that of an API request."""
        # No client can send the salts that start with the other letter.
        return f'c{salt}' if salt else '' if self.share_prefixes else f'r{secrets.token_hex(16)}'


class EngineRequests(NamedTuple):
    """Engine requests of one API request.

    Attributes:
        requests: one request per prompt.
        echoes: text to echo before each response; '' = none.
        has_tools: responses may contain tool calls.
        requires_calls: responses consist of tool calls only.
        grammar_param: parameter that the grammar of the requests comes from.
        grammar_parts: grammar of each parameter that is a part of the grammar, for errors.
        num_dropped: number of messages that were dropped; None = the request does not allow it.
    """

    requests: list[Request]
    echoes: list[str]
    has_tools: bool = False
    requires_calls: bool = False
    grammar_param: str = RESPONSE_FORMAT
    grammar_parts: Mapping[str, str] = MappingProxyType({})
    num_dropped: int | None = None


def parse_completion_request(api_request: CompletionRequest, served: ServedModel, *, max_tokens: int) -> EngineRequests:
    """Converts a completion request. Tokenizes the prompts, which can take long.

    Args:
        api_request: parsed body.
        served: the served model.
        max_tokens: limit of the server; 0 = limited by the context only.

    Raises:
        ApiError: a parameter is invalid, or the prompt does not fit.
    """
    tokenizer = served.tokenizer
    parse_special = served.parse_special if api_request.parse_special is None else api_request.parse_special
    prompts = completion_prompts(api_request, vocab_size=tokenizer.vocab_size, max_context=served.engine.max_context)
    for prompt in prompts:
        if isinstance(prompt, str):
            check_size(prompt + (api_request.suffix or ''), served, 'prompt', parse_special=parse_special)
    try:
        ids = [_encode_prompt(prompt, api_request, tokenizer, parse_special=parse_special) for prompt in prompts]
    except InputError as error:
        raise ApiError(400, str(error), param='prompt' if api_request.suffix is None else 'suffix') from error
    echoes = ['' for _ in ids]
    if api_request.echo:
        echoes = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts]
    limit = api_request.max_tokens
    # Without tokens to generate, the scores of the prompt are all that the engine can compute.
    score_prompt = bool(api_request.echo) and (api_request.logprobs is not None or limit == 0)
    num_scores = sum(map(len, ids)) * (1 + (api_request.logprobs or 0)) * (api_request.n or 1)
    if score_prompt and num_scores > MAX_PROMPT_SCORES:
        raise ApiError(
            400,
            f'logprobs: {num_scores} log-probabilities of prompts exceed {MAX_PROMPT_SCORES}; send fewer prompts per '
            'request',
            param='logprobs',
        )
    cache_salt = served.cache_salt(api_request.cache_salt)
    requests = [
        _engine_request(
            prompt,
            api_request,
            served,
            limit=limit,
            max_allowed=max_tokens,
            top_log_probs=api_request.logprobs,
            param='prompt',
            cache_salt=cache_salt,
            score_prompt=score_prompt,
        )
        for prompt in ids
    ]
    return EngineRequests(requests, echoes)


def parse_chat_request(api_request: ChatCompletionRequest, served: ServedModel, *, max_tokens: int) -> EngineRequests:
    """Converts a chat request. Renders and tokenizes the conversation, which can take long.

    Args:
        api_request: parsed body.
        served: the served model.
        max_tokens: limit of the server; 0 = limited by the context only.

    Raises:
        ApiError: a parameter is invalid, the prompt does not fit, the model has no chat template, or the template
            rejects the conversation.
    """
    options = call_options(api_request.tools, api_request.tool_choice, api_request.parallel_tool_calls)
    if options is not None:
        check_tools(api_request, served)
    tools = () if options is None else options.tools
    top_log_probs = (api_request.top_logprobs or 0) if api_request.logprobs else None
    limit = api_request.max_completion_tokens if api_request.max_tokens is None else api_request.max_tokens
    # The longest prompt, if the oldest turns may be dropped.
    room = served.engine.max_context - answer_length(served.engine.max_context, limit, max_tokens)
    longest = room if api_request.truncation == 'auto' else None
    ids, num_dropped = conversation_ids(
        api_request.messages, served, tools=tools, options=api_request, max_prompt_tokens=longest
    )
    request = _engine_request(
        ids,
        api_request,
        served,
        limit=limit,
        max_allowed=max_tokens,
        top_log_probs=top_log_probs,
        param='messages',
        cache_salt=served.cache_salt(api_request.cache_salt),
        grammar='' if options is None else options.grammar,
    )
    dropped = num_dropped if api_request.truncation == 'auto' else None
    if options is None:
        return EngineRequests([request], [''], num_dropped=dropped)
    return EngineRequests(
        [request],
        [''],
        num_dropped=dropped,
        has_tools=True,
        requires_calls=options.is_required,
        grammar_param='tools',
        grammar_parts=options.parts,
    )


def check_tools(api_request: ChatCompletionRequest, served: ServedModel) -> None:
    """Raises ApiError if the model or other parameters do not support tools."""
    if response_schema(api_request.response_format) is not None:
        raise ApiError(400, 'tools: not supported with response_format; remove one of them', param='tools')
    if served.chat is not None:
        # As a special token, the beginning of a call would not be in the text of the response.
        is_special = any(token.content == BEGIN for token in served.tokenizer.special_tokens.values())
        if is_special or BEGIN not in served.chat.template.source:
            raise ApiError(
                400, f'tools: the chat template of {served.name} has no calls in {BEGIN}; remove tools', param='tools'
            )


def conversation_ids(
    messages: Sequence[Message],
    served: ServedModel,
    *,
    tools: Sequence[dict[str, Any]] = (),
    options: TemplateOptions | None = None,
    max_prompt_tokens: int | None = None,
) -> tuple[list[int], int]:
    """Returns the token ids of a conversation, by default with the beginning of its next message.

    Args:
        messages: messages of the conversation.
        served: the served model.
        tools: tools for the chat template.
        options: options of the chat template.
        max_prompt_tokens: drop the oldest turns of a longer conversation; None = keep all.

    Returns:
        The ids, and the number of messages that were dropped.

    Raises:
        ApiError: the model has no chat template, the template rejects the conversation, or the text is too long.
    """
    if served.chat is None:
        raise ApiError(
            400,
            f'the model {served.name} has no chat template; use /v1/completions',
            param='messages',
            code='no_chat_template',
        )
    chat = served.chat
    continues = bool(options and options.continue_final_message)
    begins_answer = options is None or options.add_generation_prompt is not False

    def encode(turns: Sequence[Mapping[str, Any]]) -> list[int]:
        rendered = chat.render_prompt(
            turns,
            tools=tools,
            add_generation_prompt=not continues and begins_answer,
            continue_final_message=continues,
            template_kwargs=options.chat_template_kwargs if options else None,
        )
        # Check the length after rendering, because a template may omit much of its input.
        # The names of its special tokens are longer than other tokens of some tokenizers.
        check_size(rendered.text, served, 'messages', parse_special=True)
        return chat.encode_rendered(rendered).tolist()

    def fits(turns: Sequence[Mapping[str, Any]]) -> bool:
        # A template writes at least one token per message.
        if max_prompt_tokens is None or len(turns) > served.engine.max_context:
            return max_prompt_tokens is None
        try:
            return len(encode(turns)) <= max_prompt_tokens
        except ApiError:
            return False

    turns = [_turn(message, number, served) for number, message in enumerate(messages)]
    try:
        fitted = fit_conversation(turns, fits)
        return encode(fitted.messages), fitted.num_dropped
    except (ChatError, InputError) as error:
        raise ApiError(400, f'messages: {error}', param='messages') from error


def _turn(message: Message, number: int, served: ServedModel) -> dict[str, Any]:
    """Returns a message in the form that chat templates take, as training does. Raises ApiError."""
    check_sizes(message, number, max_parts=served.engine.max_context)
    try:
        return normalize_message({key: value for key, value in message if key != 'weight'})
    except MessageError as error:
        param = f'messages[{number}].{error.field}'
        raise ApiError(400, f'{param}: {error.problem}', param=param) from error


def check_size(text: str, served: ServedModel, param: str, *, parse_special: bool = False) -> None:
    """Raises ApiError, before tokenization, if a text is certainly longer than the context."""
    longest, size = longest_token(served.tokenizer, parse_special=parse_special), len(text.encode())
    if longest is not None and size > longest * served.engine.max_context:
        raise ApiError(
            400,
            f'the context length is {served.engine.max_context} tokens; the prompt has {size} bytes, which exceeds it',
            param=param,
            code='context_length_exceeded',
        )


def _encode_prompt(
    prompt: str | list[int], api_request: CompletionRequest, tokenizer: Tokenizer, *, parse_special: bool
) -> list[int]:
    if api_request.suffix is not None:
        if not isinstance(prompt, str):
            raise InputError('suffix: the prompt must be a string')
        return infill_prompt(tokenizer, prompt, api_request.suffix)
    if isinstance(prompt, str):
        return text_prompt(
            tokenizer,
            prompt,
            add_special_tokens=api_request.add_special_tokens is not False,
            parse_special=parse_special,
        )
    return prompt


def _engine_request(
    ids: list[int],
    api_request: RequestBase,
    served: ServedModel,
    *,
    limit: int | None,
    max_allowed: int,
    top_log_probs: int | None,
    param: str,
    cache_salt: str,
    grammar: str = '',
    score_prompt: bool = False,
) -> Request:
    available = served.engine.max_context - len(ids)
    if available < (1 if limit is None else limit):
        detail = '' if limit is None else f' and max_tokens={limit}'
        raise ApiError(
            400,
            f'the context length is {served.engine.max_context} tokens; the prompt has {len(ids)}{detail}',
            param=param,
            code='context_length_exceeded',
        )
    if limit is not None and max_allowed and limit > max_allowed:
        raise ApiError(400, f'max_tokens={limit}: must be at most {max_allowed}', param='max_tokens')
    schema = response_schema(api_request.response_format)
    try:
        request = Request(
            prompt=tuple(ids),
            max_tokens=min(available, max_allowed or available) if limit is None else limit,
            sampling=_sampling(api_request),
            seed=secrets.randbelow(MAX_SEED + 1) if api_request.seed is None else api_request.seed & MAX_SEED,
            num_samples=api_request.n or 1,
            stops=api_request.stops,
            top_log_probs=top_log_probs,
            ignore_eos=bool(api_request.ignore_eos),
            grammar=grammar if schema is None else json_grammar(schema),
            score_prompt=score_prompt,
            cache_salt=cache_salt,
        )
        served.engine.check(request)
    except InputError as error:
        raise from_input_error(error, param) from error
    return request


def _sampling(api_request: RequestBase) -> Sampling:
    names = ('temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty', 'presence_penalty', 'frequency_penalty')
    return Sampling(**{name: value for name in names if (value := getattr(api_request, name)) is not None})
