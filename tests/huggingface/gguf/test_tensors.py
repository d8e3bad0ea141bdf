"""Tests the names and layouts of the tensors of models with experts, with gguf's table of names."""

import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from maxlm.huggingface.export_model import export_model
from maxlm.huggingface.gguf.export_gguf import export_gguf
from tests.huggingface.expert_models import EXPERT_MODELS
from tests.huggingface.gguf.files import gguf, read
from tests.huggingface.workdirs import make_workdir

WITH_EXPERTS = {
    **EXPERT_MODELS,
    'deepseek_v2': {
        **EXPERT_MODELS['deepseek_v2'],
        'model__q_lora_rank': 20,
        'model__num_expert_groups': 1,
        'model__tie_embeddings': True,
    },
}


def gguf_arrays(expected, names):
    """Returns the tensors of Transformers in the names and layouts of llama.cpp's conversion scripts."""
    experts, others = {}, {}
    for name, array in expected.items():
        if match := re.fullmatch(r'(.*\.experts)\.(\d+)\.(\w+)\.weight', name):
            experts.setdefault(f'{match[1]}.{match[3]}.weight', []).append(array)
        elif name.endswith('kv_b_proj.weight'):
            # Rows of 10 dims of keys and 12 of values per head.
            keys, values = np.split(array.reshape(4, 22, -1), [10], axis=1)
            others[name.replace('kv_b', 'k_b')] = np.transpose(keys, (0, 2, 1))
            others[name.replace('kv_b', 'v_b')] = values
        elif '.experts.' in name:
            stem = name.removesuffix('_bias')
            suffix = '.bias' if name.endswith('_bias') else '.weight'
            array = array if suffix == '.bias' else np.swapaxes(array, 1, 2)
            if 'gate_up' in stem:
                others[stem.replace('gate_up', 'gate') + suffix] = array[:, ::2]
                others[stem.replace('gate_up', 'up') + suffix] = array[:, 1::2]
            else:
                others[stem + suffix] = array
        else:
            name = f'{name}.weight' if name.endswith('sinks') else name
            others[name.replace('e_score_correction_bias', 'e_score_correction.bias')] = array
    for name, arrays in experts.items():
        # gguf knows the experts of Mixtral by their original names.
        original = re.sub(r'model\.(layers\.\d+)\.block_sparse_moe', r'\1.feed_forward', name)
        others[original] = np.stack(arrays)
    return {names.get_name(name, try_suffixes=('.weight', '.bias')): array for name, array in others.items()}


@pytest.mark.parametrize('name', WITH_EXPERTS)
def test_each_tensor_of_models_with_experts_equals_the_export(tmp_path, name):
    make_workdir(tmp_path / 'run', WITH_EXPERTS[name])
    export_model(
        str(tmp_path / 'run'),
        str(tmp_path / 'hf'),
        architecture=name,
        dtype='float32',
        max_shard_size=10**9,
        show=False,
    )
    done = export_gguf(str(tmp_path / 'run'), str(tmp_path / 'model.gguf'), dtype='f16', show=False)
    arch = next(key for key, kind in gguf.MODEL_ARCH_NAMES.items() if kind == done.kind)
    theirs = load_file(tmp_path / 'hf' / 'model.safetensors')
    expected = gguf_arrays(theirs, gguf.get_tensor_name_map(arch, 3))
    found, _ = read(tmp_path / 'model.gguf')
    assert found.keys() == expected.keys()
    assert done.parameters == sum(array.size for array in theirs.values())
    for tensor, (kind, values) in found.items():
        # Rows of queries and keys of Mixtral are permuted as those of Llama.
        if name == 'mixtral' and ('attn_q' in tensor or 'attn_k' in tensor):
            continue
        assert values.shape == expected[tensor].shape, tensor
        np.testing.assert_allclose(values, expected[tensor], atol=1e-3, err_msg=tensor)
        needs_float32 = values.ndim == 1 or 'ffn_gate_inp' in tensor or tensor.endswith('.bias')
        assert kind == ('F32' if needs_float32 else 'F16'), tensor
    gates, ups = (found[f'blk.1.ffn_{kind}_exps.weight'][1] for kind in ('gate', 'up'))
    assert np.abs(gates - ups).max() > 0.5
