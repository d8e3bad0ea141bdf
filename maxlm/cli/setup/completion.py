"""Prints the completion script of a shell: `maxlm completion bash|zsh|fish`.

The script contains all commands, options, config keys and config names, so that completion does not start Python. Print
it again after an update of maxlm. `docs/launch.md` has the file of each shell.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable

import shtab

from maxlm.cli.commands import COMMANDS, module_of
from maxlm.cli.parser import ArgumentParser, command_parser
from maxlm.cli.process import run
from maxlm.config.config_files import shipped_configs
from maxlm.config.keys import declared_keys
from maxlm.errors import EXIT_DONE
from maxlm.storage.paths import Kind, PathList, PathOption

# Commands that accept --config.section.key=value.
WITH_KEYS = ('train', 'grpo', 'plan', 'doctor', 'recipe')
SHELLS = ('bash', 'zsh', 'fish')
# Bash passes `--option=value` as three words. shtab expects `--option value`.
_BASH_WITHOUT_EQUALS = """
_maxlm_complete() {
  local -a words=()
  local index current=$COMP_CWORD
  for index in "${!COMP_WORDS[@]}"; do
    if [[ ${COMP_WORDS[index]} != '=' ]]; then
      words+=("${COMP_WORDS[index]}")
    elif ((index == COMP_CWORD)); then
      words+=('')
    elif ((index < COMP_CWORD)); then
      ((current -= 1))
    fi
  done
  local -a COMP_WORDS=("${words[@]}")
  local COMP_CWORD=$current
  _shtab_maxlm
}
complete -o bashdefault -F _maxlm_complete maxlm
"""
# Option specs of zsh: `--option[help]:name:values` and `{--option,--alias}"[help]:name:values`.
_ZSH_OPTION = re.compile(r'^( *"\*?--[\w.-]+)(?=\[.*[^\\]\]:)|^( *"?\*?"?\{--[\w,-]+\})(?="\[.*[^\\]\]:)', re.MULTILINE)


def script(shell: str) -> str:
    """Returns the completion script of a shell of `SHELLS`."""
    text = shtab.complete(make_root_parser(), shell)
    if shell == 'bash':
        return text + _BASH_WITHOUT_EQUALS
    # Without `=` in its specification, zsh does not complete the value of `--option=value`.
    return _ZSH_OPTION.sub(lambda match: re.sub(r'(--[\w.-]+)', r'\1=', match[0]), text) if shell == 'zsh' else text


def make_root_parser() -> argparse.ArgumentParser:
    """Returns one parser of all commands, in which each path has its kind of completion."""
    root = argparse.ArgumentParser(prog='maxlm')
    commands = root.add_subparsers()
    for name, command in COMMANDS.items():
        parser = module_of(name).make_parser()
        if name in WITH_KEYS:
            _add_keys(parser)
        _mark_paths(parser)
        commands.add_parser(name, help=command.help, parents=[parser], add_help=False)
    return root


def _add_keys(parser: argparse.ArgumentParser) -> None:
    """Adds the option of each config key, which commands parse without argparse."""
    for key in declared_keys().values():
        choices = ('true', 'false') if key.kind is bool else key.choices
        option = parser.add_argument(f'--config.{key}', choices=choices or None, help=str(key.range or ''))
        option.type = key.path if key.kind is str else None


def _mark_paths(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _mark_paths(child)
        elif parser.prog == 'maxlm configs show' and action.dest == 'name':
            action.choices = list(shipped_configs())
        elif isinstance(action.type, PathOption | PathList):
            is_directory = isinstance(action.type, PathOption) and action.type.kind is Kind.DIRECTORY
            values = _names_and_files(shipped_configs()) if action.dest == 'config' else shtab.FILE
            # shtab reads this attribute, which argparse does not declare.
            action.complete = shtab.DIRECTORY if is_directory else values  # type: ignore[attr-defined]


def _names_and_files(names: Iterable[str]) -> dict:
    """Returns the completion of names and files for each shell, in the format of shtab."""
    words = shlex.join(names)
    bash = f"""_maxlm_compgen_config_files() {{
  compgen -W '{words}' -- "$1"
  compgen -f -- "$1"
}}"""
    zsh = f"""_maxlm_config_files() {{
  compadd {words}
  _files
}}"""
    return {
        'bash': '_maxlm_compgen_config_files',
        'zsh': '_maxlm_config_files',
        'fish': f'{words} (__fish_complete_path (commandline -ct))',
        'preamble': {'bash': bash, 'zsh': zsh},
    }


def main(argv: list[str]) -> int:
    """Prints the script."""
    print(script(make_parser().parse_args(argv).shell))
    return EXIT_DONE


def make_parser() -> ArgumentParser:
    parser = command_parser('completion', __doc__, 'bash')
    parser.add_argument('shell', choices=SHELLS, metavar='|'.join(SHELLS), help='name of the shell')
    return parser


if __name__ == '__main__':
    run('completion')
