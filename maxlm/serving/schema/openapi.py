"""OpenAPI document of the HTTP API."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from maxlm.serving.schema.generation import ChatCompletionRequest, CompletionRequest
from maxlm.serving.schema.paths import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    HEALTH,
    METRICS,
    MODELS,
    PUBLIC_PATHS,
    TOKENIZE,
    TOKENIZER_INFO,
)
from maxlm.serving.schema.tokens import DetokenizeRequest, EmbeddingRequest, TokenizeRequest

_REF = '#/components/schemas/{model}'
_ERROR = {
    'type': 'object',
    'properties': {
        'error': {
            'type': 'object',
            'properties': {
                'message': {'type': 'string', 'description': 'One line of text.'},
                'type': {'type': 'string', 'description': 'Kind of the error.'},
                'param': {'type': ['string', 'null'], 'description': 'Name of the invalid parameter.'},
                'code': {'type': ['string', 'null'], 'description': 'Machine-readable code.'},
            },
            'required': ['message', 'type', 'param', 'code'],
        }
    },
    'required': ['error'],
}


class _Endpoint(NamedTuple):
    """An endpoint: its request schema and examples of request and response."""

    path: str
    summary: str
    request: type[BaseModel] | None
    example: dict[str, Any] | None
    response: Any


def openapi_document(model: str, version: str) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of a server.

    Args:
        model: name of the served model, for examples.
        version: version of maxlm.
    """
    endpoints = _endpoints(model)
    mode: Literal['validation'] = 'validation'
    requests = [(endpoint.request, mode) for endpoint in endpoints if endpoint.request is not None]
    _, definitions = models_json_schema(requests, ref_template=_REF)
    return {
        'openapi': '3.1.0',
        'info': {
            'title': 'maxlm',
            'version': version,
            'description': 'OpenAI-compatible API. Other parameters of OpenAI are ignored if they have no effect, and '
            'rejected by name otherwise.',
        },
        'servers': [{'url': '/'}],
        'paths': {
            endpoint.path: {'get' if endpoint.request is None else 'post': _operation(endpoint)}
            for endpoint in endpoints
        },
        'components': {
            'schemas': {**definitions['$defs'], 'Error': _ERROR},
            'securitySchemes': {'key': {'type': 'http', 'scheme': 'bearer'}},
        },
    }


def _operation(endpoint: _Endpoint) -> dict[str, Any]:
    media_type = 'text/plain' if isinstance(endpoint.response, str) else 'application/json'
    error = {'description': 'Error', 'content': {'application/json': {'schema': {'$ref': _REF.format(model='Error')}}}}
    operation: dict[str, Any] = {
        'summary': endpoint.summary,
        'responses': {
            '200': {'description': 'Success', 'content': {media_type: {'example': endpoint.response}}},
            'default': error,
        },
    }
    if endpoint.path not in PUBLIC_PATHS:
        # The key is optional, because a server may have none.
        operation['security'] = [{'key': []}, {}]
    if endpoint.request is not None:
        schema = {'$ref': _REF.format(model=endpoint.request.__name__)}
        content = {'application/json': {'schema': schema, 'example': endpoint.example}}
        operation['requestBody'] = {'required': True, 'content': content}
    return operation


def _endpoints(model: str) -> list[_Endpoint]:
    hello = [{'role': 'user', 'content': 'Hello'}]
    usage = {'prompt_tokens': 9, 'completion_tokens': 3, 'total_tokens': 12}
    choice = {'index': 0, 'logprobs': None, 'finish_reason': 'stop'}
    created: dict[str, Any] = {'created': 1767225600, 'model': model}
    return [
        _Endpoint(
            CHAT,
            'Returns the next message of a conversation.',
            ChatCompletionRequest,
            {'model': model, 'messages': hello, 'max_tokens': 64},
            {
                'id': 'chatcmpl-1',
                'object': 'chat.completion',
                **created,
                'choices': [{**choice, 'message': {'role': 'assistant', 'content': 'Hello! How can I help?'}}],
                'usage': usage,
            },
        ),
        _Endpoint(
            COMPLETIONS,
            'Returns continuations of texts.',
            CompletionRequest,
            {'model': model, 'prompt': 'Once upon a time', 'max_tokens': 64},
            {
                'id': 'cmpl-1',
                'object': 'text_completion',
                **created,
                'choices': [{**choice, 'text': ' there was a fox.'}],
                'usage': usage,
            },
        ),
        _Endpoint(
            EMBEDDINGS,
            'Returns an embedding of each input: the mean of its last hidden states, normalized to an L2 norm of 1.',
            EmbeddingRequest,
            {'model': model, 'input': ['a fox', 'a dog']},
            {
                'object': 'list',
                'data': [
                    {'object': 'embedding', 'index': 0, 'embedding': [0.6, 0.8]},
                    {'object': 'embedding', 'index': 1, 'embedding': [0.8, 0.6]},
                ],
                'model': model,
                'usage': {'prompt_tokens': 4, 'total_tokens': 4},
            },
        ),
        _Endpoint(
            TOKENIZE,
            'Returns the token ids of a text or conversation.',
            TokenizeRequest,
            {'model': model, 'prompt': 'Hello'},
            {'count': 2, 'max_model_len': 2048, 'tokens': [39, 1184], 'token_strs': None},
        ),
        _Endpoint(
            DETOKENIZE,
            'Returns the text of token ids.',
            DetokenizeRequest,
            {'model': model, 'tokens': [39, 1184]},
            {'prompt': 'Hello'},
        ),
        _Endpoint(
            TOKENIZER_INFO,
            'Returns the special tokens and the chat template, for a server with --parse-special.',
            None,
            None,
            {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '<|endoftext|>', 'chat_template': None},
        ),
        _Endpoint(
            MODELS,
            'Returns the served model and its properties. /v1/models/NAME returns one model.',
            None,
            None,
            {'object': 'list', 'data': [{'id': model, 'object': 'model', 'owned_by': 'maxlm', 'max_model_len': 2048}]},
        ),
        _Endpoint(HEALTH, 'Returns status 200, or 503 during shutdown.', None, None, {'status': 'ok'}),
        _Endpoint(METRICS, 'Returns Prometheus metrics.', None, None, 'maxlm_running 0.0\n'),
    ]
