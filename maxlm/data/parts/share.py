"""Stages of a preparation, and the share of a stage that one of several processes runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from maxlm.errors import InputError

# Stages in order. The tasks of PARALLEL stages can be divided among processes on any machines.
STAGES = ('scan', 'plan', 'shards', 'merge')
PARALLEL = ('scan', 'shards')
# Variables of a task of a Slurm array.
ARRAY_INDEX, ARRAY_STEP = 'SLURM_ARRAY_TASK_ID', 'SLURM_ARRAY_TASK_STEP'
ARRAY_LIMITS = ('SLURM_ARRAY_TASK_MIN', 'SLURM_ARRAY_TASK_MAX')

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Share:
    """Share of the tasks of a stage. It depends only on the numbers of the tasks.

    Attributes:
        index: index of the share, from 0.
        count: number of shares.
    """

    index: int = 0
    count: int = 1

    def of(self, tasks: Sequence[T]) -> list[T]:
        """Returns the tasks of this share."""
        return list(tasks[self.index :: self.count])

    def __str__(self) -> str:
        return f'{self.index}/{self.count}'


ALL = Share()


def parse_share(text: str, environment: Mapping[str, str]) -> Share:
    """Returns the share `I/N`. If `text` is empty, returns the share of a task of a Slurm array, or all tasks.

    The shares of an array with the indices 3 to 7 are 0/5 to 4/5, also if some of these indices are not submitted.
    Those of the indices 0, 4 and 8, which are submitted as `0-8:4`, are 0/3 to 2/3.

    Raises:
        InputError: the text is not a share, or the variables of Slurm contradict each other.
    """
    if not text:
        return _share_of_array(environment) if environment.get(ARRAY_INDEX) else ALL
    match = re.fullmatch(r'(\d{1,9})/(\d{1,9})', text, re.ASCII)
    if match is None or int(match[1]) >= int(match[2]):
        raise InputError(f'--task={text}: must be I/N with I from 0 to N-1, for example 0/8')
    return Share(int(match[1]), int(match[2]))


def _share_of_array(environment: Mapping[str, str]) -> Share:
    """Returns the share of a task of a Slurm array."""
    # https://slurm.schedmd.com/job_array.html lists the variables. Old versions do not set the step.
    found = {name: environment.get(name, '') for name in (ARRAY_INDEX, *ARRAY_LIMITS, ARRAY_STEP)}
    found[ARRAY_STEP] = found[ARRAY_STEP] or '1'
    if all(re.fullmatch(r'\d{1,9}', value, re.ASCII) for value in found.values()):
        index, first, last, step = map(int, found.values())
        if first <= index <= last and step and (index - first) % step == 0:
            return Share((index - first) // step, (last - first) // step + 1)
    values = ', '.join(f'{name}={value}' for name, value in found.items())
    raise InputError(f'{values}: not the task of an array; give --task I/N, or unset {ARRAY_INDEX} to run all tasks')
