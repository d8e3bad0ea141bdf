import re

from maxlm.formatting import format_duration, format_percent
from maxlm.reporting.goodput import LABELS
from maxlm.reporting.page import section
from maxlm.telemetry.goodput import CATEGORIES


def test_every_category_has_a_label():
    assert sorted(LABELS) == sorted(CATEGORIES)


def test_attempts_and_their_total(run_of):
    (run,) = run_of('crashed')
    text = section('time', [run])
    assert re.findall(r'class="name">([^<]*)<', text) == ['total', 'attempt 1', 'attempt 2']
    totals = run.goodput_log.totals
    assert totals['lost'] > 10
    for category, label in LABELS.items():
        percentage = format_percent(totals[category] / run.goodput_log.seconds)
        row = f'{label}</td><td>{format_duration(totals[category])} ({percentage})</td>'
        # Categories without time have no row.
        assert (row in text) == (f'{label}</td>' in text) == (totals[category] > 0)
    assert f'all</td><td>{format_duration(run.goodput_log.seconds)} (100.0%)</td>' in text
    assert 'killed or still running' in text


def test_each_host(run_of):
    text = section('time', run_of('two_hosts'))
    assert re.findall(r'class="name">([^<]*)<', text) == ['total', 'process 0, host0', 'process 1, host1']
    assert 'Time of each process' in text
    assert 'Time of each process' not in section('time', run_of('running'))


def test_several_runs(run_of):
    text = section('time', run_of('finished', 'crashed'))
    assert re.findall(r'class="name">([^<]*)<', text) == ['finished', 'crashed']


def test_without_a_ledger(run_of):
    assert section('time', run_of('empty')) == section('time', run_of('empty', 'empty')) == ''
