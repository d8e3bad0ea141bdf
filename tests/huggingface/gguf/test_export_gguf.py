"""Tests GGUF files, read by the library gguf and by Transformers, against maxlm."""

import json
import sys

import jax
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file

from maxlm.data.chat.template import CHATML
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer, chars_tokenizer, train_bpe
from maxlm.errors import InputError
from maxlm.huggingface.config_conversion import choose_architecture
from maxlm.huggingface.export_model import export_model
from maxlm.huggingface.gguf import tensors as gguf_tensors
from maxlm.huggingface.gguf.export_gguf import export_gguf
from maxlm.inference.load import load_model
from maxlm.installation import pip_install
from maxlm.training.state import abstract_model
from tests.conftest import ROOT
from tests.huggingface.expert_models import EXPERT_MODELS
from tests.huggingface.gguf.files import gguf, read
from tests.huggingface.sentencepiece_tokenizer import sentencepiece_tokenizer
from tests.huggingface.workdirs import MODELS, make_exported, make_workdir, parameters
from tests.small import model_keys, small_config

# Transformers does not read the head dimension from GGUF files of Qwen3, and assumes 128. It does not read the scale of
# scores of Gemma, and assumes that of 256.
PLAIN = model_keys(attention_pattern='L', sliding_window=0, rope_scaling='none')
CASES = {
    'llama': {**MODELS['llama'], 'model__dim': 64, 'model__head_dim': 16, 'model__ffn_dim': 96},
    'qwen3': {
        **MODELS['qwen3'],
        **PLAIN,
        **model_keys(rope_scaling_factor=1.0, num_layers=1, num_heads=2, head_dim=128, tie_embeddings=True),
    },
    'qwen2': model_keys(family='qwen2', num_layers=1, num_kv_heads=2),
    # Transformers assumes a padding token.
    'phi3': model_keys(family='phi3', num_layers=1, num_kv_heads=2, vocab_size=32_001),
    'gemma2': model_keys(family='gemma2', sliding_window=20, head_dim=256),
    'gemma3': model_keys(family='gemma3', num_layers=6, sliding_window=20, head_dim=256, num_kv_heads=1),
    # Transformers does not read the rotary base.
    'starcoder2': model_keys(
        family='starcoder2', rope_theta=10_000.0, num_kv_heads=2, attention_pattern='L', sliding_window=0
    ),
    # Transformers assumes experts of width 768.
    'qwen3moe': {
        **EXPERT_MODELS['qwen3_moe'],
        **model_keys(num_layers=1, head_dim=128, num_kv_heads=2, expert_ffn_dim=768),
    },
}
YARN = model_keys(rope_scaling='yarn', rope_scaling_factor=2.0)
TOKENS = np.arange(40, dtype=np.int32)[None]


@pytest.fixture(scope='module')
def tokenizer():
    return train_bpe([(ROOT / 'LICENSE').read_text()], 300)


@pytest.fixture(scope='module')
def workdirs(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp('gguf')
    for name, overrides in CASES.items():
        overrides = {'model__vocab_size': tokenizer.vocab_size + 3, **overrides}
        config = small_config(**overrides)
        arrays = parameters(config, choose_architecture(config.model).model_type)
        # Values that float16 can represent, so that nothing is lost.
        rounded = {path: values.astype(np.float16).astype(np.float32) for path, values in arrays.items()}
        make_workdir(folder / name, overrides, tokenizer=tokenizer, changed=rounded, step=7)
    return folder


def our_logits(workdir):
    model = load_model(str(workdir), num_devices=1)
    graph, _ = nnx.split(abstract_model(model.config, model.layout))

    @jax.jit
    def run(params):
        decoder = nnx.merge(graph, params)
        return decoder.logits(decoder(TOKENS)[0])

    return np.asarray(run(model.params))


def their_logits(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS).long()).logits.numpy()


@pytest.mark.parametrize('name', CASES)
def test_transformers_and_maxlm_compute_the_same(workdirs, tmp_path, name):
    done = export_gguf(str(workdirs / name), str(tmp_path / 'model.gguf'), dtype='f16', show=False)
    assert (done.kind, done.float16_tensors, done.bytes) == (name, (), done.path.stat().st_size)
    assert [path.name for path in tmp_path.iterdir()] == ['model.gguf']
    ours = our_logits(workdirs / name)
    np.testing.assert_allclose(their_logits(done.path), ours, atol=1e-3)
    assert ours.std() > 0.5


def test_unpermuted_heads_are_detected(workdirs, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_tensors, 'interleave_rotary', lambda name, values, model: values)
    path = tmp_path / 'model.gguf'
    export_gguf(str(workdirs / 'llama'), str(path), dtype='f16', show=False)
    assert np.abs(their_logits(path) - our_logits(workdirs / 'llama')).max() > 0.1


@pytest.mark.parametrize(('dtype', 'tolerance'), [('f16', 0), ('f32', 0), ('q8_0', 0.01)])
def test_each_tensor_equals_the_export(workdirs, tmp_path, dtype, tolerance):
    workdir = workdirs / 'llama'
    export_model(
        str(workdir), str(tmp_path / 'hf'), architecture='auto', dtype='float32', max_shard_size=10**9, show=False
    )
    expected = load_file(tmp_path / 'hf' / 'model.safetensors')
    export_gguf(str(workdir), str(tmp_path / 'model.gguf'), dtype=dtype, show=False)
    found, _ = read(tmp_path / 'model.gguf')
    assert len(found) == len(expected)
    for ours, theirs in {
        'token_embd.weight': 'model.embed_tokens.weight',
        'output.weight': 'lm_head.weight',
        'output_norm.weight': 'model.norm.weight',
        'blk.1.attn_norm.weight': 'model.layers.1.input_layernorm.weight',
        'blk.1.ffn_norm.weight': 'model.layers.1.post_attention_layernorm.weight',
        'blk.0.attn_v.weight': 'model.layers.0.self_attn.v_proj.weight',
        'blk.1.attn_output.weight': 'model.layers.1.self_attn.o_proj.weight',
        'blk.0.ffn_gate.weight': 'model.layers.0.mlp.gate_proj.weight',
        'blk.1.ffn_up.weight': 'model.layers.1.mlp.up_proj.weight',
        'blk.1.ffn_down.weight': 'model.layers.1.mlp.down_proj.weight',
    }.items():
        kind, values = found[ours]
        assert kind == ('F32' if expected[theirs].ndim == 1 else dtype.upper())
        np.testing.assert_allclose(values, expected[theirs], atol=tolerance, err_msg=ours)
    # Rows of queries and keys are permuted within heads of 16: row 1 was the first row of the second half.
    for letter in 'qk':
        _, values = found[f'blk.1.attn_{letter}.weight']
        theirs = expected[f'model.layers.1.self_attn.{letter}_proj.weight']
        np.testing.assert_allclose(values[16:20], theirs[[16, 24, 17, 25]], atol=tolerance)
        assert np.abs(values - theirs).max() > 0.1


def test_rows_of_incomplete_blocks_are_not_quantized(tmp_path):
    make_workdir(tmp_path / 'run', {**CASES['llama'], 'model__ffn_dim': 40})
    done = export_gguf(str(tmp_path / 'run'), str(tmp_path / 'model.gguf'), dtype='q8_0', show=False)
    assert done.float16_tensors == tuple(f'model.layers.{layer}.mlp.down_proj.weight' for layer in range(2))
    tensors, _ = read(tmp_path / 'model.gguf')
    assert (tensors['blk.0.ffn_down.weight'][0], tensors['blk.0.ffn_up.weight'][0]) == ('F16', 'Q8_0')


def test_keys(workdirs, tmp_path, tokenizer):
    export_gguf(str(workdirs / 'llama'), str(tmp_path / 'model.gguf'), dtype='q8_0', show=False)
    _, keys = read(tmp_path / 'model.gguf')
    assert keys['general.architecture'] == 'llama'
    assert keys['general.file_type'] == gguf.LlamaFileType.MOSTLY_Q8_0
    numbers = {'context_length': 64, 'embedding_length': 64, 'block_count': 2, 'feed_forward_length': 96}
    heads = {'attention.head_count': 4, 'attention.head_count_kv': 2, 'rope.dimension_count': 16}
    for key, value in {**numbers, **heads, 'rope.freq_base': 10_000.0, 'attention.key_length': 16}.items():
        assert keys[f'llama.{key}'] == value, key
    facts = json.loads(tokenizer.to_json())
    assert (keys['tokenizer.ggml.model'], keys['tokenizer.ggml.pre']) == ('gpt2', 'gpt-2')
    tokens, types = keys['tokenizer.ggml.tokens'], keys['tokenizer.ggml.token_type']
    assert len(tokens) == len(types) == tokenizer.vocab_size + 3
    assert all(tokens[index] == token for token, index in facts['model']['vocab'].items())
    assert types == [3] + [1] * (tokenizer.vocab_size - 1) + [5] * 3
    assert keys['tokenizer.ggml.merges'] == [' '.join(merge) for merge in facts['model']['merges']]
    assert keys['tokenizer.ggml.eos_token_id'] == keys['tokenizer.ggml.bos_token_id'] == 0
    assert keys['tokenizer.ggml.add_bos_token'] is False
    assert 'tokenizer.chat_template' not in keys
    # Transformers builds the same tokenizer from the file.
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file='model.gguf')
    text = 'Unless required by applicable law, 2004 (the "License")'
    assert theirs(text)['input_ids'] == tokenizer.encode_batch([text])[0].tolist()


DEEPSEEK = EXPERT_MODELS['deepseek_v3']
GEMMA = {**CASES['gemma2'], 'model__num_layers': 2}
SMOLLM3 = model_keys(family='smollm3', num_layers=4)
OLMO3 = model_keys(family='olmo3', num_layers=4, sliding_window=9)


@pytest.mark.parametrize(
    ('overrides', 'expected'),
    [
        (
            model_keys(family='granite'),
            {
                'granite.embedding_scale': 12.0,
                'granite.residual_scale': 0.22,
                'granite.attention.scale': 0.015625,
                'granite.logit_scale': 8.0,
            },
        ),
        (
            GEMMA,
            {
                'gemma2.attention.sliding_window': 20,
                'gemma2.attn_logit_softcapping': 50.0,
                'gemma2.final_logit_softcapping': 30.0,
            },
        ),
        (CASES['gemma3'], {'gemma3.rope.freq_base': 1e6, 'gemma3.rope.freq_base_swa': 1e4}),
        (
            OLMO3,
            {
                'general.architecture': 'olmo2',
                'olmo2.attention.sliding_window': 9,
                'olmo2.attention.sliding_window_pattern': [True, True, True, False],
            },
        ),
        (SMOLLM3, {'general.architecture': 'smollm3', 'smollm3.rope.freq_base': 2e6}),
        (
            {**EXPERT_MODELS['mixtral'], 'model__ffn_dim': 40},
            {
                'general.architecture': 'llama',
                'llama.expert_count': 4,
                'llama.expert_used_count': 2,
                'llama.feed_forward_length': 12,
            },
        ),
        (
            EXPERT_MODELS['gpt_oss'],
            {
                'general.architecture': 'gpt-oss',
                'gpt-oss.attention.sliding_window': 6,
                'gpt-oss.expert_feed_forward_length': 12,
            },
        ),
        (
            DEEPSEEK,
            {
                'general.architecture': 'deepseek2',
                'deepseek2.attention.head_count_kv': 1,
                'deepseek2.attention.q_lora_rank': 20,
                'deepseek2.attention.kv_lora_rank': 24,
                'deepseek2.attention.key_length': 30,
                'deepseek2.attention.value_length': 24,
                'deepseek2.attention.key_length_mla': 16,
                'deepseek2.attention.value_length_mla': 12,
                'deepseek2.rope.dimension_count': 6,
                'deepseek2.leading_dense_block_count': 1,
                'deepseek2.expert_shared_count': 2,
                'deepseek2.expert_weights_scale': 1.5,
                'deepseek2.expert_weights_norm': True,
                'deepseek2.expert_gating_func': 2,
                'deepseek2.expert_group_count': 2,
                'deepseek2.expert_group_used_count': 1,
            },
        ),
        # The three keys are required also without experts.
        (
            {**MODELS['deepseek_v3'], **YARN, 'model__rope_mscale_all_dim': 0.5, 'model__rope_attention_factor': 1.0},
            {
                'deepseek2.leading_dense_block_count': 2,
                'deepseek2.expert_shared_count': 0,
                'deepseek2.expert_feed_forward_length': 128,
                'deepseek2.rope.scaling.yarn_log_multiplier': 0.05,
            },
        ),
        ({'model__family': 'starcoder2', **PLAIN}, {'starcoder2.attention.layer_norm_epsilon': 1e-5}),
        (
            model_keys(
                family='phi3',
                partial_rotary_factor=0.5,
                rope_scaling='longrope',
                rope_scaling_factor=4.0,
                rope_short_factors=(1.0, 1.5),
                rope_long_factors=(2.0, 8.0),
            ),
            {'phi3.rope.dimension_count': 4, 'phi3.rope.scaling.attn_factor': 1.224744871391589},
        ),
    ],
    ids=lambda value: value.get('model__family'),
)
def test_keys_of_an_architecture(tmp_path, overrides, expected):
    make_workdir(tmp_path / 'run', overrides)
    export_gguf(str(tmp_path / 'run'), str(tmp_path / 'model.gguf'), dtype='f16', show=False)
    tensors, keys = read(tmp_path / 'model.gguf')
    for key, value in expected.items():
        assert keys[key] == pytest.approx(value), key
    longrope = {name: values.tolist() for name, (_, values) in tensors.items() if name.startswith('rope_factors')}
    factors = {'rope_factors_long.weight': [2.0, 8.0], 'rope_factors_short.weight': [1.0, 1.5]}
    assert longrope == (factors if 'phi3' in str(expected) else {})


def test_a_chat_template_and_its_end_of_turn(tmp_path):
    tokenizer = bytes_tokenizer().with_special_tokens(['<|im_start|>', '<|im_end|>'])
    make_workdir(tmp_path / 'run', CASES['llama'], tokenizer=tokenizer)
    (tmp_path / 'run' / 'chat_template.jinja').write_text(CHATML)
    export_gguf(str(tmp_path / 'run'), str(tmp_path / 'model.gguf'), dtype='f16', show=False)
    _, keys = read(tmp_path / 'model.gguf')
    assert keys['tokenizer.chat_template'] == CHATML
    assert (keys['tokenizer.ggml.eos_token_id'], keys['tokenizer.ggml.eot_token_id']) == (256, 258)
    # A byte tokenizer has no merges, but the format has no empty list.
    (merge,) = keys['tokenizer.ggml.merges']
    assert all(len(part) > 1 for part in merge.split())


def test_a_tokenizer_of_sentencepiece(tmp_path):
    facts = sentencepiece_tokenizer()
    make_workdir(tmp_path / 'run', {**CASES['llama'], 'model__vocab_size': 300})
    (tmp_path / 'run' / 'tokenizer.json').write_text(json.dumps(facts))
    export_gguf(str(tmp_path / 'run'), str(tmp_path / 'model.gguf'), dtype='f16', show=False)
    _, keys = read(tmp_path / 'model.gguf')
    assert (keys['tokenizer.ggml.model'], keys['tokenizer.ggml.unknown_token_id']) == ('llama', 0)
    assert keys['tokenizer.ggml.add_space_prefix'] is True
    assert 'tokenizer.ggml.merges' not in keys
    # Transformers derives the merges from the scores.
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file='model.gguf')
    ours = tokenizers.Tokenizer.from_str(json.dumps(facts))
    texts = ['then one hen', 'the  tone', 'zo\nthé']
    ids = [ours.encode(text, add_special_tokens=False).ids for text in texts]
    assert [theirs(text, add_special_tokens=False)['input_ids'] for text in texts] == ids
    assert max(map(max, ids)) > 270


@pytest.mark.parametrize(
    ('overrides', 'found'),
    [
        (model_keys(rope_scaling='linear', rope_scaling_factor=4.0), {'type': 'linear', 'factor': 4.0}),
        (model_keys(rope_scaling='yarn', rope_scaling_factor=2.0), {'type': 'yarn', 'factor': 2.0}),
    ],
)
def test_scaled_positions(tmp_path, overrides, found):
    make_workdir(tmp_path / 'run', {**CASES['llama'], **overrides})
    export_gguf(str(tmp_path / 'run'), str(tmp_path / 'model.gguf'), dtype='f16', show=False)
    _, keys = read(tmp_path / 'model.gguf')
    assert {name: keys[f'llama.rope.scaling.{name}'] for name in found} == found


def test_the_factors_of_llama3_equal_transformers(tmp_path):
    scaling = model_keys(rope_scaling='llama3', rope_scaling_factor=8.0, original_max_positions=32)
    run, exported = make_exported(tmp_path, {**CASES['llama'], **scaling})
    export_gguf(str(run), str(tmp_path / 'model.gguf'), dtype='f16', show=False)
    tensors, _ = read(tmp_path / 'model.gguf')
    kind, factors = tensors['rope_freqs.weight']
    config = transformers.AutoConfig.from_pretrained(exported)
    scaled = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq.numpy()
    plain = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    assert kind == 'F32'
    np.testing.assert_allclose(plain / factors, scaled, rtol=1e-5)
    assert factors.max() == 8
    assert factors.min() == 1


@pytest.mark.parametrize(
    ('overrides', 'fragments'),
    [
        (MODELS['gpt2'], ['does not support gpt2 models']),
        (MODELS['mistral'], ['model.attention_pattern=S', 'sliding windows']),
        ({**SMOLLM3, 'model__attention_pattern': 'NL'}, ['model.attention_pattern=NL', 'LLLN']),
        ({**OLMO3, 'model__rope_local_theta': 9.0}, ['model.rope_local_theta=9.0', '500000.0']),
        ({**GEMMA, 'model__attention_multiplier': 0.5}, ['model.attention_multiplier=0.5', '0.0625']),
        ({**GEMMA, 'model__tie_embeddings': False}, ['model.tie_embeddings=False']),
        ({**GEMMA, 'model__attention_softcap': 0.0}, ['model.attention_softcap=0.0', 'a soft cap']),
        ({**CASES['gemma3'], 'model__logit_softcap': 5.0}, ['model.logit_softcap=5.0', 'require 0']),
        ({**OLMO3, 'model__head_dim': 4}, ['model.head_dim=4', 'require 8']),
        ({**OLMO3, 'model__tie_embeddings': True}, ['model.tie_embeddings=True']),
        ({**EXPERT_MODELS['qwen3_moe'], 'model__router_normalize': False}, ['model.router_normalize=False']),
        ({**EXPERT_MODELS['deepseek_v2'], 'model__q_lora_rank': 20}, ['model.expert_group_score=max', 'top2']),
        ({**DEEPSEEK, 'model__q_lora_rank': 0}, ['model.q_lora_rank=0', '3 layers', 'above 0']),
        (
            {**MODELS['deepseek_v3'], 'model__num_layers': 27, 'model__dim': 8},
            ['model.q_lora_rank=20', '27 layers', 'require 0'],
        ),
        ({**DEEPSEEK, **YARN}, ['model.rope_attention_factor=0.0']),
        ({**DEEPSEEK, **YARN, 'model__rope_attention_factor': 1.0}, ['model.rope_mscale_all_dim=0.0']),
        ({**EXPERT_MODELS['gpt_oss'], 'model__attention_pattern': 'LS'}, ['model.attention_pattern=LS', 'SL']),
        (model_keys(family='starcoder2'), ['model.attention_pattern=S', 'sliding windows']),
        ({'model__family': 'starcoder2', **PLAIN, 'model__activation': 'gelu'}, ['model.activation=gelu']),
        (
            {**GEMMA, 'model__rope_scaling': 'linear', 'model__rope_scaling_factor': 2.0},
            ['model.rope_scaling=linear', 'gemma2'],
        ),
        (
            {**CASES['llama'], 'model__rope_scaling': 'dynamic', 'model__rope_scaling_factor': 2.0},
            ['rope_scaling=dynamic'],
        ),
        (
            {**CASES['llama'], **model_keys(rope_scaling='yarn', rope_scaling_factor=2.0, rope_beta_fast=16.0)},
            ['model.rope_beta_fast=16.0'],
        ),
    ],
)
def test_unsupported_models(tmp_path, overrides, fragments):
    make_workdir(tmp_path / 'run', overrides)
    refuse(tmp_path, *fragments)


def refuse(folder, *fragments, output='model.gguf'):
    before = sorted(folder.iterdir())
    with pytest.raises(InputError) as info:
        export_gguf(str(folder / 'run'), str(folder / output), dtype='f16', show=False)
    for fragment in fragments:
        assert fragment in str(info.value)
    assert '\n' not in str(info.value)
    assert sorted(folder.iterdir()) == before


def test_invalid_outputs_and_values(tmp_path, monkeypatch):
    large = {'blocks.feedforward.up.kernel': np.full((2, 64, 96), 1e6, np.float32)}
    make_workdir(tmp_path / 'run', CASES['llama'], changed=large)
    refuse(tmp_path, 'model.layers.0.mlp.up_proj.weight', 'outside the range of float16')
    # Control: float32 represents these values.
    export_gguf(str(tmp_path / 'run'), str(tmp_path / 'model.gguf'), dtype='f32', show=False)
    (tmp_path / 'model.gguf').unlink()
    refuse(tmp_path, '--output=', 'already exists', output='run')
    refuse(tmp_path, 'not a directory', output='nowhere/model.gguf')
    (tmp_path / 'run' / 'tokenizer.json').write_text(chars_tokenizer(['abc']).to_json())
    refuse(tmp_path, 'tokenizer type is WordLevel', 'only BPE')
    (tmp_path / 'run' / 'tokenizer.json').unlink()
    refuse(tmp_path, 'tokenizer.json', 'file not found')
    monkeypatch.setitem(sys.modules, 'gguf', None)
    refuse(tmp_path, pip_install('gguf'))
