"""Restarts a command until it succeeds: `python -m maxlm.supervise [--max-failures=K] -- python -m maxlm.train …`.

Exit code 0 of the command ends the loop. Exit code 2 (bad input) also ends it, because a restart would fail in the same
way. After 75 (preempted) the command restarts immediately; after any other code it restarts after a pause. The loop
gives up after K failures in a row without a new checkpoint in the command's --workdir. It then returns the exit code of
the command, or 1 instead of 75. SIGTERM and Ctrl-C are forwarded once, as SIGTERM; the loop then waits for the command
and returns its exit code.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from maxlm.config.config_files import default_workdir
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, ArgumentParser, InputError, exit_code
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, COMMIT_MARKER

LONGEST_PAUSE_SECONDS = 300.0
# Maximum delay until a pause reacts to a signal.
TICK_SECONDS = 0.1


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
    config = _find_option(command, '--config')
    return _find_option(command, '--workdir') or (default_workdir(config) if config else '')


def _find_option(command: Sequence[str], name: str) -> str:
    words = iter(command)
    for word in words:
        if word == name:
            return next(words, '')
        if word.startswith(f'{name}='):
            return word.removeprefix(f'{name}=')
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
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(workdir)
    filesystem.invalidate_cache()
    folder = f'{root.rstrip("/")}/{CHECKPOINTS_DIR}'
    complete = [path.split('/')[-2] for path in filesystem.glob(f'{folder}/*/{COMMIT_MARKER}')]
    # Buckets with real directories have no commit marker: Orbax renames a step there once it is complete.
    return complete or [path.rstrip('/').rpartition('/')[2] for path in filesystem.ls(folder, detail=False)]


class Supervisor:
    """Runs one command repeatedly and forwards the first SIGTERM or SIGINT to it as SIGTERM."""

    def __init__(self, command: Sequence[str], policy: Policy):
        self._command = list(command)
        self._policy = policy
        self._pid = 0
        self._signal = ''

    @property
    def is_stopped(self) -> bool:
        """Returns True if a signal has asked the supervisor to stop."""
        return bool(self._signal)

    def run(self) -> int:
        """Runs the command until `next_action` or a signal ends the loop; returns the exit code of the loop.

        Raises:
            InputError: the command cannot be started.
        """
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._supervise()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _supervise(self) -> int:
        history = RestartHistory(newest_step(self._policy.workdir), 0, self._policy.backoff)
        while not self._signal:
            code = self._run_once()
            if self._signal and code not in (EXIT_DONE, EXIT_BAD_INPUT):
                _say(f'stopped by {self._signal}; the command ended with exit code {code}')
                return code
            decision, history = next_action(self._policy, history, code, newest_step(self._policy.workdir))
            if decision.text:
                _say(decision.text)
            if decision.code is not None:
                return decision.code
            end = time.monotonic() + decision.pause
            while not self._signal and (left := end - time.monotonic()) > 0:
                time.sleep(min(left, TICK_SECONDS))
        return EXIT_PREEMPTED

    def _run_once(self) -> int:
        # Python ignores these signals; the command inherits their default action.
        default = (signal.SIGPIPE, signal.SIGXFSZ)
        try:
            self._pid = os.posix_spawnp(self._command[0], self._command, os.environ, setsigdef=default)
        except OSError as error:
            raise InputError(
                f'{shlex.join(self._command)}: cannot be started: {error.strerror}; check the command'
            ) from error
        if self._signal:
            # The signal arrived before the process ID was known.
            self._terminate()
        # As process 1 of a container, this process also inherits orphans and has to reap them.
        while (ended := os.wait())[0] != self._pid:
            pass
        self._pid = 0
        code = os.waitstatus_to_exitcode(ended[1])
        # The convention of shells for a process that was killed by a signal.
        return 128 - code if code < 0 else code

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._signal:
            return
        self._signal = signal.Signals(number).name
        # SIGINT is forwarded as SIGTERM: a terminal sends Ctrl-C to the command too, and a second SIGINT would
        # interrupt the save that the first one requested.
        self._terminate()

    def _terminate(self) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)


def _say(text: str) -> None:
    print(f'supervise: {text}', file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Parses the options and supervises the command after `--`."""
    mark = argv.index('--') if '--' in argv else len(argv)
    parser = ArgumentParser(
        prog='maxlm supervise',
        allow_abbrev=False,
        description=__doc__,
        usage='%(prog)s [OPTIONS] -- COMMAND …',
        epilog='example: python -m maxlm.supervise -- python -m maxlm.train --config=configs/tiny.py',
    )
    parser.add_argument(
        '--max-failures',
        type=int,
        default=3,
        help='consecutive failures without a new checkpoint before giving up (default 3)',
    )
    parser.add_argument(
        '--backoff',
        type=float,
        default=10,
        help='pause before the first restart in seconds, doubled after each failure (default 10)',
    )
    parser.add_argument('--dry-run', action='store_true', help='print the command without running it')
    options = parser.parse_args(argv[:mark])
    command = argv[mark + 1 :]
    if not command:
        raise InputError('no command given; usage: maxlm.supervise [OPTIONS] -- COMMAND …')
    if options.max_failures < 1:
        raise InputError(f'--max-failures={options.max_failures}: must be at least 1')
    if not options.backoff >= 0:
        raise InputError(f'--backoff={options.backoff:g}: must be at least 0')
    if options.dry_run:
        print(f'would run: {shlex.join(command)}')
        return EXIT_DONE
    return Supervisor(command, Policy(options.max_failures, options.backoff, find_workdir(command))).run()


def run() -> None:
    """Entry point of `python -m maxlm.supervise` and `maxlm supervise`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
