import dataclasses
import re

from maxlm.reporting.page import section
from maxlm.reporting.run_summary import make_runs
from tests import workdirs


def with_events(run, lines):
    return make_runs([dataclasses.replace(run.history, events=lines)], workdirs.NOW)


def test_alerts_are_highlighted(run_of):
    text = section('events', run_of('diverged'))
    assert '<span class="error">rollback</span>' in text
    assert '<span class="error">saved</span>' not in text
    assert '>saved<' in text


def test_routine_events_are_omitted_first_and_counted(run_of):
    (run,) = run_of('finished')
    lines = [{'time': float(n), 'kind': 'saved', 'message': ''} for n in range(1000)]
    lines += [{'time': 2000.0 + n, 'kind': 'rollback', 'message': f'number {n}'} for n in range(400)]
    text = section('events', with_events(run, lines))
    assert text.count('<tr>') == 301
    assert '>saved<' not in text
    assert 'number 0<' in text
    assert 'number 399<' in text
    assert '1,100 more events' in text


def test_invalid_lines_are_tolerated(run_of):
    (run,) = run_of('finished')
    text = section(
        'events', with_events(run, [{}, {'time': 'x', 'kind': None, 'message': '<b>' * 500}, {'life': [1], 'step': {}}])
    )
    assert text.count('<tr>') == 4
    assert '<b>' not in text


def test_events_of_several_runs_are_sorted_by_time(run_of):
    text = section('events', run_of('finished', 'crashed'))
    times = re.findall(r'data-head="time">([^<]*)<', text)
    assert len(times) == sum(len(run.history.events) for run in run_of('finished', 'crashed'))
    assert times == sorted(times)
    assert '>finished</td>' in text


def test_without_events(run_of):
    assert section('events', run_of('empty')) == ''
