"""Model families: named settings of the decoder's switches.

A family fills every switch of `model.*` that the config leaves open; what the config sets stands.
"""

from __future__ import annotations

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": pre-norm, learned positions, GELU in its
# tanh form, biases everywhere, output tied to the embedding.
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
    'activation': 'gelu_tanh',
    'use_bias': True,
    'parallel_residual': False,
    'tie_embeddings': True,
    'init': 'normal',
}

# Black et al. 2022, "GPT-NeoX-20B": attention and feed-forward read the same residual stream, rotary positions on a
# quarter of each head, exact GELU, untied, small initial weights.
_GPT_NEOX: dict[str, object] = {
    **_GPT2,
    'position_embedding': 'rotary',
    'partial_rotary_factor': 0.25,
    'activation': 'gelu',
    'parallel_residual': True,
    'tie_embeddings': False,
    'init': 'small',
}

# Touvron et al. 2023, "LLaMA": RMSNorm, SwiGLU, rotary positions on the whole head, no biases, untied. The paper is
# silent on initial weights; the released configs say 0.02, and residual outputs are scaled as in GPT-2.
_LLAMA: dict[str, object] = {
    **_GPT2,
    'position_embedding': 'rotary',
    'norm': 'rmsnorm',
    'activation': 'swiglu',
    'use_bias': False,
    'tie_embeddings': False,
}

# Yang et al. 2025, "Qwen3 Technical Report": Llama with normalized queries and keys, and a larger rotary base. Its
# heads are 128 wide whatever the width of the model: set model.head_dim. Up to 4B the output is tied.
_QWEN3: dict[str, object] = {
    **_LLAMA,
    'rope_theta': 1_000_000.0,
    'norm_epsilon': 1e-6,
    'qk_norm': True,
}

# Karpathy 2025, nanochat: norms without parameters, also after the embedding and on queries and keys; squared ReLU (So
# et al. 2021, "Primer"); logits in ±15; untied; residual outputs start at zero.
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
