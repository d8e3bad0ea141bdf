"""Lists and prints the shipped configs: `maxlm configs`, `maxlm configs show 1b > mine.py`.

Every command accepts the name of a shipped config, such as --config=tiny or --config=code:7b.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from maxlm.config.loading import shipped_configs
from maxlm.config.validation import nearest
from maxlm.errors import EXIT_DONE, ArgumentParser, InputError, exit_code


def purpose(path: Path) -> str:
    """Returns the first line of a config file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or '').partition('\n')[0]


def fact(path: Path, name: str) -> str:
    """Returns the first line of a fact in a config file's docstring, such as `Hardware`."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
    lines = [line.partition(':')[2].strip() for line in docstring.splitlines() if line.startswith(f'{name}:')]
    return lines[0] if lines else ''


def main(argv: list[str]) -> int:
    """Lists the shipped configs, or prints one."""
    parser = ArgumentParser(
        prog='maxlm configs',
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='example: maxlm configs show tiny',
    )
    commands = parser.add_subparsers(dest='command', metavar='COMMAND')
    commands.add_parser('list', help='list the configs with their purpose and hardware (default)', allow_abbrev=False)
    show = commands.add_parser('show', help='print a config file', allow_abbrev=False)
    show.add_argument('name', help='name of the config')
    options = parser.parse_args(argv)
    files = shipped_configs()
    if options.command == 'show':
        if options.name not in files:
            raise InputError(f'{options.name!r} is not a shipped config; {nearest(options.name, files)}')
        print(files[options.name].read_text(encoding='utf-8'), end='')
        return EXIT_DONE
    width = max(map(len, files))
    for name, path in files.items():
        print(f'{name:<{width}}  {purpose(path)}')
        for each in ('Variants', 'Hardware'):
            if text := fact(path, each):
                print(f'{"":<{width}}  {each.lower()}: {text}')
    return EXIT_DONE


def run() -> None:
    """Entry point of `python -m maxlm.configs` and `maxlm configs`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
