"""Tests that the gradients of the program for GPUs, run on a CPU in float32, are those of the program for CPUs.

The program for GPUs has unstacked kernels, sums of gradients within products, a softmax in one pass, and the head's
kernel in the layout of a tied embedding.
"""

import jax
import numpy as np
import pytest

from maxlm.parallel import partitioning
from maxlm.parallel.layout import Layout
from maxlm.training import gradients
from maxlm.training.gradients import make_gradients
from tests.small import EXPERTS, LATENT, small_batch, small_config, small_layout, small_state

LLAMA = {'model__family': 'llama', 'model__num_kv_heads': 2}
CASES = {
    'tied head': (1, {'model__family': 'gpt2', 'train__z_loss': 0.1}),
    'untied head': (1, LLAMA),
    'experts after a dense layer': (1, EXPERTS),
    'latent attention': (1, LATENT),
    'adapters': (1, {**LLAMA, 'model__lora_rank': 2}),
    'loop over layers': (1, {'model__family': 'gpt2', 'model__scan_layers': True}),
    'sharded vocabulary': (4, {'model__family': 'gpt2', 'mesh__tensor': 2, 'mesh__fsdp': 2}),
    'gradients reduced once': (2, {'model__family': 'gpt2', 'mesh__fsdp': 2, 'mesh__zero_stage': 1}),
}
# Cases that take little time.
FAST = ('tied head', 'untied head', 'sharded vocabulary')


def program_on(platform, num_devices, settings, monkeypatch):
    """Returns the function of the gradients of two micro-batches on each device, and its arguments."""
    monkeypatch.setattr(Layout, 'platform', platform)
    monkeypatch.setattr(partitioning.SingleDevice, 'platform', platform)
    rows = 4 // num_devices if num_devices < 4 else 2
    own = {'model__scan_layers': False, 'train__global_batch_size': 8, 'train__per_device_batch_size': rows}
    config = small_config(num_devices, **{**own, **settings})
    assert config.rounds == 2
    layout = small_layout(config)
    state = small_state(config, layout)
    batch = {name: layout.put_batch({name: rows}, 8)[name] for name, rows in small_batch(config).items()}
    return make_gradients(config, layout), (state, batch, jax.random.key(0), None)


def gradients_on(*case):
    """Returns loss and gradients."""
    function, arguments = program_on(*case)
    sums, grads, _ = jax.jit(function)(*arguments)
    return float(sums.loss), jax.tree.map(np.asarray, grads)


@pytest.mark.parametrize(
    'name', [name if name in FAST else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_gradients_are_those_of_the_program_for_cpus(name, monkeypatch):
    expected_loss, expected = gradients_on('cpu', *CASES[name], monkeypatch)
    loss, found = gradients_on('gpu', *CASES[name], monkeypatch)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for grad, expected_grad in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-6 * max(1, np.abs(expected_grad).max()))
    # Negative control: the gradients are not 0, and those of the layers differ.
    out = jax.tree.leaves(found['blocks']['attention']['out'])[-1]
    assert np.abs(out[0] - out[1]).max() > 1e-3


def test_kernels_are_unstacked_before_the_micro_batches(monkeypatch):
    """On a GPU each micro-batch would copy them; in a loop over layers, and on a CPU, they stay stacked."""
    calls = []

    def note(params):
        # Without delayed scaling there are no kernels in FP8.
        if jax.tree.leaves(params):
            calls.append(params)
        return unstack(params)

    unstack = gradients.unstack_layers
    monkeypatch.setattr(gradients, 'unstack_layers', note)
    for name, platform, number in (('tied head', 'cpu', 0), ('loop over layers', 'gpu', 0), ('tied head', 'gpu', 1)):
        calls.clear()
        function, arguments = program_on(platform, *CASES[name], monkeypatch)
        jax.eval_shape(function, *arguments)
        assert len(calls) == number


def test_only_whole_gradients_are_summed_in_empty_arrays(monkeypatch):
    """On each device, XLA would allocate all of an empty array that is sharded."""
    for name, platform, is_empty in (
        ('tied head', 'gpu', True),
        ('gradients reduced once', 'gpu', True),
        ('sharded vocabulary', 'gpu', False),
        ('tied head', 'cpu', False),
    ):
        function, arguments = program_on(platform, *CASES[name], monkeypatch)
        assert ('= empty' in str(jax.make_jaxpr(function)(*arguments))) == is_empty, (name, platform)
