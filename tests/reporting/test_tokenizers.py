"""Tests the table of bytes per token."""

import dataclasses

from maxlm.formatting import DASH
from maxlm.reporting.page import section
from maxlm.reporting.records import tokenizer_table
from maxlm.reporting.run_summary import make_runs
from tests import workdirs


def with_start(run, **fields):
    """Returns a run whose `started` events have other fields."""
    events = [event | fields if event['kind'] == 'started' else event for event in run.history.events]
    return dataclasses.replace(run.history, events=events)


def test_one_run(run_of):
    assert tokenizer_table(run_of('finished')) == [
        ['', 'this run', 'GPT-2'],
        ['English', '2.50', '4.48'],
        ['Korean', DASH, '1.17'],
        ['validation data', '4.00', DASH],
    ]
    assert 'Bytes per token' in section('tokenizer', run_of('finished'))


def test_runs_with_equal_tokenizers_share_a_column(run_of):
    (run,) = run_of('finished')
    others = {'English': {'tokenizer': 1.0, 'GPT-2': 4.48}}
    histories = [run.history, *(with_start(run, bytes_per_token=others, baseline={}) for _ in range(2))]
    histories = [dataclasses.replace(one, workdir=f'/runs/{number}') for number, one in enumerate(histories)]
    runs = make_runs(histories, workdirs.NOW)
    assert tokenizer_table(runs) == [
        ['', runs[0].name, f'{runs[1].name}, {runs[2].name}', 'GPT-2'],
        ['English', '2.50', '1.00', '4.48'],
        ['validation data', '4.00', DASH, DASH],
    ]


def test_runs_of_earlier_versions(run_of):
    (run,) = run_of('finished')
    for value in ({}, None, [], {'English': 3}):
        runs = make_runs([with_start(run, bytes_per_token=value, baseline={})], workdirs.NOW)
        assert section('tokenizer', runs) == ''
