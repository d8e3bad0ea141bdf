"""Tests round trips of models: unchanged bytes, and the same text from Transformers and maxlm."""

import functools
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from maxlm.checkpoint.streaming import ParamsReader
from maxlm.config.serialization import from_json
from maxlm.data.tokenizer.tokenizer import train_bpe
from maxlm.errors import InputError
from maxlm.huggingface.config_conversion import choose_architecture
from maxlm.huggingface.export_model import export_model
from maxlm.huggingface.import_model import import_model
from maxlm.huggingface.state_dict import PREFIXES
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.requests import Request
from maxlm.inference.load import load_model
from maxlm.inference.sampling import Sampling
from tests.conftest import ROOT
from tests.huggingface.transformers_models import CASES, make_model, state_in_file
from tests.huggingface.workdirs import MODELS, make_workdir, parameters

# One model of Transformers for each architecture.
ONE_OF_EACH = (
    'gpt2',
    'neox',
    'llama',
    'mistral sliding',
    'qwen3 mixed, yarn',
    'nanochat',
    'deepseek, dense',
    'mixtral',
    'qwen3_moe',
    'deepseek_v2',
    'deepseek_v3',
    'gpt_oss',
    'starcoder2',
)


def export(workdir, output, *, dtype='float32', max_shard_size=10**9):
    model_type = from_json((workdir / 'config.json').read_text()).model.family
    architecture = 'nanochat' if model_type == 'nanochat' else 'auto'
    export_model(
        str(workdir), str(output), architecture=architecture, dtype=dtype, max_shard_size=max_shard_size, show=False
    )
    return output


def import_(source, workdir):
    import_model(str(source), str(workdir), show=False)
    return workdir


def arrays_of(directory):
    return {name: array for path in directory.glob('*.safetensors') for name, array in load_file(path).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name


def parameters_of(workdir):
    reader = ParamsReader(workdir / 'checkpoints' / '0')
    return {path: reader.read(path) for path in reader.shapes}


def save(name, directory, dtype='float32', **options):
    model = make_model(CASES[name]).to(getattr(torch, dtype))
    model.save_pretrained(directory, **options)
    return model


# The layout and the dtype of a tensor are independent, so each dtype is tested with two architectures.
@pytest.mark.parametrize(
    ('name', 'dtype'),
    list(zip(ONE_OF_EACH, itertools.cycle(['float32', 'bfloat16', 'float16']), strict=False)),
    ids=str,
)
def test_an_import_is_exported_byte_by_byte(tmp_path, name, dtype):
    save(name, tmp_path / 'theirs', dtype)
    again = export(
        import_(tmp_path / 'theirs', tmp_path / 'ours'), tmp_path / 'again', dtype=dtype, max_shard_size=9999
    )
    assert len(list(again.glob('*.safetensors'))) > 2
    assert_same(arrays_of(again), arrays_of(tmp_path / 'theirs'))


@pytest.mark.parametrize('name', MODELS)
def test_an_export_is_imported_bit_by_bit(tmp_path, name):
    config = make_workdir(tmp_path / 'ours', MODELS[name])
    again = import_(export(tmp_path / 'ours', tmp_path / 'theirs'), tmp_path / 'again')
    assert_same(parameters_of(again), parameters_of(tmp_path / 'ours'))
    assert (again / 'tokenizer.json').read_bytes() == (tmp_path / 'ours' / 'tokenizer.json').read_bytes()
    found = from_json((again / 'config.json').read_text())
    assert found.model.family == config.model.family
    assert found.data.seq_len == 64
    # Control: other parameters give other bytes.
    other = parameters(
        config, choose_architecture(config.model, 'nanochat' if name == 'nanochat' else 'auto').model_type, seed=1
    )
    assert all(array.tobytes() != other[path].tobytes() for path, array in parameters_of(again).items())


PROMPTS = ['Unless required by', 'a', 'licensor shall be']
MAX_TOKENS = 20
# Learned positions; grouped heads, sliding windows and scaled rotary positions.
SHORT = ('gpt2', 'qwen3')


def our_texts(workdir):
    model = load_model(str(workdir), num_devices=1)
    prompts = [ids.tolist() for ids in model.tokenizer.encode_batch(PROMPTS)]
    greedy = Sampling(temperature=0, top_k=0, top_p=1.0)
    rows = Engine(model, num_slots=len(PROMPTS)).complete(
        [Request(tuple(prompt), MAX_TOKENS, greedy) for prompt in prompts]
    )
    return [model.tokenizer.decode(row.ids) for (row,) in rows]


def their_texts(directory):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype='float32')
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors='pt')
        (row,) = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        row = row[inputs['input_ids'].shape[1] :].tolist()
        row = row[: row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else row
        texts.append(tokenizer.decode(row))
    return texts


@pytest.fixture(scope='module')
def tokenizer():
    return train_bpe([(ROOT / 'LICENSE').read_text()], 300)


@pytest.mark.parametrize(
    'name', [name if name in SHORT else pytest.param(name, marks=pytest.mark.nightly) for name in MODELS]
)
def test_transformers_and_maxlm_generate_the_same_text(tmp_path, tokenizer, name):
    # All ids have text: Transformers could generate ids that only pad the vocabulary.
    overrides = {**MODELS[name], 'model__vocab_size': tokenizer.vocab_size}
    make_workdir(tmp_path / 'ours', overrides, tokenizer=tokenizer)
    output = export(tmp_path / 'ours', tmp_path / 'theirs', max_shard_size=30_000)
    ours = our_texts(tmp_path / 'ours')
    assert min(map(len, ours)) > 10
    assert len(set(ours)) == len(PROMPTS)
    assert their_texts(output) == ours
    # Control: other parameters give other texts.
    make_workdir(tmp_path / 'other', overrides, tokenizer=tokenizer, seed=1)
    assert their_texts(export(tmp_path / 'other', tmp_path / 'their_other')) != ours


def test_shards_load_in_transformers(tmp_path):
    make_workdir(tmp_path / 'ours', MODELS['gpt_neox'])
    sharded = export(tmp_path / 'ours', tmp_path / 'sharded', max_shard_size=10_000)
    single = export(tmp_path / 'ours', tmp_path / 'single')
    assert (sharded / 'model.safetensors.index.json').exists()
    assert [path.name for path in single.glob('*safetensors*')] == ['model.safetensors']
    states = []
    for directory in (sharded, single):
        model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert not any(loading_info[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert_same(arrays_of(sharded), arrays_of(single))


def test_exports_are_reproducible(tmp_path):
    make_workdir(tmp_path / 'ours', MODELS['llama'])
    one, two = (export(tmp_path / 'ours', tmp_path / name / 'model', dtype='bfloat16') for name in ('one', 'two'))
    files = sorted(path.name for path in one.iterdir())
    assert 'README.md' in files
    assert [(one / name).read_bytes() for name in files] == [(two / name).read_bytes() for name in files]


def test_the_config_contains_the_dtype(tmp_path):
    make_workdir(tmp_path / 'ours', MODELS['llama'])
    config = json.loads((export(tmp_path / 'ours', tmp_path / 'theirs', dtype='float16') / 'config.json').read_text())
    assert config['torch_dtype'] == 'float16'
    assert 'dtype' not in config
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'theirs')
    assert model.dtype == torch.float16


def test_a_moving_average_is_exported(tmp_path):
    make_workdir(tmp_path / 'ours', MODELS['llama'])
    make_workdir(tmp_path / 'average', MODELS['llama'], seed=1)
    plain = arrays_of(export(tmp_path / 'ours', tmp_path / 'plain'))
    (tmp_path / 'average' / 'checkpoints' / '0' / 'params').rename(tmp_path / 'ours' / 'checkpoints' / '0' / 'ema')
    averaged = arrays_of(export(tmp_path / 'ours', tmp_path / 'averaged'))
    assert all(array.tobytes() != plain[name].tobytes() for name, array in averaged.items())


# --- files of other versions


def rewrite(directory, change):
    """Changes the tensors of a model in a single file."""
    path = directory / 'model.safetensors'
    save_file(change(load_file(path)), path, metadata={'format': 'pt'})


class Saved(NamedTuple):
    """A model saved by Transformers, and the parameters of its import."""

    # A string, because evaluating the annotation takes three seconds at import.
    model: 'transformers.PreTrainedModel'
    directory: Path
    expected: dict[str, np.ndarray]

    def copy_to(self, folder):
        shutil.copytree(self.directory, folder / 'theirs')


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """Returns a function from the name of a case to the model, which is saved and imported once."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp('saved')
        model = save(name, folder / 'theirs')
        return Saved(model, folder / 'theirs', parameters_of(import_(folder / 'theirs', folder / 'ours')))

    return make


@pytest.mark.parametrize('name', ONE_OF_EACH)
def test_the_prefix_of_the_base_model_may_be_missing(tmp_path, saved, name):
    saved(name).copy_to(tmp_path)
    model, expected = saved(name).model, saved(name).expected
    prefix = PREFIXES[model.config.model_type]
    rewrite(tmp_path / 'theirs', lambda arrays: {name.removeprefix(prefix): array for name, array in arrays.items()})
    assert prefix not in ' '.join(arrays_of(tmp_path / 'theirs'))
    assert_same(parameters_of(import_(tmp_path / 'theirs', tmp_path / 'found')), expected)


BUFFERS = {
    'gpt2': {'h.1.attn.bias': (1, 1, 64, 64), 'transformer.h.0.attn.masked_bias': ()},
    'neox': {
        'gpt_neox.layers.0.attention.bias': (1, 1, 4, 4),
        'gpt_neox.layers.1.attention.masked_bias': (),
        'gpt_neox.layers.1.attention.rotary_emb.inv_freq': (1,),
    },
    'llama': {'model.layers.0.self_attn.rotary_emb.inv_freq': (4,), 'model.rotary_emb.inv_freq': (4,)},
}


@pytest.mark.parametrize('name', BUFFERS)
def test_buffers_of_old_versions_are_ignored(tmp_path, saved, name):
    saved(name).copy_to(tmp_path)
    expected = saved(name).expected
    # No parameter may have this dtype.
    extra = {buffer: np.ones(shape, np.uint8) for buffer, shape in BUFFERS[name].items()}
    rewrite(tmp_path / 'theirs', lambda arrays: {**arrays, **extra})
    assert_same(parameters_of(import_(tmp_path / 'theirs', tmp_path / 'found')), expected)
    # Control: the pattern matches the complete name.
    rewrite(tmp_path / 'theirs', lambda arrays: {**arrays, next(iter(extra)) + '2': np.ones(1, np.float32)})
    with pytest.raises(InputError, match=re.escape(next(iter(extra)) + '2')):
        import_(tmp_path / 'theirs', tmp_path / 'refused')


def test_a_neox_head_under_the_common_name(tmp_path, saved):
    saved('neox').copy_to(tmp_path)
    model, expected = saved('neox').model, saved('neox').expected
    assert 'embed_out.weight' in state_in_file(model)
    rewrite(tmp_path / 'theirs', lambda arrays: {name.replace('embed_out', 'lm_head'): a for name, a in arrays.items()})
    assert_same(parameters_of(import_(tmp_path / 'theirs', tmp_path / 'found')), expected)


def test_a_tied_head_may_be_present_if_it_equals_the_embedding(tmp_path):
    save('llama one key head, tied', tmp_path / 'theirs')
    assert 'lm_head.weight' not in arrays_of(tmp_path / 'theirs')
    expected = parameters_of(import_(tmp_path / 'theirs', tmp_path / 'wanted'))
    rewrite(tmp_path / 'theirs', lambda arrays: {**arrays, 'lm_head.weight': arrays['model.embed_tokens.weight']})
    assert_same(parameters_of(import_(tmp_path / 'theirs', tmp_path / 'found')), expected)
    again = export(tmp_path / 'found', tmp_path / 'again')
    assert 'lm_head.weight' not in arrays_of(again)
    rewrite(tmp_path / 'theirs', lambda arrays: {**arrays, 'lm_head.weight': arrays['lm_head.weight'] + 1})
    with pytest.raises(InputError, match=r'lm_head\.weight differs from the embedding.*tie_word_embeddings'):
        import_(tmp_path / 'theirs', tmp_path / 'refused')
    assert not (tmp_path / 'refused').exists()


def test_an_adapter_beside_the_model_is_refused(tmp_path):
    # Transformers would load the model with the adapter.
    save('llama one key head, tied', tmp_path / 'theirs')
    (tmp_path / 'theirs/adapter_config.json').write_text('{"peft_type": "LORA"}')
    with pytest.raises(InputError, match=r'adapter_config\.json: .*merge it with PEFT'):
        import_(tmp_path / 'theirs', tmp_path / 'ours')
    assert not (tmp_path / 'ours').exists()
