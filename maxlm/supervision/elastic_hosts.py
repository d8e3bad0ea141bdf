"""Files with which the supervisors of an elastic run find each other: WORKDIR/elastic.

Each supervisor rewrites its own file with every heartbeat. A generation is a numbered file that is created once by
`link`, which fails if the file exists. Thus all hosts agree on each generation, also if several propose it. A file
`quarantined-HOST` names a host that computes wrong results. Delete the file after the repair of the host.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from pathlib import Path
from typing import Any, TypeVar

from maxlm.errors import InputError, os_message
from maxlm.storage.atomic import replace_file
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import read_text
from maxlm.supervision.membership import NO_GENERATION, Generation, HostState

FOLDER = 'elastic'
# Number of old generations whose files are kept.
KEPT_GENERATIONS = 20

_QUARANTINED = 'quarantined-'

_Record = TypeVar('_Record', HostState, Generation)


class ElasticHosts:
    """Directory with the hosts and the generations of a run. All methods except `open` raise OSError."""

    def __init__(self, workdir: Path):
        self._folder = workdir / FOLDER

    def open(self) -> None:
        """Creates the directory.

        Raises:
            InputError: it cannot be written, or its file system has no hard links, such as a mounted bucket.
        """
        probe = self._folder / f'.probe-{uuid.uuid4().hex}'
        link = probe.with_suffix('.link')
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            link.hardlink_to(probe)
            probe.unlink()
            link.unlink()
        except OSError as error:
            raise InputError(
                f'{self._folder}: files and hard links cannot be created ({os_message(error)}); use a --workdir on a '
                'shared disk'
            ) from error

    def write(self, host: HostState) -> None:
        """Writes the state of this host."""
        replace_file(self._folder / f'host-{host.token}.json', json.dumps(host._asdict()))

    def hosts(self) -> list[HostState]:
        """Returns the states of all hosts."""
        return [host for path in self._folder.glob('host-*.json') if (host := _read(path, HostState))]

    def newest(self) -> Generation:
        """Returns the newest generation."""
        newest = max(self._folder.glob('generation-*.json'), default=None)
        found = _read(newest, Generation) if newest else None
        return found._replace(hosts=tuple(found.hosts)) if found else NO_GENERATION

    def propose(self, generation: Generation) -> bool:
        """Creates a generation. Returns False if another host has created the one of this number."""
        path = self._path(generation.number)
        draft = path.with_name(f'.{path.name}.{generation.hosts[0]}')
        replace_file(draft, json.dumps(generation._asdict()))
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        with contextlib.suppress(FileNotFoundError):
            self._path(generation.number - KEPT_GENERATIONS).unlink()
        return True

    def quarantine(self, name: str, reason: str) -> None:
        """Excludes a host from this run until somebody deletes the file."""
        replace_file(self._folder / _quarantine_name(name), f'{reason}\n')

    def quarantine_file(self, name: str) -> Path | None:
        """Returns the file that excludes a host, or None if the host may join."""
        path = self._folder / _quarantine_name(name)
        return path if path.exists() else None

    def _path(self, number: int) -> Path:
        # Sorted by name, generations are in order.
        return self._folder / f'generation-{number:09}.json'


def quarantined_hosts(workdir: Path) -> list[str]:
    """Returns the names of the hosts that are excluded from a run."""
    return sorted(path.name.removeprefix(_QUARANTINED) for path in (workdir / FOLDER).glob(f'{_QUARANTINED}*'))


def _quarantine_name(host: str) -> str:
    # A host name may not contain a slash, but the name of a container may be anything.
    return _QUARANTINED + host.replace('/', '-')


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    """Returns the record of a file, or None if it was removed or is not a record."""
    try:
        fields: Any = parse_json(read_text(path))
        return kind(**fields)
    except (FileNotFoundError, ValueError, TypeError):
        return None
