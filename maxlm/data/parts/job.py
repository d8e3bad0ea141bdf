"""Inputs and options of a preparation that several commands run. Each command must have the same ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from maxlm.data.formats.input_file import InputFile
from maxlm.data.parts.part_store import WORK_DIRECTORY, PartStore
from maxlm.data.parts.versions import package_versions
from maxlm.errors import InputError
from maxlm.storage.atomic import atomic_write
from maxlm.storage.filesystem import display_path
from maxlm.storage.json_text import parse_json

JOB_NAME = f'{WORK_DIRECTORY}/job.json'


@dataclasses.dataclass(frozen=True)
class PreparationJob:
    """Inputs and options of a preparation, as JSON values.

    Attributes:
        options: all options that determine the data set, the versions of packages, and a checksum of the inputs under
            `inputs`.
        files: maps each input file to its size and version.
    """

    options: dict[str, Any]
    files: dict[str, list[Any]]

    def changes(self, other: PreparationJob) -> str:
        """Returns the differences of `other` as one line; '' if there are none."""
        keys = {**self.options, **other.options}.keys() - {'inputs'}
        found = [
            f'{key} {other.options.get(key)} instead of {self.options.get(key)}'
            for key in sorted(keys)
            if self.options.get(key) != other.options.get(key)
        ]
        files = [name for name in {**self.files, **other.files} if self.files.get(name) != other.files.get(name)]
        if files:
            name = files[0]
            what = 'is new' if name not in self.files else 'is missing' if name not in other.files else 'has changed'
            found.append(f'{name}, which {what}' + (f', and {len(files) - 1:,} more files' if len(files) > 1 else ''))
        elif self.options.get('inputs') != other.options.get('inputs'):
            found.append('the same files in another order or under other names')
        return '; '.join(found)


def make_job(made_from: dict[str, Any], files: Sequence[InputFile]) -> PreparationJob:
    """Returns the job of these options, see `made_from`, and input files."""
    packages = {f'version of {name}': version for name, version in package_versions().items()}
    versions = {display_path(file.path): [file.size, file.version] for file in files}
    # The round trip turns tuples into lists, as in the stored job.
    return PreparationJob(**parse_json(json.dumps({'options': made_from | packages, 'files': versions})))


def check_job(store: PartStore, job: PreparationJob, name: str) -> None:
    """Compares a job with that of the store, and stores it if the store has none.

    Args:
        store: store of the data set.
        job: the requested job.
        name: name of the data set in messages.

    Raises:
        InputError: the store contains another job. The message names the first change.
    """
    path = store.directory / JOB_NAME
    store.fetch([JOB_NAME])
    if not path.exists():
        atomic_write(path, json.dumps(dataclasses.asdict(job)), make_parents=True)
        store.publish([JOB_NAME])
        # Two commands may start at the same time. The job that was stored last is valid.
        store.fetch([JOB_NAME])
    try:
        known = PreparationJob(**parse_json(path.read_bytes()))
        changes = known.changes(job)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f'{name}/{JOB_NAME} is damaged ({error}); delete {name}/{WORK_DIRECTORY}') from error
    if changes:
        raise InputError(
            f'{name} contains an unfinished preparation from other inputs or options: now {changes}; restore them, '
            f'choose another --output, or delete {name}/{WORK_DIRECTORY}'
        )
