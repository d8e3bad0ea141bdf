"""Tests of the settings of multi-token prediction and distillation."""

import dataclasses

import pytest

from maxlm.config.serialization import from_json, to_json
from maxlm.errors import InputError
from tests.messages import input_error
from tests.small import small_config

MTP = {'model__mtp_depth': 1}


@pytest.mark.parametrize(
    ('num_devices', 'settings', 'fragments'),
    [
        (1, {**MTP, 'train__objective': 'dpo', 'train__init_from': 'x'}, ['model.mtp_depth=1', 'objective=dpo']),
        (2, {**MTP, 'mesh__context': 2}, ['model.mtp_depth=1', 'mesh.context=2', 'model.mtp_depth=0']),
        (
            2,
            {**MTP, 'mesh__stage': 2, 'train__per_device_batch_size': 1},
            ['model.mtp_depth=1', 'mesh.stage=2', 'model.mtp_depth=0'],
        ),
    ],
)
def test_invalid_settings_of_multi_token_prediction(num_devices, settings, fragments):
    with input_error(*fragments):
        small_config(num_devices, **settings)
    # Control: without modules the settings are valid.
    small_config(num_devices, **{**settings, 'model__mtp_depth': 0})


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({'train__objective': 'dpo', 'train__init_from': 'x'}, ['distill.teacher=runs/teacher', 'objective=dpo']),
        ({'train__loss': 'my.module:loss'}, ['distill.teacher=runs/teacher', 'train.loss=my.module:loss']),
        ({'model__vocab_size': 70}, ['distill.teacher=runs/teacher', 'vocab_size=61', '70']),
        ({'data__seq_len': 32}, ['learned positions for 16 tokens', 'data.seq_len=32']),
        ({'mesh__tensor': 8, 'mesh__fsdp': 1, 'model__num_heads': 8}, ['distill.teacher', 'model.num_heads=4']),
    ],
)
def test_invalid_settings_of_distillation(settings, fragments):
    num_devices = settings.get('mesh__tensor', 1)
    with input_error(*fragments):
        small_config(num_devices, teacher=small_config().model, **settings)


def test_stored_outputs_need_their_number():
    with pytest.raises(InputError, match=r'distill\.top_k=0 with distill\.logits_dir=x: set it'):
        small_config(distill__logits_dir='x')
    assert small_config(distill__logits_dir='x', distill__top_k=1).teacher is None
    with pytest.raises(InputError, match=r'data\.rows=documents with distill\.logits_dir=x: .*set data\.rows=stream'):
        small_config(distill__logits_dir='x', distill__top_k=1, data__rows='documents')


def test_a_quantized_teacher_is_rejected():
    model = dataclasses.replace(small_config().model, weight_quantization='int8')
    with pytest.raises(InputError, match='the teacher is quantized'):
        small_config(teacher=model)
    assert small_config(teacher=dataclasses.replace(model, weight_quantization='float')).teacher is not None


def test_a_config_file_does_not_contain_the_teacher():
    config = small_config(teacher=small_config(model__dim=64).model)
    restored = from_json(to_json(config))
    assert restored.distill == config.distill
    assert (restored.teacher, config.teacher.dim) == (None, 64)
