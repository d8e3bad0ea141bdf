"""Runs in which a replica of a parameter gets a flipped bit: they name the device and do not save the state."""

import re

import pytest

from maxlm.checkpoint.manager import saved_steps
from maxlm.errors import EXIT_DEVICE, EXIT_DONE, EXIT_PREEMPTED
from maxlm.telemetry.events import read_events
from tests import replicas
from tests.cli.runs.test_train import arguments
from tests.processes import Processes

pytestmark = pytest.mark.usefixtures('shared_steps')

SETTINGS = {
    'optimizer__schedule': 'constant',
    'mesh__fsdp': 1,
    'mesh__data': -1,
    'train__num_steps': 6,
    'train__global_batch_size': 8,
    'checkpoint__save_interval_steps': 2,
    'checkpoint__max_to_keep': 100,
    'eval__interval': 0,
    'train__hang_timeout_seconds': 60,
}


def test_one_process(dataset, tmp_path, capsys):
    workdir = tmp_path / 'run'
    words = arguments(dataset, workdir, **SETTINGS)
    assert replicas.main(3, words) == EXIT_DEVICE
    error = capsys.readouterr().err
    assert re.search(r'^error: wrong values in device 0 of .*params\.embedding .*step 4 is not saved', error, re.M), (
        error
    )
    assert saved_steps(workdir) == [2]
    alert, last = read_events(workdir).lines[-2:]
    assert (alert['kind'], alert['alert'], alert['step']) == ('device', True, 4)
    assert (last['kind'], last['code'], last['message']) == ('failed', EXIT_DEVICE, alert['message'])
    # Negative control: without a flipped bit, the run resumes and completes.
    assert replicas.main(0, words) == EXIT_DONE
    assert saved_steps(workdir) == [2, 4, 6]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ('devices', 'code', 'found'),
    [
        # Three of four replicas agree.
        (2, EXIT_DEVICE, r'wrong values in device \d+ of \S+ \(process 1\): params\.embedding differ from most'),
        # Nobody knows which of two replicas is wrong.
        pytest.param(
            1,
            EXIT_PREEMPTED,
            r'wrong values in one of device 0 of \S+ \(process 0\) and device',
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_two_processes(dataset, tmp_path, devices, code, found):
    workdir = tmp_path / 'run'
    words = arguments(dataset, workdir, **SETTINGS)
    with Processes(2, devices, ['3', *words], logs=tmp_path / 'faulty', module='tests.replicas') as processes:
        assert processes.wait() == [EXIT_PREEMPTED, code], processes.output(0) + processes.output(1)
        for process in (0, 1):
            assert re.search(f'error: {found}', processes.output(process))
    assert saved_steps(workdir) == [2]
    alert, last = read_events(workdir).lines[-2:]
    assert (alert['kind'], alert['alert'], alert['step']) == ('device', True, 4)
    assert (last['kind'], last['code'], last['message']) == ('preempted', EXIT_PREEMPTED, alert['message'])
    # Negative control: without a flipped bit, the run resumes and completes.
    with Processes(2, devices, ['0', *words], logs=tmp_path / 'again', module='tests.replicas') as processes:
        assert processes.wait() == [EXIT_DONE] * 2, processes.output(0) + processes.output(1)
    assert saved_steps(workdir) == [2, 4, 6]
