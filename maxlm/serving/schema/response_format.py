"""The parameter `response_format`: JSON objects, and JSON that follows a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxlm.serving.schema.errors import ApiError

PARAM = 'response_format'
RESPONSE_FORMAT_SCHEMA: dict[str, Any] = {
    'anyOf': [
        {'type': 'null'},
        {
            'type': 'object',
            'properties': {'type': {'enum': ['text', 'json_object']}},
            'required': ['type'],
        },
        {
            'type': 'object',
            'properties': {
                'type': {'const': 'json_schema'},
                'json_schema': {
                    'type': 'object',
                    'properties': {
                        'name': {'type': 'string'},
                        'description': {'type': 'string'},
                        'schema': {'type': 'object'},
                        'strict': {'type': ['boolean', 'null']},
                    },
                    'required': ['schema'],
                },
            },
            'required': ['type', 'json_schema'],
        },
    ]
}


def response_schema(response_format: Any) -> Mapping[str, Any] | None:
    """Returns the JSON schema of the response, or None if any text is allowed.

    The schema is followed with and without `strict`.

    Raises:
        ApiError: the parameter is invalid.
    """
    if response_format is None:
        return None
    kind = response_format.get('type') if isinstance(response_format, dict) else None
    if kind == 'text':
        return None
    if kind == 'json_object':
        return {'type': 'object'}
    if kind != 'json_schema':
        found = repr(kind)[:50] if isinstance(response_format, dict) else 'no object'
        raise ApiError(
            400, f'{PARAM}: type must be text, json_object or json_schema; found {found}', param=f'{PARAM}.type'
        )
    described = response_format.get('json_schema')
    schema = described.get('schema') if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(
            400,
            f'{PARAM}.json_schema: must be {{"name": "…", "schema": {{…}}}} with a JSON schema',
            param=f'{PARAM}.json_schema',
        )
    return schema
