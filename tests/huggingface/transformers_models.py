"""Provides Transformers models with random weights, and their parameters in maxlm's layout."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from maxlm.config.schema import ModelConfig
from maxlm.huggingface.config_conversion import from_config
from maxlm.huggingface.state_dict import tensors

VOCAB = 61


class Case(NamedTuple):
    """A model: the type for Transformers' AutoConfig, and its settings."""

    model_type: str
    settings: dict[str, Any]


def _llama(**settings: Any) -> dict[str, Any]:
    sizes = {'hidden_size': 32, 'intermediate_size': 56, 'num_hidden_layers': 2, 'num_attention_heads': 4}
    return {'vocab_size': VOCAB, 'max_position_embeddings': 64, 'num_key_value_heads': 2, **sizes, **settings}


def _neox(**settings: Any) -> dict[str, Any]:
    sizes = {'hidden_size': 32, 'intermediate_size': 72, 'num_hidden_layers': 2, 'num_attention_heads': 4}
    return {'vocab_size': VOCAB, 'max_position_embeddings': 64, **sizes, **settings}


def _gpt2(**settings: Any) -> dict[str, Any]:
    return {'vocab_size': VOCAB, 'n_positions': 64, 'n_embd': 32, 'n_layer': 2, 'n_head': 4, **settings}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {'rope_parameters': {'rope_type': rope_type, 'rope_theta': 10_000.0, **parameters}}


def _deepseek(**settings: Any) -> dict[str, Any]:
    latents = {'kv_lora_rank': 20, 'q_lora_rank': 28, 'qk_nope_head_dim': 10, 'qk_rope_head_dim': 6, 'v_head_dim': 12}
    return _llama(**{'num_key_value_heads': 4, 'first_k_dense_replace': 2} | latents | settings)


def _by_type(rope_type: str, local_theta: float, **parameters: Any) -> dict[str, Any]:
    full = _rope(rope_type, **parameters)['rope_parameters']
    local = {'rope_type': 'default', 'rope_theta': local_theta}
    return {'rope_parameters': {'full_attention': full, 'sliding_attention': local}}


def _qwen_moe(**settings: Any) -> dict[str, Any]:
    return _llama(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, **settings)


_EXPERTS = {'num_local_experts': 4, 'num_experts_per_tok': 2}
_DEEPSEEK_EXPERTS = {
    'n_routed_experts': 8,
    'num_experts_per_tok': 3,
    'moe_intermediate_size': 24,
    'n_shared_experts': 2,
}
_YARN = {'factor': 4.0, 'original_max_position_embeddings': 16}
_GRANITE = {
    'embedding_multiplier': 3.0,
    'residual_multiplier': 0.5,
    'attention_multiplier': 0.25,
    'logits_scaling': 0.5,
}
_MIXED = ['sliding_attention', 'full_attention']
_CAPS = {'attn_logit_softcapping': 2.0, 'final_logit_softcapping': 3.0}
_LONGROPE = {
    'rope_parameters': {
        'rope_type': 'longrope',
        'rope_theta': 10_000.0,
        'short_factor': [1.0, 1.1, 1.3, 1.6],
        'long_factor': [1.0, 1.5, 4.0, 8.0],
    }
}
_LLAMA3 = {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 16}

CASES = {
    'gpt2': Case('gpt2', _gpt2()),
    'gpt2 untied, odd widths': Case(
        'gpt2', _gpt2(n_embd=36, n_head=3, n_inner=50, n_layer=3, tie_word_embeddings=False)
    ),
    'gpt2 exact gelu, one head': Case('gpt2', _gpt2(n_head=1, activation_function='gelu', layer_norm_epsilon=1e-3)),
    'neox': Case('gpt_neox', _neox()),
    'neox half rotary': Case('gpt_neox', _neox(hidden_size=48, rotary_pct=0.5, num_attention_heads=3)),
    'neox one after the other': Case('gpt_neox', _neox(use_parallel_residual=False, num_hidden_layers=3)),
    'neox tied, full rotary, tanh': Case(
        'gpt_neox', _neox(rotary_pct=1.0, tie_word_embeddings=True, hidden_act='gelu_new', rotary_emb_base=100)
    ),
    'neox linear scaling': Case('gpt_neox', _neox(**_rope('linear', factor=2.0, partial_rotary_factor=0.5))),
    'llama': Case('llama', _llama()),
    'llama one key head, tied': Case('llama', _llama(num_key_value_heads=1, tie_word_embeddings=True)),
    'llama no groups, biases': Case(
        'llama', _llama(num_key_value_heads=4, attention_bias=True, mlp_bias=True, num_hidden_layers=3)
    ),
    'llama wide heads': Case('llama', _llama(hidden_size=36, head_dim=20, num_attention_heads=6, rms_norm_eps=1e-3)),
    'llama theta': Case('llama', _llama(**_rope('default') | {'rope_parameters': {'rope_theta': 77.0}})),
    'llama linear': Case('llama', _llama(**_rope('linear', factor=3.0))),
    'llama dynamic': Case('llama', _llama(max_position_embeddings=16, **_rope('dynamic', factor=2.0))),
    'llama yarn': Case('llama', _llama(**_rope('yarn', **_YARN))),
    'llama yarn, all settings': Case(
        'llama',
        _llama(
            head_dim=24,
            **_rope('yarn', **_YARN, beta_fast=8.0, beta_slow=2.0, attention_factor=0.9, truncate=False),
        ),
    ),
    'llama yarn, mscale': Case('llama', _llama(**_rope('yarn', **_YARN, mscale=0.7, mscale_all_dim=1.3))),
    'llama llama3': Case('llama', _llama(head_dim=32, **_rope('llama3', **_LLAMA3))),
    'mistral sliding': Case('mistral', _llama(sliding_window=5)),
    'mistral full context': Case('mistral', _llama(sliding_window=None, head_dim=12)),
    'qwen3': Case('qwen3', _llama(head_dim=16)),
    'qwen3 tied, narrow heads': Case('qwen3', _llama(head_dim=6, num_key_value_heads=1, tie_word_embeddings=True)),
    'qwen3 sliding from layer 1': Case(
        'qwen3', _llama(head_dim=8, num_hidden_layers=3, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    'qwen3 mixed, yarn': Case(
        'qwen3',
        _llama(
            head_dim=8,
            num_hidden_layers=4,
            use_sliding_window=True,
            sliding_window=3,
            layer_types=['sliding_attention', 'full_attention'] * 2,
            **_rope('yarn', **_YARN),
        ),
    ),
    'deepseek, dense': Case('deepseek_v3', _deepseek()),
    'deepseek, dense, full queries, yarn': Case(
        'deepseek_v3',
        _deepseek(q_lora_rank=None, rms_norm_eps=1e-3, **_rope('yarn', **_YARN, mscale=0.7, mscale_all_dim=1.3)),
    ),
    'mixtral': Case('mixtral', _llama(**_EXPERTS)),
    'mixtral sliding, tied': Case('mixtral', _llama(**_EXPERTS, sliding_window=5, tie_word_embeddings=True)),
    'qwen3_moe': Case('qwen3_moe', _qwen_moe(norm_topk_prob=True)),
    'qwen3_moe without normalization': Case('qwen3_moe', _qwen_moe(norm_topk_prob=False)),
    'deepseek_v3': Case(
        'deepseek_v3',
        _deepseek(**_DEEPSEEK_EXPERTS, num_hidden_layers=3, first_k_dense_replace=1, n_group=2, topk_group=1),
    ),
    'deepseek_v3 without groups': Case(
        'deepseek_v3',
        _deepseek(
            **_DEEPSEEK_EXPERTS,
            first_k_dense_replace=0,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            q_lora_rank=None,
        ),
    ),
    'deepseek_v2': Case(
        'deepseek_v2',
        _deepseek(
            **_DEEPSEEK_EXPERTS,
            num_hidden_layers=3,
            first_k_dense_replace=1,
            topk_method='group_limited_greedy',
            n_group=4,
            topk_group=2,
            routed_scaling_factor=3.0,
        ),
    ),
    'deepseek_v2 greedy, yarn': Case(
        'deepseek_v2',
        _deepseek(
            **_DEEPSEEK_EXPERTS,
            first_k_dense_replace=0,
            q_lora_rank=None,
            **_rope('yarn', **_YARN, mscale=0.7, mscale_all_dim=0.7),
        ),
    ),
    'gpt_oss': Case('gpt_oss', _llama(**_EXPERTS, head_dim=12, sliding_window=5, **_rope('yarn', **_YARN))),
    'gpt_oss full attention': Case(
        'gpt_oss', _llama(**_EXPERTS, head_dim=8, layer_types=['full_attention'] * 2, **_rope('default'))
    ),
    'qwen2': Case('qwen2', _llama()),
    'qwen2 sliding from layer 1, tied': Case(
        'qwen2',
        _llama(
            num_hidden_layers=3,
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=1,
            tie_word_embeddings=True,
        ),
    ),
    'smollm3': Case('smollm3', _llama(num_hidden_layers=5, pad_token_id=None)),
    'smollm3 untied, biases': Case(
        'smollm3',
        _llama(no_rope_layers=[0, 1], pad_token_id=None, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    ),
    'olmo2': Case('olmo2', _llama()),
    'olmo3': Case('olmo3', _llama(num_hidden_layers=5, sliding_window=5)),
    'olmo3 yarn': Case('olmo3', _llama(sliding_window=5, layer_types=_MIXED, **_by_type('yarn', 7000.0, **_YARN))),
    'granite': Case('granite', _llama(**_GRANITE)),
    'granite tied, biases': Case(
        'granite', _llama(**_GRANITE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    'phi3': Case('phi3', _llama(pad_token_id=None)),
    'phi3 sliding, partial': Case(
        'phi3', _llama(pad_token_id=None, sliding_window=5, partial_rotary_factor=0.5, tie_word_embeddings=True)
    ),
    'phi3 longrope': Case('phi3', _llama(pad_token_id=None, original_max_position_embeddings=32, **_LONGROPE)),
    'phi3 longrope beyond the original context': Case(
        'phi3', _llama(pad_token_id=None, original_max_position_embeddings=16, **_LONGROPE)
    ),
    'gemma2': Case('gemma2', _llama(head_dim=12, query_pre_attn_scalar=5, sliding_window=5, **_CAPS)),
    'gemma2 without caps': Case(
        'gemma2', _llama(head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=None, num_hidden_layers=3)
    ),
    'gemma3': Case('gemma3_text', _llama(head_dim=16, query_pre_attn_scalar=16, num_hidden_layers=7, sliding_window=4)),
    'gemma3 linear, soft': Case(
        'gemma3_text',
        _llama(
            head_dim=8,
            sliding_window=5,
            layer_types=_MIXED,
            final_logit_softcapping=3.0,
            **_by_type('linear', 100.0, factor=4.0),
        ),
    ),
    'starcoder2': Case('starcoder2', _llama()),
    'starcoder2 sliding, untied, exact gelu': Case(
        'starcoder2', _llama(sliding_window=5, tie_word_embeddings=False, hidden_act='gelu', norm_epsilon=1e-3)
    ),
    'nanochat': Case('nanochat', _llama(num_key_value_heads=4)),
    'nanochat grouped, soft': Case('nanochat', _llama(final_logit_softcapping=3.0, num_attention_heads=8)),
}


def make_model(case: Case, *, num_layers: int | None = None) -> transformers.PreTrainedModel:
    """Returns the case's model in float32 with random parameters, including biases and scales, so none hides a bug.

    With `num_layers`, it has only the first layers, with the same weights.
    """
    model = _build(case)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Matrices have a scale of 1 / sqrt(fan_in), which preserves the signal. Vectors are close to 1.
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.3 * noise)
    if num_layers is None:
        return model
    settings = dict(case.settings)
    settings.pop('layer_types', None)
    if 'layer_types' in case.settings:
        settings['layer_types'] = case.settings['layer_types'][:num_layers]
    settings['n_layer' if case.model_type == 'gpt2' else 'num_hidden_layers'] = num_layers
    shorter = _build(Case(case.model_type, settings))
    shorter.load_state_dict(model.state_dict(), strict=False)
    return shorter


def _build(case: Case) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(case.model_type, **case.settings)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').float().eval()


def state_in_file(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the parameters as they are saved: Transformers 5 uses other names and layouts in memory."""
    state = revert_weight_conversion(model, model.state_dict())
    is_neox = model.config.model_type == 'gpt_neox'
    return {name.replace('lm_head.', 'embed_out.') if is_neox else name: value for name, value in state.items()}


def to_maxlm(model: transformers.PreTrainedModel) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns the model for maxlm: its resolved config for float32 on a CPU, and its nested parameters."""
    config = from_config(model.config.to_dict(), 'config.json')
    config = dataclasses.replace(config, dtype='float32', attention='xla')
    # Copies, because PyTorch's optimizers change parameters in place.
    state = {name: tensor.detach().numpy().copy() for name, tensor in state_in_file(model).items()}
    layers: dict[str, dict[int | None, list[np.ndarray]]] = {}
    for tensor in tensors(model.config.model_type, config):
        for path, array in zip(tensor.sources, tensor.from_hf(state[tensor.name]), strict=True):
            layers.setdefault(path, {}).setdefault(tensor.layer, []).append(array)
    params: dict[str, Any] = {}
    of_experts = {
        path
        for tensor in tensors(model.config.model_type, config)
        if tensor.expert is not None
        for path in tensor.sources
    }
    for path, parts in layers.items():
        arrays = {layer: np.stack(found) if path in of_experts else found[0] for layer, found in parts.items()}
        stacked = arrays[None] if None in arrays else np.stack([arrays[i] for i in range(len(arrays))])
        *parents, leaf = path.split('.')
        node = params
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = np.ascontiguousarray(stacked, np.float32)
    return config, params


def from_maxlm(model_type: str, config: ModelConfig, params: Any) -> dict[str, np.ndarray]:
    """Returns maxlm's parameters under the names and in the layout of saved models."""

    def leaf(path: str, layer: int | None) -> np.ndarray:
        node = params
        for name in path.split('.'):
            node = node[name]
        return np.asarray(node if layer is None else node[layer])

    return {
        tensor.name: tensor.to_hf([leaf(path, tensor.layer) for path in tensor.sources])
        for tensor in tensors(model_type, config)
    }
