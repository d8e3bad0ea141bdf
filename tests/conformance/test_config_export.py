"""Tests that the export of an imported model equals the original: keys of config.json, weights, and text files."""

import dataclasses
import json
import shutil

import pytest
import torch
import transformers

from maxlm.data.tokenizer.tokenizer import train_bpe
from maxlm.huggingface.architectures.architecture import GPT2
from maxlm.huggingface.config_conversion import from_config
from maxlm.huggingface.export_model import export_model
from maxlm.huggingface.import_model import import_model
from maxlm.huggingface.original_config import export_config
from tests.conftest import ROOT
from tests.huggingface.test_round_trip import arrays_of, assert_same
from tests.huggingface.transformers_models import CASES, make_model

# Keys without an effect on logits, as in public files.
NEUTRAL = {
    '_name_or_path': 'someone/small-model',
    'attention_dropout': 0.1,
    'initializer_range': 0.041666666666666664,
    'pretraining_tp': 1,
    'unk_token_id': 0,
    'use_cache': False,
    'transformers_version': '4.40.1',
    'is_llama_config': True,
    'rope_interleaved': False,
    'custom': {'nested': [1, None]},
    'bos_token_id': 1,
    'eos_token_id': 2,
}
GENERATION = {'bos_token_id': 1, 'eos_token_id': [2, 5], 'do_sample': True, 'temperature': 0.6, 'top_k': 7}


def save(name, directory, *, weights='float32', **changes):
    """Saves a model with keys of config.json changed; a value of None removes the key."""
    model = make_model(CASES[name]).to(getattr(torch, weights))
    model.generation_config = transformers.GenerationConfig(**GENERATION)
    model.save_pretrained(directory)
    path = directory / 'config.json'
    values = json.loads(path.read_text()) | NEUTRAL | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return json.loads(path.read_text())


def again(directory, folder, **options):
    import_model(str(directory), str(folder / 'ours'), show=False)
    settings = {'architecture': 'auto', 'dtype': 'auto', 'max_shard_size': 10**9, **options}
    export_model(str(folder / 'ours'), str(folder / 'again'), show=False, **settings)
    return folder / 'again'


def config_of(directory):
    return json.loads((directory / 'config.json').read_text())


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize(
    'name',
    ['gpt2', 'neox', 'llama', 'mistral full context', 'qwen2', 'gemma3', 'phi3 longrope', 'qwen3_moe', 'gpt_oss'],
)
def test_an_export_equals_the_imported_model(tmp_path, name, dtype):
    wanted = save(name, tmp_path / 'theirs', weights=dtype)
    found = again(tmp_path / 'theirs', tmp_path)
    assert config_of(found) == wanted
    assert list(config_of(found)) == list(wanted)
    assert_same(arrays_of(found), arrays_of(tmp_path / 'theirs'))
    assert (found / 'generation_config.json').read_bytes() == (tmp_path / 'theirs/generation_config.json').read_bytes()


FORMER = {
    'llama': {'rope_parameters': None, 'rope_theta': 500.0, 'rope_scaling': {'type': 'linear', 'factor': 2.0}},
    'qwen3': {'rope_parameters': None, 'rope_theta': 500.0, 'rope_scaling': None},
    'neox': {'rope_parameters': None, 'rotary_emb_base': 500, 'rotary_pct': 0.5},
    'gemma3': {'rope_parameters': None, 'rope_theta': 500.0, 'rope_local_base_freq': 77.0, 'layer_types': None},
    'gpt2': {'n_ctx': 64, 'scale_attn_weights': None},
}


@pytest.mark.parametrize('name', FORMER)
def test_files_of_former_versions(tmp_path, name):
    """Files of Transformers 4 have other keys of positions, and `torch_dtype`."""
    former = {'dtype': None, 'torch_dtype': 'float16', **FORMER[name]}
    wanted = save(name, tmp_path / 'theirs', weights='float16', **former)
    found = again(tmp_path / 'theirs', tmp_path)
    assert config_of(found) == wanted
    assert_same(arrays_of(found), arrays_of(tmp_path / 'theirs'))
    ids = torch.arange(24)[None]
    with torch.no_grad():
        first, second = (
            transformers.AutoModelForCausalLM.from_pretrained(path, dtype='float32')(ids).logits
            for path in (tmp_path / 'theirs', found)
        )
    assert torch.equal(first, second)


def test_a_requested_dtype_replaces_that_of_the_model(tmp_path):
    wanted = save('llama', tmp_path / 'theirs', weights='bfloat16')
    found = again(tmp_path / 'theirs', tmp_path, dtype='float16')
    assert config_of(found) == {**wanted, 'dtype': 'float16'}


def change(workdir, **settings):
    config = json.loads((workdir / 'config.json').read_text())
    config['model'] |= settings
    (workdir / 'config.json').write_text(json.dumps(config))


def exported(folder, name, **options):
    settings = {'architecture': 'auto', 'dtype': 'auto', 'max_shard_size': 10**9, **options}
    export_model(str(folder / 'ours'), str(folder / name), show=False, **settings)
    return config_of(folder / name)


def test_changed_settings_replace_those_of_the_import(tmp_path):
    wanted = save('llama', tmp_path / 'theirs', rope_parameters=None, rope_theta=100.0)
    again(tmp_path / 'theirs', tmp_path)
    change(tmp_path / 'ours', rope_theta=200.0, max_positions=128)
    found = exported(tmp_path, 'changed')
    assert found['max_position_embeddings'] == 128
    assert found['rope_theta'] == found['rope_parameters']['rope_theta'] == 200.0
    changed = {'max_position_embeddings', 'rope_theta', 'rope_parameters'}
    assert {key: found[key] for key in wanted if key not in changed} == {
        key: value for key, value in wanted.items() if key not in changed
    }
    # Another architecture: no key of the original is certain to exist there.
    other = exported(tmp_path, 'other', architecture='smollm3')
    assert other['model_type'] == 'smollm3'
    assert not NEUTRAL.keys() & other.keys() - {'bos_token_id', 'eos_token_id'}


def test_changed_settings_with_other_names(tmp_path):
    """Another name takes precedence in Transformers, so it must not remain beside a changed key."""
    wanted = save('gpt2', tmp_path / 'theirs', n_positions=None, max_position_embeddings=64)
    model = from_config(wanted, 'config.json')
    kept = {'ids': {}, 'dtype': 'float32', 'is_trained': False}
    assert export_config(wanted, model, GPT2, **kept) == wanted
    longer = export_config(wanted, dataclasses.replace(model, max_positions=128), GPT2, **kept)
    assert longer['n_positions'] == 128
    assert 'max_position_embeddings' not in longer
    assert longer['custom'] == wanted['custom']
    found = transformers.AutoConfig.for_model(**longer)
    assert found.n_positions == 128


def test_a_step_of_training_may_change_the_tokens(tmp_path):
    wanted = save('llama', tmp_path / 'theirs')
    (tmp_path / 'theirs' / 'generation_config.json').unlink()
    again(tmp_path / 'theirs', tmp_path)
    train_bpe([(ROOT / 'LICENSE').read_text()], 300).save(tmp_path / 'ours' / 'tokenizer.json')
    assert exported(tmp_path, 'first')['eos_token_id'] == wanted['eos_token_id'] == 2
    shutil.move(tmp_path / 'ours/checkpoints/0', tmp_path / 'ours/checkpoints/1')
    trained = exported(tmp_path, 'second')
    assert trained['eos_token_id'] != 2
    assert trained['transformers_version'] == '4.40.1'


def test_the_card_names_the_base_model(tmp_path):
    save('llama', tmp_path / 'theirs')
    assert 'base_model: someone/small-model\n' in (again(tmp_path / 'theirs', tmp_path) / 'README.md').read_text()


@pytest.mark.parametrize(
    ('folder', 'name', 'base'),
    [
        ('models--Qwen--Qwen3-0.6B/snapshots/abc', None, 'Qwen/Qwen3-0.6B'),
        ('Qwen--Qwen3-0.6B', None, 'Qwen/Qwen3-0.6B'),
        ('Qwen3-0.6B', None, ''),
        ('a--b', 'c/d', 'c/d'),
        ('model', '/home/someone/model', ''),
        ('model', './model', ''),
        ('model', 'out/checkpoint-500', ''),
    ],
)
def test_names_of_base_models(tmp_path, folder, name, base):
    directory = tmp_path / folder
    save('llama', directory, _name_or_path=name)
    card = (again(directory, tmp_path) / 'README.md').read_text()
    assert f'base_model: {base}\n' in card if base else 'base_model' not in card
    assert '/home' not in card
