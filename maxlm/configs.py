"""Lists and prints the shipped configs: `maxlm configs`, `maxlm configs show 1b > mine.py`.

Every command accepts the name of a shipped config, such as --config=tiny or --config=code:7b.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from maxlm.config.config_files import shipped_configs
from maxlm.errors import EXIT_DONE, ArgumentParser, InputError, nearest, run_command
from maxlm.hints import print_next


def summary(path: Path) -> list[str]:
    """Returns lines from a config file's docstring: its purpose, and the first lines of its variants and hardware."""
    purpose, *facts = (ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or '').split('\n')
    named = {name: text.strip() for name, colon, text in (line.partition(':') for line in reversed(facts)) if colon}
    return [purpose, *(f'{name.lower()}: {named[name]}' for name in ('Variants', 'Hardware') if name in named)]


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
        for index, line in enumerate(summary(path)):
            print(f'{"" if index else name:<{width}}  {line}')
    print_next('maxlm', 'configs', 'show', 'tiny')
    return EXIT_DONE


def run() -> None:
    """Entry point of `python -m maxlm.configs` and `maxlm configs`."""
    sys.exit(run_command(main))


if __name__ == '__main__':
    run()
