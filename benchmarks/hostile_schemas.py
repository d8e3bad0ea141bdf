"""JSON schemas whose compilation or token masks need much time or memory, or crash a compiler, and clients for them.

`python -m benchmarks.hostile_schemas HOST PORT CLIENTS` sends them until it is killed.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# Time between two requests of a client, so that the bodies, of up to 1.5 MB, are not the load that is measured.
PAUSE_SECONDS = 0.2


def nested(depth: int, wrap: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Returns a schema with `depth` levels."""
    schema: dict[str, Any] = {'type': 'integer'}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


HOSTILE_SCHEMAS: dict[str, dict[str, Any]] = {
    **{f'multipleOf {62615533 + i}': {'type': 'integer', 'multipleOf': 62615533 + i} for i in (0, 2, 4, 6)},
    'multipleOf of a fraction': {'type': 'number', 'multipleOf': 1e-300},
    'many required names': {'type': 'object', 'required': [f'n{i}' for i in range(100_000)]},
    '3,000 required names': {'type': 'object', 'required': [f'n{i}' for i in range(3000)]},
    'many properties': {'type': 'object', 'properties': {f'n{i}': {'type': 'integer'} for i in range(4000)}},
    'a large enum': {'enum': [f'value {i}' for i in range(100_000)]},
    'a large enum of long texts': {'enum': [f'{i}' * 1000 for i in range(200)]},
    'alternatives in a pattern': {'type': 'string', 'pattern': '|'.join(f'a{i}b+c{i}' for i in range(20_000))},
    'a pattern within the limit': {'type': 'string', 'pattern': '|'.join(f'.*a{i}b' for i in range(700))},
    'a pattern with counters': {'type': 'string', 'pattern': '(a|b)*a(a|b){900}(a|b)*b(a|b){900}'},
    'nested counters': {'type': 'string', 'pattern': '((((a{100}){100}){100}){100})'},
    'intersections': {'allOf': [{'type': 'string', 'pattern': f'.*a{i}.*'} for i in range(40)]},
    'a constant of 200,000 characters': {'const': 'a' * 200_000},
    'a constant of 1,000,000 characters': {'const': 'a' * 1_000_000},
    'a constant within the limit': {'const': 'a' * 8000},
    'a name of 200,000 characters': {'type': 'object', 'required': ['a' * 200_000]},
    'deep arrays': nested(90, lambda schema: {'type': 'array', 'items': schema, 'minItems': 1}),
    'deeper arrays': nested(300, lambda schema: {'type': 'array', 'items': schema}),
    'deep alternatives': nested(14, lambda schema: {'anyOf': [schema, {'type': 'array', 'items': schema}]}),
    'recursion': {'$ref': '#/$defs/a', '$defs': {'a': {'anyOf': [{'$ref': '#/$defs/a'}, {'$ref': '#/$defs/a'}]}}},
    'recursion of itself': {'$ref': '#'},
    'doubling': {
        '$ref': '#/$defs/n60',
        '$defs': {
            'n0': {'type': 'integer'},
            **{f'n{i + 1}': {'type': 'array', 'prefixItems': [{'$ref': f'#/$defs/n{i}'}] * 2} for i in range(60)},
        },
    },
    'many items': {'type': 'array', 'minItems': 10**9, 'maxItems': 10**9, 'items': {'type': 'integer'}},
    'many nested items': nested(8, lambda schema: {'type': 'array', 'minItems': 10**6, 'items': schema}),
    'a long text': {'type': 'string', 'minLength': 10**8, 'maxLength': 10**9},
    'a long text with a pattern': {'type': 'string', 'minLength': 10**6, 'pattern': '^(ab|ba)*$', 'format': 'uri'},
    'a format with a pattern': {'type': 'string', 'format': 'date-time', 'pattern': '.*1.*2.*3.*', 'minLength': 20},
    'a large range': {'type': 'integer', 'minimum': -(10**300), 'maximum': 10**300, 'multipleOf': 7919},
    'a multiple of a large number': {'type': 'integer', 'multipleOf': 10**300 + 7},
    'patternProperties': {'type': 'object', 'patternProperties': {f'.*{i}.*': {} for i in range(60)}},
}


def body(schema: dict[str, Any], **fields: Any) -> bytes:
    """Returns a completion request with a schema."""
    response_format = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': schema}}
    return json.dumps({'prompt': 'hi', 'max_tokens': 100, 'response_format': response_format, **fields}).encode()


def attack(host: str, port: int, client: int) -> None:
    """Sends the schemas in turn. Clients with an even number always send a new schema that cannot be compiled."""
    bodies = [body(schema, n=4) for schema in HOSTILE_SCHEMAS.values()]
    for number in itertools.count(client):
        new = body({'type': 'integer', 'multipleOf': 62_700_001 + 2 * (100_000 * client + number)})
        content = bodies[number % len(bodies)] if client % 2 else new
        connection = http.client.HTTPConnection(host, port, timeout=600)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request('POST', '/v1/completions', content, {'Content-Type': 'application/json'})
            connection.getresponse().read()
        time.sleep(PAUSE_SECONDS)


if __name__ == '__main__':
    for client_number in range(int(sys.argv[3])):
        threading.Thread(target=attack, args=(sys.argv[1], int(sys.argv[2]), client_number)).start()
