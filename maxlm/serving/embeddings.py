"""Embeddings endpoint: the mean of the last hidden states of each input, normalized to an L2 norm of 1."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

import numpy as np
from starlette.types import Receive, Scope, Send

from maxlm.errors import InputError
from maxlm.inference.engine.requests import Request
from maxlm.inference.prompts import text_prompt
from maxlm.serving.completion_response import KEEPALIVE_SECONDS, EngineResponse
from maxlm.serving.encoding import timeout_error
from maxlm.serving.request_parsing import ServedModel, check_size
from maxlm.serving.schema.base import parse_prompts
from maxlm.serving.schema.errors import ApiError, from_input_error
from maxlm.serving.schema.tokens import MAX_INPUTS, EmbeddingRequest
from maxlm.serving.service import PendingRequest, Service

# Seconds until an input is submitted again after the queue was full.
_RETRY_SECONDS = 0.1


def parse_embedding_request(api_request: EmbeddingRequest, served: ServedModel) -> list[Request]:
    """Tokenizes the inputs and returns one engine request for each.

    Raises:
        ApiError: a parameter is invalid, or an input is empty or does not fit into the context.
    """
    dim = served.details.dim
    if api_request.dimensions not in (None, dim):
        raise ApiError(
            400, f'dimensions={api_request.dimensions}: must be {dim} for this model, or absent', param='dimensions'
        )
    context, tokenizer = served.engine.max_context, served.tokenizer
    inputs = parse_prompts(
        api_request.input, 'input', max_prompts=MAX_INPUTS, vocab_size=tokenizer.vocab_size, max_context=context
    )
    for text in inputs:
        if isinstance(text, str):
            check_size(text, served, 'input')
    try:
        ids = [text_prompt(tokenizer, text) if isinstance(text, str) else text for text in inputs]
        for index, tokens in enumerate(ids):
            if not 0 < len(tokens) <= context:
                raise ApiError(
                    400,
                    f'input[{index}]: has {len(tokens)} tokens; must have from 1 to {context}, the context length',
                    param='input',
                    code='context_length_exceeded' if tokens else None,
                )
        cache_salt = served.cache_salt()
        requests = [Request(tuple(tokens), max_tokens=0, embed=True, cache_salt=cache_salt) for tokens in ids]
        for request in requests:
            served.engine.check(request)
    except InputError as error:
        raise from_input_error(error, 'input') from error
    return requests


class EmbeddingResponse(EngineResponse):
    """Response to an embedding request.

    The engine gets as many inputs at a time as it has slots, so that many inputs do not fill the queue and other
    requests start between them.
    """

    def __init__(self, service: Service, requests: list[Request], *, encoding_format: str | None, started: float):
        """Initializes the response. `started` is the start of the request, as `time.monotonic()`."""
        super().__init__()
        self._service, self._requests, self._started = service, requests, started
        self._is_base64 = encoding_format == 'base64'
        self._pending: PendingRequest | None = None

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_slots = self._service.served.engine.state.num_slots
        embeddings: list[np.ndarray] = []
        while len(embeddings) < len(self._requests):
            batch = self._requests[len(embeddings) : len(embeddings) + num_slots]
            self._pending = await self._submit(batch, is_first=not embeddings)
            embeddings += await self._results(self._pending)
            self._pending.close()
        await send({'type': 'http.response.start', 'status': 200, 'headers': [(b'content-type', b'application/json')]})
        start = b'{"object":"list","data":['
        for index, embedding in enumerate(embeddings):
            # One event per input, because other requests must not wait until a long response is encoded.
            await send({'type': 'http.response.body', 'body': start + self._entry(index, embedding), 'more_body': True})
            await asyncio.sleep(0)
            start = b','
        num_tokens = sum(len(request.prompt) for request in self._requests)
        usage = json.dumps({'prompt_tokens': num_tokens, 'total_tokens': num_tokens})
        end = f'],"model":{json.dumps(self._service.served.name)},"usage":{usage}}}'
        await send({'type': 'http.response.body', 'body': end.encode()})

    def close(self) -> None:
        if self._pending is not None:
            self._pending.close()

    async def _submit(self, requests: list[Request], *, is_first: bool) -> PendingRequest:
        """Submits inputs. If the queue is full, only the first ones fail; later ones are submitted again."""
        while True:
            try:
                return PendingRequest(self._service, requests, started=self._started)
            except ApiError as error:
                if error.code != 'queue_full' or is_first or self._service.is_draining:
                    raise
            if time.monotonic() - self._started > self._service.limits.request_timeout:
                raise timeout_error(self._service.limits)
            await asyncio.sleep(_RETRY_SECONDS)

    @staticmethod
    async def _results(pending: PendingRequest) -> list[np.ndarray]:
        """Returns the embeddings of submitted inputs, in their order."""
        results: dict[int, np.ndarray] = {}
        while len(results) < pending.num_choices:
            for index, delta in await pending.next_deltas(KEEPALIVE_SECONDS):
                assert delta.embedding is not None, 'an embedding request has one delta'
                results[index] = delta.embedding
        return [results[index] for index in range(pending.num_choices)]

    def _entry(self, index: int, embedding: np.ndarray) -> bytes:
        """Returns the JSON object of one input."""
        norm = np.linalg.norm(embedding)
        unit = (embedding / norm if norm else embedding).astype('<f4')
        value: Any = base64.b64encode(unit.tobytes()).decode() if self._is_base64 else unit.tolist()
        return json.dumps({'object': 'embedding', 'index': index, 'embedding': value}).encode()
