"""Tests the operation counts of a model, against its parameters and by hand for one published shape."""

import dataclasses

import jax
import pytest

from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.training.flops import attention_workspace, matmul_parameters, step_flops, training_flops
from maxlm.training.state import abstract_state
from tests.conftest import ROOT
from tests.small import LATENT, small_config, small_layout

MODELS = {
    'gpt2': {'model__family': 'gpt2'},
    'gpt2 untied': {'model__family': 'gpt2', 'model__tie_embeddings': False},
    'grouped heads': {'model__family': 'qwen3', 'model__num_kv_heads': 2, 'model__head_dim': 24},
    'latents': {**LATENT, 'model__q_lora_rank': 20},
    'multi-token prediction': {'model__family': 'llama', 'model__mtp_depth': 2},
    'value embeddings': {
        'model__family': 'nanochat',
        'model__value_embedding_pattern': 'NV',
        'model__value_gate_channels': 12,
    },
}


def parameters(config):
    """Returns the number of elements by path, for the real model."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_state(config, small_layout(config)).params)
    return {'.'.join(entry.key for entry in path): leaf.size for path, leaf in leaves}


@pytest.mark.parametrize('model', MODELS)
def test_parameters_in_matmuls(model):
    config = small_config(**MODELS[model])
    sizes = parameters(config)
    looked_up = 0 if config.model.tie_embeddings else sizes['embedding']
    added = sum(size for name, size in sizes.items() if name.endswith(('.scale', '.bias')))
    # Each module of multi-token prediction uses the output projection again.
    shared = config.model.mtp_depth * config.model.vocab_size * config.model.dim
    assert matmul_parameters(config.model) - shared == (
        sum(sizes.values()) - looked_up - added - sizes.get('position_embedding', 0) - sizes.get('value_embeddings', 0)
    )
    # Control: some parameters are in no matmul.
    assert matmul_parameters(config.model) != sum(sizes.values())


def gpt2_1b():
    config = load(str(ROOT / 'configs/1b.py'))
    return resolve(config, platform='cpu', num_devices=8, vocab_size=50_000, windows=1).model


def test_gpt2_1b_by_hand():
    model = gpt2_1b()
    # 24 layers of 12 · 1536², and 1536 · 50 000 for the logits.
    assert matmul_parameters(model) == 679_477_248 + 76_800_000
    flops = training_flops(model, 2048)
    # 6 · 756 277 248 and, for each attended position, 12 · 24 · 1536 = 442 368.
    assert flops.full == 4_537_663_488 + 442_368 * 2048
    assert flops.causal == 4_537_663_488 + 442_368 * 2049 / 2


def test_causal_is_the_mean_over_the_window():
    model = small_config(model__num_kv_heads=2).model
    seq_len = 16
    dense = 6 * matmul_parameters(model)
    # The token at position t attends to t + 1 positions: two products of N · H multiply-adds, three times.
    by_position = [3 * 2 * 2 * model.num_layers * model.num_heads * model.head_dim * (t + 1) for t in range(seq_len)]
    flops = training_flops(model, seq_len)
    assert flops.causal == dense + sum(by_position) / seq_len
    assert flops.full == dense + by_position[-1]
    assert training_flops(model, 1).causal == training_flops(model, 1).full


def test_latent_attention_counts_the_widths_of_keys_and_values():
    model = small_config(**LATENT).model
    # Two layers of four heads, with keys of 16 dims and values of 12 dims, attend to one position.
    assert training_flops(model, 1).full == 6 * (matmul_parameters(model) + 2 * 4 * (16 + 12))


def test_sliding_layers_count_their_window():
    sliding = {'model__sliding_window': 3, 'model__num_layers': 3}
    mixed, full = small_config(**sliding, model__attention_pattern='SL').model, small_config(model__num_layers=3).model
    per_position = 12 * mixed.num_heads * mixed.head_dim
    dense = 6 * matmul_parameters(mixed)
    # Two layers see at most 3 positions, so by position they see 1, 2, 3, 3, … tokens.
    seen = [sum(2 * min(t + 1, 3) + (t + 1) for t in range(seq_len)) / seq_len for seq_len in (16, 2)]
    assert training_flops(mixed, 16).causal == pytest.approx(dense + per_position * seen[0])
    assert training_flops(mixed, 16).full == dense + per_position * (3 + 16 + 3)
    # A window longer than the sequence changes nothing.
    assert training_flops(mixed, 2) == training_flops(full, 2)


def test_frozen_parameters_have_no_gradient_and_a_reference_has_a_forward_pass():
    plain = small_config(model__family='llama')
    base = training_flops(plain.model, 16)
    assert step_flops(plain, 16) == base
    blocks = sum(size for name, size in parameters(plain).items() if 'blocks' in name and 'norm' not in name)
    frozen = small_config(model__family='llama', optimizer__frozen_params=('blocks',))
    assert step_flops(frozen, 16).causal == pytest.approx(base.causal - 2 * blocks)
    # With rank 2 the adapters have 2 · (inputs + outputs) elements for each matrix.
    adapted = small_config(model__family='llama', model__lora_rank=2)
    adapters = sum(size for name, size in parameters(adapted).items() if 'lora' in name)
    matrices = matmul_parameters(plain.model)
    assert step_flops(adapted, 16).causal == pytest.approx(base.causal - 2 * matrices + 6 * adapters)
    dpo = small_config(model__family='llama', train__objective='dpo', train__init_from='runs/sft')
    assert step_flops(dpo, 16).full == pytest.approx(base.full * 4 / 3)
    # The reference point of KTO adds a forward pass of both models.
    kto = dataclasses.replace(dpo, dpo=dataclasses.replace(dpo.dpo, loss_type='kto'))
    assert step_flops(kto, 16).full == pytest.approx(base.full * 2)


def test_only_the_experts_of_a_token_count():
    experts = {'model__num_experts': 8, 'model__num_experts_per_token': 2, 'model__expert_ffn_dim': 64}
    config = small_config(**experts, model__ffn_dim=128)
    model, dense = config.model, small_config(model__ffn_dim=128).model
    router = model.num_layers * model.dim * 8
    # Two experts of half the width have as many parameters as the dense feed-forward.
    assert matmul_parameters(model) == matmul_parameters(dense) + router
    assert step_flops(config, 16) == training_flops(model, 16)
    frozen = small_config(**experts, optimizer__frozen_params=('*.experts',))
    unfrozen = small_config(**experts)
    active = model.num_layers * 2 * 2 * model.dim * 64
    assert step_flops(frozen, 16).causal == step_flops(unfrozen, 16).causal - 2 * active


@pytest.mark.parametrize(
    ('attention', 'capability', 'rows'),
    [('cudnn_mask', (9, 0), 4), ('cudnn', (9, 0), 4 * 8), ('cudnn_mask', (10, 0), 0), ('xla', (9, 0), 0)],
)
def test_workspace_of_deterministic_attention(attention, capability, rows):
    settings = {'data__seq_len': 2048, 'train__global_batch_size': 4}
    config = small_config(train__deterministic=True, **settings)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention=attention))
    # Four heads; a list has an entry for 256 tokens.
    assert attention_workspace(config, capability) == 2 * rows * 4 * 2048**2
    default = dataclasses.replace(config, train=dataclasses.replace(config.train, deterministic=False))
    assert attention_workspace(default, capability) == 0
