import dataclasses
import re

import pytest

from maxlm.formatting import GIB, format_dollars, format_duration
from maxlm.reporting.costs import PAID, USES
from maxlm.reporting.page import section
from maxlm.telemetry.goodput import CATEGORIES
from maxlm.telemetry.run_history import Stored


def rows_of(text):
    """Returns the cells of each row without tags, by name."""
    rows = [re.findall(r'<td[^>]*>(.*?)</td>', row) for row in re.findall(r'<tr>(.*?)</tr>', text)]
    rows = [[re.sub('<.*?>', '', cell) for cell in row] for row in rows if len(row) > 1]
    return {row[0]: row[1:] for row in rows}


def dollars(text):
    return float(text.replace('$', '').replace(',', ''))


def changed(run, **fields):
    """Returns the run with other checkpoints or another config."""
    return dataclasses.replace(run, history=dataclasses.replace(run.history, **fields))


def test_each_paid_category_has_one_use():
    assert sorted(category for use in USES.values() for category in use) == sorted(PAID)
    assert set(CATEGORIES) - set(PAID) == {'idle'}


def test_accelerator_time_is_split_by_use(run_of):
    (run,) = run_of('crashed')
    rows = rows_of(section('cost', [run]))
    totals = run.goodput_log.totals
    # The total is that of the overview, and the pause between the attempts is free.
    assert rows['accelerator time'] == [
        format_duration(sum(totals.values()) - totals['idle']),
        format_dollars(run.dollars),
    ]
    assert totals['idle'] == 60
    for use, categories in USES.items():
        seconds = sum(totals[category] for category in categories)
        if use in ('computing steps again', 'waiting for rewards', 'waiting for tools or environments'):
            # Uses without time are omitted.
            assert seconds == 0
            assert use not in rows
            continue
        assert rows[use][0] == format_duration(seconds)
        # One device for the price of 3.5 dollars per hour.
        assert dollars(rows[use][1]) == pytest.approx(seconds / 3600 * 3.5, abs=1e-4)
    assert dollars(rows['lost steps (repeated)'][1]) > 0
    assert rows['transfer'][1] == 'unknown'


def test_unknown_prices_are_not_zero(run_of):
    (run,) = run_of('on_cpu')
    rows = rows_of(section('cost', [run]))
    assert {cells[1] for cells in rows.values()} == {'unknown'}
    assert rows['evaluation'][0] != 'unknown'
    assert 'set train.price_per_hour' in section('cost', [run])
    # Attempts without a price are not counted.
    (run,) = run_of('finished')
    first, second = run.goodput_log.attempts
    log = run.goodput_log._replace(attempts=[first._replace(dollars=None), second])
    text = section('cost', [changed(run, goodput_logs={0: log})])
    assert rows_of(text)['accelerator time'][1] == format_dollars(second.dollars)
    assert '1 of 2 attempts have no price' in text


def test_storage(run_of):
    (run,) = run_of('finished')
    assert rows_of(section('cost', [run]))['storage of checkpoints'] == ['unknown', 'unknown']
    stored = Stored(4, 80 * GIB)
    assert rows_of(section('cost', [changed(run, stored=stored)]))['storage of checkpoints'] == [
        '4 × 20.0 GiB',
        'unknown',
    ]
    # Prices of Google Cloud Storage are known, whether it contains the workdir or its copy.
    checkpoint = dataclasses.replace(run.history.config.checkpoint, remote_dir='gs://bucket/run')
    config = dataclasses.replace(run.history.config, checkpoint=checkpoint)
    for place in ({'workdir': 'gs://bucket/run'}, {'config': config}):
        text = section('cost', [changed(run, stored=stored, **place)])
        assert rows_of(text)['storage of checkpoints'] == ['4 × 20.0 GiB', '$1.60 per month']
        assert 'Google Cloud Storage' in text
    s3 = rows_of(section('cost', [changed(run, stored=stored, workdir='s3://bucket/run')]))
    assert s3['storage of checkpoints'][1] == 'unknown'


def test_transfer_is_the_traffic_between_the_first_and_last_reading(run_of):
    (run,) = run_of('running')
    lines = [
        {'time': 0.0, 'life': 1, 'net_sent_bytes_per_second': 10**9},
        {'time': 10.0, 'life': 1, 'net_sent_bytes_per_second': 1024**2, 'net_received_bytes_per_second': 1024},
        {'time': 999.0, 'life': 2, 'net_sent_bytes_per_second': 10**9},
        {'time': 1001.0, 'life': 2, 'net_sent_bytes_per_second': 1024**2},
    ]
    rows = rows_of(section('cost', [changed(run, devices={0: lines, 1: lines[:2]})]))
    assert rows['transfer'] == ['22.0 MiB sent, 20.0 KiB received', 'unknown']
    assert rows_of(section('cost', [changed(run, devices={})]))['transfer'] == ['unknown', 'unknown']


def test_several_runs(run_of):
    text = section('cost', run_of('finished', 'on_cpu', 'empty'))
    assert re.findall('<th>(.*?)</th>', text) == ['finished', 'on_cpu']
    assert re.match(r'\$[\d.]+ \(.*\)', rows_of(text)['accelerator time'][0])
    assert rows_of(text)['accelerator time'][1].startswith('unknown (')
    assert section('cost', run_of('empty')) == ''
