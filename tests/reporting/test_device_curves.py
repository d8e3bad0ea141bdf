"""Tests device readings: one curve per device, or an aggregate of all devices."""

import statistics

from maxlm.reporting.device_charts import MAX_CURVES, DeviceMetric, bin_curves, reading_curves, summarize_curves


def device_curves(by_process, key, *, start_time, factor=1.0):
    return reading_curves(by_process, DeviceMetric(key, '', '', factor), start_time)


def host_curves(by_process, key, *, start_time):
    return reading_curves(by_process, DeviceMetric(key, '', '', of_host=True), start_time)


def lines(num_devices, host='a', times=range(0, 300, 30)):
    return [
        {
            'time': 1000.0 + time,
            'host': host,
            'cpu_percent': 10.0,
            'devices': [{'index': index, 'use_percent': 90 + index} for index in range(num_devices)],
        }
        for time in times
    ]


def test_each_device_has_a_curve_over_elapsed_time():
    curves = device_curves({0: lines(2)}, 'use_percent', start_time=1000.0, factor=0.01)
    assert list(curves) == ['device 0', 'device 1']
    assert curves['device 1'][:2] == [(0.0, 0.91), (30.0, 0.91)]


def test_curves_of_several_hosts_have_host_names():
    curves = device_curves({0: lines(1), 1: lines(1, 'b')}, 'use_percent', start_time=1000.0)
    assert list(curves) == ['a (0): device 0', 'b (1): device 0']
    assert list(host_curves({0: lines(1), 1: lines(1, 'b')}, 'cpu_percent', start_time=1000.0)) == ['a (0)', 'b (1)']


def test_missing_readings_give_no_curve():
    assert device_curves({0: lines(2)}, 'temperature_c', start_time=0.0) == {}
    assert (
        device_curves({0: [{'time': 1.0, 'devices': 'none'}, {'devices': [{}]}]}, 'use_percent', start_time=0.0) == {}
    )


def test_many_devices_become_three_curves():
    by_process = {process: lines(8, f'h{process}') for process in range(4)}
    curves = device_curves(by_process, 'use_percent', start_time=1000.0)
    assert len(curves) == 32 > MAX_CURVES
    shown = summarize_curves(curves)
    assert list(shown) == ['mean of 32', 'lowest of 32', 'highest of 32']
    for name, value in zip(shown, (93.5, 90, 97), strict=True):
        assert {y for _, y in shown[name]} == {value}
    assert list(summarize_curves(dict(list(curves.items())[:MAX_CURVES]))) == list(curves)[:MAX_CURVES]


def test_pause_between_attempts_is_a_gap():
    times = [*range(0, 300, 30), *range(3000, 3300, 30)]
    (points,) = summarize_curves(device_curves({0: lines(1, times=times)}, 'use_percent', start_time=1000.0)).values()
    assert [y for _, y in points].count(None) == 1
    gaps = [y for _, y in bin_curves({'a': [(float(t), 1.0) for t in times]}, statistics.fmean)]
    assert gaps.count(None) == 1
    assert bin_curves({}, statistics.fmean) == []
