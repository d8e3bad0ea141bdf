"""Model families: named settings of the decoder's switches.

A family fills every switch of `model.*` that the config leaves open; what the config sets stands.
"""

from __future__ import annotations

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": pre-norm, learned positions, GELU in its
# tanh form, biases everywhere, output tied to the embedding.
_GPT2: dict[str, object] = {
    'position': 'learned',
    'rotary_fraction': 1.0,
    'rotary_theta': 10_000.0,
    'norm': 'layernorm',
    'norm_epsilon': 1e-5,
    'activation': 'gelu_tanh',
    'use_bias': True,
    'parallel_residual': False,
    'tie_embeddings': True,
}

# Black et al. 2022, "GPT-NeoX-20B": attention and feed-forward read the same residual stream, rotary positions on a
# quarter of each head, exact GELU, untied.
_GPT_NEOX: dict[str, object] = {
    **_GPT2,
    'position': 'rotary',
    'rotary_fraction': 0.25,
    'activation': 'gelu',
    'parallel_residual': True,
    'tie_embeddings': False,
}

# Touvron et al. 2023, "LLaMA": RMSNorm, SwiGLU, rotary positions on the whole head, no biases, untied.
_LLAMA: dict[str, object] = {
    **_GPT2,
    'position': 'rotary',
    'norm': 'rmsnorm',
    'activation': 'swiglu',
    'use_bias': False,
    'tie_embeddings': False,
}

FAMILIES: dict[str, dict[str, object]] = {'gpt2': _GPT2, 'gpt_neox': _GPT_NEOX, 'llama': _LLAMA}
