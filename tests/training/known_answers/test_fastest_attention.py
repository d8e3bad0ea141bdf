"""`model.attention=fastest`, with stand-ins for kernels: the fastest right one is chosen, stored and used again."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from maxlm.errors import InputError
from maxlm.hardware.known_faults import Libraries
from maxlm.model.attention import kernels
from maxlm.training.known_answers import fastest_attention
from maxlm.training.known_answers.fastest_attention import choose_attention, with_fastest_attention
from tests.small import small_config

CONFIG = small_config(model__attention_pattern='LS', model__sliding_window=8)
KERNELS = ['xla', 'quick', 'wrong', 'broken']


def _broken(inputs, window, partitioning):
    raise NotImplementedError('no kernel for this device')


class Device:
    """Stand-ins for the kernels of a device, and for their times in milliseconds."""

    def __init__(self, monkeypatch, path):
        stand_ins = {
            'quick': kernels.chunked,
            'wrong': lambda *arguments: 1.05 * kernels.chunked(*arguments),
            'broken': _broken,
        }
        for name, kernel in stand_ins.items():
            monkeypatch.setitem(kernels.KERNELS, name, kernel)
        self.path, self.config, self.measured = path, CONFIG, []
        self.times = {'xla': 5.0, 'quick': 3.0, 'wrong': 1.0}

    def choose(self, names=KERNELS):
        self.measured = []
        return choose_attention(self.config, names, self.path, self._measure)

    def _measure(self, answer, device):
        name = answer.kernel.partition('=')[2].rstrip(')')
        self.measured.append(name)
        return self.times[name] / 1000


@pytest.fixture
def device(monkeypatch, tmp_path, caplog):
    caplog.set_level('INFO', logger='maxlm')
    return Device(monkeypatch, tmp_path / 'attention.json')


def test_the_fastest_right_kernel_is_chosen_and_stored(device, caplog):
    assert device.choose() == 'quick'
    # Each of two windows. A wrong kernel is not timed.
    assert device.measured == ['xla', 'xla', 'quick', 'quick']
    (line,) = caplog.messages
    assert line.startswith(
        'attention: quick; in all layers, forward and backward: xla 10 ms, quick 6 ms; wrong is not '
    )
    assert 'output is off by 5.0' in line
    assert 'broken is not chosen: NotImplementedError: no kernel for this device' in line
    # A resumed run keeps the kernel, although it would be slower now.
    device.times['xla'] = 1.0
    assert device.choose() == 'quick'
    assert not device.measured
    assert caplog.messages[-1] == 'attention: quick, chosen before (attention.json)'


@pytest.mark.parametrize(
    'change',
    [{'train__per_device_batch_size': 4}, {'data__seq_len': 24}, {'model__dtype': 'bfloat16'}, {'model__num_heads': 2}],
)
def test_other_sizes_are_measured_again(device, change):
    assert device.choose(['xla', 'quick']) == 'quick'
    device.config, device.times['xla'] = small_config(**change), 1.0
    assert device.choose(['xla', 'quick']) == 'xla'


def test_other_devices_and_kernels_are_measured_again(device, monkeypatch):
    assert device.choose(['xla', 'quick']) == 'quick'
    assert device.choose(['xla']) == 'xla'
    assert device.choose(['xla', 'quick']) == 'quick'
    monkeypatch.setattr(fastest_attention, 'identify', lambda: {'driver': '580.1', 'devices': []})
    device.choose(['xla', 'quick'])
    assert device.measured


@pytest.mark.parametrize('text', ['', '[]', '{"settings": 1}', '{"kernel": "quick"}', '\0'])
def test_a_damaged_file_is_replaced(device, text):
    device.path.write_text(text)
    assert device.choose(['xla', 'quick']) == 'quick'
    assert json.loads(device.path.read_text())['kernel'] == 'quick'


def test_the_usual_kernel_is_kept_unless_another_is_clearly_faster(device):
    device.times = {'xla': 1.0, 'quick': 0.98}
    assert device.choose(['xla', 'quick']) == 'xla'
    # A usual kernel that is wrong is not kept.
    assert device.choose(['wrong', 'quick', 'xla']) == 'quick'


def test_a_run_without_a_right_kernel_stops(device):
    with pytest.raises(InputError, match='fastest: no kernel computes right results: wrong is not chosen: output is '):
        device.choose(['wrong', 'broken'])


def test_other_processes_use_the_choice_of_the_first(device, monkeypatch):
    class SecondProcess:
        process_index = 1

        def broadcast_from_host0(self, text):
            assert json.loads(text) == ['', '']
            return json.dumps(['quick', ''])

    monkeypatch.setattr(fastest_attention, 'ProcessGroup', SecondProcess)
    assert device.choose() == 'quick'
    assert not device.measured
    assert not device.path.exists()


def test_a_list_of_documents_needs_a_cudnn_without_the_fault(device, monkeypatch):
    monkeypatch.setattr(fastest_attention, 'lists_documents', lambda config, capability: True)
    monkeypatch.setattr(fastest_attention, 'installed_libraries', lambda cudnn: Libraries((0, 12, 0), 12, (9, 24)))
    with pytest.raises(InputError, match=r'xla is not chosen: attention can return NaN for lists .*cuDNN 9\.25'):
        device.choose(['xla'])
    monkeypatch.setattr(fastest_attention, 'installed_libraries', lambda cudnn: Libraries((0, 12, 0), 12, (9, 25)))
    assert device.choose(['xla']) == 'xla'


@pytest.mark.parametrize(
    ('changes', 'kernel', 'line'),
    [
        ({}, 'quick', 'attention: quick; '),
        ({'train__deterministic': True}, 'xla', 'attention: xla, because train.deterministic=true '),
    ],
)
def test_the_config_of_the_run_names_the_kernel(device, monkeypatch, caplog, changes, kernel, line):
    monkeypatch.setattr(fastest_attention, 'attention_kernels', lambda *_: ['xla', 'quick'])
    monkeypatch.setattr(fastest_attention, 'measured_seconds', device._measure)
    sized = small_config(**changes)
    config = dataclasses.replace(sized, model=dataclasses.replace(sized.model, attention='fastest'))
    found = with_fastest_attention(config, sized, device.path.parent)
    assert found == dataclasses.replace(sized, model=dataclasses.replace(sized.model, attention=kernel))
    assert caplog.messages[0].startswith(line)


def test_a_cpu_has_one_kernel(device, caplog):
    sized = small_config(model__attention='fastest')
    assert sized.model.attention == 'xla'
    assert with_fastest_attention(sized, sized, device.path.parent) == sized
    assert caplog.messages[0].startswith('attention: xla, the only kernel for this run on ')


def test_a_kernel_is_timed():
    answer = next(iter(fastest_attention.attention_answers(CONFIG).values()))
    assert answer.run(*map(jnp.asarray, answer.inputs))[0].shape == (8, 16, 4, 8)
    assert 0 < fastest_attention.measured_seconds(answer, fastest_attention.jax.devices()[0]) < 60
