"""Which config.json is refused before its sizes are read, with the reason: what maxlm does not have."""

from __future__ import annotations

from collections.abc import Iterable

from maxlm.errors import InputError
from maxlm.huggingface.fields import Fields

_EXPERTS = ('num_experts', 'num_local_experts', 'n_routed_experts', 'moe_num_experts')
_EXPERT_TYPES = ('mixtral', 'dbrx', 'jetmoe', 'deepseek_v2', 'deepseek_v3', 'gpt_oss', 'llama4')


def check_supported(config: Fields, supported: Iterable[str]) -> None:
    """Raises InputError unless a config.json is one of the supported model types and asks for nothing beyond them."""
    values, source = config.values, config.source
    kind = values.get('model_type')
    if not isinstance(kind, str):
        raise InputError(f'{source}: no model_type; needs one of {", ".join(supported)}')
    if values.get('auto_map'):
        raise config.refusal('auto_map', 'the model needs code of its own, which maxlm does not run')
    if values.get('quantization_config'):
        raise InputError(
            f'{source}: quantization_config: quantized weights are not supported; take the original of float type'
        )
    for key in _EXPERTS:
        if config.integer(key, 0, null=0):
            raise config.refusal(key, 'a mixture of experts is not supported')
    if kind in _EXPERT_TYPES or 'moe' in kind:
        raise InputError(f'{source}: model_type={kind}: a mixture of experts is not supported')
    attention = values.get('attn_config')
    if kind == 'bloom' or values.get('alibi') or (isinstance(attention, dict) and attention.get('alibi')):
        raise InputError(f'{source}: model_type={kind} has ALiBi positions, which maxlm has not')
    if kind not in supported:
        raise InputError(f'{source}: model_type={kind} is not supported; there are {", ".join(supported)}')
