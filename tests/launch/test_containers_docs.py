"""Runs the commands of docs/containers.md with fake programs, and checks them against the images and scripts."""

import re
import shlex

import pytest

from tests.conftest import ROOT
from tests.documentation import code_blocks
from tests.launch.images import ARGUMENTS, STAGES, compose, exec_form, maxlm_words
from tests.launch.parsing import parse

pytestmark = pytest.mark.multiprocess

TEXT = (ROOT / 'docs/containers.md').read_text()
BLOCKS = code_blocks(TEXT)
# The tag of each image, and the target that it is built from.
TAGS = {
    re.search(r'--tag (\S+)', line)[1]: re.search(r'--target (\S+)', line)[1]
    for line in re.findall(r'docker build .*', TEXT)
}
SERVICES = compose('compose.yaml')['services']


@pytest.fixture
def run_block(programs, tmp_path):
    """Runs a code block of the page in an empty directory with the files of the repository that it names."""
    for name in ('launch', 'configs'):
        (tmp_path / name).symlink_to(ROOT / name)

    def run(block):
        done = programs.run('bash', '-euc', block, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return programs.calls()

    return run


@pytest.mark.parametrize('block', BLOCKS)
def test_commands(run_block, block, monkeypatch):
    monkeypatch.chdir(ROOT)
    # The scripts also check the config and the data.
    calls = [call for call in run_block(block) if '--dry-run=elsewhere' not in call['arguments']]
    # Each line is a call of a program, or a builtin or standard program.
    lines = [line for line in block.replace('\\\n', ' ').splitlines() if not line.startswith(('mkdir', 'export'))]
    assert len(calls) == len(lines)
    for call in calls:
        if call['program'] == 'docker':
            check_docker(call['options'])
    for word in re.findall(r'--config=([\w/]+\.py)', block):
        assert (ROOT / word).is_file()


def check_docker(options):
    if options['command'] == 'build':
        assert options['target'] in STAGES
        for argument in options['build_arg']:
            name, _, value = argument.partition('=')
            assert name in ARGUMENTS
            assert name != 'HARDWARE' or value in STAGES
    if options['command'] == 'run':
        target = TAGS[options['image']]
        for volume in options['volume']:
            assert volume.split(':')[1] in ('/maxlm/data', '/maxlm/runs')
        if options['entrypoint']:
            assert options['entrypoint'] == 'bash'
            assert (ROOT / options['words'][0]).is_file()
        else:
            check_maxlm(exec_form(target, 'ENTRYPOINT') + options['words'])
        assert ('cuda' in target) == bool(options['gpus'])
    if options['command'] == 'compose':
        assert all((ROOT / name).is_file() for name in options['file'])
        assert set(options['profile']) <= {profile for service in SERVICES.values() for profile in service['profiles']}
        if options['verb'] == 'run':
            assert 'entrypoint' not in SERVICES[options['service']]
            check_maxlm(['maxlm', *options['words']])


def check_maxlm(words):
    verb, *rest = maxlm_words(words)
    if verb == 'supervise':
        assert rest.pop(0) == '--'
        verb, *rest = maxlm_words(rest)
    parse([verb, *rest])


def test_invalid_commands_are_rejected(programs):
    for line in ('docker build --targt cpu .', 'docker run --gpu all x', 'docker compose --profiles train up'):
        assert programs.run(*shlex.split(line)).returncode == 2
    with pytest.raises(AssertionError):
        check_docker({'command': 'build', 'target': 'cuda11', 'build_arg': []})


def test_the_container_of_slurm_reaches_the_job(programs, run_block):
    [block] = [block for block in BLOCKS if 'sbatch' in block]
    # The scripts also check the config and the data.
    calls = [call for call in run_block(block) if '--dry-run=elsewhere' not in call['arguments']]
    [imported] = [call for call in calls if call['program'] == 'enroot']
    [submitted] = [call for call in calls if call['program'] == 'sbatch']
    image = submitted['environment']['MAXLM_CONTAINER']
    assert image in imported['arguments']
    script, *training = submitted['arguments']
    done = programs.run('bash', ROOT / script, '--dry-run', *training, **submitted['environment'])
    assert done.returncode == 0, done.stderr
    assert f'--container-image={image} ' in done.stdout
    assert f'--container-mounts={ROOT}:{ROOT},/shared:/shared ' in done.stdout


def test_documented_targets_arguments_and_services():
    rows = set(re.findall(r'^\| `(\w+)`', TEXT, re.MULTILINE))
    assert rows >= {'cpu', 'cuda12', 'tpu', 'serve', *ARGUMENTS, *SERVICES}
    for name, default in ARGUMENTS.items():
        assert re.search(rf'^\| `{name}` \| `?{default}`? \|', TEXT, re.MULTILINE), name
    variables = set(re.findall(r'\$\{(\w+)', (ROOT / 'compose.yaml').read_text()))
    assert variables == {'MAXLM_CONFIG', 'MAXLM_WORKDIR', 'MAXLM_UID'}
    assert all(f'`{name}`' in TEXT for name in variables)
