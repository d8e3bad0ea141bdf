"""Endpoints of the HTTP server."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp

from maxlm.serving.chat_page import Page
from maxlm.serving.errors import ApiError
from maxlm.serving.metrics import CONTENT_TYPE
from maxlm.serving.middleware import (
    CHAT,
    COMPLETIONS,
    HEALTH,
    METRICS,
    MODELS,
    PAGE,
    AccessPolicy,
    SecurityMiddleware,
    error_response,
    internal_error,
)
from maxlm.serving.request_parsing import EngineRequests, parse_chat_request, parse_completion_request
from maxlm.serving.responses import ResponseBuilder
from maxlm.serving.schema import RequestBase, parse_chat, parse_completion
from maxlm.serving.service import Service
from maxlm.serving.streaming import CompletionResponse


def make_app(service: Service, access: AccessPolicy, *, origins: Collection[str] = ()) -> ASGIApp:
    """Returns the ASGI app of a service. Pages of `origins` may read its responses."""
    # FastAPI's documentation pages are disabled, because they load scripts from other hosts.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_exception)
    created = int(time.time())
    served, limits = service.served, service.limits
    page = Page()

    @app.api_route(PAGE, methods=['GET', 'HEAD'])
    async def show_page() -> Response:
        return HTMLResponse(page.text, headers={'content-security-policy': page.policy, 'cache-control': 'no-cache'})

    @app.api_route(HEALTH, methods=['GET', 'HEAD'])
    async def health() -> Response:
        state = 'failed' if service.engine_thread.failed else 'draining' if service.is_draining else 'ok'
        return JSONResponse({'status': state}, 200 if state == 'ok' else 503)

    @app.get(METRICS)
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={'content-type': CONTENT_TYPE})

    def model() -> dict[str, Any]:
        # Includes fields for the chat page in addition to OpenAI's four.
        return {
            'id': served.name,
            'object': 'model',
            'created': created,
            'owned_by': 'maxlm',
            'step': served.step,
            'max_context': served.engine.max_context,
            'max_tokens': limits.max_tokens or None,
            'chat': served.chat is not None,
        }

    @app.get(MODELS)
    async def list_models() -> Response:
        return JSONResponse({'object': 'list', 'data': [model()]})

    @app.get(MODELS + '/{name:path}')
    async def show_model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(model())

    async def handle(request: Request, *, chat: bool) -> Response:
        try:
            body = await service.body_reader.read(request)
            api_request, engine_requests = await service.encoders.run(
                functools.partial(_encode, service, body, chat=chat),
                chat=chat,
                size=len(body),
                receive=request.receive,
                started=request.scope['state']['started'],
                release=functools.partial(service.body_reader.release, len(body)),
            )
        except ClientDisconnect:
            return Response(status_code=499)
        return _respond(service, api_request, engine_requests, chat=chat, started=request.scope['state']['started'])

    @app.post(COMPLETIONS)
    async def complete(request: Request) -> Response:
        return await handle(request, chat=False)

    @app.post(CHAT)
    async def chat(request: Request) -> Response:
        return await handle(request, chat=True)

    secured = SecurityMiddleware(app, service, access)
    if not origins:
        return secured
    # Outermost, because CORS preflight requests have no key, and pages must be able to read error responses.
    return CORSMiddleware(
        secured, allow_origins=list(origins), allow_methods=['GET', 'POST'], allow_headers=['*'], max_age=600
    )


def _encode(service: Service, body: bytes, *, chat: bool) -> tuple[RequestBase, EngineRequests]:
    """Parses and tokenizes a request. Raises ApiError if it is invalid."""
    context, max_tokens = service.served.engine.max_context, service.limits.max_tokens
    if chat:
        conversation = parse_chat(body, max_context=context)
        service.check_model(conversation.model)
        return conversation, parse_chat_request(conversation, service.served, max_tokens=max_tokens)
    completion = parse_completion(body)
    service.check_model(completion.model)
    return completion, parse_completion_request(completion, service.served, max_tokens=max_tokens)


def _respond(
    service: Service, api_request: RequestBase, engine_requests: EngineRequests, *, chat: bool, started: float
) -> Response:
    num_samples = api_request.n or 1
    builder = ResponseBuilder(
        chat=chat,
        model=service.served.name,
        step=service.served.step,
        token_decoder=service.token_decoder,
        with_log_probs=engine_requests.requests[0].top_log_probs is not None,
        echoes=[echo for echo in engine_requests.echoes for _ in range(num_samples)],
    )
    options = api_request.stream_options
    return CompletionResponse(
        service.submit(engine_requests.requests, started=started),
        builder,
        prompt_tokens=sum(len(request.prompt) for request in engine_requests.requests),
        stream=bool(api_request.stream),
        with_usage=bool(options and options.include_usage),
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


async def _on_exception(request: Request, error: Exception) -> Response:
    return error_response(internal_error())
