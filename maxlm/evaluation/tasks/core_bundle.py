"""Reads evaluation bundles of the CORE metric: Li et al., DataComp-LM (2024), arXiv:2406.11794, section 3.5.

A bundle is a directory in the format that nanochat publishes, after the in-context tasks of LLM Foundry:

- `core.yaml`: `icl_tasks`, a list of tasks with `label`, `dataset_uri`, `num_fewshot`, `icl_task_type` and
  `continuation_delimiter`.
- `eval_meta_data.csv`: a row per task with the columns `Eval Task` and `Random baseline`, the accuracy of random
  answers in percent.
- `eval_data/DATASET_URI`: one JSON object per line. Its keys depend on the type of the task; see `PARSERS`.
"""

from __future__ import annotations

import csv
import io
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from maxlm.errors import InputError, explain_os_errors
from maxlm.evaluation.tasks.core_download import download_bundle, is_remote
from maxlm.storage.json_text import parse_lines
from maxlm.storage.paths import Kind, PathOption
from maxlm.storage.regular_files import read_bytes

# Precedes the path of a bundle in lists of tasks.
PREFIX = 'core:'
TASKS_FILE, BASELINES_FILE, DATA_DIRECTORY = 'core.yaml', 'eval_meta_data.csv', 'eval_data'
MULTIPLE_CHOICE, SCHEMA, LANGUAGE_MODELING = 'multiple_choice', 'schema', 'language_modeling'
MAX_TASKS_BYTES, MAX_DATA_BYTES = 2**20, 2**30
_MAX_PATH = 200
# The order of examples decides which few-shot examples a question has. nanochat shuffles them with this seed.
SHUFFLE_SEED = 1337


class CoreExample(NamedTuple):
    """A question with its possible answers.

    Attributes:
        line: line number in the file of the task, from 1.
        candidates: (context, continuation) of each answer. Contexts differ only in schema tasks.
        gold: index of the correct answer.
    """

    line: int
    candidates: list[tuple[str, str]]
    gold: int


class CoreTask(NamedTuple):
    """A task of a bundle.

    Attributes:
        label: name of the task.
        kind: MULTIPLE_CHOICE, SCHEMA or LANGUAGE_MODELING.
        num_fewshot: number of solved examples in each prompt.
        delimiter: text between a context and its continuation.
        baseline: accuracy of random answers, from 0 to less than 1.
        examples: all questions, in the order of nanochat.
    """

    label: str
    kind: str
    num_fewshot: int
    delimiter: str
    baseline: float
    examples: list[CoreExample]


def split_bundle(tasks: Sequence[str], key: str) -> tuple[str, list[str]]:
    """Returns the path of the bundle in a list of tasks, '' if there is none, and the other tasks.

    Raises:
        InputError: there are several bundles, which would report the same names, or the path is empty.
    """
    paths = [task.removeprefix(PREFIX) for task in tasks if task.startswith(PREFIX)]
    if len(paths) > 1 or '' in paths:
        raise InputError(f'{key}={",".join(tasks)}: give the directory or the URL of one bundle, {PREFIX}BUNDLE')
    return ''.join(paths), [task for task in tasks if not task.startswith(PREFIX)]


def open_bundle(path: str, *, limit: int | None = None, key: str = '--tasks') -> list[CoreTask]:
    """Reads all tasks of a bundle.

    Args:
        path: directory of the bundle, or a source of `download_bundle`.
        limit: maximum number of examples per task, which are also the few-shot examples; None = all.
        key: name of the option in error messages.

    Raises:
        InputError: a file cannot be downloaded or read, or has another format.
    """
    if is_remote(path):
        folder = download_bundle(path, TASKS_FILE, key=key)
    else:
        try:
            folder = Path(PathOption(Kind.DIRECTORY).checked(path))
        except ValueError as error:
            raise InputError(f'{key}={PREFIX}{error}') from error
    baselines = _baselines(folder / BASELINES_FILE)
    file = folder / TASKS_FILE
    try:
        document = yaml.safe_load(_read(file, limit=MAX_TASKS_BYTES))
    # The library also raises the errors of int and date, and recurses.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f'{file}: invalid YAML: {" ".join(str(error).split()):.300}; fix the file') from error
    entries = document.get('icl_tasks') if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise InputError(f'{file}: icl_tasks is not a list of tasks; use the core.yaml of an evaluation bundle')
    tasks: list[CoreTask] = []
    for number, entry in enumerate(entries, start=1):
        try:
            task, data = _task(entry, baselines)
        except ValueError as error:
            raise InputError(f'{file}: task {number} {error}') from error
        if task.label in {other.label for other in tasks}:
            raise InputError(f'{file}: there are two tasks {task.label}; rename one')
        tasks.append(task._replace(examples=_examples(folder / DATA_DIRECTORY / data, task.kind)[:limit]))
    return tasks


def _task(entry: Mapping[str, Any], baselines: Mapping[str, float]) -> tuple[CoreTask, str]:
    """Returns a task without its examples, and the path of its data. Raises ValueError."""
    label, kind = _text(entry, 'label'), _text(entry, 'icl_task_type')
    # A label is part of the names of metrics and files.
    if not re.fullmatch(r'\w[\w.-]{0,99}', label):
        raise ValueError(f'has the label {_shown(label)}; use at most 100 letters, digits, dots, - and _')
    if kind not in PARSERS:
        raise ValueError(f'({label}) has the unknown icl_task_type {_shown(kind)}; use {" or ".join(PARSERS)}')
    if label not in baselines:
        raise ValueError(f'({label}) has no row in {BASELINES_FILE}; add it')
    if not 0 <= baselines[label] < 1:
        raise ValueError(
            f'({label}) has a random baseline of {100 * baselines[label]:g}; it must be at least 0 and below 100'
        )
    # Published files list several numbers, of which CORE uses the first.
    num = _value(entry, 'num_fewshot')
    num = num[0] if isinstance(num, list) and num else num
    if type(num) is not int or num < 0:
        raise ValueError(f'({label}) has num_fewshot={_shown(num)}; set a number of examples')
    delimiter = _text(entry, 'continuation_delimiter') if 'continuation_delimiter' in entry else ' '
    data = _text(entry, 'dataset_uri')
    if not data.isprintable() or len(data) > _MAX_PATH or os.path.isabs(data) or '..' in data.split('/'):
        raise ValueError(f'({label}) has dataset_uri={_shown(data)}; give a path below {DATA_DIRECTORY}')
    return CoreTask(label, kind, num, delimiter, baselines[label], []), data


def _baselines(file: Path) -> dict[str, float]:
    """Returns {task: accuracy of random answers}."""
    try:
        rows = list(csv.DictReader(io.StringIO(_read(file).decode())))
        return {row['Eval Task']: float(row['Random baseline']) / 100 for row in rows}
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise InputError(
            f'{file}: {type(error).__name__}: {error!s:.200}; give a CSV file with the columns Eval Task and Random '
            'baseline'
        ) from error


def _examples(file: Path, kind: str) -> list[CoreExample]:
    examples = []
    try:
        for line, row in parse_lines(_read(file)):
            try:
                candidates, gold = PARSERS[kind](row)
            except ValueError as error:
                raise ValueError(f'line {line} {error}') from error
            if not isinstance(gold, int) or not 0 <= gold < len(candidates):
                raise ValueError(f'line {line} has gold={_shown(gold)}; it must be the index of an answer')
            examples.append(CoreExample(line, candidates, gold))
    except ValueError as error:
        raise InputError(f'{file} ({kind}): {error}') from error
    if not examples:
        raise InputError(f'{file}: no examples found; add at least one')
    random.Random(SHUFFLE_SEED).shuffle(examples)
    return examples


def _multiple_choice(row: Mapping[str, Any]) -> tuple[list[tuple[str, str]], Any]:
    return [(_text(row, 'query'), choice) for choice in _texts(row, 'choices')], _value(row, 'gold')


def _schema(row: Mapping[str, Any]) -> tuple[list[tuple[str, str]], Any]:
    return [(context, _text(row, 'continuation')) for context in _texts(row, 'context_options')], _value(row, 'gold')


def _language_modeling(row: Mapping[str, Any]) -> tuple[list[tuple[str, str]], int]:
    continuation = _text(row, 'continuation')
    if not continuation.strip():
        raise ValueError('has an empty continuation; remove the line')
    return [(_text(row, 'context').strip(), continuation)], 0


# Functions that convert a line to its candidates and the index of the correct one, by type of task.
PARSERS: dict[str, Callable[[Mapping[str, Any]], tuple[list[tuple[str, str]], Any]]] = {
    MULTIPLE_CHOICE: _multiple_choice,
    SCHEMA: _schema,
    LANGUAGE_MODELING: _language_modeling,
}


def _value(row: Mapping[str, Any], name: str) -> Any:
    if not isinstance(row, dict):
        raise ValueError(f'is not an object; set {name} and its other keys')
    if name not in row:
        raise ValueError(f'has no {name}; add it')
    return row[name]


def _text(row: Mapping[str, Any], name: str) -> str:
    value = _value(row, name)
    if not isinstance(value, str):
        raise ValueError(f'has {name}={_shown(value)}; it must be a text')
    return value


def _texts(row: Mapping[str, Any], name: str) -> list[str]:
    values = _value(row, name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f'has {name}={_shown(values)}; it must be a list of texts')
    return values


def _shown(value: Any) -> str:
    """Returns a value for error messages. Aliases of YAML can make the text of a list longer than the memory."""
    is_short = isinstance(value, (bool, float)) or value is None
    if isinstance(value, str) or (type(value) is int and abs(value) < 10**50):
        return f'{value!r:.50}'
    return repr(value) if is_short else f'a {type(value).__name__}'


def _read(file: Path, *, limit: int = MAX_DATA_BYTES) -> bytes:
    with explain_os_errors(file, 'give the directory of an evaluation bundle'):
        return read_bytes(file, limit=limit)
