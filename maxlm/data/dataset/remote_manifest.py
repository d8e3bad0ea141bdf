"""Manifest `dataset.json` of a data set in a bucket: its files and their checksums."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from maxlm.data.chat.template import CHAT_TEMPLATE_FILE
from maxlm.data.dataset.manifest_files import MANIFEST_NAME, check_names
from maxlm.data.dataset.records import BOUNDS_OF_COUNTS, FORMAT_VERSION
from maxlm.data.tokenizer.text_boundaries import TEXT_BOUNDARIES_FILE
from maxlm.errors import InputError, explain_os_errors, os_message
from maxlm.storage.download import RemoteFile, remove_partial
from maxlm.storage.errors import redact
from maxlm.storage.json_text import parse_json
from maxlm.storage.object_store import read_file
from maxlm.storage.regular_files import MAX_TEXT_BYTES, read_bytes

# Files that not every data set has, and the fields with their checksums.
OPTIONAL_FILES = {CHAT_TEMPLATE_FILE: 'chat_template_sha256', TEXT_BOUNDARIES_FILE: 'text_boundaries_sha256'}


@dataclasses.dataclass(frozen=True)
class RemoteManifest:
    """The parts of a manifest that downloads need.

    Attributes:
        url: directory of the data set.
        content: content of `dataset.json`.
        tokenizer_checksums: names and SHA-256 of the tokenizer, and of its boundaries and chat template if they exist.
        shards: maps the names of the shards of all splits to size in bytes and SHA-256.
    """

    url: str
    content: bytes
    tokenizer_checksums: dict[str, str]
    shards: dict[str, tuple[int, str]]

    def files(self, directory: Path) -> list[RemoteFile]:
        """Returns the shards with their local paths in `directory`."""
        return [
            RemoteFile(f'{self.url}/{name}', directory / name, size, sha256)
            for name, (size, sha256) in self.shards.items()
        ]


def read_remote_manifest(url: str) -> RemoteManifest:
    """Reads the manifest of the data set in the directory `url`.

    Raises:
        InputError: the manifest is missing or malformed.
        TransientStorageError: the bucket does not respond.
    """
    url = url.rstrip('/')
    return parse_manifest(url, read_file(f'{url}/{MANIFEST_NAME}'))


def parse_manifest(url: str, content: bytes) -> RemoteManifest:
    """Parses the manifest of the data set in the directory `url`. Raises InputError if it is malformed."""
    name = f'{redact(url)}/{MANIFEST_NAME}'
    try:
        manifest = parse_json(content)
        version = manifest['format_version']
        if version != FORMAT_VERSION:
            raise InputError(
                f'{name} has format {str(version)[:50]}, but this maxlm reads {FORMAT_VERSION}; prepare it again'
            )
        tokenizer_checksums = {str(manifest['tokenizer_file']): str(manifest['tokenizer_sha256'])}
        tokenizer_checksums |= {file: str(manifest[key]) for file, key in OPTIONAL_FILES.items() if manifest.get(key)}
        listed = [
            (str(shard['name']), (_size(shard['bytes']), str(shard['sha256'])))
            for split in manifest['splits'].values()
            for shard in split['shards']
        ]
        check_names([str(manifest['tokenizer_file']), *(shard for shard, _ in listed)])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f'{name} is malformed ({str(error)[:300]}); copy the data set to the bucket again') from error
    return RemoteManifest(url, content, tokenizer_checksums, dict(listed))


def _size(value: object) -> int:
    smallest, largest = BOUNDS_OF_COUNTS
    if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
        raise TypeError(f'bytes is {repr(value)[:200]}')
    return value


def remove_stale(manifest: RemoteManifest, directory: Path) -> None:
    """Removes files of another data set: shards with the names of other shards, and files that this one does not have.

    The cache identifies files by size only. The old manifest in `directory` gives the checksums of its files.
    """
    try:
        before = parse_manifest(str(directory), read_bytes(directory / MANIFEST_NAME, limit=MAX_TEXT_BYTES))
    except FileNotFoundError:
        return
    except InputError:
        # Files of an unreadable manifest are considered stale.
        before = RemoteManifest('', b'', dict.fromkeys(OPTIONAL_FILES, ''), dict.fromkeys(manifest.shards, (0, '')))
    except OSError as error:
        raise InputError(f'{directory / MANIFEST_NAME}: {os_message(error)}; check the file') from error
    for file in manifest.files(directory):
        if file.path.name in before.shards and before.shards[file.path.name][1] != file.sha256:
            _remove(file.path)
            remove_partial(file)
    # Readers of tokenizers would use them.
    for name in OPTIONAL_FILES.keys() & (before.tokenizer_checksums.keys() - manifest.tokenizer_checksums.keys()):
        _remove(directory / name)


def _remove(path: Path) -> None:
    with explain_os_errors(path, 'check its permissions'):
        path.unlink(missing_ok=True)


def with_checksums(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Adds the checksums from the manifests of prepared data sets, and sorts the manifests to the end.

    Removes local files that belong to another data set.

    Raises:
        InputError: a manifest cannot be read.
    """
    checksums: dict[Path, str] = {}
    manifests = [file for file in files if file.path.name == MANIFEST_NAME]
    for file in manifests:
        content = read_file(file.url)
        try:
            manifest = parse_manifest(file.url.rpartition('/')[0], content)
        except InputError:
            # The file belongs to another program and is treated as a normal file.
            continue
        remove_stale(manifest, file.path.parent)
        checksums |= {shard.path: shard.sha256 for shard in manifest.files(file.path.parent)}
        checksums |= {file.path.parent / name: sha256 for name, sha256 in manifest.tokenizer_checksums.items()}
    files = [dataclasses.replace(file, sha256=checksums.get(file.path, '')) for file in files]
    return sorted(files, key=lambda file: file.path.name == MANIFEST_NAME)
