"""Tests that known answers accept the kernels, and find and name wrong ones."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.model.attention import cudnn, kernels
from maxlm.model.attention.cudnn import lists_documents
from maxlm.training.known_answers.answer import find_mistake, measure
from maxlm.training.known_answers.attention import attention_answer, cache_answer
from maxlm.training.known_answers.check import describe, wrong_kernel
from maxlm.training.known_answers.experts import experts_answer
from maxlm.training.known_answers.fp8_rounding import fp8_rounding_answer
from maxlm.training.known_answers.kernels import serving_answers, training_answers, training_settings
from maxlm.training.known_answers.layers import activation_answer, norm_answer, product_answer
from maxlm.training.known_answers.loss import loss_answer
from maxlm.training.known_answers.residual_norm import residual_norm_answer
from tests.model.attention import cudnn_on_cpu
from tests.model.fp8 import rounding_on_cpu
from tests.model.layers.norm_kernels_on_cpu import use_formulas
from tests.small import small_config

CONFIG = small_config(model__dtype='bfloat16', data__seq_len=64, train__z_loss=1e-4, model__logit_softcap=30.0)
MODEL = CONFIG.model
DEVICES = jax.devices()[:2]
ROWS = 32


def attention(**settings):
    model = dataclasses.replace(MODEL, head_dim=16, **settings)
    return attention_answer(model, rows=2, length=64, window=0, has_documents=True, heads=(4, 2))


ANSWERS = {
    'attention': attention,
    'cache': lambda: cache_answer(MODEL, rows=3, slots=24, int8=False, heads=(4, 2)),
    'cache of int8': lambda: cache_answer(MODEL, rows=3, slots=24, int8=True, heads=(4, 2)),
    'loss': lambda: loss_answer(CONFIG, tokens=ROWS, vocab_size=61),
    'product': lambda: product_answer(MODEL, ROWS, 64, 48),
    'product in fp8': lambda: product_answer(dataclasses.replace(MODEL, matmul_precision='fp8'), ROWS, 64, 48),
    'product in int4': lambda: product_answer(
        dataclasses.replace(MODEL, weight_quantization='int4', quantization_group_size=32), ROWS, 64, 48
    ),
    'norm': lambda: norm_answer(MODEL, ROWS),
    'residual norm': lambda: residual_norm_answer(MODEL, ROWS),
    'rounding to fp8': lambda: fp8_rounding_answer(MODEL, ROWS, 48),
    'rounding to fp8 of gelu': lambda: fp8_rounding_answer(dataclasses.replace(MODEL, activation='gelu'), ROWS, 48),
    'activation': lambda: activation_answer(MODEL, ROWS, 48),
    'experts': lambda: experts_answer(dataclasses.replace(MODEL, expert_matmul='ragged_dot'), 16, 24),
}


def wrong(answer, index, change):
    """Returns the answer with a kernel of which one returned array is changed."""

    def run(*inputs):
        return tuple(change(x) if place == index else x for place, x in enumerate(answer.run(*inputs)))

    return answer._replace(run=run)


@pytest.mark.parametrize('name', ANSWERS)
def test_kernels_are_right_and_one_percent_is_found(name, monkeypatch):
    # Interpreted kernels take long to compile; tests/model/layers/test_norm_kernels.py compares them.
    use_formulas(monkeypatch)
    rounding_on_cpu.use_formulas(monkeypatch)
    answer = ANSWERS[name]()
    assert find_mistake(answer, DEVICES) is None
    # The last array of a training kernel is a gradient.
    last = len(answer.names) - 1
    for index in {0, last}:
        mistake = find_mistake(wrong(answer, index, lambda x: x * jnp.asarray(1.012, x.dtype)), DEVICES)
        assert mistake.name == answer.names[index]
        assert mistake.error == pytest.approx(0.012, abs=0.006)
        assert mistake.devices == DEVICES


def test_nan_and_single_wrong_vectors_are_found():
    answer = ANSWERS['product']()
    # The norm of all vectors hardly changes.
    one_vector = measure(wrong(answer, 0, lambda x: x.at[3].mul(0.9)), DEVICES)[0, 0]
    assert find_mistake(wrong(answer, 0, lambda x: x.at[3].mul(0.9)), DEVICES).name == 'product'
    assert one_vector[1] > 4 * one_vector[0]
    for value in (jnp.nan, jnp.inf):
        mistake = find_mistake(wrong(answer, 2, lambda x, value=value: x.at[-1, -1].set(value)), DEVICES)
        assert mistake.name == 'gradient of the kernel'
        assert not np.isfinite(mistake.error)


def test_attention_that_ignores_documents_is_named(monkeypatch):
    exact = kernels.chunked

    def leaking(inputs, window, partitioning):
        return exact(inputs._replace(segments_BT=None), window, partitioning)

    monkeypatch.setitem(kernels.KERNELS, 'xla', leaking)
    assert re.fullmatch(
        r'attention within documents \(model\.attention=xla\) computes wrong results on cpu, device 0: output is off '
        r'by [\d.]+% for 2 × 64 tokens, 4 query heads and 2 key heads of 16; install other versions .*',
        wrong_kernel([attention()], DEVICES[:1]),
    )


@pytest.mark.parametrize('settings', [{'attention_softcap': 5.0}, {'attention_sinks': True}], ids=['softcap', 'sinks'])
def test_other_forms_of_attention(settings, monkeypatch):
    answer = attention(**settings)
    assert find_mistake(answer, DEVICES[:1]) is None
    exact = kernels.chunked
    monkeypatch.setitem(
        kernels.KERNELS, 'xla', lambda inputs, *rest: exact(inputs._replace(softcap=0, sinks_N=None), *rest)
    )
    assert find_mistake(attention(**settings), DEVICES[:1]).name == 'output'


def test_a_window_that_is_one_too_long_is_found(monkeypatch):
    def answer():
        model = dataclasses.replace(MODEL, head_dim=16)
        return attention_answer(model, rows=2, length=64, window=8, has_documents=False, heads=(4, 4))

    assert find_mistake(answer(), DEVICES[:1]) is None
    exact = kernels.chunked
    monkeypatch.setitem(kernels.KERNELS, 'xla', lambda inputs, window, rest: exact(inputs, window + 1, rest))
    assert find_mistake(answer(), DEVICES[:1]).name == 'output'


def test_lists_of_documents_of_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, 'run_forward', cudnn_on_cpu.run_forward)
    monkeypatch.setattr(cudnn, 'run_backward', cudnn_on_cpu.run_backward)
    monkeypatch.setattr(kernels, 'supports_documents', lambda *_: True)
    assert find_mistake(attention(attention='cudnn', dtype='float32'), DEVICES[:1]) is None

    # Entries of length 0, which follow the documents, return NaN for all tokens of the last list.
    def poisoned(*arguments, **settings):
        o_BTNH, statistics = cudnn_on_cpu.run_forward(*arguments, **settings)
        return o_BTNH.at[-1, -1].set(jnp.nan), statistics

    monkeypatch.setattr(cudnn, 'run_forward', poisoned)
    found = wrong_kernel([attention(attention='cudnn', dtype='float32')], DEVICES[:1])
    assert found.startswith('attention within documents (model.attention=cudnn) computes wrong results')
    assert found.endswith('; set model.attention=xla')


def test_a_single_wrong_device_is_named():
    answer = ANSWERS['norm']()

    def run(*inputs):
        output, *gradients = answer.run(*inputs)
        factor = jnp.where(jax.lax.axis_index('device') == 1, 1.5, 1).astype(output.dtype)
        return output * factor, *gradients

    mistake = find_mistake(answer._replace(run=run), DEVICES)
    assert mistake.devices == [DEVICES[1]]
    identity = {'devices': [{'index': 0, 'uuid': 'GPU-a'}, {'index': 1, 'uuid': 'GPU-b'}]}
    assert describe(mistake, identity).startswith('layernorm computes wrong results on cpu, device 1 (GPU-b): output')
    assert describe(mistake, identity).endswith('the other devices are right, so replace device 1 (GPU-b)')


def test_only_cudnn_on_hopper_gets_lists_of_documents():
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, attention='cudnn'))
    assert lists_documents(config, (9, 0))
    assert not lists_documents(config, (8, 0))
    assert not lists_documents(config, None)
    assert not lists_documents(CONFIG, (9, 0))
    staged = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, stage=2))
    assert not lists_documents(staged, (9, 0))


def test_the_settings_of_the_kernels_change_with_the_config():
    assert training_settings(CONFIG) == training_settings(
        small_config(
            model__dtype='bfloat16', data__seq_len=64, train__z_loss=1e-4, model__logit_softcap=30.0, data__seed=7
        )
    )
    for settings in ({'data__seq_len': 32}, {'model__dim': 64}, {'train__z_loss': 0.0}, {'data__document_mask': False}):
        assert training_settings(CONFIG) != training_settings(
            small_config(
                **{
                    'model__dtype': 'bfloat16',
                    'data__seq_len': 64,
                    'train__z_loss': 1e-4,
                    'model__logit_softcap': 30.0,
                    **settings,
                }
            )
        )


def test_the_kernels_of_a_config():
    def kinds(answers):
        return [answer.kernel for answer in answers]

    layers = ['product in bfloat16'] * 2 + ['layernorm', 'gelu_tanh']
    assert kinds(training_answers(CONFIG)) == [
        'attention within documents (model.attention=xla)',
        'cross-entropy',
        *layers,
    ]
    windows = small_config(model__attention_pattern='LS', model__sliding_window=4)
    shapes = [answer.shape for answer in training_answers(windows) if answer.kernel.startswith('attention')]
    assert shapes[1] == f'{shapes[0]}, window 4'
    tensor = small_config(num_devices=2, mesh__tensor=2, mesh__fsdp=1)
    assert training_answers(tensor)[0].shape.endswith('2 query heads and 2 key heads of 8')
    experts = small_config(model__num_experts=4, model__num_experts_per_token=2, model__family='llama')
    assert kinds(training_answers(experts))[-2:] == ['product of experts (model.expert_matmul=loop)'] * 2
    fused = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, norm_kernel='pallas'))
    assert 'layernorm of a sum (model.norm_kernel=pallas)' in kinds(training_answers(fused))
    model = dataclasses.replace(CONFIG.model, fp8_kernel='pallas')
    assert 'gelu_tanh in fp8 (model.fp8_kernel=pallas)' in kinds(
        training_answers(dataclasses.replace(CONFIG, model=model))
    )
    served = serving_answers(CONFIG, max_context=32, int8_cache=True)
    assert kinds(served) == ['attention to a cache of int8', *layers]


def test_a_kernel_that_cannot_run_is_reported_and_the_others_are_tested():
    def run(*inputs):
        raise RuntimeError('RESOURCE_EXHAUSTED: Out of memory\nwhile allocating')

    def not_installed(*inputs):
        raise InputError('tokamax is not installed')

    norm, untested = ANSWERS['norm'](), []
    full = norm._replace(run=run)
    assert wrong_kernel([full, norm], DEVICES, untested.append) == ''
    assert untested == [
        f'layernorm for {norm.shape} is not tested: RuntimeError: RESOURCE_EXHAUSTED: Out of memory while allocating'
    ]
    assert 'gradient' in wrong_kernel([full, wrong(norm, 1, lambda x: 2 * x)], DEVICES, untested.append)
    assert wrong_kernel([norm._replace(run=not_installed)], DEVICES) == 'tokamax is not installed'


def test_inputs_of_waiting_tests_take_no_device_memory():
    """All tests are created before the first one runs, so their inputs together could fill a device."""
    for name in ('attention', 'cache', 'loss', 'norm', 'activation', 'experts'):
        assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(ANSWERS[name]().inputs)), name


def test_experts_without_tokamax_have_a_message(monkeypatch):
    monkeypatch.setattr('maxlm.training.known_answers.experts.installed_version', lambda package: None)
    answer = experts_answer(dataclasses.replace(MODEL, expert_matmul='tokamax'), 16, 24)
    assert '(found none)' in answer.remedy
