"""Converts text to a tokenizer and tokenized records: `python -m maxlm.prepare --input texts/ --output data/web`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxlm.data.dataset.preparation import PARTIAL_MANIFEST, Announcer
from maxlm.data.dataset.records import MANIFEST_NAME, Dataset, load_manifest
from maxlm.data.documents.field_names import parse_roles
from maxlm.data.documents.read_options import MAX_RECORD_BYTES, ReadOptions
from maxlm.data.executors.local_executor import num_cores
from maxlm.data.executors.ray_executor import make_executor
from maxlm.data.filters.dedup import choose_bands
from maxlm.data.filters.registry import FILTERS, make_cleaner
from maxlm.data.formats.discovery import find_inputs, refuse_overlap
from maxlm.data.formats.input_file import InputFile
from maxlm.data.formats.registry import find_format
from maxlm.data.prepare.existing_output import OtherDataError, check_same_data, locked, published
from maxlm.data.prepare.partitions import Partition, ReadSettings, make_partitions
from maxlm.data.prepare.pipeline import (
    LEARNED,
    ExecutionOptions,
    PrepareConfig,
    prepare,
    remove_leftovers,
    remove_partial_files,
)
from maxlm.data.prepare.provenance import chat_facts, made_from
from maxlm.data.prepare.scan import Cleaning
from maxlm.data.prepare.summary import skipped_files, summary, training_command
from maxlm.data.tokenizer.fim import FimConfig
from maxlm.data.tokenizer.tokenizer import SPECS, check_spec, make_tokenizer
from maxlm.errors import ArgumentParser, InputError, exit_code, flag, text_argument
from maxlm.hints import print_next
from maxlm.storage.filesystem import Entry, display_path
from maxlm.storage.paths import ANY, BUCKETS, Kind, PathOption

if TYPE_CHECKING:
    from maxlm.data.chat.setup import ChatRecipe


def main(argv: list[str]) -> int:
    """Prepares the data set that `argv` describes. Raises InputError if that is not possible."""
    options = _parse(argv)
    not_text: list[Entry] = []
    find: dict[str, Any] = {'max_record_bytes': options.max_record_mib * 2**20, 'on_skipped': not_text.extend}
    find |= {'exclude': options.exclude, 'max_files': options.max_files}
    training = find_inputs(options.input, **find)
    validation = find_inputs(options.validation, **find) if options.validation else []
    refuse_overlap(training, validation)
    make = _prepare if isinstance(options.output, Path) else _publish
    recipe = _recipe(options, training, validation)
    lines = make(options, recipe, make_partitions(training, validation))
    if not options.quiet:
        lines += skipped_files(not_text)
        # File names need not be valid text.
        print('\n'.join(lines).encode(errors='backslashreplace').decode())
        print_next(*training_command(options.output, recipe.reading.options.format, options.pack_seq_len))
    return 0


def run() -> None:
    """Entry point of `python -m maxlm.prepare` and `maxlm prepare`. Exits with 0, or with 2 after bad input."""
    sys.exit(exit_code(main, sys.argv[1:]))


def _prepare(options: argparse.Namespace, recipe: PrepareConfig, partitions: Sequence[Partition]) -> list[str]:
    """Prepares the data set in the directory `options.output` and returns its summary."""
    with locked(options.output):
        if (options.output / MANIFEST_NAME).exists():
            dataset = load_manifest(options.output)
            check_same_data(dataset, str(dataset.path), recipe.made_from, skip_failed=options.skip_failed)
            message = f'{options.output} is already prepared from these inputs'
        else:
            if (options.output / PARTIAL_MANIFEST).exists():
                started = load_manifest(options.output, name=PARTIAL_MANIFEST)
                check_same_data(started, str(options.output), recipe.made_from, skip_failed=True)
            dataset = _make(options, recipe, partitions)
            message = f'wrote {options.output}'
        remove_leftovers(dataset, cleaned=bool(recipe.cleaning))
    return summary(dataset, message, cleaned=bool(recipe.cleaning))


def _publish(options: argparse.Namespace, recipe: PrepareConfig, partitions: Sequence[Partition]) -> list[str]:
    """Prepares the data set in the cache, uploads it to the URL `options.output` and returns its summary."""
    from maxlm.workdir.upload_directory import Upload  # needs fsspec

    upload = Upload('--output', options.output, cache=options.cache, last=MANIFEST_NAME)
    if upload.is_complete():
        return published(options.output, recipe.made_from, skip_failed=options.skip_failed)
    upload.begin()
    local = argparse.Namespace(**{**vars(options), 'output': upload.folder})
    try:
        lines = _prepare(local, recipe, partitions)
    except OtherDataError:
        # The cached data set was prepared for this URL from other inputs, and was not uploaded.
        upload.discard()
        lines = _prepare(local, recipe, partitions)
    upload.finish(show=not options.quiet)
    return [line.replace(str(upload.folder), display_path(options.output)) for line in lines]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog='maxlm prepare',
        allow_abbrev=False,
        description='Converts text to tokenized records for training. To resume, run the same command again.',
        epilog='example: python -m maxlm.prepare --input texts/ --output data/web --tokenizer bpe:32000',
    )
    what = parser.add_argument_group('input and output').add_argument
    what(
        '--input',
        nargs='+',
        required=True,
        type=PathOption(urls=ANY),
        metavar='PATH',
        help='text, .jsonl[.gz|.zst], .parquet and token files (.npy .npz .bin), directories, globs, URLs of them, '
        'hf:NAME[:CONFIG][@REVISION][#SPLIT], tfds:NAME[#SPLIT]',
    )
    what(
        '--output',
        type=PathOption(Kind.DIRECTORY, BUCKETS, as_path=True),
        required=True,
        metavar='DIR',
        help='output directory, or a URL (gs://…, s3://…)',
    )
    what('--validation', nargs='+', type=PathOption(urls=ANY), metavar='PATH', help='validation inputs')
    what(
        '--validation-fraction',
        type=float,
        default=0.01,
        metavar='X',
        help='fraction of documents for validation, selected by a hash of their names (%(default)s)',
    )
    what('--exclude', nargs='+', default=[], metavar='NAME', help='names or patterns of files to skip')
    what('--max-files', type=int, default=0, metavar='N', help='read the first N files of each input; 0 = all')
    what(
        '--format',
        choices=('auto', 'text', 'chat', 'preference'),
        default='auto',
        help='format of records: text, conversations or preferences; auto detects it in the first (%(default)s)',
    )
    what(
        '--text-field',
        '--text-key',
        dest='text_key',
        type=text_argument,
        default='text',
        metavar='NAME',
        help='text field: key in JSONL, column in Parquet and data sets (%(default)s)',
    )
    metadata = 'columns of Parquet and of data sets that filters receive as metadata'
    what('--metadata-fields', nargs='+', default=[], type=text_argument, metavar='NAME', help=metadata)
    what(
        '--messages-field',
        type=text_argument,
        default='',
        metavar='NAME',
        help='field that contains the messages (messages, conversations)',
    )
    what(
        '--roles',
        type=text_argument,
        default='',
        metavar='ROLE=NAME,…',
        help='role names used in the messages, for example user=human,assistant=bot',
    )
    what(
        '--max-record-mib',
        type=int,
        default=MAX_RECORD_BYTES // 2**20,
        metavar='N',
        help='maximum record size in MiB: JSONL line, text of a row, decompressed text file (%(default)s)',
    )
    what('--token-dtype', choices=('uint16', 'uint32'), default='', help='dtype of raw .bin token files')
    what(
        '--eod-token',
        type=int,
        metavar='ID',
        help="id that ends a document in token files (the tokenizer's end-of-document token)",
    )
    what('--skip-bad-records', action='store_true', help='skip and list unreadable records instead of stopping')

    made = parser.add_argument_group('processing').add_argument
    made(
        '--tokenizer',
        type=PathOption(),
        default='bpe:8192',
        metavar='SPEC',
        help=f'{SPECS}; bpe trains on up to 32 MB of the text (%(default)s)',
    )
    names = f'quality filters to apply: {", ".join(FILTERS)}, or your own package.module:function'
    made('--filter', nargs='+', action='extend', default=[], metavar='NAME', help=names)
    made(
        '--deduplicate',
        choices=('none', 'exact', 'near'),
        default='none',
        help='remove exact or near duplicates (%(default)s)',
    )
    made(
        '--dedup-threshold',
        type=float,
        default=0.8,
        metavar='X',
        help='minimum Jaccard similarity of five-word shingles for near duplicates (%(default)s)',
    )
    made(
        '--fim-rate',
        type=float,
        default=0.0,
        metavar='X',
        help='fraction of documents to rearrange for fill-in-the-middle (%(default)s; typically 0.5)',
    )
    made(
        '--fim-spm-rate',
        type=float,
        default=0.5,
        metavar='X',
        help='fraction of rearranged documents with the suffix first (%(default)s)',
    )
    made(
        '--chat-template',
        type=PathOption(may_be_empty=True),
        default='',
        metavar='FILE|NAME',
        help='chat template: a Jinja file, chatml or llama3 (default: the template next to --tokenizer, or chatml)',
    )
    made(
        '--special-tokens',
        nargs='+',
        default=[],
        type=text_argument,
        metavar='TOKEN',
        help='special tokens of the chat template that do not look like <|…|>',
    )
    made(
        '--pack-seq-len',
        type=int,
        default=0,
        metavar='N',
        help='pack conversations or pairs into sequences of N tokens, data.seq_len of training (0 = off)',
    )
    made('--stream', action='store_true', help='let training start before the end: it reads the shards in order')
    made('--block', type=int, default=2048, metavar='N', help='tokens per record (%(default)s)')

    how = parser.add_argument_group('execution (does not affect the result)').add_argument
    how('--workers', type=int, default=num_cores(), metavar='N', help='number of local worker processes (%(default)s)')
    how('--executor', choices=('local', 'ray'), default='local', help='ray: a cluster that shares the disk of --output')
    how('--ray-address', default='', metavar='ADDRESS', help='cluster address (RAY_ADDRESS, or this machine)')
    how('--retries', type=int, default=2, metavar='N', help='retries of a failed partition (%(default)s)')
    how('--skip-failed', action='store_true', help='skip and list partitions that fail after all retries')
    how(
        '--cache',
        type=PathOption(Kind.DIRECTORY),
        default='~/.cache/maxlm',
        metavar='DIR',
        help='local directory for the data set before upload, if --output is a URL (%(default)s)',
    )
    how('--quiet', action='store_true', help='print only errors')
    options = parser.parse_args(argv)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    """Raises InputError for values that are invalid for any input."""
    limits = {'max_record_mib': 1, 'block': 1, 'workers': 1, 'max_files': 0, 'retries': 0, 'pack_seq_len': 0}
    for name, smallest in limits.items():
        if getattr(options, name) < smallest:
            raise InputError(f'{flag(name)}={getattr(options, name)}: must be at least {smallest}')
    if not 0 <= options.validation_fraction < 1:
        raise InputError(f'--validation-fraction={options.validation_fraction}: must be at least 0 and below 1')
    for name in ('fim_rate', 'fim_spm_rate'):
        if not 0 <= getattr(options, name) <= 1:
            raise InputError(f'{flag(name)}={getattr(options, name)}: must be from 0 to 1')
    if options.ray_address and options.executor != 'ray':
        raise InputError(f'--ray-address={options.ray_address} requires --executor=ray')
    if options.executor == 'ray' and not isinstance(options.output, Path):
        raise InputError(
            f'--output={display_path(options.output)}: --executor=ray requires a directory that the cluster shares; '
            'write to one, then upload it'
        )
    make_cleaner(options.filter)
    choose_bands(options.dedup_threshold)
    parse_roles(options.roles)
    check_spec(options.tokenizer, infill=options.fim_rate > 0)


def _recipe(
    options: argparse.Namespace, training: Sequence[InputFile], validation: Sequence[InputFile]
) -> PrepareConfig:
    infill = FimConfig(options.fim_rate, options.fim_spm_rate) if options.fim_rate else None
    learned = options.tokenizer.partition(':')[0] in LEARNED
    tokenizer = None if learned else make_tokenizer(options.tokenizer, [], infill=infill is not None)
    _check_tokens(options, [*training, *validation])
    what = _format(options, [*training, *validation])
    chat = None if what == 'text' else _chat(options)
    if chat and tokenizer:
        chat.with_tokens(tokenizer)
    read = ReadOptions(
        format=what,
        text_key=options.text_key,
        metadata_keys=tuple(options.metadata_fields),
        messages_field=options.messages_field,
        roles=parse_roles(options.roles),
        max_record_bytes=options.max_record_mib * 2**20,
    )
    if tokenizer is not None:
        end = tokenizer.end_of_document if options.eod_token is None else options.eod_token
        read = dataclasses.replace(
            read,
            token_dtype=options.token_dtype,
            end_of_document=end,
            vocab_size=tokenizer.vocab_size,
        )
    return PrepareConfig(
        tokenizer=options.tokenizer,
        reading=ReadSettings(read, options.skip_bad_records),
        cleaning=Cleaning(tuple(options.filter), options.deduplicate, options.dedup_threshold),
        validation_share=0.0 if validation else options.validation_fraction,
        infill=infill,
        block=options.block,
        made_from={**made_from(options, read, tokenizer, training, validation), **chat_facts(what, chat)},
        chat=chat,
        stream=options.stream,
    )


def _format(options: argparse.Namespace, files: Sequence[InputFile]) -> str:
    found = find_format(options.format, files, text_key=options.text_key, messages_field=options.messages_field)
    for name in (
        ('chat_template', 'special_tokens', 'pack_seq_len', 'messages_field', 'roles')
        if found == 'text'
        else ('filter', 'fim_rate')
    ):
        if value := getattr(options, name):
            given = ' '.join(value) if isinstance(value, list) else value
            if found == 'preference':
                raise InputError(f'{flag(name)}={given} is for text, but the input has preferences; remove it')
            use = (
                'conversations, but the input has none' if found == 'text' else 'text, but the input has conversations'
            )
            raise InputError(f'{flag(name)}={given} is for {use}; remove it or set --format')
    if found == 'preference' and not options.pack_seq_len:
        raise InputError('--pack-seq-len=0: preference pairs must be packed; set it to data.seq_len of training')
    return found


def _chat(options: argparse.Namespace) -> ChatRecipe:
    # Jinja is only needed for conversations.
    from maxlm.data.chat.setup import make_chat_recipe

    return make_chat_recipe(
        options.chat_template,
        tokenizer=options.tokenizer,
        special_tokens=options.special_tokens,
        window=options.pack_seq_len,
    )


def _check_tokens(options: argparse.Namespace, files: Sequence[InputFile]) -> None:
    """Raises InputError for options that token files do not support, or that only token files support."""
    tokens = next((file for file in files if file.kind == 'tokens'), None)
    if tokens is None:
        for name in ('token_dtype', 'eod_token'):
            if (value := getattr(options, name)) not in ('', None):
                raise InputError(f'{flag(name)}={value} is for token files, but --input has none; remove it')
        return
    path = display_path(tokens.path)
    if options.tokenizer.partition(':')[0] in (*LEARNED, 'bytes'):
        raise InputError(
            f'{path} is already tokenized: --tokenizer={options.tokenizer} does not identify its tokenizer; '
            'give its tokenizer.json, hf:NAME or ids:N[:END]'
        )
    for name, asked in {'fim_rate': options.fim_rate, 'filter': options.filter}.items():
        if asked:
            raise InputError(f'{path} is already tokenized: {flag(name)} requires text; remove {flag(name)}')


def _make(options: argparse.Namespace, recipe: PrepareConfig, partitions: Sequence[Partition]) -> Dataset:
    remove_partial_files(options.output)
    try:
        with (
            Announcer(options.output) if options.stream else contextlib.nullcontext() as announcer,
            make_executor(options.executor, min(options.workers, len(partitions)), options.ray_address) as engine,
        ):
            means = ExecutionOptions(engine, options.retries, options.skip_failed, not options.quiet, announcer)
            return prepare(recipe, partitions, options.output, means)
    finally:
        remove_partial_files(options.output)


if __name__ == '__main__':
    run()
