"""Start a command again until it is done: `python -m maxlm.supervise [--max_failures=K] -- python -m maxlm.train …`.

The same as `launch/restart.sh`, where there is no bash. Exit code 0 of the command: done. 2, bad input: the same would
come again, so it stops. 75, preempted: starts again at once. Any other: starts again after a pause. After K ends in a
row between which no newer checkpoint has come into the --workdir of the command it gives up: with the code of the
command, or 1 instead of 75. SIGTERM and Ctrl-C are handed on, once, as SIGTERM; it then waits for the command and ends
with its exit code.
"""

from __future__ import annotations

import shlex
import sys

from maxlm.errors import EXIT_DONE, ArgumentParser, InputError, exit_code
from maxlm.runtime.supervision import Policy, Supervisor


def main(argv: list[str]) -> int:
    """Reads the command line and supervises."""
    mark = argv.index('--') if '--' in argv else len(argv)
    parser = ArgumentParser(
        prog='maxlm.supervise', allow_abbrev=False, description=__doc__, usage='%(prog)s [OPTIONS] -- COMMAND …'
    )
    parser.add_argument('--max_failures', type=int, default=3, help='ends without a new checkpoint (default 3)')
    parser.add_argument('--backoff', type=float, default=10, help='seconds of the first pause (default 10)')
    parser.add_argument('--dry-run', action='store_true', help='only print what would run')
    options = parser.parse_args(argv[:mark])
    command = argv[mark + 1 :]
    if not command:
        raise InputError('no command; usage: maxlm.supervise [OPTIONS] -- COMMAND …')
    if options.max_failures < 1:
        raise InputError(f'--max_failures={options.max_failures}: give 1 or more')
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
