"""Decides whether and when a command restarts after an attempt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from maxlm.config.config_files import default_workdir
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DEVICE, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from maxlm.storage.object_store import open_filesystem
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, COMMIT_MARKER

LONGEST_PAUSE_SECONDS = 300.0


class Policy(NamedTuple):
    """Limits of restarts.

    Attributes:
        max_failures: maximum number of failures in a row without a new checkpoint.
        backoff: seconds of the first pause, which doubles after each failure.
        workdir: workdir whose checkpoints show progress; '': unknown, so no attempt counts as progress.
    """

    max_failures: int
    backoff: float
    workdir: str = ''


class RestartHistory(NamedTuple):
    """The newest step of the attempts so far, the failures since, and the next pause in seconds."""

    newest: int
    failures: int
    pause: float


class Decision(NamedTuple):
    """The exit code of the loop, or None for another attempt after `pause` seconds, with a message."""

    code: int | None
    pause: float
    text: str


def next_action(policy: Policy, history: RestartHistory, code: int, newest: int) -> tuple[Decision, RestartHistory]:
    """Decides how to continue after an attempt with exit code `code` and newest complete step `newest`."""
    if code == EXIT_DONE:
        return Decision(EXIT_DONE, 0, ''), history
    if code == EXIT_BAD_INPUT:
        return Decision(EXIT_BAD_INPUT, 0, f'bad input (exit code {EXIT_BAD_INPUT}): not restarted'), history
    if code == EXIT_DEVICE:
        text = f'a device of this host computes wrong results (exit code {code}): not restarted; use another host'
        return Decision(EXIT_DEVICE, 0, text), history
    if newest > history.newest:
        history = RestartHistory(newest, 0, policy.backoff)
    else:
        history = history._replace(failures=history.failures + 1)
    if history.failures >= policy.max_failures:
        place = f' in {policy.workdir}/{CHECKPOINTS_DIR}' if policy.workdir else ''
        text = f'exit code {code}; giving up after {history.failures} failures in a row without a new checkpoint{place}'
        # 75 would make a scheduler start the supervisor again.
        return Decision(EXIT_FAILED if code == EXIT_PREEMPTED else code, 0, text), history
    if code == EXIT_PREEMPTED:
        return Decision(None, 0, f'preempted (exit code {code}) at step {newest}: restarting'), history
    text = (
        f'exit code {code} at step {newest}, {history.failures} of {policy.max_failures} without a new checkpoint: '
        f'restarting in {history.pause:g} s'
    )
    longer = min(history.pause * 2, LONGEST_PAUSE_SECONDS)
    return Decision(None, history.pause, text), history._replace(pause=longer)


def find_workdir(command: Sequence[str]) -> str:
    """Returns the workdir of a command: the value of --workdir, or the default for its --config; '' without either."""
    config = find_option(command, '--config')
    return find_option(command, '--workdir') or (default_workdir(config) if config else '')


def find_option(command: Sequence[str], name: str) -> str:
    """Returns the value of an option of a command, or '' without it."""
    arguments = iter(command)
    for argument in arguments:
        if argument == name:
            return next(arguments, '')
        if argument.startswith(f'{name}='):
            return argument.removeprefix(f'{name}=')
    return ''


def newest_step(workdir: str) -> int:
    """Returns the newest complete step of a workdir, local or in a bucket; -1 if none can be found."""
    if not workdir:
        return -1
    try:
        names = (
            _steps_in_bucket(workdir)
            if '://' in workdir
            else [path.name for path in Path(workdir, CHECKPOINTS_DIR).iterdir()]
        )
    except Exception:
        # fsspec's implementations raise errors of many types. An unknown step counts as no progress.
        return -1
    # An incomplete step has a suffix.
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def _steps_in_bucket(workdir: str) -> list[str]:
    filesystem, root = open_filesystem(workdir)
    folder = f'{root.rstrip("/")}/{CHECKPOINTS_DIR}'
    complete = [path.split('/')[-2] for path in filesystem.glob(f'{folder}/*/{COMMIT_MARKER}')]
    # Buckets with real directories have no commit marker: Orbax renames a step there once it is complete.
    return complete or [path.rstrip('/').rpartition('/')[2] for path in filesystem.ls(folder, detail=False)]
