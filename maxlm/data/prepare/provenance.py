"""Provenance of a prepared data set: the inputs and options that its manifest lists under `made_from`."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from maxlm.data.dataset.records import STREAM
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.filters.registry import describe_filters
from maxlm.data.formats.input_file import InputFile
from maxlm.data.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from maxlm.data.chat.setup import ChatRecipe

# Keys of `made_from` for conversations and preference pairs, and keys that are listed only if not at their defaults.
CHAT_FACTS = ('format', 'chat_template', 'pack_window')
READING_FACTS = ('max_record_bytes', 'metadata_keys', 'messages_field', 'roles')


def chat_facts(what: str, chat: ChatRecipe | None) -> dict[str, Any]:
    """Returns the entries of `made_from` for conversations or preference pairs; none if `chat` is None."""
    if chat is None:
        return {}
    facts = [chat.source, chat.special_tokens, chat.variables]
    return {
        'format': what,
        'chat_template': f'{chat.name} with checksum {hashlib.sha256(json.dumps(facts).encode()).hexdigest()}',
        'pack_window': chat.window,
    }


def made_from(
    options: argparse.Namespace,
    read: ReadOptions,
    tokenizer: Tokenizer | None,
    training: Sequence[InputFile],
    validation: Sequence[InputFile],
) -> dict[str, Any]:
    """Returns all inputs and options that determine a data set. See `check_same_data`."""
    files = [[(f.name, f.source, f.kind, f.size, f.version) for f in part] for part in (training, validation)]
    kind = options.tokenizer.partition(':')[0]
    label = options.tokenizer
    if tokenizer is not None and kind not in ('bytes', 'ids'):
        label = f'{"" if kind == "hf" else "file"} with checksum {tokenizer.sha256}'
    return {
        'tokenizer': label,
        'validation_share': 0.0 if validation else options.validation_fraction,
        'text_key': options.text_key,
        'token_dtype': options.token_dtype,
        'end_of_document': options.eod_token,
        'skip_bad': options.skip_bad_records,
        'filter': describe_filters(options.filter),
        'deduplicate': options.deduplicate,
        'near_threshold': options.dedup_threshold if options.deduplicate == 'near' else None,
        'infill': options.fim_rate,
        'infill_spm': options.fim_spm_rate if options.fim_rate else None,
        'block': options.block,
        **_reading_facts(read),
        **({STREAM: True} if options.stream else {}),
        'inputs': hashlib.sha256(json.dumps(files).encode()).hexdigest(),
    }


def _reading_facts(read: ReadOptions) -> dict[str, Any]:
    default = ReadOptions()
    facts = {name: getattr(read, name) for name in READING_FACTS if getattr(read, name) != getattr(default, name)}
    # The round trip turns tuples into lists, as in the manifest.
    return json.loads(json.dumps(facts))
