"""Lists and prints the shipped configs: `maxlm configs`, `maxlm configs show 1b > mine.py`.

Every command accepts the name of a shipped config, such as --config=tiny or --config=code:7b.
"""

from __future__ import annotations

import ast
from pathlib import Path

from maxlm.cli.hints import print_next
from maxlm.cli.parser import ArgumentParser, command_parser
from maxlm.cli.process import run
from maxlm.config.config_files import shipped_configs
from maxlm.errors import EXIT_DONE, InputError, nearest


def summary(path: Path) -> list[str]:
    """Returns lines from a config file's docstring: its purpose, and the first lines of its variants and hardware."""
    purpose, *lines = (ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or '').split('\n')
    named = {name: text.strip() for name, colon, text in (line.partition(':') for line in reversed(lines)) if colon}
    return [purpose, *(f'{name.lower()}: {named[name]}' for name in ('Variants', 'Hardware') if name in named)]


def main(argv: list[str]) -> int:
    """Lists the shipped configs, or prints one."""
    options = make_parser().parse_args(argv)
    files = shipped_configs()
    if options.command == 'show':
        if options.name not in files:
            raise InputError(f'{options.name!r} is not a shipped config; {nearest(options.name, files)}')
        print(files[options.name].read_text(encoding='utf-8'), end='')
        return EXIT_DONE
    width = max(map(len, files))
    for name, path in files.items():
        for index, line in enumerate(summary(path)):
            print(f'{"" if index else name:<{width}}  {line}')
    print_next('maxlm', 'configs', 'show', 'tiny')
    return EXIT_DONE


def make_parser() -> ArgumentParser:
    parser = command_parser('configs', __doc__, 'show tiny')
    commands = parser.add_subparsers(dest='command', metavar='COMMAND')
    commands.add_parser('list', help='list the configs with their purpose and hardware (default)')
    show = commands.add_parser('show', help='print a config file')
    show.add_argument('name', help='name of the config')
    return parser


if __name__ == '__main__':
    run('configs')
