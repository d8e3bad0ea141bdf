"""Tests that published config.json files give models of the published sizes."""

import math

import pytest

from maxlm.huggingface.config_conversion import choose_architecture, from_config
from maxlm.huggingface.state_dict import tensors

# The files of Transformers 4, shortened to the keys that determine a model.
PUBLISHED = {
    'gpt2': (
        {
            'activation_function': 'gelu_new',
            'attn_pdrop': 0.1,
            'layer_norm_epsilon': 1e-05,
            'model_type': 'gpt2',
            'n_ctx': 1024,
            'n_embd': 768,
            'n_head': 12,
            'n_layer': 12,
            'n_positions': 1024,
            'vocab_size': 50257,
        },
        {'position_embedding': 'learned', 'tie_embeddings': True, 'head_dim': 64, 'ffn_dim': 3072, 'dtype': 'float32'},
        124_439_808,
    ),
    'pythia-70m': (
        {
            'hidden_act': 'gelu',
            'hidden_size': 512,
            'intermediate_size': 2048,
            'layer_norm_eps': 1e-05,
            'max_position_embeddings': 2048,
            'model_type': 'gpt_neox',
            'num_attention_heads': 8,
            'num_hidden_layers': 6,
            'rotary_emb_base': 10000,
            'rotary_pct': 0.25,
            'tie_word_embeddings': False,
            'torch_dtype': 'float16',
            'use_parallel_residual': True,
            'vocab_size': 50304,
        },
        {'partial_rotary_factor': 0.25, 'parallel_residual': True, 'activation': 'gelu', 'dtype': 'bfloat16'},
        70_426_624,
    ),
    'Llama-3.1-8B': (
        {
            'attention_bias': False,
            'hidden_act': 'silu',
            'hidden_size': 4096,
            'intermediate_size': 14336,
            'max_position_embeddings': 131072,
            'mlp_bias': False,
            'model_type': 'llama',
            'num_attention_heads': 32,
            'num_hidden_layers': 32,
            'num_key_value_heads': 8,
            'pretraining_tp': 1,
            'rms_norm_eps': 1e-05,
            'rope_scaling': {
                'factor': 8.0,
                'low_freq_factor': 1.0,
                'high_freq_factor': 4.0,
                'original_max_position_embeddings': 8192,
                'rope_type': 'llama3',
            },
            'rope_theta': 500000.0,
            'tie_word_embeddings': False,
            'torch_dtype': 'bfloat16',
            'vocab_size': 128256,
        },
        {
            'rope_theta': 500_000.0,
            'rope_scaling': 'llama3',
            'rope_scaling_factor': 8.0,
            'original_max_positions': 8192,
            'max_positions': 131_072,
            'num_kv_heads': 8,
        },
        8_030_261_248,
    ),
    'Mistral-7B-v0.1': (
        {
            'hidden_act': 'silu',
            'hidden_size': 4096,
            'intermediate_size': 14336,
            'max_position_embeddings': 32768,
            'model_type': 'mistral',
            'num_attention_heads': 32,
            'num_hidden_layers': 32,
            'num_key_value_heads': 8,
            'rms_norm_eps': 1e-05,
            'rope_theta': 10000.0,
            'sliding_window': 4096,
            'tie_word_embeddings': False,
            'vocab_size': 32000,
        },
        {'attention_pattern': 'S', 'sliding_window': 4096, 'head_dim': 128},
        7_241_732_096,
    ),
    'Qwen3-0.6B': (
        {
            'attention_bias': False,
            'head_dim': 128,
            'hidden_act': 'silu',
            'hidden_size': 1024,
            'intermediate_size': 3072,
            'max_position_embeddings': 40960,
            'max_window_layers': 28,
            'model_type': 'qwen3',
            'num_attention_heads': 16,
            'num_hidden_layers': 28,
            'num_key_value_heads': 8,
            'rms_norm_eps': 1e-06,
            'rope_scaling': None,
            'rope_theta': 1000000,
            'sliding_window': None,
            'tie_word_embeddings': True,
            'use_sliding_window': False,
            'vocab_size': 151936,
        },
        {'head_dim': 128, 'rope_theta': 1_000_000.0, 'qk_norm': True, 'attention_pattern': 'L'},
        596_049_920,
    ),
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_models(name):
    config, settings, parameters = PUBLISHED[name]
    model = from_config(config, 'config.json')
    assert {key: getattr(model, key) for key in settings} == settings
    # The model has the published size, and is exported as the same architecture.
    assert sum(math.prod(tensor.shape) for tensor in tensors(config['model_type'], model)) == parameters
    assert choose_architecture(model).model_type == config['model_type']
