import dataclasses

import pytest

from maxlm.reporting.page import section
from maxlm.reporting.run_summary import make_runs
from maxlm.reporting.scaling import closing_line, efficiency, throughputs
from tests import workdirs


def on_devices(run, count, rate):
    """Returns the run on other devices and with another throughput."""
    events = [
        {**event, 'devices': {**event['devices'], 'count': count}} if event['kind'] == 'started' else event
        for event in run.history.events
    ]
    metrics = [{**line, 'perf/tokens_per_second': rate} for line in run.history.metrics]
    history = dataclasses.replace(run.history, events=events, metrics=metrics)
    return make_runs([history], workdirs.NOW)[0]


def test_single_device_count_is_reported(run_of):
    assert 'All attempts ran on 1 device, with 4.0' in section('scaling', run_of('finished'))


def test_efficiency_is_per_device(run_of):
    (run,) = run_of('running')
    runs = [on_devices(run, 1, 1000.0), on_devices(run, 4, 3000.0)]
    found = [point for run in runs for point in throughputs(run)]
    assert [efficiency(point, found) for point in found] == [1.0, pytest.approx(0.75)]
    assert '<td>3k</td><td>750</td><td>75.0%</td>' in section('scaling', runs)
    # A run of another model is not compared.
    other = found[1]._replace(parameters=1.0)
    assert efficiency(other, [found[0], other]) == 1.0


def test_the_closing_line_compares_with_attempts_on_fewer_devices(run_of):
    (run,) = run_of('finished')
    first, second = (event for event in run.history.events if event['kind'] == 'started')

    def line(before, after, **values):
        """Returns the line of a run whose attempts have these numbers of devices and 1000 tokens/s each."""
        starts = [
            {**event, 'devices': {**event['devices'], 'count': n}} for event, n in ((first, before), (second, after))
        ]
        metrics = [{**one, 'perf/tokens_per_second': 1000.0, **values} for one in run.history.metrics]
        history = dataclasses.replace(run.history, events=starts, metrics=metrics)
        return closing_line(make_runs([history], workdirs.NOW)[0])

    kind = first['devices']['kind']
    assert line(1, 4) == f'4 × {kind}: 1k tokens/s, 250 per device, scaling efficiency 25.0% relative to 1 device'
    assert line(1, 1) == f'1 × {kind}: 1k tokens/s, 1k per device'
    assert line(4, 4).endswith('scaling efficiency unknown: no attempt on fewer devices')
    assert line(1, 1, **{'device/utilization_percent': 87.4}).endswith(', mean device use 87%')
    (fresh,) = run_of('fresh')
    assert closing_line(fresh) == ''


def test_lines_belong_to_the_attempt_that_wrote_them(run_of):
    (run,) = run_of('finished')
    assert [point.attempt for point in throughputs(run)] == [1, 2]


def test_without_lines(run_of):
    assert section('scaling', run_of('fresh')) == section('scaling', run_of('empty')) == ''
