"""Types and ranges of the numbers that are read from the JSON files of a model."""

from __future__ import annotations

from typing import NamedTuple

from maxlm.config.keys import declared_keys
from maxlm.config.sections.ranges import INT32, Range


class Number(NamedTuple):
    """Type and range of the values of a key.

    Attributes:
        is_integer: only integers are allowed; floats such as 2.0 are rejected.
        allowed: smallest and largest value.
    """

    is_integer: bool
    allowed: Range

    def __contains__(self, value: object) -> bool:
        """Returns True if a JSON value is a number of this type and range; nan and infinities are not."""
        types = int if self.is_integer else int | float
        return isinstance(value, types) and not isinstance(value, bool) and value in self.allowed

    def __str__(self) -> str:
        return f'{"an integer" if self.is_integer else "a number"} of {self.allowed}'


def _range(key: str) -> Range:
    allowed = declared_keys()[key].range
    assert allowed is not None, key
    return allowed


def _integer(key: str) -> Number:
    # In a config of maxlm, 0 means a derived size. In these files, the key is missing instead.
    allowed = _range(f'model.{key}')
    return Number(True, allowed._replace(low=max(1, allowed.low)))


def _float(key: str, *, or_zero: bool = False) -> Number:
    allowed = _range(f'model.{key}')
    return Number(False, allowed._replace(or_zero=allowed.or_zero or or_zero))


_POSITIONS = Number(True, Range(_range('data.seq_len').low, INT32))
_COUNT = Number(True, Range(0, INT32))
NUMBERS: dict[str, Number] = {
    # config.json: sizes.
    'vocab_size': _integer('vocab_size'),
    'hidden_size': _integer('dim'),
    'n_embd': _integer('dim'),
    'num_hidden_layers': _integer('num_layers'),
    'n_layer': _integer('num_layers'),
    'n_kv_head': _integer('num_kv_heads'),
    'num_attention_heads': _integer('num_heads'),
    'n_head': _integer('num_heads'),
    'num_key_value_heads': _integer('num_kv_heads'),
    'head_dim': _integer('head_dim'),
    'intermediate_size': _integer('ffn_dim'),
    'kv_lora_rank': _integer('kv_lora_rank'),
    'q_lora_rank': _integer('q_lora_rank'),
    'qk_nope_head_dim': _integer('qk_nope_head_dim'),
    'qk_rope_head_dim': _integer('qk_rope_head_dim'),
    'v_head_dim': _integer('v_head_dim'),
    'first_k_dense_replace': _COUNT,
    'n_inner': _integer('ffn_dim'),
    'max_position_embeddings': _POSITIONS,
    'n_positions': _POSITIONS,
    'sequence_len': _POSITIONS,
    'sliding_window': _integer('sliding_window'),
    'max_window_layers': _COUNT,
    'sliding_window_pattern': Number(True, Range(1, INT32)),
    'no_rope_layer_interval': Number(True, Range(1, INT32)),
    'query_pre_attn_scalar': Number(True, Range(1, 10**8)),
    'attention_multiplier': _float('attention_multiplier')._replace(allowed=Range(1e-4, 1e5)),
    'embedding_multiplier': _float('embedding_multiplier')._replace(allowed=Range(1e-4, 1e5)),
    'residual_multiplier': _float('residual_multiplier'),
    'logits_scaling': _float('logits_scaling'),
    'attn_logit_softcapping': _float('attention_softcap'),
    'rms_norm_eps': _float('norm_epsilon'),
    'norm_epsilon': _float('norm_epsilon'),
    'layer_norm_eps': _float('norm_epsilon'),
    'layer_norm_epsilon': _float('norm_epsilon'),
    'final_logit_softcapping': _float('logit_softcap'),
    'num_experts_per_tok': _integer('num_experts_per_token'),
    'moe_intermediate_size': _integer('expert_ffn_dim'),
    'n_shared_experts': _COUNT,
    'n_group': _integer('num_expert_groups'),
    'topk_group': _integer('num_groups_per_token'),
    'routed_scaling_factor': _float('routed_scaling_factor'),
    # config.json: number of experts, which is 0 in dense models.
    'num_experts': _COUNT,
    'num_local_experts': _COUNT,
    'n_routed_experts': _COUNT,
    'moe_num_experts': _COUNT,
    # config.json: rotary positions, at top level and in rope_parameters or rope_scaling.
    'rope_theta': _float('rope_theta'),
    'rope_local_base_freq': _float('rope_theta'),
    'rotary_emb_base': _float('rope_theta'),
    'partial_rotary_factor': _float('partial_rotary_factor'),
    'rotary_pct': _float('partial_rotary_factor'),
    'factor': _float('rope_scaling_factor'),
    'original_max_position_embeddings': _integer('original_max_positions'),
    'low_freq_factor': _float('rope_low_freq_factor'),
    'high_freq_factor': _float('rope_high_freq_factor'),
    # As in Transformers, 0 means the default.
    'beta_slow': _float('rope_beta_slow', or_zero=True),
    'beta_fast': _float('rope_beta_fast', or_zero=True),
    'attention_factor': Number(False, _range('model.rope_attention_factor')._replace(or_zero=False)),
    'mscale': Number(False, Range(0, 10)),
    'mscale_all_dim': Number(False, Range(0, 10)),
    # generation_config.json. Some files use -1 for a token that does not exist.
    'bos_token_id': Number(True, Range(-1, INT32)),
    'eos_token_id': Number(True, Range(-1, INT32)),
    'pad_token_id': Number(True, Range(-1, INT32)),
}
