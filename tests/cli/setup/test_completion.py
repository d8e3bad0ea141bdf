"""Tests `maxlm completion`: the script of bash completes commands, options, values and paths; zsh and fish."""

import inspect
import re
import shutil
import subprocess

import pytest

from maxlm.cli.commands import COMMANDS, module_of
from maxlm.cli.setup.completion import SHELLS, WITH_KEYS, main, script
from maxlm.config.loading import shipped_configs
from maxlm.errors import InputError

# Sets COMP_WORDS as bash does: `=` and `:` are words.
COMPLETE = r"""
. "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
compopt() { :; }
_maxlm_complete
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope='module')
def scripts():
    return {shell: script(shell) for shell in SHELLS}


@pytest.fixture
def complete(scripts, tmp_path):
    """Returns a function that completes the last word of a command line in bash, in a directory with two files."""
    (tmp_path / 'maxlm.bash').write_text(scripts['bash'])
    (tmp_path / 'runs').mkdir()
    (tmp_path / 'runs.txt').touch()

    def complete(*words):
        command = ['bash', '--norc', '-uc', COMPLETE, 'bash', 'maxlm.bash', 'maxlm', *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr == ''
        return set(done.stdout.split())

    return complete


def test_commands_and_options(complete):
    assert complete('') == {*COMMANDS}
    assert complete('tr') == {'train'}
    assert complete('hf', 'export-') == {'export-adapter', 'export-gguf', 'export-nanochat'}
    assert complete('train', '--work') == {'--workdir'}
    assert complete('hf', 'export', '--check') == {'--checkpoint'}
    # Control: an option of another command.
    assert complete('train', '--validation') == set()


def test_values(complete):
    assert complete('prepare', '--format', '') == {'auto', 'text', 'chat', 'preference'}
    assert complete('prepare', '--format', '=') == {'auto', 'text', 'chat', 'preference'}
    assert complete('prepare', '--format', '=', 'ch') == {'chat'}
    # The next word after a complete option is another option.
    assert complete('prepare', '--format', '=', 'chat', '--deduplicate', '=', 'n') == {'none', 'near'}
    assert complete('configs', 'show', 't') == {'tiny'}


def test_paths(complete):
    assert complete('train', '--workdir', '=', 'ru') == {'runs'}
    assert complete('prepare', '--input', 'ru') == {'runs', 'runs.txt'}
    assert complete('report', 'ru') == {'runs'}
    assert complete('train', '--config', '=', 'ti') == {'tiny'}
    assert complete('train', '--config', '=', 'ru') == {'runs', 'runs.txt'}
    assert complete('plan', '--config', '=') >= {*shipped_configs(), 'runs'}


def test_config_keys(complete):
    assert complete('train', '--config.optimizer.na') == {'--config.optimizer.name'}
    assert complete('train', '--config.optimizer.name', '=', 'mu') == {'muon'}
    assert complete('plan', '--config.model.scan_layers', '=') == {'true', 'false'}
    assert complete('grpo', '--config.data.cache_dir', '=', 'ru') == {'runs'}
    assert complete('recipe', '--config.grpo.prompts', '=', 'ru') == {'runs', 'runs.txt'}
    # Control: a command without config keys.
    assert complete('prepare', '--config.optimizer.na') == set()


def test_the_commands_with_config_keys_are_those_that_parse_them():
    parsing = {name for name in COMMANDS if 'split_overrides(argv)' in inspect.getsource(module_of(name))}
    # `maxlm grpo` shares the parser of `maxlm train`.
    assert {*WITH_KEYS} == {*parsing, 'grpo'}


def test_zsh_completes_values_after_an_equals_sign(scripts):
    text = scripts['zsh']
    assert text.startswith('#compdef maxlm')
    config, workdir = re.findall(r'(?m)^ *"(--(?:config|workdir)\S*)\[.*"$', text[text.index('_train_options') :])[:2]
    assert (config, workdir) == ('--config=', '--workdir=')
    assert re.search(r'(?m)^ *\{--text-field=,--text-key=\}"\[.*:_files', text) is None
    assert re.search(r'(?m)^ *\{--text-field=,--text-key=\}"\[', text)
    assert re.search(r'(?m)^ *"--skip-bad-records\[', text)
    assert '"--config.optimizer.name=[' in text
    assert f'compadd {" ".join(shipped_configs())}' in text


def test_fish_has_every_command_and_option(scripts):
    text = scripts['fish']
    for verb in COMMANDS:
        assert re.search(rf"(?m)^complete -c maxlm .* -a {verb} -d '", text), verb
    options = re.findall(r"(?m)^complete -c maxlm -n '_shtab_maxlm_using train' -l (\S+)", text)
    assert {'config', 'workdir', 'resume'} <= {*options}
    assert '-l config -xka "1b ' in text


@pytest.mark.parametrize('shell', SHELLS)
def test_the_shell_accepts_the_script(shell, scripts, tmp_path, capsys):
    (tmp_path / 'script').write_text(scripts[shell])
    # Only bash is on every machine.
    if program := shutil.which(shell):
        subprocess.run([program, '-n', tmp_path / 'script'], check=True)
    assert main([shell]) == 0
    assert capsys.readouterr().out == f'{scripts[shell]}\n'


def test_an_unknown_shell_is_an_error():
    with pytest.raises(InputError, match="invalid choice: 'tcsh'"):
        main(['tcsh'])
