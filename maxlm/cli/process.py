"""The process of a command: arguments, signals, output and exit code."""

from __future__ import annotations

import difflib
import gc
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import maxlm
from maxlm.cli.commands import COMMANDS, COMPUTING, TRAINING, WITHOUT_OUTPUT, module_of
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DEVICE, EXIT_DONE, EXIT_PREEMPTED, InputError, exit_code
from maxlm.runtime.console import survive_lost_terminal
from maxlm.runtime.malloc import disable_malloc_trim
from maxlm.runtime.termination import exit_on_termination, termination_signals


def main() -> NoReturn:
    """Entry point of `maxlm COMMAND …` and `python -m maxlm COMMAND …`."""
    name = sys.argv[1] if len(sys.argv) > 1 else ''
    if name in COMMANDS:
        sys.argv = [f'maxlm {name}', *sys.argv[2:]]
        run(name)
    sys.exit(run_command(_without_command))


def _without_command(argv: list[str]) -> int:
    """Prints the version, the commands, or an error about an unknown command."""
    name = argv[0] if argv else ''
    if name == '--version':
        print(f'maxlm {maxlm.__version__}')
        return EXIT_DONE
    if name not in ('', '-h', '--help'):
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f'did you mean {near[0]!r}?' if near else f'available: {", ".join(COMMANDS)}'
        raise InputError(f'unknown command {name!r}; {hint}')
    width = max(map(len, COMMANDS))
    print('usage: maxlm COMMAND [--help] …\n       maxlm --version\n')
    for command, row in COMMANDS.items():
        print(f'  {command:<{width}}  {row.help}')
    return EXIT_DONE if argv else EXIT_BAD_INPUT


def run(name: str) -> NoReturn:
    """Runs the command `maxlm NAME` with the arguments of this process, and exits with its exit code.

    It is the entry point of `python -m maxlm.NAME`.
    """
    if name in COMPUTING:
        disable_malloc_trim()
    if name in TRAINING:
        # Garbage collection takes an eighth of the time of imports and finds nothing. Training enables it again.
        gc.disable()
    main = module_of(name).main
    if name in TRAINING:
        from maxlm.telemetry.timeline import process_start_time

        main = partial(main, began=process_start_time())
    code = run_command(main, output_is_optional=name in WITHOUT_OUTPUT)
    # After an invalid argument, JAX is not imported.
    if name in TRAINING and 'jax' in sys.modules:
        from maxlm.runtime.heartbeat import disconnect

        disconnect(code)
    if name == 'doctor':
        # A check may hang in a driver.
        from maxlm.diagnostics.runner import exit_process

        exit_process(code)
    sys.exit(code)


def run_command(command: Callable[[list[str]], int | None], *, output_is_optional: bool = False) -> int:
    """Runs `command` as the main function of this process with its arguments, and returns its exit code.

    SIGTERM and the loss of the terminal (SIGHUP) end the command with EXIT_PREEMPTED; see `exit_on_termination`.

    Args:
        command: main function.
        output_is_optional: see `survive_lost_terminal`.
    """
    survive_lost_terminal(output_is_optional=output_is_optional)
    exit_on_termination()
    code = exit_code(command, sys.argv[1:])
    # The process may exit only after a second or two, as with JAX. Another signal would change the exit code, which a
    # launcher reports as a crash. A failed command can still be ended.
    action = signal.SIG_IGN if code in (EXIT_DONE, EXIT_DEVICE, EXIT_PREEMPTED) else signal.SIG_DFL
    for number in termination_signals():
        signal.signal(number, action)
    return code
