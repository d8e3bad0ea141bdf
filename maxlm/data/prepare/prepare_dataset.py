"""Prepares a data set: checks the options, finds the inputs and runs the pipeline, or continues an earlier attempt."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from maxlm.data.chat.template import CHAT_TEMPLATE_FILE
from maxlm.data.dataset.manifest_files import MANIFEST_NAME
from maxlm.data.dataset.preparation import PARTIAL_MANIFEST, Announcer
from maxlm.data.dataset.records import DatasetManifest, load_manifest
from maxlm.data.documents.field_names import parse_roles
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.executors.local_executor import num_cores
from maxlm.data.executors.ray_executor import make_executor
from maxlm.data.formats.discovery import find_inputs, refuse_overlap
from maxlm.data.formats.input_file import InputFile
from maxlm.data.formats.record_formats import find_format
from maxlm.data.formats.token_files import check_token_file
from maxlm.data.parts.job import JOB_NAME, PreparationJob, check_job, make_job
from maxlm.data.parts.part_store import PartStore, SharedDirectory
from maxlm.data.parts.scratch import scratch_directory
from maxlm.data.parts.share import ALL, PARALLEL, STAGES, Share, parse_share
from maxlm.data.prepare.existing_output import (
    OtherDataError,
    check_same_data,
    locked,
    published,
    remove_leftovers,
    remove_partial_files,
)
from maxlm.data.prepare.options import PrepareOptions, chat_fields, made_from
from maxlm.data.prepare.partitions import Partition, ReadSettings, make_partitions
from maxlm.data.prepare.pipeline import CLEANING_FILE, LEARNED, ExecutionOptions, PrepareConfig, prepare
from maxlm.data.prepare.scan import Cleaning
from maxlm.data.prepare.summary import summary
from maxlm.data.prepare.write_shards import is_shard_name
from maxlm.data.tokenizer.fim import FimConfig
from maxlm.data.tokenizer.text_boundaries import TEXT_BOUNDARIES_FILE
from maxlm.data.tokenizer.tokenizer import TOKENIZER_FILE, make_tokenizer
from maxlm.errors import InputError, flag
from maxlm.storage.filesystem import Entry, display_path

if TYPE_CHECKING:
    from maxlm.data.chat.setup import ChatRecipe
    from maxlm.data.parts.bucket_parts import BucketParts

# Lines that describe a data set, and its manifest; None after a stage that does not complete it.
Prepared: TypeAlias = tuple[list[str], DatasetManifest | None]


class PreparedOutput(NamedTuple):
    """Result of a preparation.

    Attributes:
        summary: lines that describe the data set.
        not_text: files of the inputs that were skipped because they contain no text.
        format: format of the records: text, chat or preference.
        dataset: manifest of the data set; None after a stage that does not complete it.
    """

    summary: list[str]
    not_text: list[Entry]
    format: str
    dataset: DatasetManifest | None


def prepare_dataset(options: PrepareOptions) -> PreparedOutput:
    """Writes the data set that the options describe, or continues its preparation. Runs one stage with `options.stage`.

    Raises:
        InputError: the inputs are missing or unusable, or the output contains another data set.
    """
    training, validation, not_text = _find(options)
    recipe, partitions = _recipe(options, training, validation), make_partitions(training, validation)
    job = make_job(recipe.made_from, [*training, *validation])
    if isinstance(options.output, Path):
        lines, dataset = _prepare(options, options.output, recipe, partitions, job if options.stage else None)
    else:
        lines, dataset = _publish(options, options.output, recipe, partitions, job)
    return PreparedOutput(lines, not_text, recipe.reading.options.format, dataset)


def check_preparation(options: PrepareOptions, *, has_tokenizer: bool = True) -> int | None:
    """Checks the inputs, the tokenizer and a local output as `prepare_dataset` does, and writes nothing.

    Args:
        options: options of the preparation.
        has_tokenizer: False if the tokenizer does not exist yet. Then only the inputs are checked, without it.

    Returns:
        The number of token ids, or None if the tokenizer is trained or does not exist yet.

    Raises:
        InputError: `prepare_dataset` would fail before it reads the inputs completely.
    """
    training, validation, _ = _find(options)
    tokens = next((file for file in training if file.kind == 'tokens'), None)
    if tokens and not options.skip_bad_records:
        check_token_file(tokens, options.token_dtype)
    if not has_tokenizer:
        _format(options, [*training, *validation])
        return None
    recipe = _recipe(options, training, validation)
    if isinstance(options.output, Path):
        _find_prepared(options, options.output, recipe)
    return recipe.reading.options.vocab_size


def _find(options: PrepareOptions) -> tuple[list[InputFile], list[InputFile], list[Entry]]:
    """Returns the training files, the validation files, and the files without text."""
    not_text: list[Entry] = []
    find: dict[str, Any] = {'max_record_bytes': options.max_record_mib * 2**20, 'on_skipped': not_text.extend}
    find |= {'exclude': options.exclude, 'max_files': options.max_files}
    training = find_inputs(options.input, **find)
    validation = find_inputs(options.validation, **find) if options.validation else []
    refuse_overlap(training, validation)
    return training, validation, not_text


def _find_prepared(options: PrepareOptions, output: Path, recipe: PrepareConfig) -> DatasetManifest | None:
    """Returns the complete data set in `output`, if any. Raises OtherDataError if it is another one."""
    if (output / MANIFEST_NAME).exists():
        dataset = load_manifest(output)
        check_same_data(dataset, str(dataset.path), recipe.made_from, skip_failed=options.skip_failed)
        return dataset
    if (output / PARTIAL_MANIFEST).exists():
        started = load_manifest(output, name=PARTIAL_MANIFEST)
        check_same_data(started, str(output), recipe.made_from, skip_failed=True)
    return None


def _prepare(
    options: PrepareOptions,
    output: Path,
    recipe: PrepareConfig,
    partitions: Sequence[Partition],
    job: PreparationJob | None = None,
) -> Prepared:
    """Prepares the data set in the directory `output`. Compares `job`, if any, with that of the directory."""
    with locked(output, is_share=options.stage in PARALLEL):
        dataset = _find_prepared(options, output, recipe)
        message = f'{output} is already prepared from these inputs' if dataset else f'wrote {output}'
        if dataset is None and job is not None:
            check_job(SharedDirectory(output), job, str(output))
        dataset = dataset or _make(options, output, recipe, partitions)
        if dataset is None:
            return _stage_lines(options, str(output)), None
        remove_leftovers(dataset, cleaned=bool(recipe.cleaning))
    return summary(dataset, message, cleaned=bool(recipe.cleaning)), dataset


def _publish(
    options: PrepareOptions, url: str, recipe: PrepareConfig, partitions: Sequence[Partition], job: PreparationJob
) -> Prepared:
    """Prepares the data set in the bucket, or in the cache and uploads it to `url`."""
    from maxlm.data.parts.bucket_parts import BucketParts  # needs fsspec
    from maxlm.workdir.upload_directory import Upload

    upload = Upload('--output', url, cache=options.cache, last=MANIFEST_NAME)
    if upload.is_complete():
        return _completed(options, url, recipe)
    with scratch_directory(Path(options.cache).expanduser() / 'preparations') as directory:
        parts = BucketParts(url, directory)
        if options.stage or options.executor == 'ray' or parts.contains(JOB_NAME):
            try:
                return _prepare_in_bucket(options, parts, recipe, partitions, job)
            except InputError:
                # Another command may have completed the data set and deleted its temporary files.
                if not upload.is_complete():
                    raise
                return _completed(options, url, recipe)
    upload.begin()
    try:
        lines, dataset = _prepare(options, upload.folder, recipe, partitions)
    except OtherDataError:
        # The cached data set was prepared for this URL from other inputs, and was not uploaded.
        upload.discard()
        lines, dataset = _prepare(options, upload.folder, recipe, partitions)
    upload.finish(show=not options.quiet)
    return [line.replace(str(upload.folder), display_path(url)) for line in lines], dataset


def _prepare_in_bucket(
    options: PrepareOptions,
    parts: BucketParts,
    recipe: PrepareConfig,
    partitions: Sequence[Partition],
    job: PreparationJob,
) -> Prepared:
    """Prepares the data set in a bucket, which is the only storage that the machines share."""
    name = display_path(parts.url)
    check_job(parts, job, name)
    dataset = _make(options, parts.directory, recipe, partitions, parts)
    if dataset is None:
        return _stage_lines(options, name), None
    # Another command may have replaced the job of this one in the meantime.
    check_job(parts, job, name)
    parts.publish([TOKENIZER_FILE, TEXT_BOUNDARIES_FILE, CHAT_TEMPLATE_FILE, CLEANING_FILE])
    parts.publish([MANIFEST_NAME])
    _remove_others(parts, dataset)
    lines = summary(dataset, f'wrote {parts.directory}', cleaned=bool(recipe.cleaning))
    return [line.replace(str(parts.directory), name) for line in lines], dataset


def _completed(options: PrepareOptions, url: str, recipe: PrepareConfig) -> Prepared:
    """Returns the summary and the manifest of a data set in a bucket. See `published`."""
    from maxlm.data.parts.bucket_parts import BucketParts  # needs fsspec

    lines, dataset = published(url, recipe.made_from, skip_failed=options.skip_failed)
    # The command that completed it may have been killed before it deleted the temporary files.
    _remove_others(BucketParts(url, Path()), dataset)
    return lines, dataset


def _remove_others(parts: BucketParts, dataset: DatasetManifest) -> None:
    parts.remove_others({shard.name for split in dataset.splits.values() for shard in split.shards}, is_shard_name)


def _stage_lines(options: PrepareOptions, name: str) -> list[str]:
    """Returns a line about a completed stage that does not complete the data set."""
    share = _share(options)
    part = f', task {share}' if share.count > 1 else ''
    after = f' after all {share.count} tasks' if share.count > 1 else ''
    next_stage = STAGES[STAGES.index(options.stage) + 1]
    return [f'{name}: completed stage {options.stage}{part}; run stage {next_stage}{after}']


def _share(options: PrepareOptions) -> Share:
    return parse_share(options.task, os.environ) if options.stage in PARALLEL else ALL


def _recipe(options: PrepareOptions, training: Sequence[InputFile], validation: Sequence[InputFile]) -> PrepareConfig:
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
        validation_fraction=0.0 if validation else options.validation_fraction,
        infill=infill,
        block=options.block,
        made_from={**made_from(options, read, tokenizer, training, validation), **chat_fields(what, chat)},
        chat=chat,
        stream=options.stream,
    )


def _format(options: PrepareOptions, files: Sequence[InputFile]) -> str:
    found = find_format(options.format, files, text_key=options.text_key, messages_field=options.messages_field)
    for name in (
        ('chat_template', 'special_tokens', 'pack_seq_len', 'messages_field', 'roles')
        if found == 'text'
        else ('filter', 'fim_rate')
    ):
        if value := getattr(options, name):
            value_text = ' '.join(value) if isinstance(value, list) else value
            if found == 'preference':
                raise InputError(f'{flag(name)}={value_text} is for text, but the input has preferences; remove it')
            use = (
                'conversations, but the input has none' if found == 'text' else 'text, but the input has conversations'
            )
            raise InputError(f'{flag(name)}={value_text} is for {use}; remove it or set --format')
    if found == 'preference' and not options.pack_seq_len:
        raise InputError('--pack-seq-len=0: preference pairs must be packed; set it to data.seq_len of training')
    return found


def _chat(options: PrepareOptions) -> ChatRecipe:
    # Jinja is only needed for conversations.
    from maxlm.data.chat.setup import make_chat_recipe

    return make_chat_recipe(
        options.chat_template,
        tokenizer=options.tokenizer,
        special_tokens=options.special_tokens,
        window=options.pack_seq_len,
    )


def _check_tokens(options: PrepareOptions, files: Sequence[InputFile]) -> None:
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
    for name, value in {'fim_rate': options.fim_rate, 'filter': options.filter}.items():
        if value:
            raise InputError(f'{path} is already tokenized: {flag(name)} requires text; remove {flag(name)}')


def _make(
    options: PrepareOptions,
    output: Path,
    recipe: PrepareConfig,
    partitions: Sequence[Partition],
    store: PartStore | None = None,
) -> DatasetManifest | None:
    share = _share(options)
    workers = min(options.workers or num_cores(), max(len(share.of(partitions)), 1))
    # Other shares may be writing their files.
    remove_partial = (lambda _: None) if options.stage in PARALLEL else remove_partial_files
    remove_partial(output)
    try:
        with (
            Announcer(output) if options.stream else contextlib.nullcontext() as announcer,
            make_executor(options.executor, workers, options.ray_address) as engine,
        ):
            means = ExecutionOptions(
                engine,
                options.retries,
                options.skip_failed,
                not options.quiet,
                announcer,
                store,
                options.stage,
                share,
            )
            return prepare(recipe, partitions, output, means)
    finally:
        remove_partial(output)
