"""Checks the config and the inputs of a training command before machines are rented for it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from maxlm.config.keys import declared_keys
from maxlm.config.schema import Config
from maxlm.data.loader.source import HUB
from maxlm.errors import InputError
from maxlm.storage.errors import ErrorKind, StorageError, error_kind
from maxlm.storage.filesystem import is_url, stat
from maxlm.trainer.run import OpenSource

# Keys with paths that a run reads. The other keys with paths are written, or are caches.
_CHECKPOINTS = ('train.init_from', 'distill.teacher', 'grpo.reward_model')
_PROMPTS = ('grpo.prompts', 'grpo.eval_prompts')


def check_here(config: Config, open_source: OpenSource) -> list[str]:
    """Opens the data of a run on this machine.

    Returns:
        The inputs that were not checked, each with the reason.

    Raises:
        InputError: the data does not exist, is damaged, or does not fit the config.
    """
    hub = [f'{key}={value}: is prepared while the run trains' for key, value in inputs(config) if value.startswith(HUB)]
    if not hub:
        with contextlib.ExitStack() as stack:
            open_source(config, stack)
    return hub


def check_elsewhere(config: Config) -> list[str]:
    """Checks that other machines, which get the files of the repository, can have the inputs of a run.

    Buckets are looked up. An absolute path is taken for a disk of those machines. A relative path is accepted if it is
    a file or directory of the repository.

    Returns:
        The inputs that were not checked, each with the reason.

    Raises:
        InputError: an input exists only on this machine, or not at all.
    """
    notes = []
    for key, value in inputs(config):
        if value.startswith((HUB, '/', '~')):
            notes.append(f'{key}={value}: cannot be seen from this machine')
        elif is_url(value):
            try:
                stat(value)
            except StorageError as error:
                if error.__cause__ is not None and error_kind(error.__cause__) is ErrorKind.NOT_FOUND:
                    raise InputError(f'{key}: {error}; copy the files there, or give another URL') from error
                # This machine may lack the permission or the library that the others have.
                notes.append(f'{key}: {error}')
        elif not _is_copied(Path(value)):
            raise InputError(
                f'{key}={value}: is not part of the repository, so the machines will not have it; copy it to a bucket '
                'and give its URL, such as gs://BUCKET/PATH, or give an absolute path on their shared disk'
            )
    return notes


def inputs(config: Config) -> Iterator[tuple[str, str]]:
    """Yields each path that a run of the config reads, after the name of its key."""
    if config.train.objective == 'grpo':
        names: tuple[str, ...] = _PROMPTS
    else:
        names = ('data.sources' if config.data.sources else 'data.path', 'distill.logits_dir')
    keys = declared_keys()
    for name in (*names, *_CHECKPOINTS):
        value = keys[name].of(config)
        for entry in (value,) if isinstance(value, str) else value:
            path = entry[0] if isinstance(entry, tuple) else entry
            if not path.startswith(HUB):
                # A source is DIR#SOURCE, and a checkpoint may be WORKDIR@STEP.
                path = path.rpartition('@')[0] or path if name in _CHECKPOINTS else path.partition('#')[0]
            if path:
                yield name, path


def _is_copied(path: Path) -> bool:
    """Returns True if the launch scripts copy a relative path: git does not ignore it."""
    if not path.exists():
        return False
    try:
        ignored = subprocess.run(['git', 'check-ignore', '--quiet', path], capture_output=True)
    except OSError:
        return True
    return ignored.returncode != 0
