"""Upload state of a run: WORKDIR/.mirror/record.json."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

from maxlm.storage.atomic import atomic_write
from maxlm.storage.check_directory import check_links
from maxlm.storage.json_text import parse_json
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, DAMAGED

MIRROR = '.mirror'


class UploadState:
    """Fingerprints of the steps that are complete in the bucket, and digests of the small files last seen in it."""

    def __init__(self, workdir: Path, url: str):
        """Reads the recorded state. Ignores a state of another URL."""
        self.workdir = workdir
        self.folder = workdir / MIRROR
        self._url = url
        self._lock = threading.Lock()
        record = _read(self.folder / 'record.json')
        if record.get('url') != url:
            record = {}
        self.steps: dict[int, str] = {int(step): str(mark) for step, mark in record.get('steps', {}).items()}
        # Name → digests of own uploads that the bucket may have: the last one, and the one in progress.
        self.files: dict[str, list[str]] = {name: list(known) for name, known in record.get('files', {}).items()}

    def local_steps(self) -> dict[int, str]:
        """Returns the complete local steps with fingerprints that distinguish steps of the same number."""
        steps = {}
        folder = self.workdir / CHECKPOINTS_DIR
        for entry in os.scandir(folder) if folder.is_dir() else ():
            if entry.name.isdigit():
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                steps[int(entry.name)] = f'{status.st_ino}-{status.st_mtime_ns}'
        return steps

    def pending(self, local: Mapping[int, str] | None = None) -> list[int]:
        """Returns the local steps that are not in the bucket, oldest first. `local` is the result of `local_steps`."""
        local = self.local_steps() if local is None else local
        return sorted(step for step, fingerprint in local.items() if self.steps.get(step) != fingerprint)

    def is_set_aside(self, step: int) -> bool:
        """Returns True if a step was set aside as corrupt, as opposed to deleted."""
        folder = self.workdir / CHECKPOINTS_DIR / DAMAGED
        return (folder / str(step)).exists() or any(folder.glob(f'{step}[!0-9]*'))

    def set_step(self, step: int, fingerprint: str | None) -> None:
        """Records that a step is in the bucket, or was deleted from it (`fingerprint` None). Written immediately."""
        with self._lock:
            if fingerprint is None:
                self.steps.pop(step, None)
            else:
                self.steps[step] = fingerprint
            self._write()

    def set_file(self, name: str, digests: list[str]) -> None:
        """Records the digests of a file in the bucket. Written immediately."""
        with self._lock:
            self.files[name] = digests
            self._write()

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {
            'url': self._url,
            'steps': {str(step): mark for step, mark in self.steps.items()},
            'files': self.files,
        }
        atomic_write(self.folder / 'record.json', json.dumps(record).encode())


class StagingDir:
    """Hard links to the files of the step that is being uploaded. They remain if the run deletes the step."""

    def __init__(self, upload_state: UploadState):
        self._upload_state = upload_state
        self._folder = upload_state.folder / 'staged'

    def stage(self, step: int, fingerprint: str) -> Path:
        """Returns a directory with the files of a step. Raises FileNotFoundError if the step does not exist."""
        target = self._folder / f'{step}-{fingerprint}'
        if target.is_dir():
            return target
        self.clear()
        origin = self._upload_state.workdir / CHECKPOINTS_DIR / str(step)
        check_links(origin)
        partial = self._folder / 'partial'
        try:
            shutil.copytree(origin, partial, copy_function=os.link)
        except (OSError, shutil.Error):
            # The step was deleted, or the file system has no hard links. In the latter case, read the step itself.
            shutil.rmtree(partial, ignore_errors=True)
            if not origin.is_dir():
                raise FileNotFoundError(str(origin)) from None
            return origin
        partial.rename(target)
        return target

    def clear(self) -> None:
        """Removes the links."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _read(path: Path) -> dict:
    try:
        record = parse_json(path.read_bytes())
    except (OSError, ValueError):
        # Without the recorded state, more files are compared, but nothing is lost.
        return {}
    return record if isinstance(record, dict) else {}
