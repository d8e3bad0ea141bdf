"""Numbers of hosts that are allowed for a config."""

import contextlib

import pytest

from maxlm.config.resolve import resolve
from maxlm.errors import InputError
from maxlm.supervision.host_counts import host_counts, load_config
from tests.conftest import ROOT

COMMAND = ['bash', 'launch/gpu_node.sh', '--', f'--config={ROOT}/configs/tiny.py', '--workdir=runs/x']


def config_of(**overrides):
    return load_config([*COMMAND, *(f'--config.{key.replace("__", ".")}={value}' for key, value in overrides.items())])


@pytest.mark.parametrize(
    ('overrides', 'expected'),
    [
        ({'train__global_batch_size': 64}, [1, 2, 4, 8]),
        ({'mesh__fsdp': 2, 'mesh__data': -1, 'train__global_batch_size': 48}, [1, 2, 3, 4, 6, 8]),
        ({'mesh__fsdp': 2, 'mesh__replica': -1, 'train__global_batch_size': 48 * 7}, [1, 2, 3, 4, 6, 7, 8]),
        # 12 does not divide the 16 or 32 sequences per device of 6 or 3 hosts.
        (
            {'mesh__fsdp': 1, 'mesh__data': -1, 'train__global_batch_size': 192, 'train__per_device_batch_size': 12},
            [1, 2, 4, 8],
        ),
        # Two stages use half of the devices for the batch and need an even number of micro-batches.
        (
            {
                'mesh__stage': 2,
                'mesh__fsdp': 1,
                'mesh__data': -1,
                'train__global_batch_size': 48,
                'train__per_device_batch_size': 1,
            },
            [1, 2, 3, 4, 6, 8],
        ),
    ],
)
def test_counts_are_those_that_training_accepts(overrides, expected):
    config = config_of(**overrides)
    assert host_counts(config, min_hosts=1, max_hosts=8, devices_per_host=2) == expected
    accepted = []
    for count in range(1, 9):
        with contextlib.suppress(InputError):
            resolved = resolve(config, platform='cpu', num_devices=2 * count, vocab_size=256, windows=1000)
            assert resolved.train.global_batch_size == overrides['train__global_batch_size']
            accepted.append(count)
    assert accepted == expected


def test_planning_chooses_a_batch_per_device_that_fits():
    config = config_of(train__global_batch_size=64, train__per_device_batch_size='auto')
    assert host_counts(config, min_hosts=2, max_hosts=8, devices_per_host=2) == [2, 4, 8]


@pytest.mark.parametrize(
    ('overrides', 'options', 'message'),
    [
        ({'mesh__fsdp': 8}, {}, 'mesh fsdp=8 cannot use fewer hosts; set one of mesh.fsdp, mesh.data, mesh.replica'),
        ({'mesh__fsdp': 1, 'mesh__tensor': -1}, {}, 'mesh tensor=-1 cannot use fewer hosts'),
        (
            {'train__global_batch_size': 64},
            {'min_hosts': 3},
            '--min-hosts=3 with 2 devices per host: train.global_batch_size=64 cannot be split over 6 devices .*; '
            'values from 3 to 8 that work: 4, 8',
        ),
        ({'train__global_batch_size': 48}, {'min_hosts': 3}, r'the number of hosts must divide 8; values .*: 4, 8'),
        ({'train__global_batch_size': 9}, {}, '--hosts=8 with .* values from 1 to 8 that work: none'),
    ],
)
def test_configs_that_do_not_fit_are_refused(overrides, options, message):
    settings = {'min_hosts': 1, 'max_hosts': 8, 'devices_per_host': 2, **options}
    with pytest.raises(InputError, match=message):
        host_counts(config_of(**overrides), **settings)


def test_a_command_without_a_config_is_refused():
    with pytest.raises(InputError, match='the command has no --config'):
        load_config(['python', 'x.py', '--workdir=runs/x'])
