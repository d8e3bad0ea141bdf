"""The head in fp8: loss and gradients are close to those in float32, within the rounding of both formats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.parallel.partitioning import SingleDevice
from maxlm.training.losses.cross_entropy import cross_entropy

B, T, D, V = 2, 8, 32, 48


@pytest.mark.parametrize(('platform', 'is_tied'), [('cpu', False), ('gpu', True)])
def test_loss_and_gradients(platform, is_tied):
    """On a GPU, the kernel of a tied head is [V, D]."""
    rng = np.random.default_rng(0)
    hidden_BTD = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
    kernel_DV = jnp.asarray(0.1 * rng.normal(size=(D, V)), jnp.float32)
    targets_BT, weights_BT = rng.integers(0, V, (B, T)), np.ones((B, T), np.float32)

    def run(is_fp8):
        def loss(hidden_BTD, kernel_DV):
            partitioning = SingleDevice(platform)
            options = {'partitioning': partitioning, 'chunk': 8, 'is_tied': is_tied, 'is_fp8': is_fp8}
            return cross_entropy(hidden_BTD, kernel_DV, targets_BT, weights_BT, **options).objective

        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(hidden_BTD, kernel_DV)
        return [value, *gradients]

    for narrow, wide in zip(run(True), run(False), strict=True):
        difference = np.linalg.norm(narrow - wide) / np.linalg.norm(wide)
        # E5M2 rounds by up to 2⁻³. A loss in float32 would not differ at all.
        assert 0 < difference < 0.1
