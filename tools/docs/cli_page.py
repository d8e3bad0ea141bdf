"""Reference page of the commands, from their argument parsers."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator

from maxlm.cli.commands import COMMANDS, module_of
from tools.docs.markdown import escaped

INTRODUCTION = """# Commands

All commands with their options. `maxlm COMMAND` equals `python -m maxlm.COMMAND`. All commands
print `--help`; [exit codes](../training.md#exit-codes) are the same for all.
"""

# Start of a code block whose lines are wrapped on the site.
_TEXT = '```{ .text .description }'


def _cell(text: str) -> str:
    return escaped(' '.join(text.split())).replace('|', r'\|')


def _name(action: argparse.Action) -> str:
    metavar = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    value = metavar if isinstance(metavar, str) else ' '.join(metavar)
    if not action.option_strings:
        return f'`{value}`'.replace('|', r'\|')
    names = ', '.join(action.option_strings)
    return f'`{names}`' if action.nargs == 0 else f'`{names} {value}`'.replace('|', r'\|')


def _default(action: argparse.Action) -> str:
    if action.required and action.option_strings:
        return 'required'
    if action.nargs == 0 or action.default in (None, '', argparse.SUPPRESS, [], ()):
        return ''
    return f'`{action.default}`'


def _rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        # argparse replaces `%(default)s` and `%%`.
        values = {**vars(action), 'prog': parser.prog}
        meaning = _cell((action.help or '') % values)
        if action.choices is not None:
            meaning += f' (one of {", ".join(f"`{choice}`" for choice in action.choices)})'
        yield f'| {_name(action)} | {_default(action)} | {meaning} |'


def _section(parser: argparse.ArgumentParser, title: str, depth: int) -> Iterator[str]:
    yield f'{"#" * depth} {title}\n'
    texts = [inspect.cleandoc(text) for text in (parser.description, parser.epilog) if text]
    if texts:
        yield '\n\n'.join([_TEXT, *texts]).replace(f'{_TEXT}\n\n', f'{_TEXT}\n') + '\n```\n'
    if rows := list(_rows(parser)):
        yield '\n'.join(['| option | default | meaning |', '|---|---|---|', *rows, ''])
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for name, command in action.choices.items():
                command.description = command.description or helps.get(name)
                yield from _section(command, f'{title} {name}', depth + 1)


def cli_page() -> str:
    """Returns docs/reference/cli.md."""
    lines = [INTRODUCTION]
    for verb, command in COMMANDS.items():
        lines.append(f'- [maxlm {verb}](#maxlm-{verb}): {command.help}')
    lines.append('')
    for verb in COMMANDS:
        lines += _section(module_of(verb).make_parser(), f'maxlm {verb}', 2)
    return '\n'.join(lines)
