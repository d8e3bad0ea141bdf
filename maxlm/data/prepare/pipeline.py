"""Stages of `maxlm prepare`: scan, deduplication, tokenizer, shards, manifest. An interrupted stage resumes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from maxlm.data.chat.template import CHAT_TEMPLATE_FILE
from maxlm.data.dataset.preparation import Announcer
from maxlm.data.dataset.records import STREAM_INPUTS, DatasetManifest, save_manifest
from maxlm.data.executors.executor import Executor, run_tasks
from maxlm.data.executors.stage_bar import StageBar
from maxlm.data.filters.report import CleaningReport
from maxlm.data.parts.part_store import WORK_DIRECTORY, PartStore, SharedDirectory
from maxlm.data.parts.share import ALL, Share
from maxlm.data.prepare.build_manifest import ManifestBuilder, Publisher, assemble, without_duplicates
from maxlm.data.prepare.choose_validation import Cut, ValidationChoice, choose_validation, stream_fraction
from maxlm.data.prepare.partitions import Partition, ReadSettings
from maxlm.data.prepare.sample import Preview
from maxlm.data.prepare.scan import Cleaning, DecisionFile, ScanTask, decision_files, deduplicate
from maxlm.data.prepare.task_results import identity_of, load_result, save_result
from maxlm.data.prepare.train_val_split import HASH_RANGE, SAMPLE_BYTES
from maxlm.data.prepare.write_shards import ChatShards, WriteShards
from maxlm.data.tokenizer.fim import FimConfig
from maxlm.data.tokenizer.text_boundaries import TEXT_BOUNDARIES_FILE, save_boundaries
from maxlm.data.tokenizer.tokenizer import TOKENIZER_FILE, Tokenizer, make_tokenizer
from maxlm.errors import InputError, os_message
from maxlm.storage.atomic import atomic_write

if TYPE_CHECKING:
    from maxlm.data.chat.setup import ChatRecipe

# File with the report of the filters.
CLEANING_FILE = 'cleaning.json'
# Key of `made_from`: number of partitions that failed and were skipped.
PARTITIONS_SKIPPED = 'groups_left_out'
# Key of `made_from`: reason why the validation split is the end of a document, or empty.
VALIDATION_NOTE = 'validation_note'
# Tokenizers that are trained on the text.
LEARNED = ('chars', 'bpe')

T = TypeVar('T', ScanTask, WriteShards)


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Settings that determine the data set.

    Attributes:
        tokenizer: spec of the tokenizer. See `make_tokenizer`.
        reading: settings of the readers.
        cleaning: settings of filters and deduplication.
        validation_fraction: fraction of the documents of --input used for validation.
        infill: settings of fill-in-the-middle; None = off.
        block: tokens per record.
        made_from: these settings and the inputs, for the manifest.
        chat: chat template and settings for conversations or preference pairs; None = plain text.
        stream: whether training can start before the data set is complete. Validation documents of --input then come
            from the first partition.
    """

    tokenizer: str
    reading: ReadSettings
    cleaning: Cleaning
    validation_fraction: float
    infill: FimConfig | None
    block: int
    made_from: dict[str, Any]
    chat: ChatRecipe | None = None
    stream: bool = False


@dataclasses.dataclass(frozen=True)
class ExecutionOptions:
    """Settings of the execution. The data set does not depend on them, unless failed partitions are skipped.

    Attributes:
        engine: executor of the tasks.
        retries: maximum number of retries of a failed task.
        skip_failed: whether partitions are skipped if all attempts fail.
        show_progress: whether progress bars are shown.
        announcer: announces completed shards to training; None if `PrepareConfig.stream` is False.
        store: store of the files; None = the directory of the data set.
        stage: the only stage to run, of `STAGES`; '' = all.
        share: share of the tasks of `stage`.
    """

    engine: Executor
    retries: int
    skip_failed: bool
    show_progress: bool
    announcer: Announcer | None = None
    store: PartStore | None = None
    stage: str = ''
    share: Share = ALL


def prepare(
    recipe: PrepareConfig, partitions: Sequence[Partition], output: Path, means: ExecutionOptions
) -> DatasetManifest | None:
    """Prepares a data set in `output`, or runs one of its stages. `dataset.json` is written last.

    Returns:
        The data set; None if `means.stage` does not complete it.

    Raises:
        InputError: a stage failed, or its previous stage is not complete. Completed tasks are kept, and the next call
            resumes.
    """
    stages = _Stages(recipe, output.resolve(), means)
    try:
        stages.work.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f'{stages.work}: {os_message(error)}; use a writable directory') from error
    partitions, decisions, filtered = stages.clean(partitions)
    if means.stage == 'scan':
        return None
    tokenizer, validation = stages.begin(partitions, decisions)
    if means.stage == 'plan':
        return None
    tasks, properties = stages.write(partitions, decisions, tokenizer, validation)
    if means.stage == 'shards':
        return None
    skipped = stages.skipped
    properties['made_from'] |= {PARTITIONS_SKIPPED: len(skipped)} if skipped else {}
    dataset, duplicates = assemble(tasks, tokenizer, output=output, left_out=skipped, **properties)
    if recipe.cleaning:
        report = CleaningReport()
        for task in tasks:
            report = report.merge(filtered[task.partition.number])
        atomic_write(output / CLEANING_FILE, without_duplicates(report, duplicates).to_json())
    shards = [shard for split in dataset.splits.values() for shard in split.shards]
    stages.store.check_sizes({shard.name: shard.bytes for shard in shards})
    save_manifest(dataset)
    return dataset


class _Stages:
    """Stages of one preparation. `skipped` lists the partitions that failed and were skipped."""

    def __init__(self, recipe: PrepareConfig, output: Path, means: ExecutionOptions):
        self.work = output / WORK_DIRECTORY
        self.store: PartStore = means.store or SharedDirectory(output)
        self.skipped: list[dict[str, str]] = []
        self._recipe = recipe
        self._output = output
        self._means = means

    def clean(
        self, partitions: Sequence[Partition]
    ) -> tuple[list[Partition], list[DecisionFile | None], dict[int, CleaningReport]]:
        """Runs the scan and the deduplication. Does not read their results for stages that do not need them.

        Returns:
            The partitions that were read, the file with the decisions of each, and the reports by partition number.
        """
        cleaning = self._recipe.cleaning
        if not cleaning:
            return list(partitions), [None] * len(partitions), {}
        tasks = [ScanTask(self.work, partition, self._recipe.reading, cleaning) for partition in partitions]
        if self._means.stage == 'shards':
            return list(partitions), [*decision_files(tasks)], {}
        scans = self._run('scan', tasks)
        if self._means.stage == 'scan':
            return [], [], {}
        if not scans:
            raise InputError(
                'every partition failed, so there is no data set to write; fix the failures reported above'
            )
        decisions = decision_files(scans)
        if self._means.stage != 'merge':
            self._deduplicate(scans, decisions)
        filtered = {scan.partition.number: scan.load()[1] for scan in scans}
        _refuse_empty([filtered[scan.partition.number] for scan in scans if not scan.partition.is_validation])
        return [scan.partition for scan in scans], [*decisions], filtered

    def _deduplicate(self, scans: Sequence[ScanTask], decisions: Sequence[DecisionFile]) -> None:
        """Writes the filter decisions of all partitions."""
        names = [file.name for file in decisions]
        self.store.fetch(names)
        if self._recipe.cleaning.duplicates != 'none' and not all(file.exists() for file in decisions):
            self.store.fetch(name for scan in scans for name in scan.files() or ())
        shown = self._means.show_progress and self._recipe.cleaning.duplicates != 'none'
        with StageBar('duplicates', total=0, unit='step', show=shown) as bar:
            deduplicate(scans, bar.step)
        self.store.publish(names)

    def begin(
        self, partitions: Sequence[Partition], decisions: Sequence[DecisionFile | None]
    ) -> tuple[Tokenizer, ValidationChoice]:
        """Creates and writes the tokenizer, and chooses the validation documents of --input."""
        path, stamp = self._output / TOKENIZER_FILE, self.work / 'begin.json'
        tokenizer_files = [TOKENIZER_FILE, TEXT_BOUNDARIES_FILE]
        stamp_name = f'{WORK_DIRECTORY}/{stamp.name}'
        self.store.fetch([stamp_name, *tokenizer_files])
        # Failed partitions may be missing, so the identity includes the partitions.
        identity = identity_of(self._recipe.made_from, [partition.identity for partition in partitions])
        known = load_result(stamp, identity)
        if known and path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == known['tokenizer_sha256']:
            tokenizer = Tokenizer.load(path)
            # TEXT_BOUNDARIES_FILE may be missing.
            if tokenizer.boundary_ids == known.get('boundary_ids'):
                return self._with_template(tokenizer), _validation_of(known)
        if self._means.stage in ('shards', 'merge'):
            raise InputError(f'--stage={self._means.stage}: these inputs and options are not planned; run --stage plan')
        training = [place for place, partition in enumerate(partitions) if not partition.is_validation]
        preview = Preview(
            [partitions[place] for place in training],
            [decisions[place] for place in training],
            self._recipe.reading,
            self._recipe.cleaning.filters,
            self._means.skip_failed,
        )
        validation = self._choose_validation(preview)
        total = min(SAMPLE_BYTES, sum(partitions[place].size for place in training))
        shown = self._means.show_progress and _kind(self._recipe.tokenizer) in LEARNED
        with StageBar('tokenizer', total=total, show=shown) as bar:
            chat = self._recipe.chat
            # A character tokenizer needs the characters of the template too.
            texts = itertools.chain(preview.texts(validation, bar), chat.texts if chat else ())
            tokenizer = make_tokenizer(self._recipe.tokenizer, texts, infill=self._recipe.infill is not None)
            tokenizer = chat.with_tokens(tokenizer) if chat else tokenizer
        # Without them, the tokenizer would be read with other boundaries.
        save_boundaries(self._output, tokenizer.boundaries)
        atomic_write(path, tokenizer.to_json())
        self.store.publish(tokenizer_files)
        facts = {'tokenizer_sha256': tokenizer.sha256, 'boundary_ids': tokenizer.boundary_ids}
        save_result(stamp, identity, facts | dataclasses.asdict(validation))
        self.store.publish([stamp_name])
        return self._with_template(tokenizer), validation

    def _choose_validation(self, preview: Preview) -> ValidationChoice:
        fraction = self._recipe.validation_fraction
        if not self._recipe.stream:
            return choose_validation(preview.documents(), fraction)
        first = preview.first()
        if fraction and first.partitions:
            size, total = (sum(partition.size for partition in part.partitions) for part in (first, preview))
            fraction = stream_fraction(fraction, size, total)
        number = first.partitions[0].number if first.partitions else None
        return dataclasses.replace(choose_validation(first.documents(), fraction), partition=number)

    def write(
        self,
        partitions: Sequence[Partition],
        decisions: Sequence[DecisionFile | None],
        tokenizer: Tokenizer,
        validation: ValidationChoice,
    ) -> tuple[list[WriteShards], dict[str, Any]]:
        """Writes the shards. Returns the completed tasks, and arguments of `ManifestBuilder`."""
        chat = None if self._recipe.chat is None else self._chat_shards(self._recipe.chat, tokenizer)
        tasks = [
            WriteShards(
                output=self._output,
                work=self.work,
                partition=partition,
                reading=self._recipe.reading,
                decisions=file,
                filters=self._recipe.cleaning.filters,
                validation=ValidationChoice(HASH_RANGE)
                if partition.is_validation
                else validation.within(partition.number),
                tokenizer_sha256=tokenizer.sha256,
                boundary_ids=tokenizer.boundary_ids,
                infill=self._recipe.infill,
                block=self._recipe.block,
                chat=chat,
            )
            for partition, file in zip(partitions, decisions, strict=True)
        ]
        made_from = {**self._recipe.made_from, **({VALIDATION_NOTE: validation.note} if validation.note else {})}
        properties: dict[str, Any] = {'tokenizer_kind': _kind(self._recipe.tokenizer), 'made_from': made_from}
        announcer = self._means.announcer
        if announcer is None:
            return self._run('shards', tasks), properties
        made_from[STREAM_INPUTS] = identity_of([task.identity for task in tasks])
        builder = ManifestBuilder(tasks[0], tokenizer, output=self._output, **properties)
        publisher = Publisher(announcer, builder, tasks)
        publisher.update()
        return self._run('shards', tasks, on_done=publisher.update), properties

    def _with_template(self, tokenizer: Tokenizer) -> Tokenizer:
        """Writes the chat template that belongs to the tokenizer, and returns the tokenizer."""
        if self._recipe.chat is not None:
            atomic_write(self._output / CHAT_TEMPLATE_FILE, self._recipe.chat.template_for(tokenizer))
            self.store.publish([CHAT_TEMPLATE_FILE])
        return tokenizer

    def _chat_shards(self, chat: ChatRecipe, tokenizer: Tokenizer) -> ChatShards:
        checksum = hashlib.sha256(chat.template_for(tokenizer).encode()).hexdigest()
        return ChatShards(checksum, chat.window, self._recipe.reading.options.format == 'preference')

    def _run(self, stage: str, tasks: Sequence[T], on_done: Callable[[], None] = lambda: None) -> list[T]:
        """Runs the tasks that are not done, and returns all completed tasks. Calls `on_done` after each of them.

        If another stage was requested, raises InputError unless all tasks are done.
        """
        if self._means.stage == stage:
            tasks = self._means.share.of(tasks)
        # Training needs the validation data first.
        unfinished = sorted(self.store.unfinished(tasks), key=lambda task: not task.partition.is_validation)
        if unfinished and self._means.stage not in ('', stage):
            raise InputError(
                f'--stage={self._means.stage}: {len(unfinished):,} of {len(tasks):,} partitions lack the result of '
                f'stage {stage}, for example {unfinished[0].name}; run --stage {stage} with the same options'
            )
        total, left = (sum(task.size for task in part) for part in (tasks, unfinished))
        with StageBar(stage, total=total, initial=total - left, show=self._means.show_progress) as bar:

            def report(num_bytes: int, documents: int, tokens: int) -> None:
                bar(num_bytes, documents, tokens)
                if self._means.announcer:
                    self._means.announcer.progress(num_bytes)

            failed = run_tasks(
                self._means.engine,
                [self.store.portable(task) for task in unfinished],
                retries=self._means.retries,
                on_progress=report,
                on_done=lambda _: on_done(),
            )
        if failed and not self._means.skip_failed:
            place, reason = next(iter(failed.items()))
            name = unfinished[place].name
            message = reason if name in reason else f'{name}: {reason}'
            others = f', and {len(failed) - 1} more partitions' if len(failed) > 1 else ''
            skip = '' if self._means.stage else ', or add --skip-failed to skip failed partitions'
            raise InputError(
                f'{message} (tried {self._means.retries + 1} times{others}); finished partitions are kept: run the '
                f'same command again{skip}'
            )
        for place, reason in failed.items():
            partition = unfinished[place].partition
            first = partition.file_ranges[0].file.name
            self.skipped.append({'name': f'partition {partition.number}, from {first}', 'reason': reason})
        lost = {id(unfinished[place]) for place in failed}
        completed = [task for task in tasks if id(task) not in lost]
        if unfinished:
            self.store.collect(completed)
        return completed


def _refuse_empty(reports: Sequence[CleaningReport]) -> None:
    """Raises InputError if the filters remove all training documents."""
    report = functools.reduce(CleaningReport.merge, reports, CleaningReport())
    if not report.documents or report.kept_documents:
        return
    reason, removed = max(report.removed.items(), key=lambda item: item[1].documents)
    example = removed.examples[0]
    raise InputError(
        f'--filter removes all {report.documents:,} documents of --input, {removed.documents:,} for {reason!r}, for '
        f'example {example.name} ({example.detail}); choose other filters'
    )


def _validation_of(saved: dict[str, Any]) -> ValidationChoice:
    """Returns the choice from a saved saved."""
    return ValidationChoice(saved['below'], saved['cut'] and Cut(**saved['cut']), saved['note'], saved.get('partition'))


def _kind(spec: str) -> str:
    """Returns the kind of a tokenizer spec; `file` for existing tokenizers."""
    name, _, _ = spec.partition(':')
    return name if name in (*LEARNED, 'bytes', 'ids') else 'file'
