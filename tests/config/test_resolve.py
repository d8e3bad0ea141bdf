"""Tests values derived from the machine and the data: mesh, batch size, lengths, vocabulary size, kernel."""

import pytest

from maxlm.config.kernels import attention_kernels
from maxlm.config.resolve import resolve, resolve_on
from maxlm.errors import InputError
from tests.messages import input_error
from tests.small import build_config


def resolved(num_devices=8, platform='cpu', vocab_size=1000, windows=4096, capability=None, **overrides):
    settings = {
        'model__num_layers': 2,
        'model__dim': 64,
        'model__num_heads': 4,
        'data__seq_len': 2048,
        'train__num_steps': 100,
        'train__global_batch_size': 512,
        **overrides,
    }
    return resolve(
        build_config(**settings),
        num_devices=num_devices,
        platform=platform,
        vocab_size=vocab_size,
        windows=windows,
        capability=capability,
    )


def test_accumulation_of_the_1b_run_on_8_devices_and_on_1():
    assert resolved(train__per_device_batch_size=4).accumulation == 16
    assert resolved(train__per_device_batch_size=4, num_devices=1).accumulation == 128
    assert resolved(train__per_device_batch_size=0).accumulation == 1


def test_budgets_in_tokens():
    config = resolved(
        train__num_steps=0,
        train__num_tokens=11_000_000_000,
        train__global_batch_size=0,
        train__global_batch_size_tokens=524_288,
        optimizer__warmup_tokens=100_000_000,
    )
    assert config.train.global_batch_size == 256
    assert config.train.num_steps == -(-11_000_000_000 // 524_288)
    assert config.optimizer.warmup_steps == -(-100_000_000 // 524_288)


def test_epochs():
    assert resolved(train__num_steps=0, train__num_epochs=2.0).train.num_steps == 16


def test_fsdp_takes_the_remaining_devices():
    mesh = resolved(mesh__tensor=2).mesh
    assert mesh.sizes == {'replica': 1, 'stage': 1, 'data': 1, 'fsdp': 4, 'expert': 1, 'context': 1, 'tensor': 2}


def test_vocabulary_and_widths():
    model = resolved(model__family='llama').model
    assert (model.vocab_size, model.head_dim, model.ffn_dim, model.max_positions) == (1000, 16, 256, 2048)
    assert resolved(model__vocab_size=1024).model.vocab_size == 1024
    # The tables of a base grow with the tokenizer of the data, and do not shrink.
    base = {'train__init_from': 'runs/base'}
    assert resolved(**base, model__vocab_size=998).model.vocab_size == 1000
    assert resolved(**base, model__vocab_size=1024).model.vocab_size == 1024


@pytest.mark.parametrize(
    ('settings', 'kernel'),
    [
        ({'platform': 'gpu'}, 'cudnn'),
        # cuDNN's backward pass is deterministic on Hopper and Blackwell.
        ({'platform': 'gpu', 'train__deterministic': True, 'capability': (9, 0)}, 'cudnn_mask'),
        ({'platform': 'gpu', 'train__deterministic': True, 'capability': (10, 3)}, 'cudnn_mask'),
        ({'platform': 'gpu', 'train__deterministic': True, 'capability': (8, 0)}, 'xla'),
        ({'platform': 'gpu', 'train__deterministic': True, 'capability': (12, 0)}, 'xla'),
        ({'platform': 'gpu', 'train__deterministic': True}, 'xla'),
        (
            {'platform': 'gpu', 'train__deterministic': True, 'capability': (9, 0), 'model__attention': 'cudnn'},
            'cudnn',
        ),
        ({'platform': 'tpu', 'train__deterministic': True}, 'splash'),
        ({'platform': 'tpu'}, 'splash'),
        ({'platform': 'tpu', 'model__dtype': 'float32', 'model__head_dim': 20}, 'splash'),
        ({'platform': 'tpu', 'model__attention': 'splash'}, 'splash'),
        ({'platform': 'tpu', 'model__attention': 'xla'}, 'xla'),
        ({'platform': 'tpu', 'model__dtype': 'float16'}, 'xla'),
        ({'platform': 'tpu', 'data__seq_len': 2000}, 'xla'),
        ({'platform': 'tpu', 'mesh__context': 2}, 'xla'),
        ({'platform': 'tpu', 'mesh__stage': 2, 'train__per_device_batch_size': 1}, 'xla'),
        ({'platform': 'gpu', 'model__dtype': 'float32'}, 'xla'),
        ({'platform': 'gpu', 'model__head_dim': 256}, 'xla'),
        ({'platform': 'gpu', 'model__attention_softcap': 50.0}, 'xla'),
        ({'platform': 'tpu', 'model__attention_softcap': 50.0}, 'splash'),
        ({'platform': 'gpu', 'model__attention': 'xla'}, 'xla'),
        ({'platform': 'gpu', 'model__attention_sinks': True}, 'xla'),
        ({'platform': 'gpu', 'model__attention': 'tokamax', 'model__head_dim': 64}, 'tokamax'),
        ({'platform': 'gpu', 'model__attention': 'fastest'}, 'cudnn'),
        ({'platform': 'gpu', 'model__attention': 'fastest', 'model__head_dim': 20}, 'xla'),
        ({'model__attention': 'fastest'}, 'xla'),
        ({'platform': 'tpu', 'model__attention_sinks': True}, 'xla'),
    ],
)
def test_attention_kernel(settings, kernel):
    assert resolved(**settings).model.attention == kernel


@pytest.mark.parametrize(
    ('settings', 'kernels'),
    [
        ({}, ['cudnn', 'cudnn_mask', 'tokamax', 'xla']),
        ({'model__attention': 'xla'}, ['xla', 'cudnn', 'cudnn_mask', 'tokamax']),
        ({'capability': (8, 0)}, ['cudnn', 'cudnn_mask', 'xla']),
        ({'model__attention_softcap': 50.0}, ['xla', 'tokamax']),
        ({'mesh__stage': 2, 'train__per_device_batch_size': 1}, ['cudnn', 'cudnn_mask', 'xla']),
        ({'platform': 'tpu'}, ['splash', 'xla']),
        ({'platform': 'cpu'}, ['xla']),
    ],
)
def test_kernels_that_support_a_run(settings, kernels):
    settings = {'platform': 'gpu', 'capability': (9, 0), 'model__head_dim': 64, **settings}
    config = resolved(**settings)
    assert attention_kernels(config, settings['platform'], settings['capability']) == kernels


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({'train__global_batch_size': 500}, ['500', '8 devices', '496']),
        ({'train__per_device_batch_size': 5}, ['train.per_device_batch_size=5', '64', '4']),
        ({'mesh__tensor': 3}, ['3 devices', '8']),
        ({'mesh__fsdp': 4}, ['4 devices', '8', '-1']),
        ({'model__vocab_size': 500}, ['model.vocab_size=500', '1000']),
        ({'model__attention': 'cudnn'}, ['cudnn', 'cpu']),
        ({'model__attention': 'cudnn', 'platform': 'gpu', 'model__head_dim': 20}, ['cudnn', '20']),
        (
            {'model__attention': 'cudnn', 'platform': 'gpu', 'model__attention_sinks': True},
            ['model.attention_sinks=False'],
        ),
        ({'model__attention': 'cudnn_mask'}, ['model.attention=cudnn_mask', 'cpu', 'auto']),
        (
            {
                'model__attention': 'cudnn',
                'platform': 'gpu',
                'train__deterministic': True,
                'capability': (8, 0),
            },
            ['model.attention=cudnn', 'train.deterministic=true', '9.x', '8.0', 'auto'],
        ),
        ({'model__attention': 'splash', 'platform': 'gpu'}, ['model.attention=splash', 'gpu', 'auto']),
        ({'model__attention': 'tokamax'}, ['model.attention=tokamax: not available on cpu', 'auto']),
        (
            {'model__attention': 'tokamax', 'platform': 'gpu', 'capability': (8, 9)},
            ['model.attention=tokamax requires compute capability 9.x or 10.x', 'found 8.9'],
        ),
        ({'model__attention': 'tokamax', 'platform': 'gpu'}, ['tokamax', 'head_dim of 64 or 128; found', '16']),
        (
            {'model__attention': 'cudnn', 'platform': 'gpu', 'model__attention_softcap': 50.0},
            ['model.attention=cudnn', 'attention_softcap=0', '50.0'],
        ),
        ({'model__attention': 'cudnn', 'platform': 'tpu'}, ['model.attention=cudnn', 'tpu', 'auto']),
        ({'model__attention': 'splash', 'platform': 'tpu', 'model__dtype': 'float16'}, ['splash', 'float16']),
        ({'model__attention': 'splash', 'platform': 'tpu', 'data__seq_len': 2000}, ['2000', '1920 or 2048']),
        ({'model__attention': 'splash', 'platform': 'tpu', 'mesh__context': 2}, ['mesh.context=1', 'found 2 and 1']),
    ],
)
def test_errors_suggest_valid_values(settings, fragments):
    with input_error(*fragments):
        resolved(**settings)


def test_a_finished_run_moves_to_other_devices():
    config = resolved(platform='gpu', train__per_device_batch_size=4)
    moved = resolve_on(config, platform='cpu', num_devices=2)
    assert (moved.model.attention, moved.mesh.fsdp) == ('xla', 2)
    assert (moved.train.global_batch_size, moved.accumulation) == (8, 1)
    assert resolve_on(config, platform='tpu', num_devices=2).model.attention == 'splash'


def test_share_layers_uses_tensor_parallelism():
    config = resolved(model__num_heads=4, model__num_kv_heads=2)
    moved = resolve_on(config, platform='cpu', num_devices=2, share_layers=True)
    assert {axis: size for axis, size in moved.mesh.sizes.items() if size > 1} == {'tensor': 2}
    # Rows are not split.
    assert moved.train.global_batch_size == resolve_on(config, platform='cpu', num_devices=1).train.global_batch_size
    # Control: by default, rows are split.
    split = resolve_on(config, platform='cpu', num_devices=2).mesh.sizes
    assert {axis: size for axis, size in split.items() if size > 1} == {'fsdp': 2}
    with pytest.raises(InputError, match=r'mesh\.tensor=4.*num_kv_heads'):
        resolve_on(config, platform='cpu', num_devices=4, share_layers=True)


def test_the_embedding_multiplier_follows_the_width():
    assert resolved(model__family='gemma2', model__num_layers=2).model.embedding_multiplier == 8.0
    assert resolved(model__family='gemma2', model__embedding_multiplier=3.0).model.embedding_multiplier == 3.0
    assert resolved().model.embedding_multiplier == 1.0
