"""`maxlm COMMAND`: finding commands, suggesting the nearest one, help texts, and `python -m maxlm.COMMAND`."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest

import maxlm
from maxlm import __main__
from maxlm.cli.commands import COMMANDS, module_of
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_BAD_INPUT, EXIT_BROKEN_PIPE, InputError, exit_code
from tests.conftest import ROOT

GROUPS = {command.group for command in COMMANDS.values()}


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs `maxlm …` and returns exit code, stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, 'argv', ['maxlm', *words])
        with pytest.raises(SystemExit) as info:
            __main__.main()
        return (info.value.code, *capsys.readouterr())

    return run


def test_without_a_verb_the_verbs_are_listed(run):
    code, out, err = run()
    assert (code, err) == (EXIT_BAD_INPUT, '')
    for verb, command in COMMANDS.items():
        assert f'  {verb} ' in out
        assert command.help in out


@pytest.mark.parametrize('word', ['--version', '--help'])
def test_a_full_disk(word):
    command = [sys.executable, '-m', 'maxlm', word]
    with open('/dev/full', 'w') as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert done.returncode == EXIT_BAD_INPUT
    wanted = 'error: the output cannot be written (No space left on device); write it to another disk\n'
    assert done.stderr == wanted


@pytest.mark.parametrize('word', ['--help', '-h'])
def test_help(run, word):
    code, out, err = run(word)
    assert (code, err) == (0, '')
    assert out.startswith('usage: maxlm COMMAND')


@pytest.mark.parametrize(('typed', 'meant'), [('trian', 'train'), ('eval', 'evaluate'), ('preprae', 'prepare')])
def test_a_mistyped_verb_names_the_nearest(run, typed, meant):
    assert run(typed, '--workdir=x') == (
        EXIT_BAD_INPUT,
        '',
        f'error: unknown command {typed!r}; did you mean {meant!r}?\n',
    )


def test_an_unknown_verb_lists_the_verbs(run):
    assert run('xyz') == (EXIT_BAD_INPUT, '', f"error: unknown command 'xyz'; available: {', '.join(COMMANDS)}\n")


def test_arguments_are_passed_to_the_verb(run):
    code, out, err = run('generate', '--checkpoint=nowhere', '--prompt=x')
    assert (code, out) == (EXIT_BAD_INPUT, '')
    assert err.startswith('error: --checkpoint=nowhere: no checkpoint')


@pytest.mark.parametrize('verb', COMMANDS)
def test_every_verb_has_main_run_and_help(verb, run, capsys):
    module = module_of(verb)
    with pytest.raises(SystemExit) as info:
        module.main(['--help'])
    out, err = capsys.readouterr()
    assert (info.value.code, err) == (0, '')
    assert f'maxlm {verb}' in out
    # The common command prints the same help.
    assert run(verb, '--help') == (0, out, '')


@pytest.mark.parametrize('command', ['import', 'export', 'export-adapter', 'export-gguf'])
def test_help_of_a_subcommand_has_an_example(command, capsys):
    with pytest.raises(SystemExit):
        module_of('hf').main([command, '--help'])
    assert f'\nexample:\n  maxlm hf {command} ' in capsys.readouterr().out


class ParsedError(Exception):
    """Stops a command after it has parsed its arguments."""


@pytest.mark.parametrize('verb', COMMANDS)
def test_help_has_an_example_that_parses(verb, capsys, monkeypatch):
    module = module_of(verb)
    with pytest.raises(SystemExit):
        module.main(['--help'])
    # argparse may wrap the line.
    text = ' '.join(capsys.readouterr().out.split())
    _, *examples = re.split(r'\b[Ee]xamples?:', text)
    commands = [command for part in examples for command in part.split(f'maxlm {verb} ')[1:]]
    assert commands, 'no example'
    parse = ArgumentParser.parse_args

    def parse_and_stop(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise ParsedError

    monkeypatch.setattr(ArgumentParser, 'parse_args', parse_and_stop)
    for command in commands:
        with pytest.raises(ParsedError):
            module.main(shlex.split(command.partition('`')[0]))
        # Control: the same command with an unknown option.
        with pytest.raises(InputError, match='unrecognized arguments'):
            module.main(['--nonsense', *shlex.split(command.partition('`')[0])])


def test_the_version(run):
    assert run('--version') == (0, f'maxlm {maxlm.__version__}\n', '')


def test_every_command_module_is_listed():
    files = {path.stem: path for group in GROUPS for path in (ROOT / 'maxlm/cli' / group).glob('[!_]*.py')}
    assert {*files} == {*COMMANDS}
    for name, path in files.items():
        # `python -m maxlm.NAME` runs the same file.
        assert find_spec(f'maxlm.{name}').origin == module_of(name).__file__ == str(path)
        assert path.read_text().endswith(f"\n\n\nif __name__ == '__main__':\n    run({name!r})\n")
    # Control: other modules of `maxlm.cli` are not in `maxlm`.
    assert find_spec('maxlm.process') is None


def test_as_a_module_the_command_runs_in_its_package():
    """Tests that the state of the modules of a command exists once."""
    program = (
        'import runpy, sys\n'
        "sys.argv = ['train', '--help']\n"
        'try:\n'
        "    runpy.run_module('maxlm.train', run_name='__main__', alter_sys=True)\n"
        'except SystemExit:\n'
        "    print([name for name in sys.modules if name.startswith('maxlm.') and name.endswith('train')])\n"
    )
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['maxlm.cli.runs.train']"


@pytest.mark.multiprocess
def test_as_a_process():
    # This verb imports the fewest modules.
    command = [sys.executable, '-m', 'maxlm', 'monitor', '--help']
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, '')
    assert result.stdout.startswith('usage: maxlm monitor')


def test_a_closed_pipe_ends_a_command_without_a_traceback():
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    for words in ('', 'configs'):
        program = f'{sys.executable} -m maxlm {words} | true; echo ${{PIPESTATUS[0]}}'
        done = subprocess.run(['bash', '-c', program], env=environment, capture_output=True, text=True, cwd=ROOT)
        assert done.stdout == f'{EXIT_BROKEN_PIPE}\n'
        assert 'BrokenPipe' not in done.stderr

    def broken(argv):
        raise BrokenPipeError('another pipe')

    # Control: stdout is open, so the error of another pipe is an error of the program.
    with pytest.raises(BrokenPipeError, match='another pipe'):
        exit_code(broken, [])
