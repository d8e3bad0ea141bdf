"""Tests the import of GGUF files, which `export_gguf` and the library gguf write."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
import transformers

from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.streaming import ParamsReader
from maxlm.data.chat.template import CHATML
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer, train_bpe
from maxlm.errors import InputError
from maxlm.huggingface.gguf import tensors as gguf_tensors
from maxlm.huggingface.gguf.export_gguf import export_gguf
from maxlm.huggingface.gguf.import_gguf import import_gguf
from maxlm.huggingface.gguf.metadata import Metadata
from maxlm.huggingface.gguf.positions import read_positions
from maxlm.huggingface.gguf.read_tokenizer import tokenizer_files
from maxlm.inference.resolve_model import resolved_checkpoint
from maxlm.workdir.files import read_config
from tests.conftest import ROOT
from tests.huggingface.expert_models import EXPERT_MODELS
from tests.huggingface.gguf.files import gguf
from tests.huggingface.sentencepiece_tokenizer import sentencepiece_tokenizer
from tests.huggingface.workdirs import MODELS, make_workdir
from tests.small import model_keys

YARN = model_keys(rope_scaling='yarn', rope_scaling_factor=2.0, original_max_positions=32)
PLAIN = model_keys(attention_pattern='L', sliding_window=0)
DEEPSEEK_YARN = {**YARN, **model_keys(rope_mscale_all_dim=0.5, rope_attention_factor=1.0)}
# All architectures that the export supports, with scaled positions, biases and tied embeddings.
CASES = {
    'llama': MODELS['llama'],
    'llama tied': {**MODELS['llama'], **model_keys(tie_embeddings=True, rope_theta=5e5)},
    'llama with attention biases': {**MODELS['llama'], **model_keys(qkv_bias=True, out_bias=True)},
    'llama with linear positions': {**MODELS['llama'], **model_keys(rope_scaling='linear', rope_scaling_factor=4.0)},
    'llama with YaRN': {**MODELS['llama'], **YARN},
    'llama 3': {
        **MODELS['llama'],
        **model_keys(head_dim=32, rope_scaling='llama3', rope_scaling_factor=8.0, original_max_positions=512),
    },
    'llama 3 with other bounds': {
        **MODELS['llama'],
        **model_keys(head_dim=64, rope_theta=1e4, rope_scaling='llama3', rope_scaling_factor=2.0),
        **model_keys(original_max_positions=4096, rope_high_freq_factor=16.0),
    },
    'qwen2': MODELS['qwen2'],
    'qwen3': {**MODELS['qwen3'], **PLAIN},
    'smollm3': model_keys(family='smollm3', num_layers=6),
    'olmo2': MODELS['olmo2'],
    'olmo3': model_keys(family='olmo3', num_layers=4, sliding_window=9),
    'granite': MODELS['granite'],
    'phi3': {**MODELS['phi3'], **model_keys(num_kv_heads=2)},
    'phi3 longrope': {
        **MODELS['phi3'],
        **model_keys(rope_scaling='longrope', rope_scaling_factor=4.0, max_positions=128, original_max_positions=32),
        **model_keys(rope_short_factors=(1.0, 1.1), rope_long_factors=(2.0, 8.3)),
    },
    'gemma2': {**MODELS['gemma2'], **model_keys(num_layers=3)},
    'gemma3': model_keys(family='gemma3', num_layers=7, sliding_window=6),
    'gemma3 with linear positions': model_keys(
        family='gemma3', num_layers=6, sliding_window=6, rope_scaling='linear', rope_scaling_factor=8.0
    ),
    'mixtral': EXPERT_MODELS['mixtral'],
    # Without dense layers, their width has no effect.
    'qwen3_moe': {**EXPERT_MODELS['qwen3_moe'], 'model__ffn_dim': 12},
    'deepseek_v2': {**EXPERT_MODELS['deepseek_v2'], **model_keys(num_expert_groups=1, q_lora_rank=20)},
    'deepseek_v3': EXPERT_MODELS['deepseek_v3'],
    'deepseek_v3 dense': {**MODELS['deepseek_v3'], **DEEPSEEK_YARN},
    'gpt_oss': {**EXPERT_MODELS['gpt_oss'], **model_keys(num_layers=3, rope_truncate=False)},
    'starcoder2': {**MODELS['starcoder2'], **PLAIN},
}
# Settings that have no effect on a model, and that the file does not have.
UNUSED = ('original_max_positions', 'rope_low_freq_factor', 'rope_high_freq_factor', 'init_std', 'dropout')


def exported(folder, overrides, dtype='f32', tokenizer=None):
    make_workdir(folder / 'run', overrides, tokenizer=tokenizer, step=3)
    return export_gguf(str(folder / 'run'), str(folder / 'model.gguf'), dtype=dtype, show=False).path


def imported(path, output=None, tokenizer=''):
    return import_gguf(path, str(output or path.parent / 'imported'), tokenizer=tokenizer, show=False)


def parameters(workdir):
    reader = ParamsReader(find_local_step(str(workdir)))
    return {name: reader.read(name) for name in reader.shapes}


@pytest.mark.parametrize('name', CASES)
def test_a_round_trip_is_exact(tmp_path, name):
    done = imported(exported(tmp_path, CASES[name]))
    before, after = parameters(tmp_path / 'run'), parameters(done.workdir)
    assert before.keys() == after.keys()
    for path, values in before.items():
        # The offset of Gemma's norms is added and subtracted in float32.
        np.testing.assert_allclose(after[path], values, rtol=0, atol=2e-7 if 'gemma' in name else 0, err_msg=path)
    assert done.parameters == sum(values.size for values in before.values())
    # The models are equal in every setting that changes the computation.
    models = [dataclasses.asdict(read_config(workdir).model) for workdir in (tmp_path / 'run', done.workdir)]
    unused = UNUSED if models[0]['rope_scaling'] == 'none' else UNUSED[3:]
    different = {key: tuple(model[key] for model in models) for key in models[0] if models[0][key] != models[1][key]}
    assert {key: values for key, values in different.items() if key not in unused} == {}


@pytest.mark.parametrize(
    ('keys', 'expected'),
    [
        ({'rope.scaling.factor': 4.0}, ('linear', 4.0)),
        ({'rope.scale_linear': 4.0}, ('linear', 4.0)),
        ({'rope.scaling.factor': 0.0}, ('none', 1.0)),
        ({'rope.scaling.type': 'none', 'rope.scaling.factor': 4.0}, ('none', 1.0)),
    ],
)
def test_a_factor_without_a_type_scales_linearly(keys, expected):
    # llama.cpp, `llama_model_base::load_hparams`.
    values = {'general.architecture': 'llama', **{f'llama.{key}': value for key, value in keys.items()}}
    found = read_positions(Metadata(values, 'a.gguf'), {}, {'head_dim': 8, 'max_positions': 64})
    assert (found['rope_scaling'], found.get('rope_scaling_factor', 1.0)) == expected


def test_unpermuted_heads_are_detected(tmp_path, monkeypatch):
    path = exported(tmp_path, MODELS['llama'])
    monkeypatch.setattr(gguf_tensors, 'separate_rotary', lambda name, values, model: values)
    before, after = parameters(tmp_path / 'run'), parameters(imported(path).workdir)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {'blocks.attention.query.kernel', 'blocks.attention.key.kernel'}


# Values with 256 in a row, because some types have blocks of this size.
WIDE = {**MODELS['llama'], **model_keys(dim=256, head_dim=64, num_heads=4, num_kv_heads=2, ffn_dim=256, num_layers=1)}
QUANTIZED = ('Q8_0', 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1', 'Q4_K', 'Q6_K', 'BF16')


@pytest.mark.parametrize('kind', QUANTIZED)
def test_quantized_tensors_equal_transformers(tmp_path, kind):
    """The library gguf cannot quantize to all types, so the codes of a tensor are random."""
    path = exported(tmp_path, WIDE)
    stored = gguf.GGMLQuantizationType[kind]
    size, width = gguf.GGML_QUANT_SIZES[stored]
    codes = np.random.default_rng(0).integers(0, 48, (256, 256 // size * width), np.uint8)
    replaced = replace_tensor(path, 'blk.0.ffn_up.weight', codes, stored)
    done = imported(replaced)
    found = parameters(done.workdir)['blocks.feedforward.up.kernel'][0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=replaced.name, dtype='float32')
    expected = model.model.layers[0].mlp.up_proj.weight.detach().numpy().T
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(found)) > 10
    assert read_config(done.workdir).model.dtype == 'bfloat16'


def replace_tensor(path, name, codes, kind):
    """Copies a file with another content of a tensor."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name('changed.gguf'), reader.fields['general.architecture'].contents())
    for key, field in reader.fields.items():
        if not key.startswith('GGUF.') and key != 'general.architecture':
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        is_it = tensor.name == name
        writer.add_tensor(tensor.name, codes if is_it else tensor.data, raw_dtype=kind if is_it else tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name('changed.gguf')


TEXTS = ['then one  hen', 'the  tone\n\n', "Don't 12345 I'LL", 'zo\nthé ³ 你好 😀', ' x', '']


def encoded(workdir, texts):
    tokenizer = tokenizers.Tokenizer.from_file(str(workdir / 'tokenizer.json'))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert [tokenizer.decode(one, skip_special_tokens=False) for one in ids] == texts
    return ids


def test_the_tokenizer_and_the_chat_template(tmp_path):
    tokenizer = train_bpe([(ROOT / 'LICENSE').read_text()], 300).with_special_tokens(['<|im_start|>', '<|im_end|>'])
    make_workdir(tmp_path / 'run', MODELS['llama'], tokenizer=tokenizer)
    (tmp_path / 'run' / 'chat_template.jinja').write_text(CHATML)
    path = tmp_path / 'model.gguf'
    export_gguf(str(tmp_path / 'run'), str(path), dtype='f16', show=False)
    done = imported(path)
    assert encoded(done.workdir, TEXTS) == encoded(tmp_path / 'run', TEXTS)
    assert (done.workdir / 'chat_template.jinja').read_text() == CHATML
    assert json.loads((done.workdir / 'text_boundaries.json').read_text())['stops'] == [0, 301]


def test_a_byte_tokenizer(tmp_path):
    done = imported(exported(tmp_path, MODELS['llama'], tokenizer=bytes_tokenizer()))
    assert encoded(done.workdir, TEXTS) == encoded(tmp_path / 'run', TEXTS)


@pytest.mark.parametrize(
    ('split', 'flag', 'expected'),
    [
        ('llama-bpe', {}, True),
        ('llama3', {}, True),
        ('tekken', {}, True),
        ('llama-bpe', {'tokenizer.ggml.add_bos_token': False}, False),
        ('qwen2', {}, False),
        ('dbrx', {}, False),
        ('qwen2', {'tokenizer.ggml.add_bos_token': True}, True),
    ],
)
def test_the_beginning_of_texts_without_a_flag_is_that_of_llama_cpp(split, flag, expected):
    # llama-vocab.cpp, `llama_vocab::impl::load`. Files of Llama 3 of 2024 have no flag.
    values = {'model': 'gpt2', 'pre': split, 'tokens': ['a', 'b', '<s>'], 'token_type': [1, 1, 3], 'bos_token_id': 2}
    files = tokenizer_files({**{f'tokenizer.ggml.{key}': value for key, value in values.items()}, **flag}, 'a.gguf')
    ids = tokenizers.Tokenizer.from_str(files['tokenizer.json']).encode('ab').ids
    assert ids == [2, 0, 1] if expected else ids == [0, 1]
    assert json.loads(files['tokenizer_config.json'])['add_bos_token'] is expected


@pytest.mark.parametrize('prefix', [True, False])
def test_a_tokenizer_of_sentencepiece(tmp_path, prefix):
    facts = sentencepiece_tokenizer()
    if not prefix:
        facts['normalizer'] = facts['normalizer']['normalizers'][1]
        facts['decoder']['decoders'] = facts['decoder']['decoders'][:3]
    make_workdir(tmp_path / 'run', {**MODELS['llama'], 'model__vocab_size': 300})
    (tmp_path / 'run' / 'tokenizer.json').write_text(json.dumps(facts))
    path = export_gguf(str(tmp_path / 'run'), str(tmp_path / 'model.gguf'), dtype='f16', show=False).path
    done = imported(path)
    assert encoded(done.workdir, TEXTS[:5]) == encoded(tmp_path / 'run', TEXTS[:5])
    assert max(map(max, encoded(done.workdir, TEXTS[:5]))) > 270


def test_another_tokenizer(tmp_path):
    path = exported(tmp_path, MODELS['llama'])
    other = train_bpe([(ROOT / 'LICENSE').read_text()], 259)
    (tmp_path / 'other').mkdir()
    other.save(tmp_path / 'other' / 'tokenizer.json')
    for number, option in enumerate((tmp_path / 'other', tmp_path / 'other' / 'tokenizer.json')):
        done = imported(path, tmp_path / f'imported{number}', tokenizer=str(option))
        assert (done.workdir / 'tokenizer.json').read_text() == other.to_json()
    with pytest.raises(InputError, match=r'no tokenizer\.json'):
        imported(path, tmp_path / 'third', tokenizer=str(tmp_path / 'run' / 'config.json'))


def test_a_file_as_a_checkpoint(tmp_path):
    path = exported(tmp_path, MODELS['llama'])
    before = parameters(tmp_path / 'run')
    for checkpoint in (path, path.parent):
        with resolved_checkpoint(str(checkpoint)) as workdir:
            assert parameters(workdir).keys() == before.keys()
    # Other commands name the import.
    with pytest.raises(InputError, match=r'format of GGUF; import it with `maxlm hf import --input=\S+model\.gguf'):
        find_local_step(str(path))
