"""Errors as OpenAI's API gives them: a status, and one JSON object that says what was wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from maxlm.errors import InputError

INVALID = 'invalid_request_error'
SERVER = 'server_error'
# What a client sent may stand in a message, but not all of it.
MAX_MESSAGE = 500
# Names of the engine's requests → those of the API.
_PARAMETERS = {'num_samples': 'n', 'stops': 'stop', 'top_log_probs': 'logprobs', 'ignore_ends': 'ignore_eos'}


class ApiError(Exception):
    """What a request is answered instead of a result.

    Attributes:
        status: of HTTP.
        message: one line for the person.
        kind: OpenAI's `type`.
        param: the parameter at fault, None for none.
        code: a word for programs, None for none.
        headers: of the response, besides.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        line = ' '.join(message.split())
        self.message = line if len(line) <= MAX_MESSAGE else f'{line[:MAX_MESSAGE]}…'
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {'error': {'message': self.message, 'type': self.kind, 'param': self.param, 'code': self.code}}


def from_input(error: InputError, param: str | None = None) -> ApiError:
    """What the engine or a tokenizer refuses; a message that begins with `name=` or `name:` names the parameter."""
    named = re.match(r'(\w+)[=:]', str(error))
    name = named[1] if named else None
    found = _PARAMETERS.get(name, name) if name else None
    message = str(error).replace(name, found, 1) if name and found else str(error)
    return ApiError(400, message, param=found or param)


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that a request's JSON has wrong."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first['type'] == 'json_invalid':
        reason = first['msg'].removeprefix('Invalid JSON: ')
        return ApiError(400, f'the body is no JSON that can be read: {reason}', code='invalid_json')
    param = ''
    for part in first['loc']:
        param += f'[{part}]' if isinstance(part, int) else f'.{part}' if param else str(part)
    param = param[:100]
    message = first['msg'][0].lower() + first['msg'][1:]
    if not param:
        return ApiError(400, f'the body: {message}')
    return ApiError(400, f'{param}: {message}', param=param)
