"""Documentation of the endpoints, from which FastAPI creates the OpenAPI document.

FastAPI describes only bodies that it parses. The endpoints parse bodies themselves, within limits, so the schemas of
requests are added here.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from fastapi import FastAPI
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse, PlainTextResponse

from maxlm.serving.schema import paths
from maxlm.serving.schema.generation import ChatCompletionRequest, CompletionRequest
from maxlm.serving.schema.tokens import DetokenizeRequest, EmbeddingRequest, TokenizeRequest

DESCRIPTION = (
    'OpenAI-compatible API. Other parameters of OpenAI are ignored if they have no effect, and rejected by name '
    'otherwise.'
)
_REF = '#/components/schemas/{model}'


class ErrorDetail(BaseModel):
    """An error."""

    message: str = Field(description='One line of text.')
    type: str = Field(description='Kind of the error.')
    param: str | None = Field(description='Name of the invalid parameter.')
    code: str | None = Field(description='Machine-readable code.')


class Error(BaseModel):
    """The body of an error response."""

    error: ErrorDetail = Field(description='The error.')


class _Endpoint(NamedTuple):
    """An endpoint: its request schema and examples of request and response."""

    path: str
    summary: str
    request: type[BaseModel] | None
    example: dict[str, Any] | None
    response: Any

    def route_options(self) -> dict[str, Any]:
        response_class = PlainTextResponse if isinstance(self.response, str) else JSONResponse
        content: dict[str, Any] = {response_class.media_type: {'example': self.response}}
        if self.path in paths.COMPLETION_PATHS:
            content['text/event-stream'] = {
                'schema': {
                    'type': 'string',
                    'description': 'With stream=true: events `data: CHUNK`, where CHUNK is JSON, and finally '
                    '`data: [DONE]`. An error is also an event.',
                }
            }
        # The key is optional, because a server may have none.
        extra: dict[str, Any] = {} if self.path in paths.PUBLIC_PATHS else {'security': [{'key': []}, {}]}
        if self.request is not None:
            body = {'schema': {'$ref': _REF.format(model=self.request.__name__)}, 'example': self.example}
            extra['requestBody'] = {'required': True, 'content': {'application/json': body}}
        return {
            'summary': self.summary,
            'response_class': response_class,
            'responses': {
                200: {'description': 'Success', 'content': content},
                'default': {'description': 'Error', 'model': Error},
            },
            'openapi_extra': extra,
        }


def route_options(model: str) -> dict[str, dict[str, Any]]:
    """Returns options of FastAPI's routes, by path. `model` is the name of the served model, for examples."""
    return {endpoint.path: endpoint.route_options() for endpoint in _endpoints(model)}


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of an app whose routes have these options."""
    document = app.openapi()
    mode: Literal['validation'] = 'validation'
    requests = [(endpoint.request, mode) for endpoint in _endpoints('') if endpoint.request is not None]
    _, definitions = models_json_schema(requests, ref_template=_REF)
    document['components']['schemas'] |= definitions['$defs']
    document['components']['securitySchemes'] = {'key': {'type': 'http', 'scheme': 'bearer'}}
    return document


def _endpoints(model: str) -> list[_Endpoint]:
    hello = [{'role': 'user', 'content': 'Hello'}]
    usage = {'prompt_tokens': 9, 'completion_tokens': 3, 'total_tokens': 12}
    choice = {'index': 0, 'logprobs': None, 'finish_reason': 'stop'}
    created: dict[str, Any] = {'created': 1767225600, 'model': model}
    return [
        _Endpoint(
            paths.CHAT,
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
            paths.COMPLETIONS,
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
            paths.EMBEDDINGS,
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
            paths.TOKENIZE,
            'Returns the token ids of a text or conversation.',
            TokenizeRequest,
            {'model': model, 'prompt': 'Hello'},
            {'count': 2, 'max_model_len': 2048, 'tokens': [39, 1184], 'token_strs': None},
        ),
        _Endpoint(
            paths.DETOKENIZE,
            'Returns the text of token ids.',
            DetokenizeRequest,
            {'model': model, 'tokens': [39, 1184]},
            {'prompt': 'Hello'},
        ),
        _Endpoint(
            paths.TOKENIZER_INFO,
            'Returns the special tokens and the chat template, for a server with --parse-special.',
            None,
            None,
            {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '<|endoftext|>', 'chat_template': None},
        ),
        _Endpoint(
            paths.MODELS,
            'Returns the served model and its properties. /v1/models/NAME returns one model.',
            None,
            None,
            {'object': 'list', 'data': [{'id': model, 'object': 'model', 'owned_by': 'maxlm', 'max_model_len': 2048}]},
        ),
        _Endpoint(paths.HEALTH, 'Returns status 200, or 503 during shutdown.', None, None, {'status': 'ok'}),
        _Endpoint(paths.METRICS, 'Returns Prometheus metrics.', None, None, 'maxlm_running 0.0\n'),
    ]
