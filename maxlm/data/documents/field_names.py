"""Finds fields of records by name, also nested ones, and maps nonstandard names to the standard names."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from maxlm.data.documents.messages import ROLES, text_or_messages
from maxlm.data.documents.read_options import ReadOptions
from maxlm.errors import InputError
from maxlm.storage.json_text import parse_json

# Fields that may contain messages, and fields of a message that contain its role.
MESSAGE_FIELDS = ('messages', 'conversations', 'prompt', 'completion', 'chosen', 'rejected')
ROLE_FIELDS = ('role', 'from')
# Maximum number of fields listed in an error message.
MAX_FIELDS_LISTED = 20


def parse_roles(roles: str) -> tuple[tuple[str, str], ...]:
    """Returns (name in the data, role) for each part of `user=human,assistant=bot`.

    Raises:
        InputError: a part is malformed, a role is unknown, or a name is given twice.
    """
    pairs = []
    for part in roles.split(',') if roles else ():
        role, equals, name = (piece.strip() for piece in part.partition('='))
        if not equals or not name or role not in ROLES:
            raise InputError(f'--roles={roles}: must be ROLE=NAME,…, where ROLE is one of {", ".join(ROLES)}')
        pairs.append((name, role))
    if len(dict(pairs)) < len(pairs):
        raise InputError(f'--roles={roles}: a name is given twice; give each name one role')
    return tuple(pairs)


def field_value(entry: Any, name: str) -> Any:
    """Returns the value of a field, or None without it: the field `a.b`, else the field `b` of the object `a`."""
    if not isinstance(entry, Mapping):
        return None
    if name in entry:
        return entry[name]
    values = (field_value(entry[head], rest) for head, rest in _cuts(name) if head in entry)
    return next((value for value in values if value is not None), None)


def top_field(name: str, fields: Collection[str]) -> str:
    """Returns the field of `fields` that contains the field `name`, or `name` if none does."""
    return name if name in fields else next((head for head, _ in _cuts(name) if head in fields), name)


def nested_names(entry: Any) -> list[str]:
    """Returns the names `a.b` of the fields of nested objects, those with fewer dots first."""
    names: list[str] = []
    level = [(str(name), value) for name, value in entry.items()] if isinstance(entry, Mapping) else []
    while level:
        level = [
            (f'{name}.{inner}', item)
            for name, value in level
            if isinstance(value, Mapping)
            for inner, item in value.items()
        ]
        names += [name for name, _ in level]
    return names


def _cuts(name: str) -> list[tuple[str, str]]:
    """Returns the parts of a name before and after each dot."""
    return [(name[:i], name[i + 1 :]) for i, character in enumerate(name) if character == '.']


def with_usual_names(entry: Any, options: ReadOptions) -> Any:
    """Returns a record with its messages in a standard field and with standard roles. Other values are unchanged."""
    if not isinstance(entry, dict):
        return entry
    field = options.messages_field
    if field and (value := field_value(entry, field)) is not None:
        messages = _decoded(value)
        is_sharegpt = isinstance(messages, list) and any(isinstance(m, dict) and 'from' in m for m in messages)
        rest = {key: value for key, value in entry.items() if key not in (field, 'messages', 'conversations')}
        entry = {**rest, 'conversations' if is_sharegpt else 'messages': value}
    if options.roles:
        roles = dict(options.roles)
        entry = {key: _renamed(value, roles) if key in MESSAGE_FIELDS else value for key, value in entry.items()}
    return entry


def list_fields(entry: Any) -> str:
    """Returns a list of the fields of a record, for error messages."""
    if not isinstance(entry, Mapping):
        return f'the record is {type(entry).__name__}, not an object'
    nulls = {name for name, value in entry.items() if value is None}
    names = [' '.join(str(name).split())[:50] + ' (null)' * (name in nulls) for name in (*entry, *nested_names(entry))]
    more = f' and {len(names) - MAX_FIELDS_LISTED} more' if len(names) > MAX_FIELDS_LISTED else ''
    return f'it has {", ".join(names[:MAX_FIELDS_LISTED])}{more}' if names else 'it has no fields'


def _decoded(value: Any) -> Any:
    """Returns the value of a JSON text of a list or an object; other values are unchanged."""
    try:
        found = parse_json(value) if isinstance(value, str) and value.lstrip()[:1] in ('[', '{') else value
    except ValueError:
        return value
    return [_decoded(item) for item in found] if isinstance(found, list) else found


def _renamed(messages: Any, roles: Mapping[str, str]) -> Any:
    if isinstance(messages, str):
        found = _decoded(messages)
        renamed = found if isinstance(found, str) else _renamed(found, roles)
        text = json.dumps(renamed, ensure_ascii=False)
        # A text that contains no messages is not changed.
        return messages if renamed == found or isinstance(text_or_messages(text), str) else text
    if isinstance(messages, list):
        return [_renamed(message, roles) for message in messages]
    if not isinstance(messages, dict):
        return messages
    return {
        key: roles.get(value, value) if key in ROLE_FIELDS and isinstance(value, str) else value
        for key, value in messages.items()
    }
