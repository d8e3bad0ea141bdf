"""Writes results of evaluations to a directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from maxlm.errors import explain_os_errors


@contextlib.contextmanager
def output_directory(folder: Path) -> Iterator[None]:
    """Creates the directory of `--output`, and converts errors of files written within the context to InputError."""
    with explain_os_errors(f'--output={folder}', 'choose a writable directory'):
        folder.mkdir(parents=True, exist_ok=True)
        yield


def write_samples(folder: Path, task: str, step: int, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes `samples_TASK_STEP.jsonl` in lm-eval's format: one JSON object per line. Raises OSError."""
    lines = (json.dumps(record, default=to_json, ensure_ascii=False) + '\n' for record in records)
    (folder / f'samples_{task}_{step}.jsonl').write_text(''.join(lines), encoding='utf-8')


def to_json(value: Any) -> Any:
    """Converts NumPy scalars to numbers and other objects to strings."""
    return value.item() if hasattr(value, 'item') else str(value)
