"""Tests launch/slurm/prepare.sh with a small Slurm that runs arrays, loses nodes and requeues tasks."""

import os
import random
import sys

import pytest

from maxlm.data.prepare import partitions
from tests.conftest import ROOT
from tests.data.parts.stages import OPTIONS, write_inputs
from tests.launch.slurm_queue import SlurmQueue
from tests.preparing import contents, run

pytestmark = pytest.mark.multiprocess

SCRIPT = ROOT / 'launch/slurm/prepare.sh'
# Runs `python -m maxlm prepare` with small partitions.
PYTHON = """#!{python}
import sys
from maxlm.cli.process import run
from maxlm.data.prepare import partitions
partitions.GROUPS, partitions.MIN_GROUP_BYTES = 20, 1000
assert sys.argv[1:4] == ['-m', 'maxlm', 'prepare']
sys.argv[:4] = ['maxlm prepare']
run('prepare')
"""
NUM_KILLS = 3


@pytest.fixture
def queue(programs, tmp_path):
    return SlurmQueue(programs, tmp_path / 'slurm')


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Returns a Python whose preparations have several partitions, as those of this process."""
    monkeypatch.setattr(partitions, 'GROUPS', 20)
    monkeypatch.setattr(partitions, 'MIN_GROUP_BYTES', 1000)
    path = tmp_path / 'small_python'
    path.write_text(PYTHON.format(python=sys.executable))
    path.chmod(0o755)
    return path


def submit(programs, queue, *words, **environment):
    return programs.run('bash', SCRIPT, *words, **{'PATH': queue.environment['PATH'], **environment})


def test_lost_nodes_and_time_limits_leave_the_same_bytes(programs, queue, python, tmp_path):
    arguments = [*write_inputs(tmp_path / 'inputs'), *OPTIONS, '--output']
    assert run(*arguments, tmp_path / 'expected') == 0
    queue.environment['PYTHON'] = str(python)
    done = submit(programs, queue, '--tasks=2', '--partition=cpu', '--', *arguments, tmp_path / 'data')
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ['submitted stage scan: job 101', 'submitted stage plan: job 102']
    rng, work = random.Random(3), tmp_path / 'data' / '.prepare'
    kills, limit = [], [1]

    def interrupt(running):
        """Alternates between lost nodes and time limits, when further partitions are complete."""
        try:
            results = sum(name.startswith(('survey-', 'group-')) for name in os.listdir(work))
        except FileNotFoundError:
            # The last task deletes the directory, and the first one creates it.
            return
        if running and len(kills) < NUM_KILLS and results >= limit[0]:
            element = rng.choice(running)
            kills.append(element.name)
            limit[0] = results + rng.randrange(1, 6)
            if len(kills) % 2:
                queue.fail_node(element)
            else:
                queue.end_step(element)

    codes = queue.run(interrupt)
    assert codes == {101: [0, 0], 102: [0], 103: [0, 0], 104: [0]}, [each.output for each in queue.elements]
    assert len(kills) == NUM_KILLS
    # A task that Slurm signals may be at its end.
    assert sum(element.restarts for element in queue.elements) >= NUM_KILLS - 1
    assert contents(tmp_path / 'data') == contents(tmp_path / 'expected')


def test_bad_input_is_not_requeued(programs, queue, tmp_path):
    submit(programs, queue, '--tasks=2', '--', '--input', tmp_path / 'missing', '--output', tmp_path / 'data')
    queue.environment['PYTHON'] = sys.executable
    # Slurm removes the jobs that depend on the first one.
    assert queue.run() == {101: [2, 2], 102: [-1], 103: [-1, -1], 104: [-1]}
    assert 'missing: No such file' in queue.elements[0].output
    assert 'not queued again' in queue.elements[0].output
    assert queue.elements[0].restarts == 0


def test_gives_up_after_ten_restarts(programs, queue, tmp_path):
    submit(programs, queue, '--tasks=1', '--', '--input', 'x', '--output', tmp_path / 'data')
    queue.environment['PYTHON'] = 'false'
    assert queue.run() == {101: [1], 102: [-1], 103: [-1], 104: [-1]}
    assert queue.elements[0].restarts == 10
    assert 'exit code 1; given up after 10 restarts' in queue.elements[0].output


def test_dry_run(programs):
    words = ['--dry-run', '--tasks=8', '--mem=64G', '--', '--input', 'a b', '--output=gs://bucket/web']
    done = programs.run('bash', SCRIPT, *words)
    assert done.returncode == 0
    stages = {'scan': ' --array=0-7', 'plan': '', 'shards': ' --array=0-7', 'merge': ''}
    before = ''
    for line, (stage, array) in zip(done.stdout.splitlines(), stages.items(), strict=False):
        after = f' --dependency=afterok:JOB_OF_{before} --kill-on-invalid-dep=yes' if before else ''
        script = ROOT / 'launch/slurm/prepare.sbatch'
        assert line == (
            f'would run: sbatch --parsable --job-name=maxlm-prepare-{stage}{array}{after} --mem=64G {script} '
            f"{stage} 8 --input 'a b' --output=gs://bucket/web"
        )
        before = stage
    assert programs.calls() == []


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--tasks=2'], 'the options of maxlm prepare are missing; add them after --'),
        (['--', '--output', 'x'], '--tasks is missing'),
        (['--tasks=0', '--', '--output', 'x'], '--tasks=0: must be at least 1'),
        (['--tasks=two', '--', '--output', 'x'], '--tasks=two: give a whole number'),
        (['--tasks=08', '--', '--output', 'x'], '--tasks=08: remove the leading zeros'),
        (['--tasks=2', '-a', '0-3', '--', '--output', 'x'], '-a: this script sets it; use --tasks=N'),
        (['--tasks=2', '--', '--input', 'x'], '--output is missing: a directory or bucket that all nodes can reach'),
        (['--tasks=2', '--', '--output', 'x', '--stage=plan'], '--stage=plan: this script sets it; remove it'),
        (['--tasks=2', '--array=0-3', '--', '--output', 'x'], '--array=0-3: this script sets it; use --tasks=N'),
    ],
)
def test_bad_options(programs, words, message):
    done = programs.run('bash', SCRIPT, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f'error: {message}')
    assert done.stderr.count('\n') == 1
    assert programs.calls() == []
