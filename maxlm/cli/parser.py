"""Argument parsers of the commands, and the options that several commands share."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from maxlm.config.renames import OPTIONS, report_renamed
from maxlm.config.sections.quantization import KV_CACHE_DTYPES, QUANTIZATION_GROUPS, ROUNDED_INPUTS
from maxlm.errors import InputError, surrogate_in
from maxlm.storage.paths import ANY, Kind, PathOption

_REPEATED = re.compile(r'argument (\S+): =')


def text_argument(value: str) -> str:
    """Returns the value of a text option; an argparse type that rejects values that are not UTF-8."""
    place = surrogate_in(value)
    if place >= 0:
        byte = len(os.fsencode(value[:place]))
        raise argparse.ArgumentTypeError(f'byte {byte} of the value is not UTF-8; use UTF-8 text')
    return value


def number(minimum: float, maximum: float = float('inf'), kind: type = int) -> Callable[[str], Any]:
    """Returns an argparse type of numbers from `minimum` to `maximum`."""

    def convert(text: str) -> Any:
        value = kind(text)
        if not minimum <= value <= maximum:
            limit = f'at least {minimum:g}' if maximum == float('inf') else f'from {minimum:g} to {maximum:.10g}'
            raise argparse.ArgumentTypeError(f'={text}: must be {limit}')
        return value

    # argparse names the type in errors about texts that are not numbers.
    convert.__name__ = kind.__name__
    return convert


# Options that several commands have in the same way.
SHARED: dict[str, dict[str, Any]] = {
    '--config': {
        'type': PathOption(Kind.FILE),
        'required': True,
        'help': 'config file, optionally with a variant (configs/x.py, configs/x.py:big), or a config.json',
    },
    'workdirs': {
        'nargs': '+',
        'type': PathOption(Kind.DIRECTORY, ANY),
        'metavar': 'WORKDIR',
        'help': 'workdir or URL of a run',
    },
    '--checkpoint': {
        'type': PathOption(Kind.DIRECTORY, ANY),
        'required': True,
        'help': 'workdir (newest step), WORKDIR@STEP, WORKDIR@best (lowest validation loss), or directory of one step',
    },
    'checkpoint': {
        'type': PathOption(Kind.DIRECTORY, ANY),
        'metavar': 'CHECKPOINT',
        'help': 'workdir (newest step), WORKDIR@STEP, WORKDIR@best, directory of one step, model of Transformers or '
        'nanochat, or GGUF file',
    },
    '--data': {'type': PathOption(Kind.DIRECTORY, ANY), 'help': "data set of maxlm prepare (default: the run's)"},
    '--num-batches': {'type': number(0), 'default': 0, 'help': 'number of validation batches; 0 = all (default)'},
    '--kv-cache-dtype': {
        'choices': KV_CACHE_DTYPES,
        'default': 'model',
        'help': 'dtype of the key-value cache (default %(default)s)',
    },
    '--temperature': {'type': float, 'default': 0.8, 'help': 'sampling temperature; 0 = greedy (default 0.8)'},
    '--top-k': {'type': int, 'default': 0, 'help': 'sample from the k most likely tokens; 0 = all (default)'},
    '--top-p': {
        'type': float,
        'default': 1.0,
        'help': 'sample from the most likely tokens up to this total probability (default 1)',
    },
    '--min-p': {
        'type': float,
        'default': 0.0,
        'help': 'minimum probability relative to the most likely token (default 0)',
    },
    '--repetition-penalty': {
        'type': float,
        'default': 1.0,
        'help': 'penalty for repeated tokens; 1 = none (default)',
    },
    '--stop': {
        'action': 'append',
        'type': text_argument,
        'help': 'stop string, not included in the output; repeatable',
    },
    '--seed': {'type': number(0, 2**32 - 1), 'default': 0, 'help': 'random seed (default 0)'},
    '--quantize': {
        'choices': ('', *QUANTIZATION_GROUPS, *ROUNDED_INPUTS),
        'default': '',
        'help': 'format to quantize the kernels to while loading; w8a8 and w4a8 also round their inputs (CPU only)',
    },
    '--num-draft-tokens': {
        'type': int,
        'default': 0,
        'help': 'tokens drafted per pass, from the preceding text or by --draft-model; 0 = none, or 4 with '
        '--draft-model (default)',
    },
    '--draft-model': {
        'type': PathOption(urls=ANY, may_be_empty=True),
        'default': '',
        'metavar': 'CHECKPOINT',
        'help': 'small model with the same tokenizer that drafts tokens: as --checkpoint, a model of Transformers or '
        'nanochat, hf:NAME[@REVISION] of the Hugging Face Hub, or a GGUF file (default: none)',
    },
    '--threads': {
        'type': number(1),
        'default': 8,
        'metavar': 'N',
        'help': 'number of concurrent downloads (%(default)s)',
    },
    '--max-failures': {
        'type': number(1),
        'default': 3,
        'metavar': 'N',
        'help': 'consecutive failures without a new checkpoint before giving up (default %(default)s)',
    },
    '--dry-run': {'action': 'store_true', 'help': 'print what would be done, without doing it'},
    '--quiet': {'action': 'store_true', 'help': 'print only errors and warnings'},
    '--json': {'action': 'store_true', 'help': 'print one JSON object'},
}


class _Formatter(argparse.HelpFormatter):
    """Wraps paragraphs, and keeps the lines of those with indented lines, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.strip('\n').split('\n\n')
        return '\n\n'.join(part if '\n ' in f'\n{part}' else fill(part, width, indent) for part in parts)


class ArgumentParser(argparse.ArgumentParser):
    """argparse with InputError for errors: one line and exit code 2, like all invalid input.

    If the error of a `type` starts with `=`, the message starts with the option: `--option=value: …`.
    """

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **{'allow_abbrev': False, 'formatter_class': _Formatter, **settings})

    def add_shared(self, *names: str, **changes: Any) -> None:
        """Adds options of `SHARED`; `changes` replace parts of their declarations."""
        for name in names:
            self.add_argument(name, **{**SHARED[name], **changes})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Accepts underscores in option names, and former option names; see `maxlm.config.renames`."""
        command = self.prog.rpartition('maxlm ')[2]
        arguments = list(sys.argv[1:] if args is None else args)
        end = arguments.index('--') if '--' in arguments else len(arguments)
        arguments[:end] = [self._current(command, argument) for argument in arguments[:end]]
        return super().parse_known_args(arguments, namespace)

    def _current(self, command: str, argument: str) -> str:
        name, equals, value = argument.partition('=')
        kebab = name.replace('_', '-')
        current = OPTIONS.get(command, {}).get(kebab, kebab)
        if not name.startswith('--') or current not in self._option_string_actions:
            return argument
        if current != kebab:
            report_renamed(f'{command} {kebab}', current)
        return f'{current}{equals}{value}'

    def error(self, message: str) -> NoReturn:
        if match := _REPEATED.match(message):
            raise InputError(message.replace(match[0], f'{match[1]}=', 1))
        raise InputError(f'{message} (see {self.prog} --help)')


def command_parser(name: str, description: str | None, *examples: str) -> ArgumentParser:
    """Returns the parser of the command `maxlm NAME`, without arguments.

    Args:
        name: name of the command.
        description: text for `--help`.
        examples: arguments of the examples for `--help`.
    """
    lines = [f'\n  maxlm {name} {example}' for example in examples]
    return ArgumentParser(
        prog=f'maxlm {name}', description=description, epilog=f'example{"s" if len(lines) > 1 else ""}:{"".join(lines)}'
    )
