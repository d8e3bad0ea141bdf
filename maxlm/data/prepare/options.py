"""Options of a preparation, and the entries of them that the manifest of the data set lists under `made_from`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxlm.data.dataset.records import STREAM
from maxlm.data.documents.field_names import parse_roles
from maxlm.data.documents.read_options import MAX_RECORD_BYTES, ReadOptions
from maxlm.data.filters.dedup import choose_bands
from maxlm.data.filters.filters_by_name import describe_filters, make_cleaner
from maxlm.data.formats.input_file import InputFile
from maxlm.data.parts.share import PARALLEL, STAGES, parse_share
from maxlm.data.tokenizer.tokenizer import Tokenizer, check_spec
from maxlm.errors import InputError, flag

if TYPE_CHECKING:
    from maxlm.data.chat.setup import ChatRecipe

# Keys of `made_from` for conversations and preference pairs, and keys that are listed only if not at their defaults.
CHAT_FIELDS = ('format', 'chat_template', 'pack_window')
READING_FIELDS = ('max_record_bytes', 'metadata_keys', 'messages_field', 'roles')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options of `maxlm prepare`, with their defaults. `maxlm prepare --help` describes them."""

    input: Sequence[str]
    output: str | Path
    validation: Sequence[str] = ()
    validation_fraction: float = 0.01
    exclude: Sequence[str] = ()
    max_files: int = 0
    format: str = 'auto'
    text_key: str = 'text'
    metadata_fields: Sequence[str] = ()
    messages_field: str = ''
    roles: str = ''
    max_record_mib: int = MAX_RECORD_BYTES // 2**20
    token_dtype: str = ''
    eod_token: int | None = None
    skip_bad_records: bool = False
    tokenizer: str = 'bpe:8192'
    filter: Sequence[str] = ()
    deduplicate: str = 'none'
    dedup_threshold: float = 0.8
    fim_rate: float = 0.0
    fim_spm_rate: float = 0.5
    chat_template: str = ''
    special_tokens: Sequence[str] = ()
    pack_seq_len: int = 0
    stream: bool = False
    block: int = 2048
    # None = one per core.
    workers: int | None = None
    executor: str = 'local'
    ray_address: str = ''
    stage: str = ''
    task: str = ''
    retries: int = 2
    skip_failed: bool = False
    cache: str = '~/.cache/maxlm'
    quiet: bool = False

    def __post_init__(self) -> None:
        """Raises InputError for values that are invalid for any input."""
        _check(self)


def _check(options: PrepareOptions) -> None:
    """Raises InputError for values that are invalid for any input."""
    limits = {'max_record_mib': 1, 'block': 1, 'workers': 1, 'max_files': 0, 'retries': 0, 'pack_seq_len': 0}
    for name, smallest in limits.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            raise InputError(f'{flag(name)}={value}: must be at least {smallest}')
    if not 0 <= options.validation_fraction < 1:
        raise InputError(f'--validation-fraction={options.validation_fraction}: must be at least 0 and below 1')
    for name in ('fim_rate', 'fim_spm_rate'):
        if not 0 <= getattr(options, name) <= 1:
            raise InputError(f'{flag(name)}={getattr(options, name)}: must be from 0 to 1')
    if options.ray_address and options.executor != 'ray':
        raise InputError(f'--ray-address={options.ray_address} requires --executor=ray')
    _check_stage(options)
    make_cleaner(options.filter)
    choose_bands(options.dedup_threshold)
    parse_roles(options.roles)
    check_spec(options.tokenizer, infill=options.fim_rate > 0)


def _check_stage(options: PrepareOptions) -> None:
    """Raises InputError for options that do not work with stages, or on machines with only a bucket in common."""
    if options.stage not in ('', *STAGES):
        raise InputError(f'--stage={options.stage}: must be one of {", ".join(STAGES)}')
    if options.task and options.stage not in PARALLEL:
        raise InputError(f'--task={options.task} requires --stage={" or --stage=".join(PARALLEL)}')
    parse_share(options.task, {})
    if options.stage and options.skip_failed:
        raise InputError(
            f'--skip-failed does not work with --stage={options.stage}, because all stages must skip the same '
            'partitions; remove it, or run all stages in one command'
        )
    if options.stream and (options.stage or (options.executor == 'ray' and not isinstance(options.output, Path))):
        other = f'--stage={options.stage}' if options.stage else '--executor=ray and a bucket'
        raise InputError(f'--stream does not work with {other}: training reads the shards of one directory; remove it')


def chat_fields(what: str, chat: ChatRecipe | None) -> dict[str, Any]:
    """Returns the entries of `made_from` for conversations or preference pairs; none if `chat` is None."""
    if chat is None:
        return {}
    source = [chat.source, chat.special_tokens, chat.variables]
    return {
        'format': what,
        'chat_template': f'{chat.name} with checksum {hashlib.sha256(json.dumps(source).encode()).hexdigest()}',
        'pack_window': chat.window,
    }


def made_from(
    options: PrepareOptions,
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
        label = f'{"" if kind == "hf" else "file"} with checksum {tokenizer.ids_sha256}'
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
        **_reading_fields(read),
        **({STREAM: True} if options.stream else {}),
        **({'text_boundaries': tokenizer.boundary_ids} if tokenizer and tokenizer.boundary_ids else {}),
        'inputs': hashlib.sha256(json.dumps(files).encode()).hexdigest(),
    }


def _reading_fields(read: ReadOptions) -> dict[str, Any]:
    default = ReadOptions()
    fields = {name: getattr(read, name) for name in READING_FIELDS if getattr(read, name) != getattr(default, name)}
    # The round trip turns tuples into lists, as in the manifest.
    return json.loads(json.dumps(fields))
