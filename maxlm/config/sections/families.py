"""Model families: named presets for the architecture keys of `model.*`.

A family sets every architecture key that the config leaves at its default. Keys set in the config take precedence.
"""

from __future__ import annotations

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": pre-norm, learned positions, the tanh
# approximation of GELU, biases in all projections, output tied to the embedding.
_GPT2: dict[str, object] = {
    'position_embedding': 'learned',
    'partial_rotary_factor': 1.0,
    'rope_theta': 10_000.0,
    'rope_local_theta': 0.0,
    'norm': 'layernorm',
    'norm_epsilon': 1e-5,
    'norm_use_scale': True,
    'norm_unit_offset': False,
    'norm_placement': 'pre',
    'qk_norm': False,
    'qk_norm_scope': 'head',
    'embedding_norm': False,
    'embedding_multiplier': 1.0,
    'residual_multiplier': 1.0,
    'attention_multiplier': 0.0,
    'attention_softcap': 0.0,
    'logits_scaling': 1.0,
    'logit_softcap': 0.0,
    'attention_sinks': False,
    'activation': 'gelu_tanh',
    'use_bias': True,
    'qkv_bias': False,
    'parallel_residual': False,
    'tie_embeddings': True,
    'attention_pattern': 'L',
    'sliding_window': 0,
    'init': 'normal',
}

# Black et al. 2022, "GPT-NeoX-20B": parallel attention and feed-forward, rotary positions on a quarter of each head,
# exact GELU, untied output, small initial weights.
_GPT_NEOX: dict[str, object] = {
    **_GPT2,
    'position_embedding': 'rotary',
    'partial_rotary_factor': 0.25,
    'activation': 'gelu',
    'parallel_residual': True,
    'tie_embeddings': False,
    'init': 'small',
}

# Lozhkov et al. 2024, "StarCoder 2 and The Stack v2": GPT-2 with rotary positions and sliding windows. Set
# model.num_kv_heads. The rotary base is that of the models of 3B and 7B.
_STARCODER2: dict[str, object] = {
    **_GPT2,
    'position_embedding': 'rotary',
    'rope_theta': 1_000_000.0,
    'attention_pattern': 'S',
    'sliding_window': 4096,
}

# Touvron et al. 2023, "LLaMA": RMSNorm, SwiGLU, rotary positions on the entire head, no biases, untied output. The
# paper does not specify initial weights. The released configs use 0.02; residual outputs are scaled as in GPT-2.
_LLAMA: dict[str, object] = {
    **_GPT2,
    'position_embedding': 'rotary',
    'norm': 'rmsnorm',
    'activation': 'swiglu',
    'use_bias': False,
    'tie_embeddings': False,
}

# Yang et al. 2025, "Qwen3 Technical Report": Llama with normalized queries and keys and a larger rotary base. All
# model sizes use head_dim=128, so set model.head_dim. Models up to 4B tie the output to the embedding.
_QWEN3: dict[str, object] = {
    **_LLAMA,
    'rope_theta': 1_000_000.0,
    'norm_epsilon': 1e-6,
    'qk_norm': True,
}

# Qwen Team 2024, "Qwen2.5 Technical Report": Llama with biases of queries, keys and values. Models up to 3B tie the
# output to the embedding.
_QWEN2: dict[str, object] = {
    **_LLAMA,
    'rope_theta': 1_000_000.0,
    'norm_epsilon': 1e-6,
    'qkv_bias': True,
}

# Hugging Face 2025, SmolLM3: Llama without rotary positions in every fourth layer (Yang et al. 2025, "Rope to Nope and
# Back Again"), and a tied output.
_SMOLLM3: dict[str, object] = {
    **_LLAMA,
    'rope_theta': 2_000_000.0,
    'norm_epsilon': 1e-6,
    'attention_pattern': 'LLLN',
    'tie_embeddings': True,
}

# OLMo Team 2024, "2 OLMo 2 Furious": Llama with norms of the outputs of attention and feed-forward instead of their
# inputs, and queries and keys normalized over all heads.
_OLMO2: dict[str, object] = {
    **_LLAMA,
    'rope_theta': 500_000.0,
    'norm_epsilon': 1e-6,
    'norm_placement': 'post',
    'qk_norm': True,
    'qk_norm_scope': 'projection',
}

# OLMo Team 2025, "OLMo 3": OLMo 2 with sliding windows in three of four layers, whose rotary frequencies stay those of
# the original training if `model.rope_scaling` extends the context.
_OLMO3: dict[str, object] = {
    **_OLMO2,
    'rope_local_theta': 500_000.0,
    'attention_pattern': 'SSSL',
    'sliding_window': 4096,
}

# IBM 2024, Granite 3: Llama with factors of embedding, residual branches, scores and logits, as in maximal update
# parametrization (Yang et al. 2022). These values are those of granite-3.3-2b-base.
_GRANITE: dict[str, object] = {
    **_LLAMA,
    'rope_theta': 10_000_000.0,
    'embedding_multiplier': 12.0,
    'residual_multiplier': 0.22,
    'attention_multiplier': 0.015625,
    'logits_scaling': 8.0,
    'tie_embeddings': True,
}

# Abdin et al. 2024, "Phi-3 Technical Report": Llama. Phi-4-mini rotates 3/4 of each head and ties the output.
_PHI3: dict[str, object] = {**_LLAMA}

# Gemma Team 2024, "Gemma 2": RMSNorm with 1 + scale before and after each branch, GEGLU, alternating windows, soft caps
# of scores and logits, and a scaled, tied embedding.
_GEMMA2: dict[str, object] = {
    **_LLAMA,
    'norm_epsilon': 1e-6,
    'norm_unit_offset': True,
    'norm_placement': 'both',
    'embedding_multiplier': 0.0,
    'attention_softcap': 50.0,
    'logit_softcap': 30.0,
    'activation': 'geglu_tanh',
    'tie_embeddings': True,
    'attention_pattern': 'SL',
    'sliding_window': 4096,
}

# Gemma Team 2025, "Gemma 3 Technical Report": Gemma 2 with normalized queries and keys instead of soft caps. Five
# layers with windows precede each full layer, and the two kinds of layers have different rotary frequencies.
_GEMMA3: dict[str, object] = {
    **_GEMMA2,
    'rope_theta': 1_000_000.0,
    'rope_local_theta': 10_000.0,
    'qk_norm': True,
    'attention_softcap': 0.0,
    'logit_softcap': 0.0,
    'attention_pattern': 'SSSSSL',
    'sliding_window': 512,
}

# Jiang et al. 2024, "Mixtral of Experts": Llama with experts, which the keys of experts set.
_MIXTRAL: dict[str, object] = {**_LLAMA, 'rope_theta': 1_000_000.0}

# Yang et al. 2025, "Qwen3 Technical Report": Qwen3 with experts.
_QWEN3_MOE: dict[str, object] = {**_QWEN3}

# DeepSeek-AI 2024, "DeepSeek-V2" and "DeepSeek-V3 Technical Report": Llama with latent attention and experts. Set the
# sizes of latent attention and the keys of the router.
_DEEPSEEK: dict[str, object] = {**_LLAMA, 'norm_epsilon': 1e-6}

# OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card": alternating windows, attention sinks, biases, and experts with
# a clamped SwiGLU. Set model.router_use_bias.
_GPT_OSS: dict[str, object] = {
    **_LLAMA,
    'rope_theta': 150_000.0,
    'attention_sinks': True,
    'activation': 'swiglu_oai',
    'use_bias': True,
    'attention_pattern': 'SL',
    'sliding_window': 128,
}

# Karpathy 2025, nanochat: norms without parameters, also after the embedding and on queries and keys; squared ReLU
# (So et al. 2021, "Primer"); logits soft-capped to ±15; untied output; residual outputs initialized to zero.
_NANOCHAT: dict[str, object] = {
    **_LLAMA,
    'norm_epsilon': 1e-6,
    'norm_use_scale': False,
    'qk_norm': True,
    'embedding_norm': True,
    'logit_softcap': 15.0,
    'activation': 'relu2',
    'init': 'uniform',
}

FAMILIES: dict[str, dict[str, object]] = {
    'gpt2': _GPT2,
    'gpt_neox': _GPT_NEOX,
    'starcoder2': _STARCODER2,
    'llama': _LLAMA,
    'qwen2': _QWEN2,
    'qwen3': _QWEN3,
    'smollm3': _SMOLLM3,
    'olmo2': _OLMO2,
    'olmo3': _OLMO3,
    'granite': _GRANITE,
    'phi3': _PHI3,
    'gemma2': _GEMMA2,
    'gemma3': _GEMMA3,
    'mixtral': _MIXTRAL,
    'qwen3_moe': _QWEN3_MOE,
    'deepseek_v2': _DEEPSEEK,
    'deepseek_v3': _DEEPSEEK,
    'gpt_oss': _GPT_OSS,
    'nanochat': _NANOCHAT,
}


# Values of model.activation with one and with two input projections.
PLAIN_ACTIVATIONS = ('gelu', 'gelu_tanh', 'relu', 'relu2', 'silu')
GATED_ACTIVATIONS = ('swiglu', 'swiglu_oai', 'geglu', 'geglu_tanh', 'reglu')


def is_of_experts(path: str) -> bool:
    """Returns True if a parameter with this dotted path has an additional axis that numbers experts."""
    return '.experts.' in path
