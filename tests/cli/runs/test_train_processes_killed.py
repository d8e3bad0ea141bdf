"""Two processes, one of which gets SIGKILL, SIGSTOP or SIGTERM at random times: both exit and resume exactly.

Nightly, because attempts run in sequence. `test_train_processes.py` kills one process and suspends another once.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.cli.runs.test_train import arguments, curve, params_of, same
from tests.conftest import ROOT
from tests.cpu import cpu_flags
from tests.faults import how_many, measured

# The test takes a minute, several on a busy machine, and up to an hour with the full count.
pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly, pytest.mark.timeout(how_many(900, 3600))]

# Long enough for interruptions in the middle and for several attempts.
LAST = how_many(24, 60)
SETTINGS = {
    'train__num_steps': LAST,
    'checkpoint__save_interval_steps': 3,
    'checkpoint__max_to_keep': 2,
    'eval__interval': 0,
    'train__hang_timeout_seconds': 60,
}
# Seconds within which other processes must exit. Linger time, heartbeat and polling take about 10.
END_SECONDS = 15
SIGNALS = ('SIGTERM', 'SIGKILL', 'SIGSTOP')


@pytest.fixture(scope='module')
def end_one(dataset, tmp_path_factory):
    """Returns a function that sends each signal to one process, and returns the longest times and a result text."""

    def end_one(*names):
        directory = tmp_path_factory.mktemp('runs')
        environment = {
            **os.environ,
            'XLA_FLAGS': cpu_flags(1),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        }
        config, _, *words = arguments(dataset, 'none', **SETTINGS)
        command = [
            sys.executable,
            '-m',
            'tests.killing_processes',
            str(directory),
            '0',
            ','.join(names),
            config,
            *words,
        ]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        report = json.loads(done.stdout.splitlines()[-1])
        assert (report['injected'], report['lost']) == (len(names), [])
        assert report['finished'] >= 1
        wanted_curve, wanted_params = curve(directory / 'uninterrupted'), params_of(directory / 'uninterrupted', LAST)
        assert sorted(wanted_curve) == list(range(1, LAST + 1))
        for number in range(report['finished']):
            assert curve(directory / str(number)) == wanted_curve
            assert same(params_of(directory / str(number), LAST), wanted_params)
        # Negative control: steps differ.
        assert wanted_curve[LAST]['train/loss'] != wanted_curve[LAST - 3]['train/loss']
        assert not same(params_of(directory / 'uninterrupted', LAST - 3), wanted_params)
        return report['longest'], f'runs that differ: 0 of {report["finished"]}'

    return end_one


@pytest.fixture(scope='module')
def once_each(end_one):
    return end_one(*SIGNALS)


@pytest.fixture
def found(request):
    """Returns a check of the trials of one signal, or of the common results of a sample."""

    def found(name, full):
        times = how_many(1, full)
        if times > 1:
            longest, runs = request.getfixturevalue('end_one')(*[name] * times)
        else:
            longest, runs = request.getfixturevalue('once_each')
        assert max(longest[name].values()) < END_SECONDS
        return times, longest[name], runs

    return found


def test_one_is_killed(found, record_property):
    times, longest, runs = found('SIGKILL', 50)
    figure = f'the other exits with 75 within {longest["others"]:.1f} s'
    measured(record_property, 'kill-one', f'{times} kills: {figure}; {runs}')


def test_one_gets_sigterm(found, record_property):
    times, longest, runs = found('SIGTERM', 20)
    measured(record_property, 'sigterm', f'{times} of {times}: both exit with 75 within {longest["all"]:.1f} s; {runs}')


def test_one_is_suspended(found, record_property):
    times, longest, runs = found('SIGSTOP', 6)
    others, itself = longest['others'], longest['itself']
    figure = f'the other exits with 75 within {others:.1f} s, the suspended one within {itself:.1f} s after SIGCONT'
    measured(record_property, 'stopped', f'{times} times: {figure}; {runs}')
