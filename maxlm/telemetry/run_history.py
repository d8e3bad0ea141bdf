"""Reads the history of a run from its workdir, for `maxlm monitor` and `maxlm report`.

Truncated, corrupt or missing files in a workdir are reported as notes and not raised.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.config.renames import current_metrics
from maxlm.config.schema import Config
from maxlm.config.serialization import from_json
from maxlm.errors import InputError
from maxlm.storage.download_tree import list_tree
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import Entry, display_path, is_url, list_directory, read_bytes
from maxlm.storage.json_fields import items, number
from maxlm.storage.json_text import parse_json
from maxlm.storage.jsonl_tail import JsonlTail
from maxlm.storage.regular_files import MAX_TEXT_BYTES
from maxlm.supervision.elastic_hosts import FOLDER, quarantined_hosts
from maxlm.telemetry.goodput import ACTIVITIES, ADDED_LATER, GoodputLog, attempts_of
from maxlm.workdir.files import CONFIG, EVALUATION_DIR, EVALUATION_FILE, EXPERT_LOADS_FILE, goodput_name
from maxlm.workdir.lock import LOCK, Owner, is_alive

METRICS, EVENTS, SAMPLES, EXPERT_LOADS = 'metrics.jsonl', 'events.jsonl', 'samples.jsonl', EXPERT_LOADS_FILE
CHECKPOINTS = 'checkpoints'
# Stems of files by process: `goodput.jsonl` of process 0, `goodput-N.jsonl` of process N.
GOODPUT, DEVICES = 'goodput', 'devices'
_PER_PROCESS_FILE = re.compile(rf'({GOODPUT}|{DEVICES})(?:-(\d+))?\.jsonl')
# Larger numbers are treated as corrupt.
MAX_NUMBER = 1e18
# Each of these files shows that a run has started in the directory.
RUN_FILES = (METRICS, EVENTS, f'{GOODPUT}.jsonl', 'run.log', LOCK, CHECKPOINTS)


class Stored(NamedTuple):
    """Number of checkpoints in a workdir, and size of their files."""

    num_checkpoints: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class RunHistory:
    """Snapshot of a run's workdir. Lists are oldest first, and lines are JSON objects as in their files.

    Attributes:
        workdir: workdir as given, without secrets.
        config: resolved config; None if it is missing or cannot be read.
        metrics: lines of metrics.jsonl.
        events: lines of events.jsonl.
        samples: lines of samples.jsonl.
        expert_loads: lines of expert_loads.jsonl.
        heartbeats: process → lines of its goodput log.
        goodput_logs: process → attempts of those lines.
        devices: process → lines of its devices.jsonl.
        alive: True if a running process holds the lock; None if this cannot be checked from this machine.
        notes: one line for each truncated, corrupt or missing file.
        stored: checkpoints in the workdir; None if they are not read or cannot be listed. `HistoryReader` does not.
        evaluation: rows of the table that `maxlm evaluate` wrote to the workdir; `HistoryReader` does not read them.
    """

    workdir: str
    config: Config | None = None
    metrics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    expert_loads: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    heartbeats: dict[int, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    goodput_logs: dict[int, GoodputLog] = dataclasses.field(default_factory=dict)
    devices: dict[int, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    alive: bool | None = None
    notes: tuple[str, ...] = ()
    stored: Stored | None = None
    evaluation: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the run: the last part of its workdir."""
        path = self.workdir.rstrip('/')
        return path.rsplit('/', 1)[-1] if is_url(path) else Path(path).resolve().name or path

    @property
    def has_started(self) -> bool:
        """True if a run has started in the workdir."""
        return bool(self.config or self.metrics or self.events or self.heartbeats)

    @property
    def started(self) -> dict[str, Any]:
        """Newest event `started`, with machine, versions and plan, or {}."""
        return next((event for event in reversed(self.events) if event.get('kind') == 'started'), {})


def read_history(workdir: str | Path) -> RunHistory:
    """Reads the history of a run from a directory or URL (gs://…, s3://…).

    Raises:
        InputError: the directory is missing, cannot be listed, or is not a workdir. An empty directory is accepted as
            that of a future run.
    """
    history = HistoryReader(workdir).read()
    rows, notes = _evaluation(str(workdir))
    return dataclasses.replace(history, stored=_stored(str(workdir)), evaluation=rows, notes=(*history.notes, *notes))


def _evaluation(workdir: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the rows of the table of an evaluation, and notes on a file that cannot be read."""
    name = f'{EVALUATION_DIR}/{EVALUATION_FILE}'
    directory = f'{workdir.rstrip("/")}/{EVALUATION_DIR}'
    try:
        if EVALUATION_DIR not in {entry.name for entry in list_directory(workdir)}:
            return [], []
        if EVALUATION_FILE not in {entry.name for entry in list_directory(directory)}:
            return [], []
        rows = items(parse_json(read_bytes(f'{directory}/{EVALUATION_FILE}', limit=MAX_TEXT_BYTES)), 'table')
    except StorageError as error:
        return [], [str(error)]
    except ValueError as error:
        return [], [f'{name}: invalid JSON ({" ".join(str(error).split())[:200]})']
    return [row for row in rows if isinstance(row, dict)], []


def _stored(workdir: str) -> Stored | None:
    directory = Path(CHECKPOINTS)
    try:
        files = list_tree(f'{workdir.rstrip("/")}/{CHECKPOINTS}', directory)
    except (InputError, StorageError):
        return None
    steps = {file.path.relative_to(directory).parts[0] for file in files}
    return Stored(sum(step.isdigit() for step in steps), sum(file.bytes for file in files))


class HistoryReader:
    """Reads a workdir repeatedly. Unchanged files are not read again."""

    def __init__(self, workdir: str | Path):
        self._workdir = str(workdir).rstrip('/') or '/'
        self._tails: dict[str, JsonlTail] = {}
        self._config: tuple[tuple[int, str], Config | None, str] | None = None

    def read(self) -> RunHistory:
        """Returns the current history of the run.

        Raises:
            InputError: see `read_history`.
        """
        entries = self._list()
        notes: list[str] = []
        config = self._read_config(entries.get(CONFIG), notes)
        if config is None and entries and not any(name in entries for name in RUN_FILES):
            raise InputError(
                f'{display_path(self._workdir)}: not a workdir of maxlm train: it contains no {CONFIG}; give the '
                'workdir of a run'
            )
        by_process: dict[str, dict[int, JsonlTail]] = {GOODPUT: {}, DEVICES: {}}
        for name in sorted(entries):
            if match := _PER_PROCESS_FILE.fullmatch(name):
                by_process[match[1]][int(match[2] or 0)] = self._tail_file(name, entries, notes)
        metrics, events, samples, expert_loads = (
            self._tail_file(name, entries, notes) for name in (METRICS, EVENTS, SAMPLES, EXPERT_LOADS)
        )
        heartbeats, devices = (
            {process: list(tail.lines) for process, tail in sorted(by_process[stem].items()) if tail.lines}
            for stem in (GOODPUT, DEVICES)
        )
        history = RunHistory(
            display_path(self._workdir),
            config=config,
            metrics=_drop_invalid_mfu([line for line in metrics.lines if isinstance(line.get('step'), int)], notes),
            events=list(events.lines),
            samples=list(samples.lines),
            expert_loads=list(expert_loads.lines),
            heartbeats=heartbeats,
            goodput_logs=_goodput_logs(heartbeats, notes),
            devices=devices,
            alive=self._is_alive(entries.get(LOCK)),
        )
        if history.has_started:
            notes += [f'{name}: missing' for name in (CONFIG, EVENTS) if name not in entries]
        if FOLDER in entries and not is_url(self._workdir):
            quarantined = quarantined_hosts(Path(self._workdir))
            notes += [f'{FOLDER}: {host} is quarantined, because it computed wrong results' for host in quarantined]
        return dataclasses.replace(history, notes=tuple(notes))

    def _list(self) -> dict[str, Entry]:
        try:
            return {entry.name: entry for entry in list_directory(self._workdir)}
        except StorageError as error:
            raise InputError(f'{error}; give a workdir of maxlm train') from error

    def _tail_file(self, name: str, entries: dict[str, Entry], notes: list[str]) -> JsonlTail:
        if name not in self._tails:
            self._tails[name] = JsonlTail(current_metrics) if name == METRICS else JsonlTail()
        tail = self._tails[name]
        entry = entries.get(name)
        try:
            tail.update(None if entry is None or entry.is_directory else entry)
        except StorageError as error:
            # The file may have been replaced since the directory was listed. The next update reads it again.
            notes.append(str(error))
        notes += tail.notes(name)
        return tail

    def _read_config(self, entry: Entry | None, notes: list[str]) -> Config | None:
        if entry is None or entry.is_directory:
            return None
        version = entry.size, entry.version
        if self._config is None or self._config[0] != version or not entry.version:
            config, note = None, ''
            try:
                config = from_json(read_bytes(entry.path, limit=MAX_TEXT_BYTES).decode())
            except StorageError as error:
                note = str(error)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                note = f'{CONFIG}: not a valid config of this version of maxlm ({" ".join(str(error).split())[:200]})'
            self._config = version, config, note
        _, config, note = self._config
        if note:
            notes.append(note)
        return config

    def _is_alive(self, lock: Entry | None) -> bool | None:
        if is_url(self._workdir):
            return None
        if lock is None:
            # A training process holds the lock from its first line to its last one.
            return False
        try:
            return is_alive(Owner(**parse_json(read_bytes(lock.path, limit=MAX_TEXT_BYTES))))
        except (StorageError, ValueError, TypeError):
            return None


def _drop_invalid_mfu(metrics: list[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """Removes MFU from all lines if any is above 1. Older versions wrote it, but the current `Throughput` omits it."""
    names = ('perf/mfu', 'perf/mfu_full')
    wrong = sum(any((number(line, name) or 0) > 1 for name in names) for line in metrics)
    if not wrong:
        return metrics
    notes.append(
        f'{METRICS}: MFU is hidden because it exceeds 1 in {wrong} lines: the assumed peak FLOP/s is too low; '
        'set metrics.peak_tflops'
    )
    return [{name: value for name, value in line.items() if name not in names} for line in metrics]


def _goodput_logs(heartbeats: dict[int, list[dict[str, Any]]], notes: list[str]) -> dict[int, GoodputLog]:
    goodput_logs = {}
    for process, lines in heartbeats.items():
        usable = [line for line in lines if _is_goodput_line(line)]
        if len(usable) < len(lines):
            num_skipped = len(lines) - len(usable)
            notes.append(f'{goodput_name(process)}: skipped {num_skipped} of {len(lines)} lines, which are invalid')
        if usable:
            goodput_logs[process] = GoodputLog(attempts_of(usable), [])
    return goodput_logs


def _is_goodput_line(line: dict[str, Any]) -> bool:
    """Returns True if a line has all fields of a goodput log."""
    seconds = line.get('seconds')
    numbers: list[Any] = [line.get(key) for key in ('life', 'time', 'began')]
    # None means unknown at that time.
    optional = [line.get(key, '') for key in ('step', 'start_step', 'saved_step', 'dollars')]
    if not isinstance(seconds, dict):
        return False
    numbers += [seconds.get(name, 0 if name in ADDED_LATER else None) for name in ACTIVITIES]
    numbers += [value for value in optional if value is not None]
    has_texts = isinstance(line.get('host'), str) and isinstance(line.get('why'), str)
    return has_texts and all(type(value) in (int, float) and abs(value) < MAX_NUMBER for value in numbers)
