"""What `--tasks` asks for: benchmarks of lm-eval, files of programming problems, hidden facts."""

from __future__ import annotations

from typing import NamedTuple

from maxlm.errors import InputError
from maxlm.evaluation.code import KINDS

NEEDLE = 'needle'


class Requested(NamedTuple):
    """benchmarks: names and paths for lm-eval. suites: (kind, path). needle: whether facts are hidden."""

    benchmarks: tuple[str, ...]
    suites: tuple[tuple[str, str], ...]
    needle: bool


def parse_tasks(text: str) -> Requested:
    """`arc_easy,tasks/mine.yaml,humaneval:HumanEval.jsonl,needle` → what each part is.

    Raises:
        InputError: a part is empty.
    """
    parts = [part.strip() for part in text.split(',')]
    if not all(parts):
        raise InputError(f'--tasks={text}: needs names with commas between, e.g. arc_easy,humaneval:HumanEval.jsonl')
    suites, others = [], []
    for part in dict.fromkeys(parts):
        kind, separator, path = part.partition(':')
        if kind in KINDS and separator and path:
            suites.append((kind, path))
        elif part != NEEDLE:
            others.append(part)
    return Requested(tuple(others), tuple(suites), NEEDLE in parts)
