"""Runs killed at random times have the same losses and parameters as an uninterrupted run.

Nightly, because attempts run in sequence. `test_resume.py` kills a run of each objective once.
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

LAST = 20
SETTINGS = {
    'train__num_steps': LAST,
    'checkpoint__save_interval_steps': 2,
    'checkpoint__max_to_keep': 2,
    # The first evaluation compiles. It precedes the first save, from which the time to a kill is measured.
    'eval__interval': 2,
    'optimizer__ema_decay': 0.9,
}


def test_kills_at_random_moments(dataset, tmp_path, record_property):
    kills = how_many(3, 200)
    environment = {
        **os.environ,
        'XLA_FLAGS': cpu_flags(1),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    config, _, *words = arguments(dataset, 'none', **SETTINGS)
    command = [sys.executable, '-m', 'tests.killing_training', str(tmp_path), '0', str(kills), 'train', config, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report['interrupted'].pop('preempted') == 1
    assert sum(report['interrupted'].values()) == kills
    # Kills before the first save would prove nothing.
    assert report['interrupted'].get('start', 0) < kills
    assert report['lost'] == []
    assert report['finished'] >= 1
    wanted_curve, wanted_params = curve(tmp_path / 'uninterrupted'), params_of(tmp_path / 'uninterrupted', LAST)
    assert sorted(wanted_curve) == list(range(1, LAST + 1))
    for number in range(report['finished']):
        assert curve(tmp_path / str(number)) == wanted_curve
        for item in ('params', 'ema'):
            assert same(
                params_of(tmp_path / str(number), LAST, item), params_of(tmp_path / 'uninterrupted', LAST, item)
            )
    # Negative control: steps differ. `test_resume.py` covers other seeds.
    assert wanted_curve[LAST]['train/loss'] != wanted_curve[LAST - 2]['train/loss']
    assert not same(params_of(tmp_path / 'uninterrupted', LAST - 2), wanted_params)
    operations = ', '.join(f'{count} during {name}' for name, count in sorted(report['interrupted'].items()))
    measured(
        record_property,
        'kill',
        f'{kills} kills ({operations}); runs that differ: 0 of {report["finished"]}; no step lost',
    )
