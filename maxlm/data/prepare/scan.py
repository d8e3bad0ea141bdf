"""Scans the documents of each partition: runs the filters and computes signatures for deduplication.

`deduplicate` then finds the duplicates among all partitions and writes the filter decisions of each partition.
"""

from __future__ import annotations

import collections
import dataclasses
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from maxlm.data.documents.document import Document
from maxlm.data.executors.executor import OnProgress
from maxlm.data.filters.base import FilterResult
from maxlm.data.filters.dedup import Duplicates, find_duplicates, kept_names
from maxlm.data.filters.filters_by_name import describe_filters, make_cleaner
from maxlm.data.filters.minhash import is_current, minhash_signature
from maxlm.data.filters.report import MAX_EXAMPLES, CleaningReport
from maxlm.data.parts.part_store import WORK_DIRECTORY
from maxlm.data.prepare.filter_results import DocumentHash, FilterDecision, FilterDecisions
from maxlm.data.prepare.partitions import Partition, PartitionTask, ReadSettings, read_batches
from maxlm.data.prepare.task_results import identity_of, load_result, pack, save_result, unpack
from maxlm.errors import InputError


@dataclasses.dataclass(frozen=True)
class Cleaning:
    """Settings of filters and deduplication.

    Attributes:
        filters: names of the filters, in order.
        duplicates: duplicates to remove: `none`, `exact` or `near`.
        near_threshold: minimum Jaccard similarity of near-duplicates.
        identities: `describe_filters` of `filters`, computed once for all workers.
    """

    filters: tuple[str, ...]
    duplicates: str
    near_threshold: float
    identities: list[str] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, 'identities', describe_filters(self.filters))

    def __bool__(self) -> bool:
        return bool(self.filters) or self.duplicates != 'none'


@dataclasses.dataclass(frozen=True)
class ScanTask(PartitionTask):
    """Task that scans one partition. See `Task`.

    Attributes:
        work: directory of temporary files, which is deleted when the data set is complete.
        partition: the partition.
        reading: settings of the readers.
        cleaning: settings of filters and deduplication.
    """

    work: Path
    partition: Partition
    reading: ReadSettings
    cleaning: Cleaning

    @property
    def identity(self) -> str:
        """Checksum of everything that determines the result. `near_threshold` only matters in `deduplicate`."""
        cleaning = self.cleaning
        return identity_of(self.partition.identity, self.reading.identity, cleaning.identities, cleaning.duplicates)

    @property
    def signatures_path(self) -> Path:
        """Path of the signatures of the documents that the filters keep."""
        return self.work / f'signatures-{self.partition.number:05d}'

    @property
    def _path(self) -> Path:
        return self.work / f'survey-{self.partition.number:05d}.json'

    @property
    def inputs(self) -> tuple[str, ...]:
        """See `PartTask`."""
        return ()

    @property
    def result_name(self) -> str:
        """See `PartTask`."""
        return f'{WORK_DIRECTORY}/{self._path.name}'

    def in_directory(self, directory: Path) -> ScanTask:
        """See `PartTask`."""
        return dataclasses.replace(self, work=directory / WORK_DIRECTORY)

    def files(self) -> dict[str, int] | None:
        """See `PartTask`."""
        result = load_result(self._path, self.identity)
        return None if result is None else result.get('files')

    def is_done(self) -> bool:
        """See `PartTask`."""
        if self.files() is None:
            return False
        return self.cleaning.duplicates == 'none' or is_current(self.signatures_path, self.identity)

    def check_machine(self) -> None:
        """See `PartTask`. Also compares the files of filters."""
        super().check_machine()
        found = describe_filters(self.cleaning.filters)
        for name, ours, expected in zip(self.cleaning.filters, found, self.cleaning.identities, strict=True):
            if ours != expected:
                raise InputError(
                    f'--filter={name}: its files on {socket.gethostname()} differ from those on the machine that '
                    'started maxlm prepare; copy the same files to all machines'
                )

    def run(self, report: OnProgress) -> None:
        """Runs the filters and computes signatures of the kept documents. See `Task`.

        Raises:
            InputError: a document cannot be read and may not be skipped, or a file cannot be written.
            TransientError: the storage fails.
        """
        clean = make_cleaner(self.cleaning.filters)
        cleaning, checksum, codes = CleaningReport(), DocumentHash(), bytearray()

        def kept_documents() -> Iterator[Document]:
            # WriteShards reports the skipped records.
            for documents, size in read_batches(self.partition, self.reading, skipped=[]):
                for document in documents:
                    checksum.add(document)
                    cleaned = clean(document)
                    cleaning.count(document, cleaned)
                    if isinstance(cleaned, FilterResult):
                        codes.append(FilterDecision.FILTERED)
                        continue
                    codes.append(FilterDecision.KEPT if cleaned.text == document.text else FilterDecision.SHORTENED)
                    yield cleaned
                report(size, len(documents), 0)

        if self.cleaning.duplicates == 'none':
            collections.deque(kept_documents(), maxlen=0)
        else:
            near = self.cleaning.duplicates == 'near'
            minhash_signature(kept_documents(), near=near, identity=self.identity).save(self.signatures_path)
        files = {}
        if self.cleaning.duplicates != 'none':
            files[f'{WORK_DIRECTORY}/{self.signatures_path.name}'] = self.signatures_path.stat().st_size
        result = {
            'files': files,
            'codes': pack(np.frombuffer(bytes(codes), np.uint8)),
            'checksum': checksum.value(),
            'report': cleaning.to_json(),
        }
        save_result(self._path, self.identity, result)

    def load(self) -> tuple[FilterDecisions, CleaningReport]:
        """Returns the decisions before deduplication and the report. Raises InputError if the task is not done."""
        result = load_result(self._path, self.identity)
        if result is None:
            raise InputError(f'{self._path}: removed or changed while maxlm prepare was running; run it again')
        codes = unpack(result['codes'])
        decisions = FilterDecisions(codes, result['checksum'], codes == FilterDecision.SHORTENED, {})
        return decisions, CleaningReport.from_json(result['report'])


@dataclasses.dataclass(frozen=True)
class DecisionFile:
    """File with the filter decisions of a partition, for workers to load."""

    path: Path
    identity: str

    @property
    def name(self) -> str:
        """Name of the file relative to the directory of the data set."""
        return f'{WORK_DIRECTORY}/{self.path.name}'

    def exists(self) -> bool:
        """Returns True if the file contains the decisions."""
        return FilterDecisions.load(self.path, self.identity) is not None

    def load(self) -> FilterDecisions:
        """Returns the decisions. Raises InputError if the file is missing or has changed."""
        decisions = FilterDecisions.load(self.path, self.identity)
        if decisions is None:
            raise InputError(f'{self.path}: removed or changed while maxlm prepare was running; run it again')
        return decisions


def deduplicate(scans: Sequence[ScanTask], on_step: Callable[[int, int], None]) -> list[DecisionFile]:
    """Finds the duplicates among all scanned documents and writes the filter decisions of each partition.

    Validation partitions come first: of two equal documents, the validation document is kept. If all files exist
    already, nothing is computed.

    Args:
        scans: the scans, all of them done.
        on_step: called with the number of completed steps and the total number of steps.

    Raises:
        InputError: a result is missing or cannot be written.
    """
    files = decision_files(scans)
    if all(file.exists() for file in files):
        return files
    order, cleaning = _order(scans), scans[0].cleaning
    ordered = [scans[place] for place in order]
    duplicates: list[Duplicates | None] = [None] * len(scans)
    if cleaning.duplicates != 'none':
        duplicates = list(_find(ordered, on_step))
    names = _names_of_kept(ordered, duplicates)
    for place, found in zip(order, duplicates, strict=True):
        decisions, _ = scans[place].load()
        if found is not None:
            decisions = _with_duplicates(decisions, found, names)
        decisions.save(files[place].path, files[place].identity)
    return files


def decision_files(scans: Sequence[ScanTask]) -> list[DecisionFile]:
    """Returns the file with the filter decisions of each partition. The files need not exist."""
    corpus = identity_of([scans[place].identity for place in _order(scans)], dataclasses.asdict(scans[0].cleaning))
    return [
        DecisionFile(
            scan.work / f'decisions-{scan.partition.number:05d}.json', identity_of(corpus, scan.partition.identity)
        )
        for scan in scans
    ]


def _order(scans: Sequence[ScanTask]) -> list[int]:
    # The sort is stable, so both kinds keep their order.
    return sorted(range(len(scans)), key=lambda place: not scans[place].partition.is_validation)


def _find(scans: Sequence[ScanTask], on_step: Callable[[int, int], None]) -> list[Duplicates]:
    cleaning = scans[0].cleaning
    return find_duplicates(
        [scan.signatures_path for scan in scans],
        threshold=cleaning.near_threshold if cleaning.duplicates == 'near' else None,
        identities=[scan.identity for scan in scans],
        on_step=on_step,
    )


def _named(found: Duplicates) -> np.ndarray:
    """Returns the indices, among documents with signatures, of the duplicates that a report shows."""
    return np.concatenate(
        [np.flatnonzero((found.kept >= 0) & (found.near == near))[:MAX_EXAMPLES] for near in (False, True)]
    )


def _names_of_kept(scans: Sequence[ScanTask], duplicates: Sequence[Duplicates | None]) -> dict[int, str]:
    numbers = sorted({int(i) for found in duplicates if found is not None for i in found.kept[_named(found)]})
    names = kept_names([scan.signatures_path for scan in scans], numbers) if numbers else []
    return dict(zip(numbers, names, strict=True))


def _with_duplicates(decisions: FilterDecisions, found: Duplicates, names: dict[int, str]) -> FilterDecisions:
    # Only the documents that the filters keep have signatures.
    places = np.flatnonzero(decisions.codes != FilterDecision.FILTERED)
    codes = decisions.codes.copy()
    duplicate = found.kept >= 0
    codes[places[duplicate]] = np.where(
        found.near[duplicate], FilterDecision.NEAR_DUPLICATE, FilterDecision.EXACT_DUPLICATE
    )
    named = {int(places[i]): names[int(found.kept[i])] for i in _named(found)}
    return dataclasses.replace(decisions, codes=codes, kept_names=named)
