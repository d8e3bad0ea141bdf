"""Architectures of GGUF files: their metadata, and the models that llama.cpp runs.

The metadata and the layout of rotary positions are those of llama.cpp's convert_hf_to_gguf.py. Files with interleaved
rotation rotate adjacent elements, where Transformers and maxlm rotate pairs half a head apart.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError
from maxlm.model.layers.masks import layer_kinds, layer_windows
from maxlm.model.layers.rope import longrope_attention_factor

# Tensors of frequency factors.
FACTORS_LLAMA3 = 'rope_freqs.weight'
FACTORS_LONGROPE = ('rope_factors_long.weight', 'rope_factors_short.weight')


class Gating(enum.Enum):
    """Values of llama.cpp's `llama_expert_gating_func_type` by `model.router_score`."""

    softmax = 1
    sigmoid = 2


@dataclasses.dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of GGUF files.

    Attributes:
        kind: value of `general.architecture`.
        is_interleaved: rows of queries and keys are permuted for interleaved rotation.
        pattern: the only attention pattern that llama.cpp runs, which it does not read from the file.
        add_metadata: function that writes the keys of this architecture.
    """

    kind: str
    is_interleaved: bool = False
    pattern: str = 'L'
    add_metadata: Callable[[Any, ModelConfig], None] = lambda writer, model: None


def _add_multipliers(writer: Any, model: ModelConfig) -> None:
    writer.add_embedding_scale(model.embedding_multiplier)
    writer.add_residual_scale(model.residual_multiplier)
    writer.add_attention_scale(model.attention_multiplier or model.head_dim**-0.5)
    writer.add_logit_scale(model.logits_scaling)


def _add_windows(writer: Any, model: ModelConfig) -> None:
    writer.add_sliding_window(model.sliding_window)
    writer.add_sliding_window_pattern([window > 0 for window in layer_windows(model)])
    writer.add_rope_freq_base_swa(model.rope_local_theta or model.rope_theta)


def _add_olmo(writer: Any, model: ModelConfig) -> None:
    if model.sliding_window:
        _add_windows(writer, model)


def _add_gemma(writer: Any, model: ModelConfig) -> None:
    _add_windows(writer, model)
    if model.attention_softcap:
        writer.add_attn_logit_softcapping(model.attention_softcap)
        writer.add_final_logit_softcapping(model.logit_softcap)


def _add_phi3(writer: Any, model: ModelConfig) -> None:
    # llama.cpp requires the key.
    writer.add_sliding_window(0)
    writer.add_rope_scaling_orig_ctx_len(model.original_max_positions)
    if model.rope_scaling == 'longrope':
        factor = longrope_attention_factor(model.rope_scaling_factor, model.original_max_positions)
        writer.add_rope_scaling_attn_factors(model.rope_attention_factor or factor)


def _add_experts(writer: Any, model: ModelConfig) -> None:
    writer.add_expert_count(model.num_experts)
    writer.add_expert_used_count(model.num_experts_per_token)
    writer.add_expert_feed_forward_length(model.expert_ffn_dim)


def _add_deepseek(writer: Any, model: ModelConfig) -> None:
    if model.q_lora_rank:
        writer.add_q_lora_rank(model.q_lora_rank)
    writer.add_kv_lora_rank(model.kv_lora_rank)
    writer.add_key_length_mla(model.qk_nope_head_dim + model.qk_rope_head_dim)
    writer.add_value_length_mla(model.v_head_dim)
    if model.rope_scaling == 'yarn':
        writer.add_rope_scaling_yarn_log_mul(0.1 * model.rope_mscale_all_dim)
    # llama.cpp requires these keys also for a model without experts.
    writer.add_leading_dense_block_count(model.num_dense_layers if model.num_experts else model.num_layers)
    writer.add_expert_shared_count(model.num_shared_experts)
    if not model.num_experts:
        writer.add_expert_feed_forward_length(model.ffn_dim)
        return
    _add_experts(writer, model)
    writer.add_expert_weights_scale(model.routed_scaling_factor)
    writer.add_expert_weights_norm(model.router_normalize)
    writer.add_expert_gating_func(Gating[model.router_score])
    if _limits_groups(model):
        writer.add_expert_group_count(model.num_expert_groups)
        writer.add_expert_group_used_count(model.num_groups_per_token)


def _limits_groups(model: ModelConfig) -> bool:
    return model.num_groups_per_token < model.num_expert_groups


def _add_gpt_oss(writer: Any, model: ModelConfig) -> None:
    writer.add_sliding_window(model.sliding_window)
    _add_experts(writer, model)


# Mistral differs from Llama only by a sliding window, which is rejected. OLMo 3 differs from OLMo 2 by its windows.
GGUF_ARCHITECTURES = {
    'llama': GgufArchitecture('llama', is_interleaved=True),
    'mistral': GgufArchitecture('llama', is_interleaved=True),
    'qwen2': GgufArchitecture('qwen2'),
    'qwen3': GgufArchitecture('qwen3'),
    'smollm3': GgufArchitecture('smollm3', is_interleaved=True, pattern='LLLN'),
    'olmo2': GgufArchitecture('olmo2'),
    'olmo3': GgufArchitecture('olmo2', pattern='SSSL', add_metadata=_add_olmo),
    'granite': GgufArchitecture('granite', is_interleaved=True, add_metadata=_add_multipliers),
    'phi3': GgufArchitecture('phi3', add_metadata=_add_phi3),
    'gemma2': GgufArchitecture('gemma2', pattern='SL', add_metadata=_add_gemma),
    'gemma3_text': GgufArchitecture('gemma3', pattern='SSSSSL', add_metadata=_add_gemma),
    'mixtral': GgufArchitecture('llama', is_interleaved=True, add_metadata=_add_experts),
    'qwen3_moe': GgufArchitecture('qwen3moe', add_metadata=_add_experts),
    'deepseek_v2': GgufArchitecture('deepseek2', add_metadata=_add_deepseek),
    'deepseek_v3': GgufArchitecture('deepseek2', add_metadata=_add_deepseek),
    'gpt_oss': GgufArchitecture('gpt-oss', pattern='SL', add_metadata=_add_gpt_oss),
    'starcoder2': GgufArchitecture('starcoder2'),
}
# Kind of file → model_type, the first of several.
KINDS = {row.kind: architecture for architecture, row in reversed(GGUF_ARCHITECTURES.items())}
# Settings of YaRN that llama.cpp does not read from the file.
_YARN = {'rope_beta_slow': 1.0, 'rope_beta_fast': 32.0, 'rope_truncate': True, 'rope_attention_factor': 0.0}
# llama.cpp rounds the bounds also for gpt-oss, which was trained without rounding. DeepSeek multiplies the scores by a
# factor instead of the queries and keys.
_YARN_OF = {
    'gpt-oss': {key: value for key, value in _YARN.items() if key != 'rope_truncate'},
    'deepseek2': {**_YARN, 'rope_attention_factor': 1.0},
}
# Activations by kind; others have `swiglu`.
ACTIVATIONS = {
    'starcoder2': 'gelu_tanh',
    'gemma2': 'geglu_tanh',
    'gemma3': 'geglu_tanh',
    'gpt-oss': 'swiglu_oai',
}
# Kinds whose files have biases in all projections, and kinds whose files have none.
_BIASED = ('starcoder2', 'gpt-oss')
_UNBIASED = ('qwen3', 'qwen3moe', 'olmo2', 'gemma2', 'gemma3', 'phi3', 'deepseek2')
# Numbers of layers for which llama.cpp expects queries without a latent, as in DeepSeek-V2-Lite.
_LITE_DEEPSEEK = (26, 27)
# Layers of the 27B models, for which llama.cpp divides scores by sqrt(dim / num_heads) instead of sqrt(head_dim).
WIDE_GEMMA = {'gemma2': 46, 'gemma3': 62}


def gguf_architecture(model: ModelConfig, architecture: str, source: str) -> GgufArchitecture:
    """Returns the architecture of a model's GGUF file.

    Args:
        model: resolved model.
        architecture: its model_type in Transformers.
        source: path of its config, for messages.

    Raises:
        InputError: llama.cpp does not run the model. The message names the setting.
    """
    if architecture not in GGUF_ARCHITECTURES:
        raise InputError(
            f'{source}: GGUF export does not support {architecture} models; export it for Transformers instead'
        )
    row = GGUF_ARCHITECTURES[architecture]
    found = _unsupported(model, architecture, row)
    if found:
        raise InputError(f'{source}: {found}; export the model for Transformers instead')
    return row


def _unsupported(model: ModelConfig, architecture: str, row: GgufArchitecture) -> str:
    """Returns what llama.cpp does not support of a model, or ''."""
    kinds = layer_kinds(model)
    if kinds != (row.pattern * len(kinds))[: len(kinds)]:
        windows = 'do not support sliding windows' if row.pattern == 'L' else f'require {row.pattern}'
        return f'model.attention_pattern={model.attention_pattern}: {row.kind} files {windows}'
    scaling, required_yarn = model.rope_scaling, _YARN_OF.get(row.kind, _YARN)
    changed = [
        f'model.{key}={getattr(model, key)}'
        for key, value in required_yarn.items()
        if scaling == 'yarn' and getattr(model, key) != value
    ]
    if scaling == 'dynamic' or changed:
        detail = ', '.join(changed) or f'model.rope_scaling={scaling}'
        return f'{detail}: llama.cpp does not support this position encoding'
    local = model.rope_local_theta
    if architecture == 'olmo3' and (local != model.rope_theta if local else scaling != 'none'):
        return f'model.rope_local_theta={local}: {row.kind} files require {model.rope_theta}, that of the other layers'
    if row.kind == 'qwen3moe' and not model.router_normalize:
        return f'model.router_normalize=False: {row.kind} files require True'
    if row.kind == 'deepseek2' and _limits_groups(model) and model.expert_group_score != 'top2':
        return f'model.expert_group_score={model.expert_group_score}: {row.kind} files require top2 or a single group'
    if row.kind == 'deepseek2' and scaling == 'yarn' and not model.rope_mscale_all_dim:
        return f'model.rope_mscale_all_dim={model.rope_mscale_all_dim}: {row.kind} files with YaRN require a factor'
    if row.kind == 'deepseek2' and bool(model.q_lora_rank) == (model.num_layers in _LITE_DEEPSEEK):
        rank = '0' if model.q_lora_rank else 'a rank above 0'
        return f'model.q_lora_rank={model.q_lora_rank}: {row.kind} files of {model.num_layers} layers require {rank}'
    activation = ACTIVATIONS.get(row.kind, 'swiglu')
    if model.activation != activation:
        return f'model.activation={model.activation}: {row.kind} files require {activation}'
    if row.kind in _BIASED and not model.use_bias:
        return f'model.use_bias=False: {row.kind} files require True'
    biased = [part for part in ('qkv', 'out', 'mlp') if row.kind in _UNBIASED and model.has_bias(part)]
    if biased:
        return f'model.{biased[0]}_bias=True: {row.kind} files have no biases'
    if row.kind == 'olmo2' and model.head_dim * model.num_heads != model.dim:
        return f'model.head_dim={model.head_dim}: {row.kind} files require {model.dim // model.num_heads}'
    if row.kind == 'olmo2' and model.tie_embeddings:
        return f'model.tie_embeddings=True: {row.kind} files require a separate output'
    for key in ('attention_softcap', 'logit_softcap'):
        # llama.cpp always applies both caps to Gemma 2, and never to Gemma 3.
        value = getattr(model, key)
        if (row.kind == 'gemma2' and not value) or (row.kind == 'gemma3' and value):
            return f'model.{key}={value}: {row.kind} files require {"0" if value else "a soft cap"}'
    if row.kind == 'gemma2' and scaling != 'none':
        return f'model.rope_scaling={scaling}: {row.kind} files have no scaled positions'
    if row.kind == 'gemma3' and not local and scaling != 'none':
        return f'model.rope_local_theta={local}: {row.kind} files do not scale the positions of S layers'
    if row.kind in ('gemma2', 'gemma3'):
        is_wide = model.num_layers == WIDE_GEMMA[row.kind]
        required = (model.dim / model.num_heads if is_wide else model.head_dim) ** -0.5
        if not math.isclose(model.attention_multiplier or model.head_dim**-0.5, required, rel_tol=1e-6):
            return f'model.attention_multiplier={model.attention_multiplier}: {row.kind} files require {required:g}'
        if not model.tie_embeddings:
            return f'model.tie_embeddings=False: {row.kind} files have no separate output'
    return ''


def frequency_factors(model: ModelConfig) -> dict[str, np.ndarray]:
    """Returns the divisors of rotary frequencies [num_rotated_pairs] in float32 by the name of their tensor."""
    if model.rope_scaling == 'longrope':
        values = (model.rope_long_factors, model.rope_short_factors)
        return {name: np.array(factors, np.float32) for name, factors in zip(FACTORS_LONGROPE, values, strict=True)}
    if model.rope_scaling != 'llama3':
        return {}
    bounds = (model.rope_low_freq_factor, model.rope_high_freq_factor, model.original_max_positions)
    factors = llama3_factors(model.head_dim, model.rope_theta, model.rope_scaling_factor, *bounds)
    return {FACTORS_LLAMA3: factors.astype(np.float32)}


def llama3_factors(head_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """Returns the divisors of llama3 scaling [head_dim / 2]. Formula: Transformers, `modeling_rope_utils.py`."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = original * frequencies / (2 * math.pi)
    ramp = np.clip((turns - low) / (high - low), 0, 1)
    divisors: np.ndarray = 1 / ((1 - ramp) / factor + ramp)
    return divisors
