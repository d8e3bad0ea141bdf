"""Goodput: the ledger of a run with known delays that is killed twice."""

import json
import os
import subprocess
import sys

import pytest

from maxlm.checkpoint.item_metadata import read_json
from maxlm.storage.jsonl import read_lines
from maxlm.telemetry.events import ENDS, read_events
from maxlm.telemetry.goodput import CATEGORIES, read_goodput
from tests import slow_training
from tests.cli.runs.test_train import arguments
from tests.conftest import ROOT
from tests.cpu import cpu_flags

pytestmark = pytest.mark.multiprocess

BEAT_SECONDS = 0.1
SETTINGS = {
    'train__num_steps': slow_training.LAST,
    'eval__interval': 20,
    'checkpoint__save_interval_steps': slow_training.EVERY,
    'metrics__goodput_interval_seconds': BEAT_SECONDS,
    'train__price_per_hour': 3.6,
    # A large prefetch buffer would hide slow data.
    'data__prefetch_buffer_size': 1,
    'data__num_threads': 1,
}
# Unmeasured time between the exit of a process and the start of the next, and between parts.
SLACK_SECONDS = 0.15


@pytest.fixture(scope='module')
def delayed(dataset, tmp_path_factory):
    """Returns the directory of the run and its measurements."""
    directory = tmp_path_factory.mktemp('delayed')
    environment = {
        **os.environ,
        'XLA_FLAGS': cpu_flags(1),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    config, _, *words = arguments(dataset, 'none', **SETTINGS)
    command = [sys.executable, '-m', 'tests.slow_training', str(directory), config, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return directory


def recorded(directory):
    return read_lines(directory / 'truth.jsonl').lines


def measured_parts(directory, ledger):
    """Returns seconds by category; steps that a later attempt repeated count as lost."""
    wanted = dict.fromkeys(('step', 'lost', 'data_wait', 'evaluation', 'checkpoint'), 0.0)
    starts = {attempt.number: attempt.start_step for attempt in ledger.attempts}
    notes = recorded(directory)
    times = {kind: [note['seconds'] for note in notes if note['category'] == kind] for kind in ('began', 'killed')}
    wanted['idle'] = sum(times['began'][1:]) - sum(times['killed'])
    for note in notes:
        if note['category'] in times:
            continue
        later = [start for number, start in starts.items() if number > note['attempt']]
        is_repeated = note['step'] > min(later, default=slow_training.LAST)
        wanted['lost' if is_repeated else note['category']] += note['seconds']
    return wanted


def misses(found, wanted):
    """Returns the categories that differ from the measurements by more than 5 %."""
    return {
        name: (round(found[name], 3), round(seconds, 3))
        for name, seconds in wanted.items()
        if abs(found[name] - seconds) > 0.05 * seconds + SLACK_SECONDS
    }


def test_every_category_equals_the_measurement(delayed):
    ledger = read_goodput(delayed / 'slow')
    assert [(attempt.number, attempt.start_step, attempt.is_closed) for attempt in ledger.attempts] == [
        (1, 0, False),
        (2, 20, False),
        (3, 20, True),
    ]
    wanted = measured_parts(delayed, ledger)
    # Each delay is large enough to be detected.
    assert min(wanted.values()) > 1.5
    assert misses(ledger.totals, wanted) == {}
    # Negative control: if repeated steps count as steps, two categories are wrong.
    naive = read_goodput(delayed / 'slow', count_lost=False)
    assert set(misses(naive.totals, wanted)) == {'step', 'lost'}
    assert sum(naive.totals.values()) == pytest.approx(ledger.seconds)


def test_the_sum_and_the_cost_match_the_wall_time(delayed):
    ledger = read_goodput(delayed / 'slow')
    assert set(ledger.totals) == set(CATEGORIES)
    assert min(ledger.totals.values()) >= 0
    # The last line is written at the end of the run.
    seconds = (delayed / 'slow' / 'goodput.jsonl').stat().st_mtime - recorded(delayed)[0]['seconds']
    assert ledger.seconds == pytest.approx(seconds, rel=0.01)
    # The price is a tenth of a cent per second while the run is active.
    assert ledger.dollars == pytest.approx((ledger.seconds - ledger.totals['idle']) / 1000, rel=1e-3)


def test_metrics_and_events_agree_with_the_ledger(delayed):
    ledger = read_goodput(delayed / 'slow')
    lines = [json.loads(line) for line in (delayed / 'slow' / 'metrics.jsonl').read_text().splitlines()]
    last = [line for line in lines if 'cost/hours' in line][-1]
    assert last['step'] == slow_training.LAST
    # Time after the last step is not included.
    reported, paid = last['cost/hours'] * 3600, ledger.seconds - ledger.totals['idle']
    after = sum(ledger.attempts[2].seconds[name] for name in ('compile', 'evaluation', 'checkpoint', 'other'))
    assert paid - after - 0.5 < reported < paid
    assert last['cost/dollars'] == pytest.approx(last['cost/hours'] * 3.6, rel=1e-3)
    assert last['perf/eta_seconds'] == 0
    assert (
        ledger.fraction < last['goodput/fraction'] < ledger.fraction * ledger.seconds / (ledger.seconds - after - 0.5)
    )
    # Budgets count the same hours, including unsaved time of killed attempts.
    progress = read_json(delayed / 'slow' / 'checkpoints' / str(slow_training.LAST) / 'progress')
    assert reported - 0.5 < 3600 * progress['history']['decisions']['hours'] < paid
    # Negative control: the unsaved time is not zero.
    assert ledger.totals['lost'] > 1.0
    events = read_events(delayed / 'slow').lines
    assert [event['life'] for event in events if event['kind'] == 'started'] == [1, 2, 3]
    assert [event['from_step'] for event in events if event['kind'] == 'resumed'] == [20, 20]
    assert [event['step'] for event in events if event['kind'] == 'saved'] == [10, 20, 30, 40]
    # Two of three attempts were killed.
    assert [(event['life'], event['kind'], event['code']) for event in events if event['kind'] in ENDS] == [
        (3, 'finished', 0)
    ]
