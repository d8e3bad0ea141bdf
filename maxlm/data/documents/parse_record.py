"""Converts records of JSONL, Parquet and data sets to documents: texts, conversations or preferences."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from maxlm.data.documents.conversation import FORMATS, has_completion, has_format, parse_completion, parse_conversation
from maxlm.data.documents.document import Document
from maxlm.data.documents.field_names import field_value, list_fields, with_usual_names
from maxlm.data.documents.label import LABEL
from maxlm.data.documents.null_fields import present_fields
from maxlm.data.documents.preference import FORMATS as PREFERENCE_FORMATS
from maxlm.data.documents.preference import has_preference, parse_preference
from maxlm.data.documents.read_options import ReadOptions

# Fields of conversations and preference pairs.
RECORD_FIELDS = (
    *('messages', 'conversations', 'system', 'tools', 'instruction', 'input', 'output', 'prompt', 'completion'),
    *('history', 'functions', 'chosen', 'rejected', 'question', LABEL),
)


def entry_format(entry: Any, options: ReadOptions) -> str:
    """Returns the format of a record: `preference`, `chat` or `text`. The default is `text`."""
    entry = present_fields(entry)
    if _has_messages(entry, options):
        return 'chat'
    if _has_text(entry, options.text_key):
        return 'text'
    # Preferences come first, because their records may also contain a conversation.
    return 'preference' if has_preference(entry) else 'chat' if has_format(entry) else 'text'


def columns_format(columns: Collection[str], options: ReadOptions) -> str:
    """Detects the format of rows from the names of their columns."""
    # A column of labels identifies preferences, as a label in JSONL does.
    return entry_format({column: True if column == LABEL else '' for column in columns}, options)


def entry_document(name: str, source: str, entry: Any, options: ReadOptions) -> Document:
    """Converts a record to a document.

    Raises:
        ValueError: the record has no valid content in the format of `options`. The message is one line.
    """
    named = with_usual_names(present_fields(entry), options)
    if options.format == 'preference':
        preference = parse_preference(named)
        if preference is None:
            raise ValueError(f'no preference: a record must have {PREFERENCE_FORMATS}; {list_fields(entry)}')
        return Document(name, source, preference.text, preference=preference, metadata=_scalars(entry, options))
    has_text = _has_text(entry, options.text_key)
    if options.format == 'chat' or (options.format == 'auto' and (_has_messages(entry, options) or not has_text)):
        return _parse_chat(name, source, entry, named, options)
    if not has_text:
        hint = 'use --format=chat for conversations' if has_format(named) else 'set --text-field to the text field'
        hint = 'use --format=preference for preferences' if has_preference(named) else hint
        if isinstance(entry, Mapping) and options.text_key in entry:
            found = type(entry[options.text_key]).__name__.replace('NoneType', 'null')
            raise ValueError(f'the key {options.text_key!r} contains {found}, not text; {hint}')
        raise ValueError(f'no text at the key {options.text_key!r}; {list_fields(entry)}; {hint}')
    text = field_value(entry, options.text_key)
    _refuse_surrogates(text)
    metadata = {key: value for key, value in _scalars(entry, options).items() if key != options.text_key}
    return Document(name, source, text, metadata=metadata)


def _parse_chat(name: str, source: str, entry: Any, named: Any, options: ReadOptions) -> Document:
    if has_completion(named):
        prompt, completion = parse_completion(named)
        _refuse_surrogates(prompt + completion)
        return Document(name, source, prompt + completion, learned_from=len(prompt), metadata=_scalars(entry, options))
    conversation = parse_conversation(named)
    if conversation is None:
        missing = f'no messages at the key {options.messages_field!r}' if options.messages_field else 'no conversation'
        no_text = '' if options.format == 'chat' else f', and no text at the key {options.text_key!r}'
        hint = 'set --messages-field to the key' if options.messages_field else f'a record must have {FORMATS}'
        raise ValueError(f'{missing}{no_text}: {hint}; {list_fields(entry)}')
    return Document(name, source, conversation.text, conversation=conversation, metadata=_scalars(entry, options))


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError('contains an unpaired surrogate, which is not valid text; remove it') from error


def _has_text(entry: Any, text_key: str) -> bool:
    return isinstance(field_value(entry, text_key), str)


def _has_messages(entry: Any, options: ReadOptions) -> bool:
    return bool(options.messages_field) and field_value(entry, options.messages_field) is not None


def _scalars(entry: Mapping[str, Any], options: ReadOptions) -> dict[str, Any]:
    """Returns the strings and numbers of a record, and of the nested fields that `options` names."""
    nested = {key: field_value(entry, key) for key in options.metadata_keys if key not in entry}
    return {key: value for key, value in {**entry, **nested}.items() if not isinstance(value, dict | list)}
