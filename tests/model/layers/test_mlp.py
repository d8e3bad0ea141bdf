"""The activations of the feed-forward against those of Transformers."""

import jax.numpy as jnp
import numpy as np
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from maxlm.model.layers.mlp import swiglu, swiglu_oai


def test_the_clamped_swiglu_equals_that_of_gpt_oss():
    gate, up = np.random.default_rng(0).normal(0, 6, (2, 4, 50)).astype(np.float32)
    assert np.abs([gate, up]).max() > 7
    experts = GptOssExperts.__new__(GptOssExperts)
    torch.nn.Module.__init__(experts)
    experts.alpha, experts.limit = 1.702, 7.0
    theirs = experts._apply_gate(torch.from_numpy(np.stack([gate, up], axis=-1).reshape(4, 100))).numpy()
    np.testing.assert_allclose(swiglu_oai(jnp.asarray(gate), jnp.asarray(up)), theirs, rtol=1e-5, atol=1e-5)
    assert np.abs(swiglu(jnp.asarray(gate), jnp.asarray(up)) - theirs).max() > 1
