"""Code blocks and commands of the documentation."""

from __future__ import annotations

import argparse
import functools
import re
import shlex

from maxlm.cli.commands import module_of
from tests.conftest import ROOT

# The site has further pages in the folders of docs/.
PAGES = sorted((ROOT / 'docs').rglob('*.md'))


def code_blocks(text: str, language: str = '') -> list[str]:
    """Returns the code blocks of a language of a Markdown text; '' selects those without a language."""
    found = re.findall(r'^```(\w*)\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def python_blocks(page: str) -> list[str]:
    """Returns the Python blocks of a page."""
    return code_blocks((ROOT / page).read_text(), 'python')


def command_lines(text: str) -> list[list[str]]:
    """Returns the commands of maxlm and of its scripts in code blocks, as words. `maxlm VERB` becomes `python -m`."""
    lines = [line for block in code_blocks(text) for line in block.replace('\\\n', ' ').splitlines()]
    return [as_module(shlex.split(line, comments=True)) for line in lines if COMMAND.match(line)]


COMMAND = re.compile(r'(python -m|bash|\./launch|maxlm [a-z])')


def as_module(words: list[str]) -> list[str]:
    """Returns the words of a command with `python -m maxlm.VERB` in place of `maxlm VERB`."""
    return ['python', '-m', f'maxlm.{words[1]}', *words[2:]] if words[0] == 'maxlm' else words


@functools.cache
def options_of(name: str, subcommand: str = '') -> frozenset[str]:
    """Returns the options of a command of maxlm, or of one of its subcommands."""
    parser = module_of(name).make_parser()
    if subcommand:
        (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = commands.choices[subcommand]
    return frozenset(parser._option_string_actions)
