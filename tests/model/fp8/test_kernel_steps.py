"""Training steps whose arrays the rounding kernel rounds, as formulas on CPUs, against those of XLA."""

import dataclasses

import jax
import numpy as np
import pytest

from maxlm.training.compile import compile_train_step
from maxlm.training.state import abstract_state
from tests.model.fp8.rounding_on_cpu import use_formulas
from tests.parameters import first_state
from tests.small import small_batch, small_config, small_layout

COMMON = {
    'model__vocab_size': 64,
    'model__dtype': 'bfloat16',
    'model__matmul_precision': 'fp8',
    'model__fp8_scaling': 'delayed',
    'model__fp8_history': 2,
    'model__scan_layers': False,
    'train__global_batch_size': 8,
    'train__per_device_batch_size': 4,
    # Large updates amplify the differences of rounding.
    'optimizer__warmup_from_zero': True,
}
CASES = {
    'gpt2': {'model__family': 'gpt2'},
    'two devices': {'num_devices': 2, 'mesh__fsdp': 2, 'mesh__zero_stage': 3, 'train__per_device_batch_size': 2},
    'own gradients': {'num_devices': 2, 'mesh__fsdp': 2, 'mesh__zero_stage': 1, 'train__per_device_batch_size': 2},
    'loop': {'model__scan_layers': True, 'model__remat_policy': 'full'},
}
STEPS = 3


def run(kernel, **overrides):
    """Returns loss and gradient norm of each step, and the history of the largest elements."""
    config = small_config(**{**COMMON, **overrides})
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, fp8_kernel=kernel))
    layout = small_layout(config)
    step = compile_train_step(config, layout, abstract_state(config, layout)).step
    state, shapes = first_state(config, layout, std=0.02), abstract_state(config, layout)
    state = jax.tree.map(lambda array, shape: jax.device_put(array, shape.sharding), state, shapes)
    rows = []
    for seed in range(STEPS):
        state, metrics = step(state, layout.put_batch(small_batch(config, seed), config.train.global_batch_size))
        rows.append([float(metrics[name]) for name in ('loss', 'grad_norm')])
    return np.array(rows), jax.device_get(state.fp8_history)


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_steps_are_those_of_xla(case, monkeypatch):
    traced = use_formulas(monkeypatch)
    found, history = run('pallas', **case)
    assert traced
    expected, right = run('xla', **case)
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=3e-4)
    np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=1e-2)
    assert (right > 0).all()
    np.testing.assert_allclose(history, right, rtol=0.2)
