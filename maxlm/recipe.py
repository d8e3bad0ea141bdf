"""Runs the phases of a recipe in order: `python -m maxlm.recipe --config=configs/neox.py:production text=texts/`.

The phases are the commands that `get_phases(variant)` of the config file returns, from data preparation to the exported
model. NAME=PATH arguments fill in the {NAME} fields of the commands. Each phase resumes where it stopped, so the same
command continues an interrupted recipe. `train` and `grpo` restart after failures (see maxlm.supervise). The first
phase that fails ends the recipe with its exit code. Arguments --config.section.key=value apply to all phases that
train.
"""

from __future__ import annotations

import argparse
import os
import shlex
import string
import sys
from collections.abc import Mapping, Sequence

from maxlm.config.loading import load, load_phases, split_overrides
from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED, ArgumentParser, InputError, exit_code
from maxlm.hints import HINTS, print_next
from maxlm.storage.paths import Kind, PathOption
from maxlm.supervision.restarts import Policy, find_workdir
from maxlm.supervision.supervisor import Supervisor

# Commands that take --config and --config.section.key=value.
TRAINING = ('train', 'grpo')


def fill_in(phase: str, values: Mapping[str, str]) -> list[str]:
    """Splits a phase into words and replaces its {NAME} fields. A value may contain several words.

    Raises:
        InputError: a field has no value.
    """
    fields = [name for _, name, _, _ in string.Formatter().parse(phase) if name is not None]
    missing = [name for name in fields if name not in values]
    if missing:
        raise InputError(f'the phase {phase!r} needs {missing[0]}; add {missing[0]}=PATH to the command line')
    return shlex.split(phase.format(**values))


def to_command(words: Sequence[str], overrides: Sequence[str], launcher: Sequence[str]) -> list[str]:
    """Returns the command line of a phase.

    Args:
        words: the phase: a verb of maxlm, or `-m MODULE`, and its arguments.
        overrides: `section.key=value` overrides for training.
        launcher: command that starts training in place of `python -m maxlm.train`; empty for this interpreter.
    """
    verb, *arguments = words
    if verb in TRAINING:
        arguments += [f'--config.{override}' for override in overrides]
    if verb == 'train' and launcher:
        return [*launcher, *arguments]
    return [sys.executable, *(words if verb == '-m' else ['-m', f'maxlm.{verb}', *arguments])]


def check_phases(phases: Sequence[Sequence[str]], overrides: Sequence[str]) -> None:
    """Loads the config of each training phase, so that an invalid one is found before the first phase starts."""
    for verb, *arguments in phases:
        specs = [word.removeprefix('--config=') for word in arguments if word.startswith('--config=')]
        if verb in TRAINING and specs:
            own, _ = split_overrides(arguments)
            load(specs[0], [*own, *overrides])


def run_phases(commands: Sequence[Sequence[str]], *, max_failures: int) -> int:
    """Runs the commands in order until one fails or a signal arrives, and returns the exit code of the last one."""
    for number, command in enumerate(commands, start=1):
        print(f'recipe: phase {number} of {len(commands)}: {shlex.join(command)}', file=sys.stderr, flush=True)
        is_training = any(f'maxlm.{verb}' in command for verb in TRAINING) or command[0] != sys.executable
        policy = Policy(max_failures if is_training else 1, 10.0, find_workdir(command) if is_training else '')
        supervisor = Supervisor(command, policy)
        code = supervisor.run()
        if code != EXIT_DONE:
            print(f'recipe: phase {number} of {len(commands)} ended with exit code {code}', file=sys.stderr)
            return code
        if supervisor.is_stopped and number < len(commands):
            return EXIT_PREEMPTED
    return EXIT_DONE


def main(argv: list[str]) -> int:
    """Runs the recipe that `argv` describes and returns the exit code of its last phase."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(
        prog='maxlm recipe',
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='example: python -m maxlm.recipe --config=configs/neox.py:smoke text=texts/',
    )
    parser.add_argument(
        '--config', required=True, type=PathOption(Kind.FILE), help='config file with phases, FILE[:variant]'
    )
    parser.add_argument('inputs', nargs='*', metavar='NAME=PATH', help='value of a {NAME} field of the phases')
    parser.add_argument(
        '--launcher',
        default='',
        metavar='COMMAND',
        help="command that starts training, such as 'launch/gpu_node.sh --once --' (default: this interpreter)",
    )
    parser.add_argument(
        '--max-failures',
        type=int,
        default=3,
        metavar='N',
        help='consecutive failures of a training phase without a new checkpoint before giving up (%(default)s)',
    )
    parser.add_argument('--dry-run', action='store_true', help='print the commands without running them')
    options = parser.parse_args(rest)
    if options.max_failures < 1:
        raise InputError(f'--max-failures={options.max_failures}: must be at least 1')
    values = {'config': options.config.partition(':')[0]}
    for text in options.inputs:
        name, equals, value = text.partition('=')
        if not (name and equals and value):
            raise InputError(f'{text!r} is not NAME=PATH; give the inputs of the recipe as in text=texts/')
        values[name] = value
    phases = [fill_in(phase, values) for phase in load_phases(options.config)]
    check_phases(phases, overrides)
    commands = [to_command(words, overrides, shlex.split(options.launcher)) for words in phases]
    if options.dry_run:
        print('\n'.join(f'would run: {shlex.join(command)}' for command in commands))
        return EXIT_DONE
    # Each phase would print the command of the next one.
    before = os.environ.get(HINTS, '1')
    os.environ[HINTS] = '0'
    code = run_phases(commands, max_failures=options.max_failures)
    os.environ[HINTS] = before
    workdirs = [find_workdir(words) for words in phases if words[0] in TRAINING]
    if code == EXIT_DONE and workdirs:
        print_next('maxlm', 'report', workdirs[-1])
    return code


def run() -> None:
    """Entry point of `python -m maxlm.recipe` and `maxlm recipe`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
