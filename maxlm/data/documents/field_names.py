"""Maps nonstandard field and role names in records to the standard names."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def parse_roles(given: str) -> tuple[tuple[str, str], ...]:
    """Returns (name in the data, role) for each part of `user=human,assistant=bot`.

    Raises:
        InputError: a part is malformed, a role is unknown, or a name is given twice.
    """
    pairs = []
    for part in given.split(',') if given else ():
        role, equals, name = (piece.strip() for piece in part.partition('='))
        if not equals or not name or role not in ROLES:
            raise InputError(f'--roles={given}: must be ROLE=NAME,…, where ROLE is one of {", ".join(ROLES)}')
        pairs.append((name, role))
    if len(dict(pairs)) < len(pairs):
        raise InputError(f'--roles={given}: a name is given twice; give each name one role')
    return tuple(pairs)


def with_usual_names(entry: Any, options: ReadOptions) -> Any:
    """Returns a record with its messages in a standard field and with standard roles. Other values are unchanged."""
    if not isinstance(entry, dict):
        return entry
    field = options.messages_field
    if field and field in entry:
        messages = _decoded(entry[field])
        is_sharegpt = isinstance(messages, list) and any(isinstance(m, dict) and 'from' in m for m in messages)
        rest = {key: value for key, value in entry.items() if key not in (field, 'messages', 'conversations')}
        entry = {**rest, 'conversations' if is_sharegpt else 'messages': entry[field]}
    if options.roles:
        roles = dict(options.roles)
        entry = {key: _renamed(value, roles) if key in MESSAGE_FIELDS else value for key, value in entry.items()}
    return entry


def list_fields(entry: Any) -> str:
    """Returns a list of the fields of a record, for error messages."""
    if not isinstance(entry, Mapping):
        return f'the record is {type(entry).__name__}, not an object'
    names = [' '.join(str(name).split())[:50] for name in entry]
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
