"""Downloads the files of buckets."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from maxlm.cli.hints import print_next
from maxlm.cli.training_hint import training_command
from maxlm.data.dataset.manifest_files import MANIFEST_NAME
from maxlm.data.dataset.remote_manifest import with_checksums
from maxlm.errors import InputError
from maxlm.log import BYTES, progress_bar
from maxlm.storage.download import RemoteFile
from maxlm.storage.download_tree import fetch_tree, list_tree
from maxlm.storage.errors import redact


def execute(options: argparse.Namespace) -> int:
    """Fetches the files that `options` name.

    Raises:
        InputError: a file cannot be fetched.
    """
    found = [
        list_tree(url, options.output, include=options.include, max_files=options.max_files) for url in options.input
    ]
    files = with_checksums([file for part in found for file in part])
    _refuse_clashes(files)
    missing = [file for file in files if not file.is_complete]
    _fetch(files, missing, options)
    if not options.quiet:
        size = sum(file.bytes for file in files)
        print(
            f'{options.output}: {len(files):,} files, {size:,} bytes; '
            f'{len(missing):,} fetched, {len(files) - len(missing):,} already present'
        )
        if any(file.path.name == MANIFEST_NAME for file in files):
            print_next(*training_command(options.output, 'text', 0))
        else:
            print_next('maxlm', 'prepare', '--input', str(options.output), '--output', f'{options.output}-tokens')
    return 0


def _refuse_clashes(files: Sequence[RemoteFile]) -> None:
    seen: dict[Path, RemoteFile] = {}
    for file in files:
        other = seen.setdefault(file.path, file)
        if other is not file:
            raise InputError(
                f'{redact(other.url)} and {redact(file.url)} would both be {file.path}; use one --output for each'
            )
    for path in seen:
        parent = next((parent for parent in path.parents if parent in seen), None)
        if parent:
            raise InputError(
                f'{redact(seen[parent].url)} and {redact(seen[path].url)} would be a file and a folder of the same '
                f'name, {parent}; select one with --include'
            )


def _fetch(files: Sequence[RemoteFile], missing: Sequence[RemoteFile], options: argparse.Namespace) -> None:
    num_done = len(files) - len(missing)
    total, left = (sum(file.bytes for file in part) for part in (files, missing))
    with progress_bar('fetch', total=total, initial=total - left, unit=BYTES, show=not options.quiet) as bar:
        # The progress bar is not thread-safe.
        lock = threading.Lock()

        def on_bytes(num_bytes: int) -> None:
            with lock:
                bar.update(num_bytes)

        def on_file() -> None:
            nonlocal num_done
            with lock:
                num_done += 1
                bar.set_postfix_str(f'{num_done:,} of {len(files):,} files', refresh=False)

        fetch_tree(
            missing,
            threads=options.threads,
            on_alarm=lambda line: tqdm.write(f'fetch: {line}', file=sys.stderr),
            # A directory with a manifest counts as a complete data set.
            last=MANIFEST_NAME,
            on_bytes=on_bytes,
            on_file=on_file,
        )
