import dataclasses

from maxlm.reporting.page import section
from maxlm.reporting.run_summary import make_runs
from tests import workdirs


def with_command(run, *words):
    events = [{**event, 'command': list(words)} for event in run.history.events]
    return make_runs([dataclasses.replace(run.history, events=events)], workdirs.NOW)


def test_command_config_and_versions(run_of):
    text = section('reproduce', run_of('finished'))
    assert 'maxlm train --config=configs/tiny.py --workdir=finished' in text
    assert 'commit 0123456789abcdef0123456789abcdef01234567.' in text
    assert '<td class="t">model.vocab_size</td><td class="t">0</td><td class="t">512</td>' in text
    assert '<td class="t">jax</td><td class="t">0.12.0</td>' in text
    assert 'a1b2c3' in text
    assert '&#34;num_steps&#34;: 400' in text


def test_devices_of_each_process_are_listed(run_of):
    (run,) = run_of('finished')
    identity = [{'driver': '580.65.06', 'devices': [{'index': 0, 'kind': 'NVIDIA H200', 'uuid': 'GPU-<1>'}]}, 'damaged']
    events = [{**event, 'identity': identity} for event in run.history.events]
    text = section('reproduce', make_runs([dataclasses.replace(run.history, events=events)], workdirs.NOW))
    row = '<td class="t">driver 580.65.06; device 0: NVIDIA H200, GPU-&lt;1&gt;</td>'
    assert row in text
    assert 'devices of process 0' not in section('reproduce', [run])


def test_command_is_quoted_for_the_shell(run_of):
    (run,) = run_of('finished')
    text = section('reproduce', with_command(run, 'python', '--config=my runs.py', '$(x)'))
    assert 'python &#39;--config=my runs.py&#39; &#39;$(x)&#39;' in text
    assert 'names no config file of this version of maxlm' in text


def test_several_runs_show_their_differences(run_of):
    (run,) = run_of('finished')
    config = dataclasses.replace(run.history.config, train=dataclasses.replace(run.history.config.train, seed=7))
    other = dataclasses.replace(run.history, config=config, workdir='/other')
    runs = make_runs([run.history, other], workdirs.NOW)
    assert '<td class="t">train.seed</td><td class="t">0</td><td class="t">7</td>' in section('reproduce', runs)
    assert 'are the same' in section('reproduce', make_runs([run.history, run.history], workdirs.NOW))


def test_without_events(run_of):
    assert section('reproduce', run_of('empty')) == ''
