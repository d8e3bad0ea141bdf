"""Tests the activations that a layer saves, by hand. `test_memory.py` compares totals with compiled programs."""

import jax.numpy as jnp
import pytest

from maxlm.model.blocks import Block
from maxlm.planning.estimate.backends import BACKENDS
from maxlm.planning.estimate.saved_activations import saved_bytes
from tests.small import STREAM, small_config

# Width 32, four heads of 8 dims; a micro-batch of 2 · 16 tokens. The family has no biases and recomputes its norms.
LLAMA = {'model__family': 'llama', 'train__per_device_batch_size': 2, 'model__ffn_dim': 64}
TOKENS, D, F, N = 2 * 16, 32, 64, 4


def saved(policy, platform='gpu', **settings):
    config = small_config(**{**LLAMA, **settings})
    return saved_bytes(config, config.model, BACKENDS[platform], policy) / (4 * TOKENS)


def test_policies_by_hand():
    # Softmax statistics are one number per head.
    assert saved('full') == D
    # The input, queries, keys and values, the output of attention, the stream after it, and gate and up.
    assert saved('dots_no_batch') == 6 * D + 2 * F + N
    # The inputs of both norms and their results, and the activation.
    everything = 8 * D + 3 * F + N
    assert saved('none') == pytest.approx(everything, abs=8)
    # Control.
    assert saved('none', model__ffn_dim=128) - saved('none') == 3 * F


def test_devices_share_heads_and_feed_forward():
    config = small_config(num_devices=2, mesh__tensor=2, mesh__fsdp=1, model__vocab_size=64, **LLAMA)
    assert saved_bytes(config, config.model, BACKENDS['gpu'], 'dots_no_batch') / (4 * TOKENS) == 4 * D + F + N / 2


def test_the_last_axis_is_padded_on_a_tpu():
    # Heads of 8 dims are padded to 128 lanes, and so is every other axis.
    assert saved('full', 'tpu') == 128
    assert saved('full', 'tpu', model__dim=256, model__num_heads=2) == 256


class Twice(Block):
    """A block of a user that saves another array of the stream."""

    def __call__(self, x_BTD, *arguments):
        y_BTD, *rest = super().__call__(x_BTD, *arguments)
        return jnp.sin(y_BTD), *rest


def test_a_block_of_the_user_is_traced():
    assert saved('none', model__block=f'{__name__}:Twice') == saved('none') + D


def test_rows_of_experts_grow_with_the_exchange():
    experts = {**LLAMA, 'model__num_experts': 4, 'model__num_experts_per_token': 2, 'model__expert_ffn_dim': 24}
    experts['model__expert_matmul'] = 'ragged_dot'
    alone = small_config(num_devices=4, **experts)
    exchanging = small_config(num_devices=4, mesh__expert=4, mesh__fsdp=1, **experts)
    before, after = (saved_bytes(each, each.model, BACKENDS['gpu'], 'none') for each in (alone, exchanging))
    # Every device may receive one row of each token of all four devices, instead of two of its own tokens.
    rows = 2 * TOKENS
    assert (after - before) / 4 == rows * (D + 3 * 24)
    dots = (saved_bytes(each, each.model, BACKENDS['gpu'], 'dots') for each in (alone, exchanging))
    assert len(set(dots)) == 1


def test_every_second_layer_saves_the_rows_and_the_factors_of_its_value_embedding():
    settings = {'model__value_embedding_pattern': 'NV', 'model__num_layers': 4}
    # Without a gate, the gradient needs no rows.
    assert saved('none', **settings) == saved('none')
    # The rows, and one factor per head.
    gated = {**settings, 'model__value_gate_channels': 4}
    assert saved('none', **gated) - saved('none') == pytest.approx(D / 2, abs=2 * N)
    assert saved('full', **gated) == saved('full')


def test_the_mean_over_a_pattern_of_attention():
    patterned = {'model__attention_pattern': 'SL', 'model__sliding_window': 4, 'model__num_layers': 4}
    assert saved('none', **patterned) == saved('none')


def test_options_of_the_stream():
    """A layer saves its input before and after the scales, and the earlier states of the stream not at all."""
    assert saved('none', **STREAM) == saved('none') + D
    assert saved('full', **STREAM) == saved('full') == D
    half = {'model__dtype': 'bfloat16'}
    assert saved('none', **STREAM, **half) == saved('none', **half) + D / 2
