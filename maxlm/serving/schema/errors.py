"""Errors in the format of OpenAI's API: an HTTP status and a JSON object."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from maxlm.errors import InputError

INVALID = 'invalid_request_error'
SERVER = 'server_error'
# Maximum length of a message, because messages quote client input.
MAX_MESSAGE = 500
# Parameter names of the engine → names of the API.
_API_PARAMETERS = {
    'num_samples': 'n',
    'stops': 'stop',
    'top_log_probs': 'logprobs',
    'grammar': 'response_format',
}


class ApiError(Exception):
    """An error response.

    Attributes:
        status: HTTP status.
        message: one line of text for users.
        kind: OpenAI's `type`.
        param: name of the invalid parameter, or None.
        code: machine-readable error code, or None.
        headers: additional response headers.
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
        """JSON body of the response."""
        return {'error': {'message': self.message, 'type': self.kind, 'param': self.param, 'code': self.code}}


def from_input_error(error: InputError, param: str | None = None) -> ApiError:
    """Converts an error of the engine or a tokenizer. A message `name=…` or `name: …` names the parameter."""
    match = re.match(r'(\w+)[=:]', str(error))
    name = match[1] if match else None
    api_name = _API_PARAMETERS.get(name, name) if name else None
    message = str(error).replace(name, api_name, 1) if name and api_name else str(error)
    return ApiError(400, message, param=api_name or param)


def from_validation_error(error: ValidationError) -> ApiError:
    """Converts the first error of a failed JSON validation."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first['type'] == 'json_invalid':
        reason = first['msg'].removeprefix('Invalid JSON: ')
        return ApiError(400, f'the request body is not valid JSON: {reason}', code='invalid_json')
    param = ''
    for key in first['loc']:
        param += f'[{key}]' if isinstance(key, int) else f'.{key}' if param else str(key)
    param = param[:100]
    message = first['msg'][0].lower() + first['msg'][1:]
    if not param:
        return ApiError(400, f'request body: {message}')
    return ApiError(400, f'{param}: {message}', param=param)
