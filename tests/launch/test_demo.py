"""Tests launch/demo.sh: its steps and, as a nightly test, the complete demo in a new virtual environment."""

import json
import math
import os
import re
import shutil
import subprocess

import pytest

from maxlm.cli.models import evaluate, generate
from maxlm.cli.runs import train
from maxlm.cli.setup import prepare
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from tests.conftest import ROOT
from tests.messages import assert_error_line

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def scripts(tmp_path):
    """Returns a directory with the launch scripts, without an environment."""
    folder = tmp_path / 'repository'
    folder.mkdir()
    shutil.copytree(ROOT / 'launch', folder / 'launch')
    shutil.copy(ROOT / 'pyproject.toml', folder)
    return folder


@pytest.fixture
def demo(programs, scripts):
    """Runs the demo as if maxlm were installed. The interpreter is a fake that records its calls."""
    (scripts / '.venv/bin').mkdir(parents=True)
    (scripts / '.venv/bin/python').symlink_to(shutil.which('python', path=programs.environment['PATH']))
    checksum = subprocess.run(
        ['cksum'], input=(scripts / 'pyproject.toml').read_bytes(), capture_output=True, check=True
    ).stdout.decode()
    (scripts / '.venv/installed').write_text(f' {checksum}')
    (scripts / 'runs/tiny').mkdir(parents=True)
    (scripts / 'runs/tiny/run.log').write_text('12:00 INFO done: 12 steps\n12:01 INFO exit\n')

    def run(*options):
        done = programs.run(scripts / 'launch/demo.sh', *options, cwd='/')
        assert done.returncode == 0, done.stderr
        return done.stdout, [call['arguments'] for call in programs.calls('python') if 'ready' not in call]

    return run


def test_steps(demo):
    out, (stdlib, *commands) = demo('--steps', '12')
    assert 'sysconfig' in stdlib[1]
    assert [words[:2] for words in commands] == [
        ['-m', f'maxlm.{name}'] for name in ('prepare', 'train', 'generate', 'evaluate')
    ]
    assert '--config.train.num_steps=12' in commands[1]
    assert '\ndone: 12 steps\n' in out
    assert 'installing' not in out
    # The plan comes first, and the next steps come last.
    plan, _, rest = out.partition('== 1 of 5')
    assert [int(number) for number in re.findall(r'(?m)^  (\d)  ', plan)] == [1, 2, 3, 4, 5]
    assert 'train 12 steps, in runs/tiny/          1 min\n' in plan
    assert re.findall(r'(?m)^== (\d) of 5', out) == [*'12345']
    assert rest.splitlines()[-8] == 'Next:'
    # Control: without the option there are 350 steps.
    *_, (_, _, *training), _, _ = demo()[1]
    assert training == ['--config=configs/tiny.py', '--workdir=runs/tiny', '--config.train.num_steps=350']


@pytest.mark.parametrize(
    ('answer', 'found', 'installed'),
    [
        (
            {'stdout': 'GPU 0: NVIDIA H100 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: GPU-2)\n'},
            'found GPU 0: NVIDIA H100',
            1,
        ),
        # Without a driver, or without a GPU.
        ({'stdout': 'NVIDIA-SMI has failed\n', 'code': 9}, 'found no NVIDIA GPU', 0),
        ({'stdout': 'No devices found\n'}, 'found no NVIDIA GPU', 0),
    ],
)
def test_cuda_build_where_nvidia_smi_finds_a_gpu(demo, programs, answer, found, installed):
    programs.plan(replies=[{'match': 'nvidia-smi -L', **answer}])
    out, _ = demo('--steps', '1')
    assert f'\n{found}: using the ' in out
    # The environment of the fixture already has the CPU build.
    assert sum(line.endswith('--editable .[cuda12]') for line in programs.lines('python')) == installed


def test_commands_take_the_arguments_of_the_steps(demo, tmp_path, monkeypatch, capsys):
    _, (_, *commands) = demo()
    prepared, trained, generated, evaluated = (words[2:] for words in commands)
    library = tmp_path / 'library'
    (library / 'test').mkdir(parents=True)
    (library / 'text.py').write_text('import sys\n' * 50)
    (library / 'test/bad.py').write_bytes(b'\xff' * 50)
    # The fake Python printed no path of the standard library.
    assert prepared[:2] == ['--input', '']
    monkeypatch.chdir(tmp_path)
    small = ['--input', str(library), *prepared[2:], '--validation-fraction', '0', '--workers', '1', '--quiet']
    assert prepare.main(small) == EXIT_DONE
    assert json.loads((tmp_path / 'data/dataset.json').read_text())['splits']['train']['documents'] == 1
    capsys.readouterr()
    # Each command parses its options before it looks for the run.
    for main, words in ((generate.main, generated), (evaluate.main, evaluated)):
        assert exit_code(main, words) == EXIT_BAD_INPUT
        assert '--checkpoint=runs/tiny: no checkpoint in ' in capsys.readouterr().err
    trained[0] = f'--config={ROOT}/configs/tiny.py'
    assert exit_code(train.main, [*trained, '--config.data.path=nowhere']) == EXIT_BAD_INPUT
    assert 'nowhere' in capsys.readouterr().err


def test_invalid_options_and_interpreters(scripts):
    for command in (['--steps'], ['--steps', 'many'], ['--step', '3']):
        done = run(scripts, 'launch/demo.sh', *command)
        assert done.returncode == 2
        assert_error_line(done.stderr)
    done = run(scripts, 'env', 'PYTHON=/bin/false', 'launch/demo.sh')
    assert done.returncode == 2
    assert 'Python 3.11' in done.stderr
    assert not (scripts / '.venv').exists()


@pytest.fixture
def clean_copy(tmp_path):
    """Returns a copy of the files that git tracks or would track, without ignored files."""
    command = ['git', 'ls-files', '--cached', '--others', '--exclude-standard']
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def run(folder, *command):
    # As on a new machine, no virtual environment is active and no settings of the tests apply.
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(('JAX_', 'XLA_', 'VIRTUAL_ENV', 'PYTHONPATH'))
    }
    # The test must not write to the user's home directory.
    kept['JAX_COMPILATION_CACHE_DIR'] = ''
    # Compiling all modules of all packages takes longer than compiling imported modules on first use.
    kept['PIP_NO_COMPILE'] = '1'
    kept['PATH'] = os.pathsep.join(part for part in kept['PATH'].split(os.pathsep) if '.venv' not in part)
    return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True)


# Slow: installs all packages.
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_demo_in_a_new_environment(clean_copy):
    done = run(clean_copy, 'launch/demo.sh', '--steps', '12')
    assert done.returncode == 0, done.stdout + done.stderr
    assert (clean_copy / '.venv/bin/maxlm').exists()
    facts = json.loads((clean_copy / 'data/dataset.json').read_text())
    assert facts['vocab_size'] == 4096
    assert facts['splits']['train']['tokens'] > 2_000_000
    lines = [json.loads(line) for line in (clean_copy / 'runs/tiny/metrics.jsonl').read_text().splitlines()]
    assert lines[-1]['step'] == 12
    assert lines[-1]['eval/loss'] < math.log(4096)
    out = done.stdout
    for words in ('def read_file(path):', 'import ', 'class Queue:', 'done: 12 steps', 'MFU', 'tokens/s', 'nats/token'):
        assert words in out
    assert 'unigram entropy' in out
    assert out.count('--- ') == 3
    assert 'wall time' in out
    assert 'runs/tiny/report.html' in out
    assert 'installing' in out
    assert '<!doctype html>' in (clean_copy / 'runs/tiny/report.html').read_text()

    # A second run installs nothing, keeps the data, finds the run finished and prints the same summary.
    again = run(clean_copy, 'launch/demo.sh', '--steps', '12')
    assert again.returncode == 0, again.stdout + again.stderr
    assert 'installing' not in again.stdout
    assert 'nothing to do' in again.stdout
    assert 'done: 12 steps' in again.stdout
