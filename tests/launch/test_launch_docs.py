"""Checks that each launch command of README.md, the pages about launching and the tutorials is accepted."""

import re
import shlex
import shutil
import subprocess

import pytest
import yaml

from maxlm.cli.execution import dry_run
from maxlm.config.loading import load
from maxlm.errors import InputError
from maxlm.hardware.prices import PRICES
from tests.conftest import ROOT
from tests.documentation import code_blocks
from tests.launch.programs import SECRET

pytestmark = pytest.mark.multiprocess

PAGES = [ROOT / 'docs/launch.md', *sorted((ROOT / 'docs/launch').glob('*.md'))]
OTHER_PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs/tutorials').glob('*.md'))]


def command_lines(page):
    """Returns the lines of the code blocks of a page. tests/test_readme.py tests the commands of maxlm."""
    lines = [line for block in code_blocks(page.read_text()) for line in block.replace('\\\n', ' ').splitlines()]
    return [line for line in lines if line.strip() and not line.startswith('maxlm ')]


LAUNCHES = [line for page in OTHER_PAGES for line in command_lines(page) if line.startswith('launch/')]
LINES = list(dict.fromkeys([*(line for page in PAGES for line in command_lines(page)), *LAUNCHES]))
# Programs of others run as they are, and have fakes. The scripts of maxlm only print what they would run.
OTHERS = ('sky', 'kubectl', 'squeue', 'scancel', 'pip')
COMMANDS = [line for line in LINES if line.split()[0] not in OTHERS]


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


@pytest.mark.parametrize('line', [line for line in LINES if line not in COMMANDS])
def test_commands_of_other_programs(programs, line):
    # The fake sky fails for commands and options that SkyPilot does not have.
    done = programs.run(*shlex.split(line))
    assert (done.returncode, done.stderr) == (0, '')
    [call] = programs.calls()
    values = dict(re.findall(r"--env (\w+)=('[^']*'|\S+)", line))
    assert values.keys() <= task_variables().keys()
    # A job needs both variables, and the config exists.
    if 'launch' in call['arguments']:
        assert values.keys() >= {'CONFIG', 'WORKDIR'}
        assert (ROOT / values['CONFIG']).is_file()


# Machines that these commands create get the files of the repository, without those that git ignores.
CREATE = [line for line in LINES if re.match(r'launch/tpu_vm.sh (up|run)|launch/k8s/apply.sh|sky (jobs )?launch', line)]


@pytest.mark.parametrize('line', CREATE)
def test_inputs_exist_on_machines_that_are_created(line, monkeypatch):
    seen = []
    monkeypatch.setattr(dry_run, 'stat', seen.append)
    words = shlex.split(line)
    variables = dict(word.split('=', 1) for word in words if re.match('[A-Z]+=', word))
    words += shlex.split(variables.get('ARGUMENTS', ''))
    name = variables.get('CONFIG') or re.search(r'--config[= ](\S+)', line)[1]
    config = load(name, [word.removeprefix('--config.') for word in words if word.startswith('--config.')])
    notes = dry_run.check_elsewhere(config)
    # Buckets are looked up, and paths on shared disks are named.
    assert len(seen) + len(notes) >= 1
    # Negative control: the data of this checkout.
    with pytest.raises(InputError, match='is not part of the repository'):
        dry_run.check_elsewhere(load(name, ['data.path=data/missing', 'data.sources=()']))


def task_variables():
    return yaml.safe_load((ROOT / 'launch/sky/train.yaml').read_text())['envs']


def test_price_table_of_tpus():
    rows = re.findall(
        r'^\| (v\w+) \| ([\d.]+) \| ([\d.]+) \|$', (ROOT / 'docs/launch/tpu.md').read_text(), re.MULTILINE
    )
    assert [row[0] for row in rows] == ['v4', 'v5e', 'v5p', 'v6e']
    for chip, on_demand, spot in rows:
        assert (on_demand, spot) == (f'{PRICES[chip].on_demand:.2f}', f'{PRICES[chip].spot:.2f}')


def test_invalid_command_is_rejected(programs):
    line = next(line for line in COMMANDS if '--node-rank' in line)
    assert programs.run(*dry(line.replace('--node-rank', '--rank'))).returncode == 2


@pytest.mark.skipif(not shutil.which('systemd-analyze'), reason='only systemd can check its units; containers lack it')
def test_systemd_unit(tmp_path):
    [unit] = code_blocks((ROOT / 'docs/launch/gpu-nodes.md').read_text(), 'ini')
    path = tmp_path / 'maxlm.service'

    def messages(text):
        path.write_text(text.replace('/home/me/maxlm', str(ROOT)))
        # Other units of this machine may have errors.
        command = ['systemd-analyze', 'verify', '--man=no', '--recursive-errors=no', path]
        done = subprocess.run(command, capture_output=True, text=True)
        return [line for line in done.stderr.splitlines() if 'maxlm.service' in line]

    assert messages(unit) == []
    # Negative control.
    assert messages(unit.replace('on-abnormal', 'on-abnormality')) != []


def test_every_script_is_documented():
    assert LAUNCHES
    commands = '\n'.join(LINES)
    for name in ('gpu_node.sh', 'slurm/train.sbatch', 'k8s/apply.sh', 'tpu_vm.sh', 'sky/train.yaml'):
        assert f'launch/{name}' in commands
    for verb in ('create', 'install', 'run', 'logs', 'stop', 'delete', 'up'):
        assert f'launch/tpu_vm.sh {verb} ' in commands
