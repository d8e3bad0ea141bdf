import dataclasses

import pytest

from maxlm.reporting.page import section
from maxlm.reporting.run_summary import make_runs
from maxlm.reporting.scaling import efficiency, throughputs
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


def test_lines_belong_to_the_attempt_that_wrote_them(run_of):
    (run,) = run_of('finished')
    assert [point.attempt for point in throughputs(run)] == [1, 2]


def test_without_lines(run_of):
    assert section('scaling', run_of('fresh')) == section('scaling', run_of('empty')) == ''
