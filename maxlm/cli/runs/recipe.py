"""Runs the phases of a recipe in order: `maxlm recipe --config=configs/neox.py:production text=texts/`.

The phases are the commands that `get_phases(variant)` of the config file returns, from data preparation to the exported
model. NAME=PATH arguments fill in the {NAME} fields of the commands. Each phase resumes where it stopped, so the same
command continues an interrupted recipe. `train` and `grpo` restart after failures (see maxlm supervise). The first
phase that fails ends the recipe with its exit code. Arguments --config.section.key=value apply to all phases that
train. Before the first phase, the inputs and configs of all phases are checked, and their times, prices and disk space
are printed. --phase=N runs only one phase.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxlm.cli.commands import TRAINING
from maxlm.cli.hints import HINTS, print_next
from maxlm.cli.parser import ArgumentParser, command_parser, number
from maxlm.cli.process import run
from maxlm.config.config_files import split_overrides
from maxlm.config.schema import Config
from maxlm.config.serialization import public_command
from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED, InputError, nearest
from maxlm.supervision.restarts import Policy, find_option, find_workdir
from maxlm.supervision.supervisor import Supervisor

# Ends of errors that name options of a phase, which the user of a recipe does not write.
HINTS_BY_ERROR = {
    'give its tokenizer.json': ', as in tokenizer=ids:50257:50256',
    'add --token-dtype': ', as in text="DIR --token-dtype=uint16"',
    '--exclude': ', as in text="DIR --exclude=README.md"',
    'the directory of an evaluation bundle': ', as in core=DIRECTORY or core=URL; see docs/evaluation.md',
    'choose another --output': '; in a recipe, remove that directory or start in another one',
}


def fields_of(phases: Sequence[str]) -> dict[str, str]:
    """Returns the names of the {NAME} and {NAME:DEFAULT} fields of phases with their defaults; '' = required.

    Raises:
        InputError: a phase has a single brace.
    """
    try:
        fields = {
            name: default or ''
            for phase in phases
            for _, name, default, _ in string.Formatter().parse(phase)
            if name is not None
        }
    except ValueError as error:
        raise InputError(f'get_phases: {error} in a phase; write {{{{ and }}}} for braces') from error
    return {name: default for name, default in fields.items() if name != 'config'}


def parse_inputs(inputs: Sequence[str], fields: Mapping[str, str]) -> dict[str, str]:
    """Returns the values of NAME=PATH arguments.

    Raises:
        InputError: an argument is malformed, names no field, or is given twice.
    """
    values: dict[str, str] = {}
    for argument in inputs:
        name, equals, value = argument.partition('=')
        if not (name and equals and value):
            raise InputError(f'{argument!r} is not NAME=PATH; give the inputs of the recipe as in text=texts/')
        if name not in fields:
            raise InputError(f'{argument}: the recipe has no input {name!r}; {nearest(name, fields)}')
        if name in values:
            raise InputError(f'{argument}: {name} is given twice; give all its paths as one argument, {name}="A B"')
        values[name] = value
    return values


def fill_in(phase: str, values: Mapping[str, str], *, for_tokens: bool = False) -> list[str]:
    """Splits a phase into words and replaces its {NAME} and {NAME:DEFAULT} fields. A value may contain several words.

    A default `TEXT|TOKENS` is TOKENS if the phase reads token files (`for_tokens`), else TEXT.

    Raises:
        InputError: a field has neither a value nor a default.
    """
    text = ''
    for literal, name, default, _ in string.Formatter().parse(phase):
        texts, _, tokens = (default or '').partition('|')
        value = '' if name is None else values.get(name) or (for_tokens and tokens) or texts
        if name is not None and not value:
            raise InputError(f'the phase {phase!r} needs {name}; add {name}=PATH to the command line')
        text += literal + (value or '')
    return shlex.split(text)


def fill_in_all(templates: Sequence[str], values: Mapping[str, str], *, only: int = 0) -> list[list[str] | None]:
    """Returns the words of all phases, or None for phases other than the phase `only` (from 1; 0 = all).

    Raises:
        InputError: a field of a returned phase has neither a value nor a default, or there is no phase `only`.
    """
    if only > len(templates):
        raise InputError(f'--phase={only}: the recipe has {len(templates)} phases; choose one of them')
    phases: list[list[str] | None] = []
    for position, template in enumerate(templates, start=1):
        phase = fill_in(template, values) if only in (0, position) else None
        if phase and phase[0] == 'prepare' and reads_tokens(phase[1:]):
            phase = fill_in(template, values, for_tokens=True)
        phases.append(phase)
    return phases


def reads_tokens(arguments: Sequence[str]) -> bool:
    """Returns True if the arguments of `maxlm prepare` name local token files, or a directory that contains some."""
    from maxlm.cli.setup.prepare import parse  # slow to import
    from maxlm.data.formats.discovery import find_inputs

    # Parsing and reading the inputs is repeated later, with errors.
    with contextlib.suppress(InputError):
        options = parse([*arguments, '--tokenizer=bytes'])
        local = [path for path in options.input if ':' not in path]
        return any(file.kind == 'tokens' for file in find_inputs(local, exclude=options.exclude))
    return False


def to_command(phase: Sequence[str], overrides: Sequence[str], launcher: Sequence[str]) -> list[str]:
    """Returns the command line of a phase.

    Args:
        phase: the phase: a verb of maxlm, or `-m MODULE`, and its arguments.
        overrides: `section.key=value` overrides for training.
        launcher: command that starts training in place of `maxlm train`; empty for this interpreter.
    """
    verb, *arguments = phase
    if verb in TRAINING:
        arguments += [f'--config.{override}' for override in overrides]
    if verb == 'train' and launcher:
        return [*launcher, *arguments]
    return [sys.executable, *(phase if verb == '-m' else ['-m', f'maxlm.{verb}', *arguments])]


def check_phases(phases: Sequence[Sequence[str] | None], overrides: Sequence[str]) -> list[Config | None]:
    """Loads the config of each training phase, so that an invalid one is found before the first phase starts.

    A phase that is None does not run.
    """
    from maxlm.config.loading import load  # slow to import

    configs: list[Config | None] = []
    for phase in phases:
        verb, *arguments = phase or ('',)
        specs = [argument.removeprefix('--config=') for argument in arguments if argument.startswith('--config=')]
        own, _ = split_overrides(arguments)
        configs.append(load(specs[0], [*own, *overrides]) if verb in TRAINING and specs else None)
    return configs


def check_inputs(phases: Sequence[Sequence[str] | None], configs: Sequence[Config | None]) -> None:
    """Checks the inputs of all phases as the phases do, except for files that earlier phases write.

    Args:
        phases: the words of each phase; None for phases that do not run.
        configs: config of each training phase, else None.

    Raises:
        InputError: an input is missing or unusable. The message names the phase.
    """
    from maxlm.cli.setup.prepare import parse
    from maxlm.data.formats.discovery import find_inputs
    from maxlm.data.formats.jsonl import read_objects  # slow to import
    from maxlm.data.prepare.prepare_dataset import check_preparation
    from maxlm.evaluation.tasks.core_bundle import open_bundle, split_bundle

    vocabularies: dict[str, int] = {}
    for position, (phase, config) in enumerate(zip(phases, configs, strict=True), start=1):
        verb, *arguments = phase or ('',)
        earlier = EarlierPhases([before for before in phases[: position - 1] if before])
        try:
            if verb == 'prepare':
                # Parsing checks that the tokenizer exists.
                is_pending = earlier.will_write(find_option(arguments, '--tokenizer'))
                options = parse([*arguments, '--tokenizer=bytes'] if is_pending else arguments)
                if not any(map(earlier.will_write, (*options.input, *options.validation))):
                    size = check_preparation(options, has_tokenizer=not is_pending)
                    vocabularies[str(options.output)] = size or 0
            elif verb == 'questions':
                find_inputs([find_option(arguments, '--input')])
            elif config:
                _check_vocabulary(config, vocabularies)
                for path in (config.grpo.prompts, config.grpo.eval_prompts) if verb == 'grpo' else ():
                    if path and not earlier.will_write(path):
                        # Read all lines, because reading checks them.
                        for _ in read_objects(path):
                            pass
            elif verb == 'evaluate':
                bundle, _ = split_bundle(find_option(arguments, '--tasks').split(','), '--tasks')
                if bundle and not earlier.will_write(bundle):
                    open_bundle(bundle)
        except InputError as error:
            hint = next((hint for message, hint in HINTS_BY_ERROR.items() if message in str(error)), '')
            raise InputError(f'phase {position} of {len(phases)} ({verb}): {error}{hint}') from error


class EarlierPhases:
    """Phases before another one, and the files that they will write."""

    def __init__(self, phases: Sequence[Sequence[str]]):
        self._outputs = [find_option(phase, '--output') or find_workdir(phase) for phase in phases]
        # Other commands may write any file.
        self._are_known = all(phase[0] in ('prepare', 'questions', *TRAINING) for phase in phases)

    def will_write(self, path: str) -> bool:
        """Returns True if a path does not exist yet and the phases may write it."""
        if os.path.exists(path) or ':' in path:
            return False
        return not self._are_known or any(output and Path(path).is_relative_to(output) for output in self._outputs)


def _check_vocabulary(config: Config, vocabularies: Mapping[str, int]) -> None:
    paths = [path.partition('#')[0] for path, _ in config.data.sources] or [config.data.path]
    size = max(vocabularies.get(path, 0) for path in paths)
    if 0 < config.model.vocab_size < size:
        raise InputError(
            f'model.vocab_size={config.model.vocab_size} is below the {size} ids of the tokenizer; '
            f'add --config.model.vocab_size={size}'
        )


def run_phases(commands: Sequence[Sequence[str] | None], *, max_failures: int) -> int:
    """Runs the commands in order until one fails or a signal arrives, and returns the exit code of the last one.

    A command that is None does not run.
    """
    last = max(position for position, command in enumerate(commands, start=1) if command)
    for position, command in enumerate(commands, start=1):
        if command is None:
            continue
        print(
            f'recipe: phase {position} of {len(commands)}: {shlex.join(public_command(command))}',
            file=sys.stderr,
            flush=True,
        )
        is_training = any(f'maxlm.{verb}' in command for verb in TRAINING) or command[0] != sys.executable
        policy = Policy(max_failures if is_training else 1, 10.0, find_workdir(command) if is_training else '')
        supervisor = Supervisor(command, policy)
        code = supervisor.run()
        if code != EXIT_DONE:
            print(f'recipe: phase {position} of {len(commands)} ended with exit code {code}', file=sys.stderr)
            return code
        if supervisor.is_stopped and position < last:
            return EXIT_PREEMPTED
    return EXIT_DONE


def main(argv: list[str]) -> int:
    """Runs the recipe that `argv` describes and returns the exit code of its last phase."""
    overrides, rest = split_overrides(argv)
    options = make_parser().parse_args(rest)
    from maxlm.config.loading import load_phases  # slow to import

    templates = load_phases(options.config)
    values = parse_inputs(options.inputs, fields_of(templates)) | {'config': options.config.partition(':')[0]}
    phases = fill_in_all(templates, values, only=options.phase)
    configs = check_phases(phases, overrides)
    commands = [phase and to_command(phase, overrides, shlex.split(options.launcher)) for phase in phases]
    from maxlm.cli.execution.recipe_plan import plan_phases, plan_text, present_target

    target = options.target or present_target()
    if options.dry_run:
        print('\n'.join(f'would run: {shlex.join(command)}' for command in commands if command))
        print(plan_text(plan_phases(phases, configs, target), target))
        return EXIT_DONE
    check_inputs(phases, configs)
    print(plan_text(plan_phases(phases, configs, target), target), file=sys.stderr, flush=True)
    # Each phase would print the command of the next one.
    before = os.environ.get(HINTS, '1')
    os.environ[HINTS] = '0'
    code = run_phases(commands, max_failures=options.max_failures)
    os.environ[HINTS] = before
    workdirs = [find_workdir(phase) for phase in phases if phase and phase[0] in TRAINING]
    if code == EXIT_DONE and workdirs:
        print_next('maxlm', 'report', workdirs[-1])
    return code


def make_parser() -> ArgumentParser:
    parser = command_parser('recipe', __doc__, '--config=configs/neox.py:smoke text=texts/')
    parser.add_shared('--config', '--max-failures')
    parser.add_argument('inputs', nargs='*', metavar='NAME=PATH', help='value of a {NAME} field of the phases')
    parser.add_argument(
        '--launcher',
        default='',
        metavar='COMMAND',
        help="command that starts training, such as 'launch/gpu_node.sh --once --' (default: this interpreter)",
    )
    parser.add_argument(
        '--phase', type=number(1), default=0, metavar='N', help='number of the only phase to run (default: all)'
    )
    parser.add_argument(
        '--target',
        default='',
        metavar='NAME',
        help='hardware of the printed plan, as for maxlm plan, e.g. h100:8 (default: the GPUs of this machine)',
    )
    parser.add_shared('--dry-run', help='print the commands and the plan without running them')
    return parser


if __name__ == '__main__':
    run('recipe')
