"""Tests the sizes of latent attention, and the keys that exclude it."""

import pytest

from maxlm.errors import InputError
from tests.small import LATENT, small_config


def test_sizes_are_resolved():
    model = small_config(**LATENT, model__q_lora_rank=20).model
    assert (model.head_dim, model.num_kv_heads, model.value_dim) == (16, 4, 12)
    plain = small_config(model__family='llama', model__num_kv_heads=2).model
    assert (plain.head_dim, plain.num_kv_heads, plain.value_dim) == (8, 2, 8)
    # The number of heads need not divide the width.
    assert small_config(**LATENT, model__num_heads=3).model.head_dim == 16


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'q_lora_rank': 8, 'kv_lora_rank': 0}, r'model\.q_lora_rank=8 requires latent attention'),
        ({'v_head_dim': 0}, r'model\.v_head_dim=0 with model\.kv_lora_rank=24'),
        ({'v_head_dim': 17}, r'model\.v_head_dim=17 is above .*=16; set it to 16 or less'),
        ({'num_kv_heads': 2}, r'model\.num_kv_heads=2 .* requires model\.num_kv_heads=4'),
        ({'head_dim': 8}, r'model\.head_dim=8 .* requires model\.head_dim=16'),
        ({'family': 'gpt2'}, r'model\.position_embedding=learned .* requires model\.position_embedding=rotary'),
        ({'family': 'qwen3'}, r'model\.qk_norm=True .* requires model\.qk_norm=False'),
        ({'use_bias': True}, r'model\.use_bias=True .* requires model\.use_bias=False'),
        ({'value_embedding_pattern': 'V'}, r"_pattern=V .* requires model\.value_embedding_pattern=''"),
        ({'relative_attention_multiplier': 2.0}, r'=2\.0 .* requires model\.relative_attention_multiplier=1\.0'),
        ({'qk_rope_head_dim': 5}, r'is an odd number of dimensions'),
        ({'rope_mscale_all_dim': 1.0}, r'model\.rope_mscale_all_dim=1.0 has no effect with model\.rope_scaling=none'),
    ],
)
def test_contradictions_are_refused_by_name(settings, message):
    without = {key: 0 for key in LATENT if settings.get('kv_lora_rank') == 0 and key != 'model__family'}
    given = {f'model__{key}': value for key, value in settings.items()}
    with pytest.raises(InputError, match=message):
        small_config(**{**LATENT, **without, **given})
