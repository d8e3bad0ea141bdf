"""Tests launch/slurm/train.sbatch: its options, and the conditions for a requeue."""

import re

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.multiprocess

SCRIPT = ROOT / 'launch/slurm/train.sbatch'
TRAIN = ('--config=configs/1b.py', '--workdir=run')


@pytest.fixture
def folder(tmp_path):
    """Returns the directory from which a job is submitted, with the scripts as in a repository."""
    directory = tmp_path / 'submitted'
    directory.mkdir()
    (directory / 'launch').symlink_to(ROOT / 'launch')
    return directory


def job(programs, folder, *replies, arguments=TRAIN):
    """Starts the job once. Slurm runs a copy of the script from another directory."""
    programs.plan(replies=[{'match': 'srun', 'workdir': str(folder / 'run'), **reply} for reply in replies])
    copy = folder.parent / 'slurm_script'
    copy.write_text(SCRIPT.read_text())
    return programs.run('bash', copy, *arguments, cwd='/', SLURM_SUBMIT_DIR=str(folder), SLURM_JOB_ID='41')


def test_sbatch_options():
    options = dict(re.findall(r'^#SBATCH --([\w-]+)(?:=(.*))?$', SCRIPT.read_text(), re.MULTILINE))
    assert options['ntasks-per-node'] == '1'
    assert options['gpus-per-node'] == '8'
    # Without B:, Slurm signals the processes and not srun.
    assert options['signal'] == 'TERM@120'
    assert options.keys() >= {'requeue', 'nodes', 'time'}
    # Slurm stops reading options at the first command.
    text = SCRIPT.read_text()
    assert text.rindex('#SBATCH') < text.index('set -euo pipefail')


def test_finished_job(programs, folder):
    done = job(programs, folder, {'code': 0})
    assert done.returncode == 0
    assert programs.lines() == [
        'srun --kill-on-bad-exit=0 --wait=120 python -m maxlm.train --config=configs/1b.py --workdir=run'
    ]


def test_container(programs, folder):
    programs.environment |= {'MAXLM_CONTAINER': 'registry#maxlm:1', 'MAXLM_CONTAINER_MOUNTS': '/data:/data'}
    options = [
        '--no-container-entrypoint',
        '--container-image=registry#maxlm:1',
        f'--container-mounts={folder}:{folder},/data:/data',
        f'--container-workdir={folder}',
    ]
    # The node of the script has no environment, so the newest step is read in the container too.
    job(programs, folder, {'code': 75}, {'code': 0, 'stdout': '7\n'})
    train, read = programs.calls('srun')
    words = ['python', '-m', 'maxlm.train', *TRAIN]
    assert train['arguments'] == ['--kill-on-bad-exit=0', '--wait=120', *options, *words]
    assert read['arguments'][:-3] == ['--nodes=1', '--ntasks=1', *options, 'python']
    assert read['arguments'][-1] == 'run'
    assert programs.calls('python') == []
    assert programs.lines('scontrol') == ['scontrol requeue 41']
    assert (folder / 'maxlm-41.steps').read_text() == '7\n'


@pytest.mark.parametrize('code', [75, 137])
def test_requeue(programs, folder, code):
    done = job(programs, folder, {'code': code})
    assert done.returncode == 0
    assert programs.lines('scontrol') == ['scontrol requeue 41']


def test_bad_input_is_not_requeued(programs, folder):
    done = job(programs, folder, {'code': 2})
    assert done.returncode == 2
    assert programs.lines('scontrol') == []


def test_gives_up_without_progress(programs, folder):
    # Any number of starts with progress, followed by three without.
    starts = [{'code': 75, 'step': step} for step in (10, 20, 30, 40, 50)] + [{'code': 75}] * 3
    results = [job(programs, folder, start) for start in starts]
    assert [done.returncode for done in results] == [0] * 7 + [1]
    assert len(programs.lines('scontrol')) == 7
    assert 'given up after 3 starts' in results[-1].stderr


def test_gives_up_without_a_checkpoint(programs, folder):
    codes = [job(programs, folder, {'code': 137}).returncode for _ in range(3)]
    assert codes == [0, 0, 137]
    # Control: a finished job leaves no state.
    assert job(programs, folder, {'code': 0}).returncode == 0
    assert list(folder.glob('*.steps')) == []


def test_dry_run(programs):
    done = programs.run('bash', SCRIPT, '--dry-run', *TRAIN)
    assert done.returncode == 0
    assert 'would run: srun' in done.stdout
    assert programs.calls() == []


def test_bad_options(programs, folder):
    done = job(programs, folder, arguments=('--config=configs/1b.py',))
    assert done.returncode == 2
    assert '--workdir is missing' in done.stderr
    done = programs.run('bash', SCRIPT, *TRAIN, cwd='/')
    assert done.returncode == 2
    assert 'submit from the root of the repository' in done.stderr
    assert programs.calls() == []
