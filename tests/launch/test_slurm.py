"""Tests launch/slurm/train.sbatch: its options, and the conditions for a requeue."""

import os
import re
import signal
import subprocess
import sys

import pytest

from maxlm.errors import EXIT_DEVICE, EXIT_PREEMPTED
from tests.conftest import ROOT

pytestmark = pytest.mark.multiprocess

SCRIPT = ROOT / 'launch/slurm/train.sbatch'
# Saves for half a second after SIGTERM.
WAITING = """
import signal, sys, time
def save(*_):
    time.sleep(0.5)
    print('saved', flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print('ready', flush=True)
time.sleep(60)
"""
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
        'srun --kill-on-bad-exit=0 --wait=120 bash launch/slurm/task.sh maxlm-41.faulty '
        'python -m maxlm.train --config=configs/1b.py --workdir=run'
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
    words = ['bash', 'launch/slurm/task.sh', 'maxlm-41.faulty', 'python', '-m', 'maxlm.train', *TRAIN]
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


@pytest.mark.parametrize('code', [EXIT_DEVICE, EXIT_PREEMPTED])
def test_a_node_with_a_faulty_device_is_named(programs, folder, code):
    # Runs the process of one of two nodes. Like the real srun, it returns the largest exit code.
    srun = folder.parent / 'bin/srun'
    srun.parent.mkdir()
    srun.write_text('#!/bin/sh\nwhile [ "$1" != bash ]; do shift; done\nSLURMD_NODENAME=node7 "$@"\nexit 75\n')
    srun.chmod(0o755)
    programs.environment['PATH'] = f'{srun.parent}:{programs.environment["PATH"]}'
    (folder / 'maxlm-41.faulty').write_text('node of an earlier start\n')
    programs.plan(attempts=[{'code': code}])
    copy = folder.parent / 'slurm_script'
    copy.write_text(SCRIPT.read_text())
    done = programs.run('bash', copy, *TRAIN, cwd='/', SLURM_SUBMIT_DIR=str(folder), SLURM_JOB_ID='41')
    if code == EXIT_DEVICE:
        assert (done.returncode, programs.lines('scontrol')) == (EXIT_DEVICE, [])
        assert (
            'error: wrong results of a device of node7 (exit code 74): submit the job again with --exclude=node7'
            in done.stderr
        )
    else:
        # Negative control.
        assert (done.returncode, programs.lines('scontrol')) == (0, ['scontrol requeue 41'])


def test_a_faulty_node_that_cannot_be_recorded_keeps_its_exit_code(tmp_path):
    task = ['bash', SCRIPT.parent / 'task.sh', tmp_path / 'missing/faulty', 'bash', '-c', f'exit {EXIT_DEVICE}']
    done = subprocess.run(task, capture_output=True, text=True)
    assert done.returncode == EXIT_DEVICE
    assert 'error: cannot add this node to' in done.stderr


def test_a_faulty_device_without_a_known_node_is_not_requeued(programs, folder):
    done = job(programs, folder, {'code': EXIT_DEVICE})
    assert (done.returncode, programs.lines('scontrol')) == (EXIT_DEVICE, [])


def test_a_signal_to_all_processes_of_a_task_does_not_end_the_shell(tmp_path):
    words = ['bash', SCRIPT.parent / 'task.sh', tmp_path / 'faulty', sys.executable, '-c', WAITING]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, process_group=0)
    assert process.stdout.readline() == b'ready\n'
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == b'saved\n'
    assert process.returncode == EXIT_PREEMPTED
    assert not (tmp_path / 'faulty').exists()


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
