"""Training steps with fp8 products: learning, equality on all layouts, and fp8 kernels on GPUs."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from maxlm.model.fp8 import products as fp8
from maxlm.training.compile import compile_train_step
from maxlm.training.state import abstract_state
from tests.gpu_compiler import needs_gpu_compiler, run_python
from tests.parameters import first_state
from tests.small import VOCAB, small_batch, small_config, small_layout

STEPS = 60
# Each array has one scale, so equal results need equal micro-batches of four rows on all layouts.
COMMON = {
    'model__vocab_size': 64,
    'train__global_batch_size': 16,
    'train__num_steps': STEPS,
    'train__per_device_batch_size': 4,
}
FP8 = {'model__matmul_precision': 'fp8'}
LAYOUTS = [
    {
        'mesh__fsdp': 2,
        'mesh__tensor': 2,
        'mesh__context': 2,
        'train__per_device_batch_size': 2,
        'model__remat_policy': 'dots',
    },
    pytest.param(
        {
            'mesh__stage': 2,
            'mesh__fsdp': 4,
            'mesh__zero_stage': 2,
            'train__per_device_batch_size': 1,
            'model__remat_policy': 'full',
        },
        marks=pytest.mark.nightly,
    ),
]
# Another order of float32 sums causes differences of up to 2e-7, or 1.5e-4 if a number rounds to the next fp8 value.
# Different products change the gradient norm by 3e-4 to 3e-3.
TOLERANCE = 2e-5
# Below this loss the blocks have learned; the initial loss is ln 61 = 4.1.
LEARNED = 3.2
# The loss falls by up to 0.07 per step, and two runs may differ by one or two steps. With four seeds, the differences
# between both dtypes are -0.02, 0.11, 0.00 and 0.04.
SAME = 0.2


@functools.cache
def compiled(**overrides):
    """Returns a resolved config, its layout and its step."""
    config = small_config(**{**COMMON, **overrides})
    layout = small_layout(config)
    return config, layout, compile_train_step(config, layout, abstract_state(config, layout)).step


def last_loss(config, layout, step, seed=0):
    """Returns the mean loss of the last tenth of training to repeat the last token, which requires the blocks."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
    state, rng = first_state(config, layout, std=0.02), np.random.default_rng(seed)
    batch, losses = small_batch(config), []
    B, T = batch['tokens'].shape
    batch |= {'weights': np.ones_like(batch['weights']), 'segments': np.ones_like(batch['segments'])}
    batch['positions'] = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    for _ in range(STEPS):
        rows = rng.integers(0, VOCAB, (B, T + 1), dtype=np.int32)
        batch |= {'tokens': rows[:, 1:], 'targets': rows[:, :-1]}
        state, metrics = step(state, layout.put_batch(batch, B))
        losses.append(float(metrics['loss']))
    return np.mean(losses[-STEPS // 10 :])


@pytest.mark.nightly
def test_a_model_learns_as_well():
    wide, narrow = last_loss(*compiled()), last_loss(*compiled(**FP8))
    assert wide < LEARNED
    assert abs(narrow - wide) < SAME


@pytest.mark.nightly
def test_a_model_with_other_scales_does_not_learn(monkeypatch):
    """Negative control of the previous test: large scales leave only the lowest bits of the range."""
    right = fp8._scale
    monkeypatch.setattr(fp8, '_scale', lambda largest, top: right(largest, top) * 2.0**16)
    assert last_loss(*compiled.__wrapped__(**FP8)) > last_loss(*compiled()) + 2 * SAME


def first_steps(**overrides):
    """Returns loss and gradient norm [3, 2] of the first step on three batches."""
    config, layout, step = compiled(**overrides)
    rows = []
    for seed in range(3):
        batch = layout.put_batch(small_batch(config, seed), config.train.global_batch_size)
        _, metrics = step(first_state(config, layout), batch)
        rows.append([float(metrics[name]) for name in ('loss', 'grad_norm')])
    return np.array(rows)


def difference(measured, expected):
    """Returns the median relative difference, since another order of a sum may round a number to the next fp8 value."""
    return np.median(np.abs(measured / expected - 1), axis=0)


@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
def test_every_layout_equals_one_device(layout):
    expected = first_steps(**FP8)
    assert (difference(first_steps(num_devices=8, **FP8, **layout), expected) < TOLERANCE).all()
    # Negative control: other products give other results.
    assert (difference(first_steps(), expected) > 5 * TOLERANCE).any()


PROGRAM = """
import json, sys
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.training.compile import compile_train_step
from maxlm.planning.compiled.hlo import parse_hlo
from maxlm.planning.targets import compiling_for, parse_target, target_layout
from maxlm.training.state import abstract_state
from tests.gpu_compiler import library_products

target = parse_target('h100:8')
sizes = ['num_layers=2', 'dim=256', 'num_heads=4', 'ffn_dim=1024', 'remat_policy=full', 'family=llama']
sizes += ['vocab_size=4096', 'scan_layers=true', *sys.argv[1:]]
overrides = [*(f'model.{size}' for size in sizes), 'train.global_batch_size=32', 'data.seq_len=512']
overrides += ['train.per_device_batch_size=4', 'mesh.zero_stage=3']
config = resolve(load('configs/1b.py', overrides), platform='gpu', num_devices=8, vocab_size=4096, windows=100)
layout = target_layout(target, config.mesh)
with compiling_for(target):
    step = compile_train_step(
        config, layout, abstract_state(config, layout), options={'xla_gpu_enable_triton_gemm': False}
    ).step
text = step.as_text()
print(json.dumps({'text': text, 'products': library_products(parse_hlo(text))}))
"""


def compiled_for_h100(*overrides):
    """Compiles in a process with the GPU compiler that launch/test.sh installs."""
    done = run_python('-c', PROGRAM, *overrides)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_gpu_compiler
def test_gpus_run_products_of_8_bits_and_send_bytes():
    output = compiled_for_h100('matmul_precision=fp8')
    products = {name: flops for name, (_, flops) in output['products'].items()}
    tokens = 32 * 512 / 8
    # A block has four matrices for attention and three for feed-forward, with three products each. With
    # model.remat_policy=full, all products except the last are repeated.
    attention, feed_forward = 4 * 256**2, 256 * 1024
    in_blocks = 2 * 2 * tokens * (4 * attention + (4 + 4 + 3) * feed_forward)
    head = 6 * tokens * 256 * 4096
    assert products == {'__cublas$lt$matmul$f8': in_blocks, '__cublas$lt$matmul': head}
    text = output['text']
    gathers = [line for line in text.splitlines() if ' all-gather-start(' in line or ' all-gather(' in line]
    narrow = [line for line in gathers if 'u8[256,' in line]
    # These are the collectives of a layer, forward and backward; none has another dtype.
    assert len(narrow) == 2
    assert not any('bf16[256,1024]' in line for line in gathers)
    assert all('bf16[' not in line for line in narrow)
