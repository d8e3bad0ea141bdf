"""Model families: named presets for the architecture keys of `model.*`, and the projections of their blocks.

A family sets every architecture key that the config leaves at its default. Keys set in the config take precedence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxlm.config.schema import ModelConfig

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": pre-norm, learned positions, the tanh
# approximation of GELU, biases in all projections, output tied to the embedding.
_GPT2: dict[str, object] = {
    'position_embedding': 'learned',
    'partial_rotary_factor': 1.0,
    'rope_theta': 10_000.0,
    'norm': 'layernorm',
    'norm_epsilon': 1e-5,
    'norm_use_scale': True,
    'qk_norm': False,
    'embedding_norm': False,
    'logit_softcap': 0.0,
    'attention_sinks': False,
    'activation': 'gelu_tanh',
    'use_bias': True,
    'parallel_residual': False,
    'tie_embeddings': True,
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
    'llama': _LLAMA,
    'qwen3': _QWEN3,
    'nanochat': _NANOCHAT,
}


# Values of model.activation that take the outputs of two projections.
GATED_ACTIVATIONS = ('swiglu', 'swiglu_oai')


def projections(model: ModelConfig) -> tuple[str, ...]:
    """Returns the dotted names, within a block, of the projections that can have LoRA adapters (Hu et al. 2022)."""
    modules = ['feedforward'] if model.num_dense_layers or not model.num_experts else []
    modules += ['feedforward.experts'] if model.num_experts else []
    modules += ['feedforward.shared'] if model.num_shared_experts else []
    names = ('gate', 'up', 'down') if model.activation in GATED_ACTIVATIONS else ('up', 'down')
    of_attention = ['query', 'key', 'value', 'out']
    if model.kv_lora_rank:
        of_attention = [*(['query_latent'] if model.q_lora_rank else []), 'key_value_latent', *of_attention]
    attention = tuple(f'attention.{name}' for name in of_attention)
    return (*attention, *(f'{module}.{name}' for module in modules for name in names))


def is_of_experts(path: str) -> bool:
    """Returns True if a parameter with this dotted path has an additional axis that numbers experts."""
    return '.experts.' in path
