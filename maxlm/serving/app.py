"""Endpoints of the HTTP server."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

import maxlm
from maxlm.serving.completion_response import CompletionResponse
from maxlm.serving.embeddings import EmbeddingResponse, parse_embedding_request
from maxlm.serving.metrics import CONTENT_TYPE
from maxlm.serving.middleware import AccessPolicy, SecurityMiddleware, error_response, internal_error
from maxlm.serving.pages.api_reference import api_reference
from maxlm.serving.pages.chat_page import chat_page
from maxlm.serving.request_parsing import EngineRequests, parse_chat_request, parse_completion_request
from maxlm.serving.responses import ResponseBuilder
from maxlm.serving.schema import paths
from maxlm.serving.schema.errors import ApiError
from maxlm.serving.schema.generation import RequestBase, parse_chat, parse_completion
from maxlm.serving.schema.openapi import DESCRIPTION, openapi_document, route_options
from maxlm.serving.schema.tokens import (
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    parse_request,
    parse_tokenize,
)
from maxlm.serving.service import Service
from maxlm.serving.tokenization import detokenize, tokenize, tokenizer_info

# Path → options that document the endpoint.
_RouteOptions = Mapping[str, Mapping[str, Any]]


def make_app(service: Service, access: AccessPolicy, *, origins: Collection[str] = (), docs: bool = False) -> ASGIApp:
    """Returns the ASGI app of a service.

    Args:
        service: the service.
        access: rules for requests.
        origins: origins of pages that may read the responses.
        docs: serve the API reference and the OpenAPI document.
    """
    # FastAPI's own pages are disabled, because they load scripts from other hosts.
    app = FastAPI(
        title='maxlm',
        version=maxlm.__version__,
        description=DESCRIPTION,
        servers=[{'url': '/'}],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_exception)
    options = route_options(service.served.name)
    _add_information(app, service, options)
    _add_tasks(app, service, options)
    _add_pages(app, docs=docs)
    secured = SecurityMiddleware(app, service, access)
    if not origins:
        return secured
    # Outermost, because CORS preflight requests have no key, and pages must be able to read error responses.
    return CORSMiddleware(
        secured, allow_origins=list(origins), allow_methods=['GET', 'POST'], allow_headers=['*'], max_age=600
    )


def _add_information(app: FastAPI, service: Service, options: _RouteOptions) -> None:
    """Adds the endpoints that describe the server and its model."""
    served, limits, created = service.served, service.limits, int(time.time())

    @app.head(paths.HEALTH, include_in_schema=False)
    @app.get(paths.HEALTH, **options[paths.HEALTH])
    async def health() -> Response:
        status, content = service.health
        return JSONResponse(content, status)

    @app.get(paths.METRICS, **options[paths.METRICS])
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={'content-type': CONTENT_TYPE})

    def model() -> dict[str, Any]:
        # OpenAI's four fields, vLLM's `max_model_len`, and fields for the chat page.
        return {
            'id': served.name,
            'object': 'model',
            'created': created,
            'owned_by': 'maxlm',
            'max_model_len': served.engine.max_context,
            'step': served.step,
            'max_tokens': limits.max_tokens or None,
            'chat': served.chat is not None,
            'vocab_size': served.tokenizer.vocab_size,
            **served.details._asdict(),
            'special_tokens': served.tokenizer.boundary_names,
        }

    @app.get(paths.MODELS, **options[paths.MODELS])
    async def list_models() -> Response:
        return JSONResponse({'object': 'list', 'data': [model()]})

    @app.get(paths.MODELS + '/{name:path}', include_in_schema=False)
    async def show_model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(model())


def _add_pages(app: FastAPI, *, docs: bool) -> None:
    """Adds the chat page and, with `docs`, the API reference of the endpoints that the app has."""
    page = chat_page()

    @app.api_route(paths.PAGE, methods=['GET', 'HEAD'], include_in_schema=False)
    async def show_page(request: Request) -> Response:
        return page.response(request)

    if not docs:
        return
    document = openapi_document(app)
    reference = api_reference(document)

    @app.get(paths.OPENAPI, include_in_schema=False)
    async def show_document() -> Response:
        return JSONResponse(document)

    @app.get(paths.DOCS, include_in_schema=False)
    async def show_reference(request: Request) -> Response:
        return reference.response(request)


def _add_tasks(app: FastAPI, service: Service, options: _RouteOptions) -> None:
    """Adds the endpoints that use the model or its tokenizer."""
    served, context = service.served, service.served.engine.max_context

    async def read(request: Request, parse: Callable[[bytes], Any], answer: Callable[[Any], Any], *, chat: bool) -> Any:
        """Reads a body, and returns `answer(parse(body))` from a thread, because tokenization can take long."""
        body = await service.body_reader.read(request)

        def handle() -> Any:
            parsed = parse(body)
            service.check_model(parsed.model)
            return answer(parsed)

        return await service.encoders.run(
            handle,
            chat=chat,
            size=len(body),
            receive=request.receive,
            started=request.scope['state']['started'],
            release=functools.partial(service.body_reader.release, len(body)),
        )

    async def respond(
        request: Request, parse: Callable[[bytes], Any], convert: Callable[..., EngineRequests], *, chat: bool
    ) -> Response:
        started = request.scope['state']['started']

        def pair(parsed: Any) -> tuple[RequestBase, EngineRequests]:
            return parsed, convert(parsed, served, max_tokens=service.limits.max_tokens)

        api_request, engine_requests = await read(request, parse, pair, chat=chat)
        prepared = await service.grammars.prepare(engine_requests, receive=request.receive, started=started)
        return _completion_response(service, api_request, prepared, chat=chat, started=started)

    @app.post(paths.COMPLETIONS, **options[paths.COMPLETIONS])
    async def complete(request: Request) -> Response:
        return await respond(request, parse_completion, parse_completion_request, chat=False)

    @app.post(paths.CHAT, **options[paths.CHAT])
    async def chat(request: Request) -> Response:
        parse = functools.partial(parse_chat, max_context=context)
        return await respond(request, parse, parse_chat_request, chat=True)

    @app.post(paths.EMBEDDINGS, **options[paths.EMBEDDINGS])
    async def embed(request: Request) -> Response:
        def answer(inputs: EmbeddingRequest) -> Response:
            return EmbeddingResponse(
                service,
                parse_embedding_request(inputs, served),
                encoding_format=inputs.encoding_format,
                started=request.scope['state']['started'],
            )

        return await read(request, functools.partial(parse_request, EmbeddingRequest), answer, chat=False)

    @app.post(paths.TOKENIZE, **options[paths.TOKENIZE])
    async def show_tokens(request: Request) -> Response:
        def answer(text: TokenizeRequest) -> Response:
            return JSONResponse(tokenize(text, served, service.token_decoder))

        # The text may be a conversation, whose template may be slow.
        return await read(request, functools.partial(parse_tokenize, max_context=context), answer, chat=True)

    @app.post(paths.DETOKENIZE, **options[paths.DETOKENIZE])
    async def show_text(request: Request) -> Response:
        def answer(tokens: DetokenizeRequest) -> Response:
            return JSONResponse(detokenize(tokens, served))

        return await read(request, functools.partial(parse_request, DetokenizeRequest), answer, chat=False)

    @app.get(paths.TOKENIZER_INFO, **options[paths.TOKENIZER_INFO])
    async def show_tokenizer() -> Response:
        return JSONResponse(tokenizer_info(served))


def _completion_response(
    service: Service, api_request: RequestBase, engine_requests: EngineRequests, *, chat: bool, started: float
) -> Response:
    num_samples, options = api_request.n or 1, api_request.stream_options
    builder = ResponseBuilder(
        chat=chat,
        model=service.served.name,
        step=service.served.step,
        token_decoder=service.token_decoder,
        with_log_probs=engine_requests.requests[0].top_log_probs is not None,
        has_tools=engine_requests.has_tools,
        requires_calls=engine_requests.requires_calls,
        num_dropped=engine_requests.num_dropped,
        with_usage=bool(options and options.include_usage),
        echoes=[echo for echo in engine_requests.echoes for _ in range(num_samples)],
        prompts=[request.prompt for request in engine_requests.requests for _ in range(num_samples)],
    )
    return CompletionResponse(
        service.submit(engine_requests.requests, started=started),
        builder,
        prompt_tokens=sum(len(request.prompt) for request in engine_requests.requests),
        stream=bool(api_request.stream),
    )


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f'no such path: {request.url.path[:100]}', 405: f'{request.method} is not allowed at this path'}
    codes = {404: 'not_found', 405: 'method_not_allowed'}.get(error.status_code)
    message = messages.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, code=codes, headers=error.headers))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _on_exception(request: Request, error: Exception) -> Response:
    return error_response(internal_error())
