"""Checks that the scripts accept each launch command of README.md, docs/launch.md and the tutorials."""

import re
import shlex

import pytest

from tests.conftest import ROOT
from tests.documentation import code_blocks
from tests.launch.programs import SECRET

pytestmark = pytest.mark.multiprocess

TEXT = (ROOT / 'docs/launch.md').read_text()
OTHER_PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs/tutorials').glob('*.md'))]


def command_lines(text):
    """Returns the lines of the code blocks of a Markdown text."""
    return [line for block in code_blocks(text) for line in block.replace('\\\n', ' ').splitlines() if line.strip()]


LAUNCHES = [line for page in OTHER_PAGES for line in command_lines(page.read_text()) if line.startswith('launch/')]
COMMANDS = list(dict.fromkeys([*command_lines(TEXT), *LAUNCHES]))


def dry(line):
    """Returns the words of a command, with --dry-run where its script expects options."""
    words = shlex.split(line)
    if words[0] == 'sbatch':
        script = next(number for number, word in enumerate(words) if word.endswith('.sbatch'))
        return ['bash', words[script], '--dry-run', *words[script + 1 :]]
    # Options follow the module or the subcommand, if any.
    options = 3 if words[1] == '-m' else 1 if words[1].startswith('-') else 2
    return [*words[:options], '--dry-run', *words[options:]]


@pytest.mark.parametrize('line', COMMANDS)
def test_commands(programs, line):
    done = programs.run(*dry(line))
    assert done.returncode == 0, done.stderr
    assert 'would run: ' in done.stdout
    assert done.stderr == ''
    # git only lists files.
    assert {call['program'] for call in programs.calls()} <= {'git'}
    assert SECRET not in done.stdout
    # Each workdir and config is passed to training.
    for word in re.findall(r'--(?:workdir|config)[= ](\S+)', line):
        assert word in done.stdout
    for name in re.findall(r'--config[= ]([\w/]+\.py)', line):
        assert (ROOT / name).is_file()


def test_invalid_command_is_rejected(programs):
    line = next(line for line in COMMANDS if '--node-rank' in line)
    assert programs.run(*dry(line.replace('--node-rank', '--rank'))).returncode == 2


def test_every_script_is_documented():
    assert LAUNCHES
    commands = '\n'.join(COMMANDS)
    for name in ('gpu_node.sh', 'slurm/train.sbatch', 'k8s/apply.sh', 'tpu_vm.sh'):
        assert f'launch/{name}' in commands
    for verb in ('create', 'install', 'run', 'logs', 'stop', 'delete', 'up'):
        assert f'launch/tpu_vm.sh {verb} ' in commands
