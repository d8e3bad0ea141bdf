"""Stores of the files that the machines of a preparation share, and the protocol of tasks whose files they store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar

from maxlm.data.executors.executor import OnProgress, Task
from maxlm.errors import InputError

# Directory of temporary files below the directory of the data set. It is deleted when the data set is complete.
WORK_DIRECTORY = '.prepare'


class PartTask(Protocol):
    """A task whose files can be moved. Names of files are relative to the directory of the data set.

    Attributes:
        inputs: names of the files that `run` reads, apart from the input of the preparation. Some may not exist.
        result_name: name of the file that `run` writes last.
    """

    @property
    def name(self) -> str:
        """See `Task`."""

    @property
    def size(self) -> int:
        """See `Task`."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """See the class."""

    @property
    def result_name(self) -> str:
        """See the class."""

    def in_directory(self, directory: Path) -> Self:
        """Returns the same task with its files in another directory."""

    def files(self) -> dict[str, int] | None:
        """Returns the sizes of the files that the stored result describes; None if there is no result of this task."""

    def is_done(self) -> bool:
        """Returns True if the result and its files exist in the directory of the task."""

    def check_machine(self) -> None:
        """Raises InputError if the local files that the task reads differ from those of the first machine."""

    def run(self, report: OnProgress) -> None:
        """See `Task`."""


T = TypeVar('T', bound=PartTask)


class PartStore(Protocol):
    """Store of the shared files. The coordinator reads and writes its files in `directory`.

    Attributes:
        directory: local directory of the data set, to which the tasks of the coordinator refer.
    """

    @property
    def directory(self) -> Path:
        """See the class."""

    def unfinished(self, tasks: Sequence[T]) -> list[T]:
        """Returns the tasks without a result, and makes the results of the others readable in `directory`."""

    def collect(self, tasks: Sequence[PartTask]) -> None:
        """Makes the results of completed tasks readable in `directory`. Raises InputError if one is missing."""

    def check_sizes(self, sizes: dict[str, int]) -> None:
        """Raises InputError unless the files of the data set exist with these sizes in bytes by name."""

    def portable(self, task: PartTask) -> Task:
        """Returns the task that an executor can run on any machine."""

    def fetch(self, names: Iterable[str]) -> None:
        """Makes files of the store readable in `directory`, and removes those that the store lacks."""

    def publish(self, names: Iterable[str]) -> None:
        """Makes files of `directory` readable on all machines."""


def lost_file(path: str) -> InputError:
    """Returns the error for a file of the store that another process removed or changed."""
    return InputError(f'{path}: removed or changed while maxlm prepare was running; run it again')


class SharedDirectory:
    """Directory on this machine, or on a disk that all machines share. See `PartStore`."""

    def __init__(self, directory: Path):
        self.directory = directory

    def unfinished(self, tasks: Sequence[T]) -> list[T]:
        """See `PartStore`."""
        self._list()
        return [task for task in tasks if not task.is_done()]

    def collect(self, tasks: Sequence[PartTask]) -> None:
        """See `PartStore`."""
        self._list()

    def check_sizes(self, sizes: dict[str, int]) -> None:
        """See `PartStore`."""
        for name, size in sizes.items():
            path = self.directory / name
            if not path.is_file() or path.stat().st_size != size:
                raise lost_file(str(path))

    def portable(self, task: PartTask) -> Task:
        """See `PartStore`."""
        return task

    def fetch(self, names: Iterable[str]) -> None:
        """See `PartStore`."""

    def publish(self, names: Iterable[str]) -> None:
        """See `PartStore`."""

    def _list(self) -> None:
        # On a shared file system, files from other machines can stay invisible until the directory is listed again.
        for directory in (self.directory, self.directory / WORK_DIRECTORY):
            os.listdir(directory)
