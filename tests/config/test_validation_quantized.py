"""Tests which configs for training with quantized weights are rejected."""

import pytest

from tests.messages import input_error
from tests.small import small_config

QLORA = {'model__lora_rank': 2, 'model__weight_quantization': 'int4'}


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        (
            {'model__weight_quantization': 'int8'},
            ['model.weight_quantization=int8', 'cannot be trained', 'maxlm quantize'],
        ),
        (QLORA, ['model.weight_quantization=int4', "train.init_from is ''"]),
        ({**QLORA, 'train__init_from': 'runs/base', 'model__mtp_depth': 1}, ['model.mtp_depth=1', 'not quantized']),
        (
            {**QLORA, 'train__init_from': 'runs/base', 'model__matmul_precision': 'fp8'},
            ['model.matmul_precision=fp8', 'model.matmul_precision=default'],
        ),
    ],
)
def test_invalid_settings_are_rejected(settings, fragments):
    with input_error(*fragments):
        small_config(**settings)


def test_adapters_train_beside_quantized_kernels():
    model = small_config(**QLORA, train__init_from='runs/base').model
    assert (model.weight_quantization, model.quantization_group_size) == ('int4', 32)
    larger = small_config(**QLORA, train__init_from='runs/base', model__quantization_group_size=64).model
    assert larger.quantization_group_size == 64


def test_floats_are_the_default():
    assert small_config(model__weight_quantization='float').model == small_config().model
