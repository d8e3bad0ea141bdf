"""Runs a task of a preparation in a scratch directory. Its files are in a bucket, which all machines can reach."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

from maxlm.data.executors.executor import OnProgress, TransientError
from maxlm.data.parts.part_store import WORK_DIRECTORY, PartTask
from maxlm.data.parts.scratch import scratch_directory
from maxlm.data.parts.versions import package_versions
from maxlm.errors import InputError
from maxlm.storage.bucket import ACCESS_REMEDY, Bucket, Listed, PermissionDeniedError
from maxlm.storage.download import RemoteFile, fetch_file
from maxlm.storage.errors import TransientStorageError
from maxlm.workdir.bucket_steps import upload_file


@dataclasses.dataclass(frozen=True)
class BucketTask:
    """A task whose files are in a bucket. See `Task`.

    The result is uploaded after the other files, each of which becomes visible when it is complete. Two machines that
    run the same task write the same bytes.

    Attributes:
        url: URL of the data set.
        task: the task.
        versions: versions of the packages on the machine that creates the task.
    """

    url: str
    task: PartTask
    versions: dict[str, str] = dataclasses.field(default_factory=package_versions)

    @property
    def name(self) -> str:
        """See `Task`."""
        return self.task.name

    @property
    def size(self) -> int:
        """See `Task`."""
        return self.task.size

    def run(self, report: OnProgress) -> None:
        """Fetches the inputs, runs the task, and uploads its files. Does nothing if the bucket contains its result.

        Raises:
            InputError: see the task; or the bucket refuses a request.
            TransientError: the storage fails.
        """
        try:
            with scratch_directory() as directory:
                self._run(Bucket(self.url), directory, report)
        except PermissionDeniedError as error:
            raise InputError(f'{error}; {ACCESS_REMEDY}') from error
        except TransientStorageError as error:
            raise TransientError(str(error)) from error

    def _run(self, bucket: Bucket, directory: Path, report: OnProgress) -> None:
        (directory / WORK_DIRECTORY).mkdir()
        task, result_name = self.task.in_directory(directory), self.task.result_name
        if fetch_object(bucket, result_name, directory, bucket.list_one(result_name)):
            files = task.files()
            if files is not None and all(_size(bucket.list_one(name)) == size for name, size in files.items()):
                report(self.size, 0, 0)
                return
            # If this process is killed, this result must not describe the files that are uploaded now.
            bucket.delete([result_name])
        for name in task.inputs:
            fetch_object(bucket, name, directory, bucket.list_one(name))
        task.check_machine()
        self._check_versions()
        task.run(report)
        for name in [*(task.files() or {}), result_name]:
            upload_file(bucket, name, directory / name)

    def _check_versions(self) -> None:
        found = package_versions()
        for name, version in self.versions.items():
            if found.get(name) != version:
                raise InputError(
                    f'{socket.gethostname()} has {name} {found.get(name, "(missing)")} instead of {version} as on '
                    'the machine that started maxlm prepare; install the same versions on all machines'
                )


def fetch_object(bucket: Bucket, name: str, directory: Path, listed: Listed | None) -> bool:
    """Downloads an object to the same name below a directory, or removes the file if the object does not exist.

    Args:
        bucket: the bucket.
        name: name of the object.
        directory: local directory.
        listed: the object as listed by the bucket; None = it does not exist.

    Returns:
        True if the object exists.

    Raises:
        InputError: the file cannot be written.
        TransientStorageError: the bucket does not respond.
    """
    path = directory / name
    path.unlink(missing_ok=True)
    if listed is None:
        return False
    fetch_file(RemoteFile(f'{bucket.url}/{name}', path, listed.size))
    return True


def _size(listed: Listed | None) -> int | None:
    return None if listed is None else listed.size
