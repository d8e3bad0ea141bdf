"""Tests which configs reject 8-bit matmuls, and the matmul precision of a finished run on other devices."""

import pytest

from maxlm.config.resolve import resolve, resolve_on
from maxlm.config.schema import ModelConfig
from tests.messages import input_error
from tests.small import build_config

A100, L4, H100 = (8, 0), (8, 9), (9, 0)


def resolved(*, platform='gpu', capability=H100, **overrides):
    settings = {
        'model__num_layers': 2,
        'model__dim': 64,
        'model__num_heads': 4,
        'model__matmul_precision': 'fp8',
        'train__num_steps': 10,
        'train__global_batch_size': 8,
        **overrides,
    }
    devices = {'platform': platform, 'capability': capability, 'num_devices': 4}
    return resolve(build_config(**settings), **devices, vocab_size=100, windows=100)


@pytest.mark.parametrize(
    ('platform', 'capability'), [('gpu', L4), ('gpu', H100), ('gpu', (10, 0)), ('gpu', None), ('cpu', None)]
)
def test_devices_that_support_fp8(platform, capability):
    assert resolved(platform=platform, capability=capability).model.matmul_precision == 'fp8'


@pytest.mark.parametrize(('platform', 'capability'), [('gpu', (10, 0)), ('gpu', None), ('cpu', None)])
def test_devices_that_support_mxfp8(platform, capability):
    settings = {'platform': platform, 'capability': capability, 'data__seq_len': 32}
    assert resolved(model__matmul_precision='mxfp8', **settings).model.matmul_precision == 'mxfp8'


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({'capability': H100}, ['model.matmul_precision=mxfp8: the devices are of compute capability 9.0', '10.0']),
        ({'platform': 'tpu', 'capability': None}, ['devices are of kind tpu', 'set model.matmul_precision=default']),
        ({'model__dim': 80}, ['model.dim is 80', 'multiple of 32', '64 or 96']),
        ({'mesh__tensor': 2}, ['requires mesh.tensor=1; found 2', 'set model.matmul_precision=fp8']),
        ({'data__seq_len': 36}, ['data.seq_len = 2 · 36 rows', 'multiple of 32']),
    ],
)
def test_errors_of_mxfp8(settings, fragments):
    supported = {'capability': (10, 0), 'data__seq_len': 32, 'model__matmul_precision': 'mxfp8'}
    with input_error(*fragments):
        resolved(**{**supported, **settings})


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        (
            {'capability': A100},
            ['model.matmul_precision=fp8', 'capability 8.0', '8.9', 'set model.matmul_precision=default'],
        ),
        ({'capability': (8, 6)}, ['capability 8.6']),
        ({'platform': 'tpu', 'capability': None}, ['devices are of kind tpu', 'set model.matmul_precision=default']),
        ({'model__dim': 72}, ['model.dim is 72', 'multiple of 16', '64 or 80']),
        ({'model__num_kv_heads': 1, 'model__head_dim': 24}, ['num_kv_heads · model.head_dim is 24', '16 or 32']),
        ({'model__ffn_dim': 8}, ['model.ffn_dim is 8 but', 'nearest: 16']),
        ({'mesh__tensor': 4, 'model__ffn_dim': 96}, ['model.ffn_dim is 24 on each of mesh.tensor=4', '16 or 32']),
        ({'model__dtype': 'float16'}, ['model.matmul_precision=fp8', 'model.dtype=float16', 'bfloat16']),
        ({'model__matmul_precision': 'fp4'}, ['model.matmul_precision', "'fp4'", "'fp8'"]),
    ],
)
def test_errors_suggest_valid_values(settings, fragments):
    with input_error(*fragments):
        resolved(**settings)
    if settings.get('model__matmul_precision', 'fp8') == 'fp8':
        # Control: the same config without fp8 is accepted.
        assert resolved(**settings, model__matmul_precision='default').model.matmul_precision == 'default'


@pytest.mark.parametrize(
    ('platform', 'capability', 'matmul'),
    [('gpu', H100, 'fp8'), ('cpu', None, 'fp8'), ('gpu', A100, 'default'), ('tpu', None, 'default')],
)
def test_a_finished_run_uses_fp8_only_on_supported_devices(platform, capability, matmul):
    moved = resolve_on(resolved(), platform=platform, num_devices=1, capability=capability)
    assert moved.model.matmul_precision == matmul


DELAYED = {'model__fp8_scaling': 'delayed'}
HEAD = {'model__fp8_head': True}
KERNEL = {'model__fp8_kernel': 'pallas'}


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({**DELAYED, 'model__matmul_precision': 'default'}, ['matmul_precision=default', 'fp8_scaling=current']),
        ({**DELAYED, 'train__objective': 'dpo'}, ['model.fp8_scaling=delayed', 'train.objective=dpo']),
        ({**DELAYED, 'mesh__stage': 2}, ['model.fp8_scaling=delayed', 'mesh.stage=2', 'fp8_scaling=current']),
        ({**DELAYED, 'mesh__host_offload': 'all'}, ['model.fp8_scaling=delayed', 'mesh.host_offload=optimizer']),
        ({**HEAD, 'model__matmul_precision': 'default'}, ['model.fp8_head=True', 'model.matmul_precision=fp8']),
        ({**HEAD, 'train__objective': 'dpo'}, ['model.fp8_head=True', 'train.objective=dpo']),
        ({**HEAD, 'train__loss': 'losses:focal'}, ['model.fp8_head=True', 'cross-entropy', 'fp8_head=false']),
        ({**HEAD, 'distill__logits_dir': 'data/logits'}, ['model.fp8_head=True', 'cross-entropy']),
        ({**HEAD, 'model__vocab_size': 100}, ['model.vocab_size is 100', '96 or 112']),
        ({'model__fp8_history': 0}, ['model.fp8_history', '1']),
        (KERNEL, ['model.fp8_kernel=pallas requires model.fp8_scaling=delayed; found current', 'set it to xla']),
        ({**DELAYED, **KERNEL, 'platform': 'cpu'}, ['fp8_kernel=pallas: not available on cpu devices', 'xla']),
        ({**DELAYED, **KERNEL, 'mesh__tensor': 2}, ['fp8_kernel=pallas', 'a mesh.tensor of at most 1; found 2']),
        ({**DELAYED, **KERNEL, 'mesh__context': 2}, ['fp8_kernel=pallas', 'a mesh.context of at most 1; found 2']),
        ({**DELAYED, **KERNEL, 'model__lora_rank': 4}, ['fp8_kernel=pallas', 'a model.lora_rank of at most 0']),
        ({**DELAYED, **KERNEL, 'model__dtype': 'float32'}, ['fp8_kernel=pallas', 'model.dtype=bfloat16']),
    ],
)
def test_unsupported_scaling_and_heads_are_refused(settings, fragments):
    with input_error(*fragments):
        resolved(**settings)


@pytest.mark.parametrize(
    'settings', [DELAYED, {**DELAYED, **KERNEL}, {**HEAD, 'model__vocab_size': 112}, {**DELAYED, 'mesh__tensor': 2}]
)
def test_supported_scaling_and_heads(settings):
    model = resolved(**settings).model
    for key in DELAYED | HEAD | KERNEL:
        name = key.removeprefix('model__')
        assert getattr(model, name) == settings.get(key, getattr(ModelConfig(), name))


def test_a_finished_run_without_fp8_products_has_no_scales():
    config = resolve_on(resolved(**DELAYED), platform='gpu', num_devices=1, capability=A100)
    assert config.model.fp8_scaling == 'current'


def test_a_finished_run_needs_no_kernel():
    config = resolve_on(resolved(**DELAYED, **KERNEL), platform='cpu', num_devices=1)
    assert (config.model.matmul_precision, config.model.fp8_kernel) == ('fp8', 'xla')
