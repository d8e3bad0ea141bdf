"""Tests names, shapes and layouts of tensors against Transformers models of the same config."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from maxlm.huggingface.config_conversion import from_config, to_config
from maxlm.huggingface.state_dict import HEADS, PREFIXES, parameter_shapes, tensors
from maxlm.model.decoder import Decoder
from tests.huggingface.expert_models import EXPERT_MODELS
from tests.huggingface.transformers_models import state_in_file
from tests.small import LATENT, small_config

SWITCHES = {
    'gpt2': {'model__family': 'gpt2'},
    'gpt_neox': {'model__family': 'gpt_neox', 'model__partial_rotary_factor': 0.5},
    'llama': {'model__family': 'llama'},
    'llama with biases': {'model__family': 'llama', 'model__use_bias': True},
    'mistral': {'model__family': 'llama', 'model__attention_pattern': 'S', 'model__sliding_window': 5},
    'qwen3': {'model__family': 'qwen3'},
    'qwen2': {'model__family': 'qwen2'},
    'smollm3': {'model__family': 'smollm3', 'model__attention_pattern': 'N'},
    'olmo2': {'model__family': 'olmo2'},
    'olmo3': {'model__family': 'olmo3', 'model__attention_pattern': 'S'},
    'granite': {'model__family': 'granite', 'model__use_bias': True},
    'phi3': {'model__family': 'phi3', 'model__rope_theta': 99.0},
    'gemma2': {'model__family': 'gemma2', 'model__attention_pattern': 'S'},
    'gemma3_text': {'model__family': 'gemma3', 'model__attention_pattern': 'S'},
    **{f'{name} with experts': overrides for name, overrides in EXPERT_MODELS.items()},
    'deepseek_v3': {**LATENT, 'model__q_lora_rank': 20},
    'deepseek_v3 with full queries': LATENT,
    'starcoder2': {'model__family': 'starcoder2'},
    'nanochat': {'model__family': 'nanochat'},
}


def random_model(name, seed):
    """Returns a model with random sizes, all of them different if its architecture allows it."""
    rng = np.random.default_rng(seed)
    heads, head_dim = int(rng.integers(2, 6)), 4 * int(rng.integers(1, 5))
    free = name not in ('gpt2', 'gpt_neox', 'phi3', 'starcoder2') and 'deepseek' not in name
    sizes = {
        'model__num_layers': int(rng.integers(1, 4)),
        'model__num_heads': heads,
        'model__dim': heads * int(rng.integers(3, 9)) if free else heads * head_dim,
        'model__head_dim': head_dim if free else 0,
        'model__num_kv_heads': 1 if free and seed % 2 else 0,
        'model__ffn_dim': int(rng.integers(20, 60)),
        'model__vocab_size': int(rng.integers(61, 99)),
        'model__max_positions': int(rng.integers(16, 50)),
        'model__tie_embeddings': bool(rng.integers(2)),
    }
    if name.endswith('experts'):
        # Its own sizes, because the keys of experts depend on them.
        del sizes['model__num_layers'], sizes['model__ffn_dim']
    return small_config(**{**sizes, **SWITCHES[name]}).model


def model_type(name):
    return name.partition(' ')[0]


def shapes_in_transformers(config):
    with torch.device('meta'):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    # Transformers' names of saved parameters, without a tied head.
    shapes = {name: tuple(p.shape) for name, p in state_in_file(model).items()}
    if model.config.tie_word_embeddings:
        del shapes[HEADS.get(model.config.model_type, 'lm_head.weight')]
    return shapes, type(model).__name__


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('name', SWITCHES)
def test_names_and_shapes_equal_transformers(name, seed):
    model = random_model(name, seed)
    config = to_config(model, model_type(name) if name == 'nanochat' else 'auto')
    assert config['model_type'] == model_type(name)
    theirs, class_name = shapes_in_transformers(config)
    assert config['architectures'] == [class_name]
    assert {tensor.name: tensor.shape for tensor in tensors(model_type(name), model)} == theirs
    # Control: another width is detected.
    wider = dataclasses.replace(model, ffn_dim=model.ffn_dim + 1, expert_ffn_dim=model.expert_ffn_dim + 1)
    assert {tensor.name: tensor.shape for tensor in tensors(model_type(name), wider)} != theirs


# Odd seeds give grouped key heads.
@pytest.mark.parametrize('seed', range(2))
@pytest.mark.parametrize('name', SWITCHES)
def test_parameters_equal_those_of_the_decoder(name, seed):
    model = random_model(name, seed)
    state = nnx.state(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))))
    ours = {'.'.join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    assert parameter_shapes(tensors(model_type(name), model)) == ours


@pytest.mark.parametrize('name', SWITCHES)
def test_round_trip(name):
    rng = np.random.default_rng(0)
    for tensor in tensors(model_type(name), random_model(name, 1)):
        sources = [rng.standard_normal(shape, np.float32) for shape in tensor.source_shapes]
        array = tensor.to_hf(sources)
        if tensor.expert is not None:
            sources = [source[tensor.expert] for source in sources]
        assert array.shape == tensor.shape, tensor.name
        back = tensor.from_hf(array)
        assert len(back) == len(sources)
        for repeated, other in zip(back, sources, strict=True):
            np.testing.assert_array_equal(repeated, other, err_msg=tensor.name)
        # The inverse also holds: no value of the file is lost.
        back = tensor.from_hf(array)
        back = back if tensor.expert is None else [dict.fromkeys([tensor.expert], part) for part in back]
        np.testing.assert_array_equal(tensor.to_hf(back), array)


def find(architecture, model, name):
    return next(tensor for tensor in tensors(architecture, model) if tensor.name == name)


def test_neox_rows_are_ordered_by_head():
    model = random_model('gpt_neox', 0)
    tensor = find('gpt_neox', model, 'gpt_neox.layers.0.attention.query_key_value.weight')
    D, N, H = model.dim, model.num_heads, model.head_dim
    query, key, value = (np.full((D, N, H), kind, np.float32) for kind in (1, 2, 3))
    column = tensor.to_hf([query, key, value])[:, 0]
    assert column.tolist() == ([1.0] * H + [2.0] * H + [3.0] * H) * N


def test_gpt2_columns_are_ordered_by_kind():
    model = random_model('gpt2', 0)
    tensor = find('gpt2', model, 'transformer.h.0.attn.c_attn.weight')
    D, N, H = model.dim, model.num_heads, model.head_dim
    arrays = [np.full((D, N, H), kind, np.float32) for kind in (1, 2, 3)]
    assert tensor.to_hf(arrays)[0].tolist() == [1.0] * D + [2.0] * D + [3.0] * D


def test_nanochat_has_the_halves_of_queries_and_keys_swapped():
    model = random_model('nanochat', 0)
    D, N, H = model.dim, model.num_heads, model.head_dim
    array = np.broadcast_to(np.arange(H, dtype=np.float32), (D, N, H))
    halves = [*range(H // 2, H), *range(H // 2)]
    query, llama = (find(kind, model, 'model.layers.0.self_attn.q_proj.weight') for kind in ('nanochat', 'llama'))
    assert query.to_hf([array])[:H, 0].tolist() == halves
    assert llama.to_hf([array])[:H, 0].tolist() == list(range(H))
    value = find('nanochat', model, 'model.layers.0.self_attn.v_proj.weight')
    assert value.to_hf([np.zeros(value.source_shapes[0])]).shape == value.shape


@pytest.mark.parametrize('name', SWITCHES)
def test_names_have_the_prefix_of_the_base_model(name):
    kind = model_type(name)
    config = to_config(random_model(name, 0), kind)
    with torch.device('meta'):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert PREFIXES[kind] == f'{model.base_model_prefix}.'
    found = from_config(config, 'config.json')
    untied = dataclasses.replace(found, tie_embeddings=False)
    outside = [tensor.name for tensor in tensors(kind, untied) if not tensor.name.startswith(PREFIXES[kind])]
    assert outside == [HEADS.get(kind, 'lm_head.weight')]
