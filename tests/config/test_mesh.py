"""Tests that meshes must fit devices, model and batch, and that the numbers suggested in errors are valid."""

import itertools
import re

import pytest

from maxlm.errors import InputError
from tests.small import small_config

# The model has 8 heads of size 4 and an FFN dimension of 128; the sequence length is 16.
COMMON = {
    'model__num_heads': 8,
    'model__num_layers': 4,
    'train__global_batch_size': 16,
    'train__per_device_batch_size': 1,
}


def config_on(num_devices, **settings):
    return small_config(num_devices, **{**COMMON, **settings})


def error_message(num_devices, **settings):
    with pytest.raises(InputError) as error:
        config_on(num_devices, **settings)
    message = str(error.value)
    assert '\n' not in message
    return message


def numbers_after(message, fragments):
    """Returns the numbers that follow `fragments` at the end of a message."""
    found = re.search(rf'{re.escape(fragments)} (\d+(?:, \d+)*)$', message)
    assert found, message
    return [int(number) for number in found[1].split(', ')]


@pytest.mark.parametrize(
    ('num_devices', 'settings', 'fragments', 'numbers'),
    [
        (6, {'mesh__tensor': 3}, ['mesh.tensor=3', 'model.num_heads=8'], [1, 2]),
        (8, {'mesh__tensor': 8, 'model__num_kv_heads': 4}, ['mesh.tensor=8', 'model.num_kv_heads=4'], [1, 2, 4]),
        (8, {'mesh__tensor': 8, 'model__ffn_dim': 100}, ['mesh.tensor=8', 'model.ffn_dim=100'], [1, 2, 4]),
        # The numbers are valid for all three values: 4 would divide the number of heads in the message, but not the
        # other values.
        (
            8,
            {'mesh__tensor': 8, 'model__num_heads': 4, 'model__num_kv_heads': 2, 'model__ffn_dim': 100},
            ['mesh.tensor=8', 'model.num_heads=4'],
            [1, 2],
        ),
        (6, {'mesh__context': 3}, ['mesh.context=3', '2 chunks', 'data.seq_len=16'], [1, 2]),
        # Half of 9, the nearest divisor of the sequence length, is not a number of devices.
        (4, {'mesh__context': 4, 'data__seq_len': 18}, ['mesh.context=4', 'data.seq_len=18'], [1]),
        (8, {'mesh__context': 4, 'data__seq_len': 12}, ['mesh.context=4', 'data.seq_len=12'], [1, 2]),
        (
            8,
            {'mesh__context': 8, 'data__seq_len_schedule': ((8, 0.5),)},
            ['mesh.context=8', 'data.seq_len_schedule=8'],
            [1, 2, 4],
        ),
    ],
)
def test_an_axis_must_divide_the_dimensions_that_it_splits(num_devices, settings, fragments, numbers):
    # All device counts of this test divide the batch size.
    settings = {**settings, 'train__global_batch_size': 48}
    message = error_message(num_devices, **settings)
    for fragment in fragments:
        assert fragment in message
    axis = 'context' if 'mesh__context' in settings else 'tensor'
    assert numbers_after(message, f'on {num_devices} devices mesh.{axis} can be') == numbers
    for number in numbers:
        config = config_on(num_devices, **{**settings, f'mesh__{axis}': number})
        assert (getattr(config.mesh, axis), config.mesh.fsdp) == (number, num_devices // number)
    # Control: divisors of the device count that the message does not list are rejected.
    for number in {n for n in range(1, num_devices + 1) if num_devices % n == 0} - set(numbers):
        error_message(num_devices, **{**settings, f'mesh__{axis}': number})


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({'mesh__tensor': 3}, ['fsdp=-1', 'tensor=3', 'other than mesh.fsdp use 3 devices', 'the 8 available']),
        ({'mesh__data': -1, 'mesh__fsdp': 2, 'mesh__tensor': 3}, ['data=-1', 'fsdp=2 tensor=3', 'mesh.data use 6']),
        ({'mesh__tensor': 16}, ['tensor=16', 'use 16 devices', 'the 8 available']),
        (
            {'mesh__data': 4, 'mesh__fsdp': 4},
            ['data=4 fsdp=4', 'needs 16 devices', '8 are available', 'one axis to -1'],
        ),
        ({'mesh__fsdp': 4}, ['fsdp=4', 'needs 4 devices', '8 are available', 'one axis to -1']),
        ({'mesh__fsdp': 1}, ['mesh with size 1 on every axis', 'needs 1 devices', '8 are available', 'one axis to -1']),
    ],
)
def test_the_product_of_the_axes_must_be_the_number_of_devices(settings, fragments):
    message = error_message(8, **settings)
    for fragment in fragments:
        assert fragment in message
    products = numbers_after(message, 'product is one of')
    assert products == [1, 2, 4, 8]
    for product in products:
        mesh = config_on(8, mesh__fsdp=-1, mesh__tensor=product).mesh
        assert (mesh.fsdp, mesh.tensor) == (8 // product, product)


def test_an_axis_of_minus_1_takes_the_remaining_devices():
    mesh = config_on(8, mesh__data=-1, mesh__fsdp=2, mesh__tensor=2).mesh
    assert mesh.sizes == {'replica': 1, 'stage': 1, 'data': 2, 'fsdp': 2, 'expert': 1, 'context': 1, 'tensor': 2}
    # Control: a complete and valid mesh is accepted.
    assert config_on(8, mesh__data=2, mesh__fsdp=2, mesh__tensor=2).mesh == mesh


@pytest.mark.parametrize(
    ('settings', 'fragments', 'numbers'),
    [
        ({'mesh__stage': 8}, ['mesh.stage=8', 'mesh.num_pipeline_repeats=1', 'num_layers=4'], [(2, 1), (2, 2), (4, 1)]),
        (
            {'mesh__stage': 2, 'mesh__num_pipeline_repeats': 4},
            ['mesh.stage=2', 'num_pipeline_repeats=4'],
            [(2, 1), (2, 2), (4, 1)],
        ),
        # Five stages would divide the layers but not the devices.
        ({'mesh__stage': 4, 'model__num_layers': 10}, ['mesh.stage=4', 'num_layers=10'], [(2, 1), (2, 5)]),
        (
            {
                'mesh__stage': 4,
                'model__num_layers': 6,
                'model__attention_pattern': 'SSL',
                'model__sliding_window': 4,
            },
            ['mesh.stage=4', 'num_layers=6', 'a multiple of the 3 of model.attention_pattern'],
            [(2, 1)],
        ),
        (
            {
                'mesh__stage': 2,
                'model__num_layers': 6,
                'model__attention_pattern': 'SL',
                'model__sliding_window': 4,
                'model__value_embedding_pattern': 'NNV',
            },
            ['mesh.stage=2', 'a multiple of the 6 of model.attention_pattern and model.value_embedding_pattern'],
            [(1, 1)],
        ),
        ({'mesh__stage': 2, 'model__num_layers': 3}, ['mesh.stage=2', 'num_layers=3'], [(1, 1)]),
    ],
)
def test_stages_must_divide_the_layers(settings, fragments, numbers):
    message = error_message(8, **settings)
    for fragment in (*fragments, 'into equal parts'):
        assert fragment in message
    _, suggested = message.split('use one of: ')
    assert [tuple(map(int, pair.split(' × '))) for pair in suggested.split(', ')] == numbers
    for stage, repeats in numbers:
        mesh = config_on(8, **{**settings, 'mesh__stage': stage, 'mesh__num_pipeline_repeats': repeats}).mesh
        assert (mesh.stage, mesh.num_pipeline_repeats, mesh.fsdp) == (stage, repeats, 8 // stage)
    # Control: no other pairs are valid.
    for pair in set(itertools.product((2, 4, 8), range(1, 6))) - set(numbers):
        assert 'does not split' in error_message(
            8, **{**settings, 'mesh__stage': pair[0], 'mesh__num_pipeline_repeats': pair[1]}
        )


def test_the_number_of_micro_batches_must_be_a_multiple_of_the_stages():
    settings = {'mesh__stage': 4, 'train__global_batch_size': 24}
    message = error_message(8, **settings, train__per_device_batch_size=2)
    for fragment in ('train.per_device_batch_size=2 gives 6 micro-batches', 'mesh.stage=4 needs a multiple of 4'):
        assert fragment in message
    sizes = numbers_after(message, 'values that work with train.global_batch_size=24:')
    assert sizes == [1, 3]
    for size in sizes:
        assert config_on(8, **settings, train__per_device_batch_size=size).accumulation % 4 == 0
    # Without accumulation there is one micro-batch.
    assert 'train.per_device_batch_size=12 gives 1 micro-batches' in error_message(
        8, **settings, train__per_device_batch_size=0
    )


def test_a_batch_size_without_a_valid_number_of_micro_batches():
    message = error_message(8, mesh__stage=4, train__global_batch_size=12, train__per_device_batch_size=1)
    assert 'train.per_device_batch_size=1 gives 6 micro-batches' in message
    size = int(message.rpartition('set train.per_device_batch_size=1 and train.global_batch_size=')[2])
    assert (
        config_on(8, mesh__stage=4, train__global_batch_size=size, train__per_device_batch_size=1).accumulation % 4 == 0
    )


def test_repeats_require_stages():
    message = error_message(8, mesh__num_pipeline_repeats=2)
    assert message == 'mesh.num_pipeline_repeats=2 requires pipeline stages; set it to 1, or set mesh.stage above 1'
    assert config_on(8, mesh__num_pipeline_repeats=1).mesh.stage == 1
    assert config_on(8, mesh__num_pipeline_repeats=2, mesh__stage=2).mesh.num_pipeline_repeats == 2


@pytest.mark.parametrize('offload', ['optimizer', 'all'])
def test_offload_requires_adamw(offload):
    message = error_message(8, mesh__host_offload=offload, optimizer__name='muon')
    for fragment in (f'mesh.host_offload={offload}', 'optimizer.name=adamw, not muon', 'or mesh.host_offload=none'):
        assert fragment in message
    assert config_on(8, mesh__host_offload=offload, optimizer__name='adamw').mesh.host_offload == offload
    assert config_on(8, mesh__host_offload='none', optimizer__name='muon').optimizer.name == 'muon'


def test_stages_cannot_offload_parameters():
    message = error_message(8, mesh__host_offload='all', mesh__stage=2)
    assert (
        message
        == 'mesh.host_offload=all: pipeline stages cannot offload their parameters; set mesh.host_offload=optimizer'
    )
    assert config_on(8, mesh__host_offload='optimizer', mesh__stage=2).mesh.host_offload == 'optimizer'


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({'mesh__zero_stage': 0}, ['mesh.zero_stage=0', '1, 2, 3']),
        ({'mesh__host_offload': 'params'}, ['mesh.host_offload', 'params', 'none, optimizer, all']),
        ({'mesh__context': 0}, ['mesh.context=0', 'at least 1', '-1']),
        ({'mesh__context': -1}, ['mesh.fsdp and mesh.context', 'both -1']),
        ({'mesh__context': 2, 'model__attention_softcap': 5.0}, ['mesh.context=2', 'attention_softcap=5.0', 'ring']),
    ],
)
def test_invalid_values_are_rejected(settings, fragments):
    message = error_message(8, **settings)
    for fragment in fragments:
        assert fragment in message
