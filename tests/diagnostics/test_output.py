"""Tests the output of results."""

import sys

import pytest

from maxlm.diagnostics.output import as_json, as_lines, print_results, progress, summary, worst_status
from maxlm.diagnostics.result import CheckStatus, failure, ok, skipped, warning
from maxlm.diagnostics.runner import Result

RESULTS = [
    Result('python', ok('3.11.7'), 0.1),
    Result('shm', warning('64.0 MiB free of 64.0 MiB', 'give the container more'), 0.2),
    Result('driver', failure(f'no driver {"that answers " * 10}', 'install [one]'), 0.3),
    Result('gpus', skipped('no driver to ask'), 0.4),
]


def test_a_table_of_eighty_columns(capsys):
    print_results(RESULTS)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert 'failure  driver  no driver that answers' in out
    # Brackets are text, not markup.
    assert '→ install [one]' in out
    assert out.endswith('\n1 ok, 1 warning, 1 failure, 1 skipped; not ready for the run: driver\n')


def test_without_rich_there_are_lines(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'rich.console', None)
    print_results(RESULTS)
    out = capsys.readouterr().out
    assert out.splitlines()[: len(as_lines(RESULTS))] == as_lines(RESULTS)
    assert 'give the container more' in out


def test_for_a_script():
    output = as_json(RESULTS)
    assert output['status'] == 'failure'
    assert output['checks'][1] == {
        'name': 'shm',
        'status': 'warning',
        'found': '64.0 MiB free of 64.0 MiB',
        'remedy': 'give the container more',
        'seconds': 0.2,
    }


@pytest.mark.parametrize(('count', 'status'), [(0, 'skipped'), (1, 'ok'), (2, 'warning'), (3, 'failure')])
def test_the_worst_decides(count, status):
    assert worst_status(RESULTS[:count]) == CheckStatus(status)


def test_summary():
    assert summary(RESULTS[:1]) == '1 ok'
    assert summary([*RESULTS[1:2] * 2, RESULTS[0]]) == '1 ok, 2 warnings'


def test_without_a_terminal_progress_is_at_most_a_line_per_ten_seconds(capsys):
    now = [0.0]
    for is_shown in (True, False):
        with progress(is_shown=is_shown, clock=lambda: now[0]) as show:
            for check in range(5):
                show(f'check {check}')
                now[0] += 6.0
    assert capsys.readouterr() == ('', 'check 2\ncheck 4\n')
