"""Prepares the Hugging Face datasets of a config in background processes of a run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from maxlm.config.schema import DataConfig
from maxlm.data.dataset.manifest_files import MANIFEST_NAME
from maxlm.data.dataset.preparation import is_preparing
from maxlm.data.executors.local_executor import num_cores
from maxlm.data.loader.source import HUB, POLL_SECONDS, hub_directory
from maxlm.errors import InputError, explain_os_errors
from maxlm.storage.atomic import atomic_write
from maxlm.storage.regular_files import read_text

# Seconds that a preparation has to stop its workers at the end of the run.
END_SECONDS = 10.0
# Name of the file with the dataset and the commit that a directory is prepared from.
PINNED_NAME = 'hub.txt'
# Runs maxlm prepare until its input is closed. This also happens if the run is killed.
_PREPARE = """
import os, runpy, signal, sys, threading

def stop_with_run():
    # A blocking read of sys.stdin would abort the interpreter at its exit.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)

# A run in the background of a script ignores SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=stop_with_run, daemon=True).start()
runpy.run_module('maxlm.prepare', run_name='__main__', alter_sys=True)
"""


def hub_entries(data: DataConfig) -> list[str]:
    """Returns the Hugging Face datasets of the config. Raises InputError if they have no tokenizer."""
    paths = [entry for entry, _ in data.sources] or [data.path]
    entries = [path for path in paths if path.startswith(HUB)]
    if entries and not data.tokenizer:
        raise InputError(
            f"data.tokenizer='': {entries[0]} is prepared during the run and needs a tokenizer; set data.tokenizer to "
            'a tokenizer.json, hf:NAME or bpe:N'
        )
    return entries


@contextlib.contextmanager
def background_preparation(data: DataConfig) -> Iterator[None]:
    """Prepares the Hugging Face datasets of the config that are not complete, until the context ends.

    All preparations are running or complete when the context begins. A preparation that another run has started is
    used as it is. An interrupted preparation continues at the same commit.

    Raises:
        InputError: a preparation cannot start.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for entry in hub_entries(data):
            directory = hub_directory(entry, data)
            if not (directory / MANIFEST_NAME).exists() and not is_preparing(directory):
                print(f'preparing {entry} in {directory}', flush=True)
                started.append((entry, directory, stack.enter_context(_process(entry, directory, data.tokenizer))))
        for entry, directory, process in started:
            _wait_for_start(entry, directory, process)
        yield


@contextlib.contextmanager
def _process(entry: str, directory: Path, tokenizer: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the preparation of a dataset."""
    options = ['--input', _pinned(entry, directory), '--output', str(directory), '--tokenizer', tokenizer]
    # The other half of the cores reads and computes the batches.
    options += ['--stream', '--quiet', '--workers', str(max(1, num_cores() // 2))]
    explained = explain_os_errors(directory, 'set data.cache_dir to a writable directory')
    with explained, _log_path(directory).open('wb') as log:
        process = subprocess.Popen(
            [sys.executable, '-c', _PREPARE, *options],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # Ctrl-C stops the run, which then stops the preparation.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        assert process.stdin
        process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_start(entry: str, directory: Path, process: subprocess.Popen[bytes]) -> None:
    """Waits until a preparation is running or complete. Raises InputError if it fails before."""
    while not is_preparing(directory) and not (directory / MANIFEST_NAME).exists():
        if process.poll() is not None and not is_preparing(directory) and not (directory / MANIFEST_NAME).exists():
            lines = read_text(_log_path(directory)).strip().splitlines()
            reason = lines[-1].removeprefix('error: ') if lines else f'exit code {process.returncode}'
            raise InputError(f'the preparation of {entry} failed: {reason}; correct this and start the run again')
        time.sleep(POLL_SECONDS)


def _pinned(entry: str, directory: Path) -> str:
    """Returns the entry with its commit, which is resolved once, so that an interrupted preparation can continue."""
    record = directory / PINNED_NAME
    if record.exists():
        return read_text(record).strip()
    from maxlm.data.formats.hf_datasets import pin  # imports PyArrow

    pinned = pin(entry)
    atomic_write(record, pinned + '\n', make_parents=True)
    return pinned


def _log_path(directory: Path) -> Path:
    return directory.with_name(f'{directory.name}.log')
