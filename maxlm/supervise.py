"""Start a command again until it is done: `python -m maxlm.supervise [--max-failures=K] -- python -m maxlm.train …`.

The same as `launch/restart.sh`, where there is no bash. Exit code 0 of the command: done. 2, bad input: the same would
come again, so it stops. 75, preempted: starts again at once. Any other: starts again after a pause. After K ends in a
row between which no newer checkpoint has come into the --workdir of the command it gives up: with the code of the
command, or 1 instead of 75. SIGTERM and Ctrl-C are handed on, once, as SIGTERM; it then waits for the command and ends
with its exit code.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from maxlm.config.default_workdir import default_workdir
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, ArgumentParser, InputError, exit_code
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, COMMIT_MARKER

LONGEST_PAUSE_SECONDS = 300.0
# How long a signal may go unnoticed in a pause.
TICK_SECONDS = 0.1


class Policy(NamedTuple):
    """When to give up, and how long to wait.

    Attributes:
        max_failures: ends in a row without a newer checkpoint.
        backoff: seconds of the first pause; twice as long each time.
    """

    max_failures: int
    backoff: float


class RestartHistory(NamedTuple):
    """What is remembered of the lives so far: their newest step, and the ends since without a newer one."""

    newest: int
    failures: int
    pause: float


class Decision(NamedTuple):
    """What follows from an end: an exit code, or where that is None another life after a pause."""

    code: int | None
    pause: float
    text: str


def next_action(policy: Policy, history: RestartHistory, code: int, newest: int) -> tuple[Decision, RestartHistory]:
    """What to do after a life has ended with `code` and left `newest` as its newest complete step."""
    if code == EXIT_DONE:
        return Decision(EXIT_DONE, 0, ''), history
    if code == EXIT_BAD_INPUT:
        return Decision(EXIT_BAD_INPUT, 0, f'bad input (exit code {EXIT_BAD_INPUT}): not started again'), history
    if newest > history.newest:
        history = RestartHistory(newest, 0, policy.backoff)
    else:
        history = history._replace(failures=history.failures + 1)
    if history.failures >= policy.max_failures:
        text = f'exit code {code}; given up after {history.failures} in a row without a new checkpoint'
        # 75 would only tell whoever started this to do so again.
        return Decision(EXIT_FAILED if code == EXIT_PREEMPTED else code, 0, text), history
    if code == EXIT_PREEMPTED:
        return Decision(None, 0, f'preempted (exit code {code}) at step {newest}: starting again'), history
    text = (
        f'exit code {code} at step {newest}, {history.failures} of {policy.max_failures} without a new checkpoint: '
        f'again in {history.pause:g} s'
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
    """The newest complete step of a workdir, local or in a bucket; -1 if there is none or it cannot be found out."""
    if not workdir:
        return -1
    try:
        names = (
            _steps_in_bucket(workdir)
            if '://' in workdir
            else [path.name for path in Path(workdir, CHECKPOINTS_DIR).iterdir()]
        )
    except Exception:
        # File systems of buckets have errors of all kinds. Not to know counts as no progress.
        return -1
    # A step that is being written has a longer name until it is complete.
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def _steps_in_bucket(workdir: str) -> list[str]:
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(workdir)
    filesystem.invalidate_cache()
    folder = f'{root.rstrip("/")}/{CHECKPOINTS_DIR}'
    complete = [path.split('/')[-2] for path in filesystem.glob(f'{folder}/*/{COMMIT_MARKER}')]
    # Buckets with real directories have no such file: their steps are renamed when they are complete.
    return complete or [path.rstrip('/').rpartition('/')[2] for path in filesystem.ls(folder, detail=False)]


class Supervisor:
    """Runs one command as often as need be. SIGTERM and SIGINT are handed on to it, once, as SIGTERM."""

    def __init__(self, command: Sequence[str], policy: Policy):
        self._command = list(command)
        self._policy = policy
        self._child: subprocess.Popen | None = None
        self._signal = ''

    def run(self) -> int:
        """Returns the exit code of the last life, or 1 for one of 75 after which it is given up.

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
        workdir = find_workdir(self._command)
        history = RestartHistory(newest_step(workdir), 0, self._policy.backoff)
        while not self._signal:
            code = self._live()
            if self._signal and code not in (EXIT_DONE, EXIT_BAD_INPUT):
                _say(f'told to stop by {self._signal}; the command ended with exit code {code}')
                return code
            decision, history = next_action(self._policy, history, code, newest_step(workdir))
            if decision.text:
                _say(decision.text)
            if decision.code is not None:
                return decision.code
            end = time.monotonic() + decision.pause
            while not self._signal and (left := end - time.monotonic()) > 0:
                time.sleep(min(left, TICK_SECONDS))
        return EXIT_PREEMPTED

    def _live(self) -> int:
        try:
            self._child = subprocess.Popen(self._command)
        except OSError as error:
            raise InputError(f'{shlex.join(self._command)}: cannot be started: {error.strerror}') from error
        if self._signal:
            # It came between the two.
            self._child.terminate()
        code = self._child.wait()
        self._child = None
        # As shells tell of a death by signal.
        return 128 - code if code < 0 else code

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._signal:
            return
        self._signal = signal.Signals(number).name
        # SIGINT goes on as SIGTERM: Ctrl-C reaches the command from the terminal too, and a second SIGINT would break
        # off the save that the first has asked for.
        if self._child:
            self._child.terminate()


def _say(text: str) -> None:
    print(f'supervise: {text}', file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Reads the command line and supervises."""
    mark = argv.index('--') if '--' in argv else len(argv)
    parser = ArgumentParser(
        prog='maxlm.supervise', allow_abbrev=False, description=__doc__, usage='%(prog)s [OPTIONS] -- COMMAND …'
    )
    parser.add_argument('--max-failures', type=int, default=3, help='ends without a new checkpoint (default 3)')
    parser.add_argument('--backoff', type=float, default=10, help='seconds of the first pause (default 10)')
    parser.add_argument('--dry-run', action='store_true', help='only print what would run')
    options = parser.parse_args(argv[:mark])
    command = argv[mark + 1 :]
    if not command:
        raise InputError('no command; usage: maxlm.supervise [OPTIONS] -- COMMAND …')
    if options.max_failures < 1:
        raise InputError(f'--max-failures={options.max_failures}: give 1 or more')
    if not options.backoff >= 0:
        raise InputError(f'--backoff={options.backoff:g}: give 0 or more')
    if options.dry_run:
        print(f'would run: {shlex.join(command)}')
        return EXIT_DONE
    return Supervisor(command, Policy(options.max_failures, options.backoff)).run()


def run() -> None:
    """Entry of `python -m maxlm.supervise` and `maxlm supervise`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
