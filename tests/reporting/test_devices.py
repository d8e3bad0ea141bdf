import re

from maxlm.reporting.page import section


def test_devices_of_two_hosts(run_of):
    text = section('devices', run_of('two_hosts'))
    assert re.findall(r'<figcaption>([^<]*?) ?<', text)[:5] == [
        *('Device utilization', 'Device memory', 'Temperature', 'Power', 'Clock')
    ]
    assert 'host1 (1): device 3' in text
    assert '44.0 GiB of 80.0 GiB</td><td>62 °C</td><td>640 W</td><td class="t">100.0% power</td>' in text
    assert '61 °C</td><td>640 W</td><td class="t">never</td>' in text


def test_a_machine_without_accelerators(run_of):
    text = section('devices', run_of('on_cpu'))
    assert 'No accelerator readings in on_cpu' in text
    assert 'Device utilization' not in text
    assert 'Host CPU' in text


def test_several_runs(run_of):
    assert 'two_hosts, mean' in section('devices', run_of('running', 'two_hosts'))


def test_without_readings(run_of):
    assert section('devices', run_of('empty')) == ''
