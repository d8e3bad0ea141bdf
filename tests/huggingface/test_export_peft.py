"""Tests the export of runs with adapters for Transformers: merged, and as adapters that PEFT loads."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file

from maxlm.cli.models import hf
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.inference.load import load_model
from maxlm.model.decoder import Decoder
from tests.adapters import adapter_arrays
from tests.huggingface.workdirs import MODELS, make_workdir
from tests.messages import assert_error_line
from tests.small import small_config

RANK = {'model__lora_rank': 3, 'model__lora_alpha': 7.5}
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 12), dtype=np.int32)
# Queries, keys and values have separate or fused kernels, and all or some of them have adapters.
CASES = [
    ('llama', ('*',)),
    pytest.param('qwen3', ('attention.*',), marks=pytest.mark.nightly),
    ('gpt2', ('*.query', '*.value', '*.down')),
    pytest.param('gpt_neox', ('*',), marks=pytest.mark.nightly),
    ('gpt_neox', ('*.value', 'attention.out')),
    # For this architecture, PEFT looks for projections of a feed-forward only in experts.
    pytest.param('deepseek_v3', ('attention.*',), marks=pytest.mark.nightly),
    pytest.param('deepseek_v3 with experts', ('attention.*',), marks=pytest.mark.nightly),
    ('nanochat', ('*',)),
]


def make_run(folder, family, targets=('*',), **overrides):
    """Writes a base and a run with adapters, and returns the directory of the run."""
    make_workdir(folder / 'base', MODELS[family])
    settings = {
        **MODELS[family],
        **RANK,
        'model__lora_target_modules': targets,
        'train__init_from': str(folder / 'base'),
    }
    settings |= {'model__vocab_size': 260, 'data__seq_len': 64, **overrides}
    model = small_config(**settings).model
    make_workdir(folder / 'run', settings, step=5, changed=adapter_arrays(model))
    return folder / 'run'


def run(*arguments):
    return exit_code(hf.main, [str(argument) for argument in arguments])


def our_logits(workdir):
    loaded = load_model(str(workdir), num_devices=1)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(loaded.config.model, rngs=nnx.Rngs(0))))

    @jax.jit
    def logits(params):
        model = nnx.merge(graph, params)
        return model.logits(model(TOKENS)[0])

    return np.asarray(logits(loaded.params))


def their_logits(model):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS).long()).logits.numpy()


# PEFT still uses an attribute that version 6 of Transformers removes.
@pytest.mark.filterwarnings('ignore:`is_gradient_checkpointing` is deprecated:FutureWarning')
@pytest.mark.parametrize(('family', 'targets'), CASES, ids=str)
def test_peft_and_maxlm_compute_the_same(tmp_path, family, targets, capsys):
    workdir = make_run(tmp_path, family, targets)
    architecture = 'nanochat' if family == 'nanochat' else 'auto'
    base, adapter, merged = (tmp_path / name for name in ('base_out', 'adapter', 'merged'))
    options = ('--dtype=float32', f'--architecture={architecture}')
    assert run('export', f'--checkpoint={tmp_path / "base"}', f'--output={base}', *options) == EXIT_DONE
    assert run('export', f'--checkpoint={workdir}', f'--output={merged}', *options) == EXIT_DONE
    assert run('export-adapter', f'--checkpoint={workdir}', f'--output={adapter}', options[1]) == EXIT_DONE
    arrays = load_file(adapter / 'adapter_model.safetensors')
    assert f'adapters of {sum(array.size for array in arrays.values()):,} parameters' in capsys.readouterr().out
    assert sorted(path.name for path in adapter.iterdir()) == ['adapter_config.json', 'adapter_model.safetensors']
    expected = our_logits(workdir)
    # A global import would cost every worker three seconds.
    from peft import PeftModel

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype='float32')
    plain = their_logits(model)
    np.testing.assert_allclose(their_logits(PeftModel.from_pretrained(model, adapter)), expected, atol=1e-4)
    model = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype='float32')
    np.testing.assert_allclose(their_logits(model), expected, atol=1e-4)
    # Control: the adapters change the logits.
    assert np.abs(plain - expected).max() > 0.1


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """Returns a function from a family to the directory of a base and a run with adapters. Tests must not change it."""

    @functools.cache
    def make(family):
        return make_run(tmp_path_factory.mktemp(family), family).parent

    return make


@pytest.fixture
def llama_run(made, tmp_path):
    """Returns a copy of the run with adapters. Its base is in the same directory."""
    shutil.copytree(made('llama'), tmp_path, dirs_exist_ok=True)
    change_config(tmp_path / 'run', train={'init_from': str(tmp_path / 'base')})
    return tmp_path / 'run'


def change_config(workdir, **sections):
    path = workdir / 'config.json'
    config = json.loads(path.read_text())
    for section, values in sections.items():
        config[section] |= values
    path.write_text(json.dumps(config))


@pytest.mark.parametrize('family', ['llama', 'gpt2'])
def test_adapters_are_the_difference_of_two_exports(made, tmp_path, family):
    for verb, source, name in (('export', 'base', 'base'), ('export', 'run', 'merged'), ('export-adapter', 'run', 'a')):
        options = ['--dtype=float32'] if verb == 'export' else []
        checkpoint = f'--checkpoint={made(family) / source}'
        assert run(verb, checkpoint, f'--output={tmp_path / name}', *options) == EXIT_DONE
    base, merged = (load_file(tmp_path / name / 'model.safetensors') for name in ('base', 'merged'))
    adapters = load_file(tmp_path / 'a' / 'adapter_model.safetensors')
    for name, lora_a in adapters.items():
        if 'lora_A' in name:
            weight = name.removeprefix('base_model.model.').replace('lora_A.', '')
            # alpha / rank; the ratio is the same for fused adapters.
            added = 7.5 / 3 * adapters[name.replace('lora_A', 'lora_B')] @ lora_a
            base[weight] += added.T if family == 'gpt2' else added
            assert np.abs(added).max() > 0.1
    assert base.keys() == merged.keys()
    for name, array in merged.items():
        np.testing.assert_allclose(base[name], array, atol=1e-5, err_msg=name)


def test_the_config_has_the_fields_of_peft(made, tmp_path):
    options = [f'--checkpoint={made("gpt2") / "run"}@5', f'--output={tmp_path / "adapter"}', '--base=someone/model']
    assert run('export-adapter', *options) == EXIT_DONE
    config = json.loads((tmp_path / 'adapter' / 'adapter_config.json').read_text())
    assert config['base_model_name_or_path'] == 'someone/model'
    assert config['target_modules'] == ['attn.c_proj', 'c_attn', 'c_fc', 'mlp.c_proj']
    assert (config['r'], config['lora_alpha'], config['fan_in_fan_out']) == (3, 7.5, True)
    assert (config['rank_pattern'], config['alpha_pattern']) == ({'c_attn': 9}, {'c_attn': 22.5})
    shapes = {name: a.shape for name, a in load_file(tmp_path / 'adapter' / 'adapter_model.safetensors').items()}
    assert shapes['base_model.model.transformer.h.1.attn.c_attn.lora_A.weight'] == (9, 32)
    assert shapes['base_model.model.transformer.h.1.attn.c_attn.lora_B.weight'] == (96, 9)


@pytest.mark.parametrize(
    ('changes', 'parts'),
    [
        ({'train': {'init_from': ''}}, ["train.init_from=''", '--base']),
        ({'train': {'init_from': 'nowhere'}}, ['train.init_from=nowhere', 'cannot be read', '--base']),
        (
            {'optimizer': {'trainable_params': ['embedding']}},
            ["optimizer.trainable_params=('embedding',)", 'maxlm hf export'],
        ),
    ],
    ids=str,
)
def test_runs_with_more_than_adapters(tmp_path, capfd, llama_run, changes, parts):
    change_config(llama_run, **changes)
    refused(tmp_path, capfd, llama_run, *parts)


def refused(folder, capfd, workdir, *parts):
    before = sorted(folder.rglob('*'))
    capfd.readouterr()
    assert run('export-adapter', f'--checkpoint={workdir}', f'--output={folder / "out"}') == EXIT_BAD_INPUT
    assert_error_line(capfd.readouterr().err, *parts)
    assert sorted(folder.rglob('*')) == before


def test_adapters_of_experts(tmp_path, capfd):
    workdir = make_run(tmp_path, 'mixtral with experts', ('*.experts.up', 'attention.*'))
    refused(tmp_path, capfd, workdir, 'adapters of feedforward.experts.up,', '`maxlm hf export`')


def test_wrong_bases(tmp_path, capfd, made, llama_run):
    base = tmp_path / 'base'
    refused(tmp_path, capfd, base, 'model.lora_rank=0', 'run with adapters')
    base.rename(tmp_path / 'right')
    make_workdir(base, MODELS['llama'], seed=1)
    refused(tmp_path, capfd, llama_run, f'train.init_from={base}', 'differ in ')
    base.rename(tmp_path / 'wrong')
    make_workdir(base, {**MODELS['llama'], 'model__vocab_size': 300})
    refused(tmp_path, capfd, llama_run, f'train.init_from={base}', 'differ in embedding')
    base.rename(tmp_path / 'longer')
    shutil.copytree(made('llama') / 'run', base)
    refused(tmp_path, capfd, llama_run, f'train.init_from={base}', 'has adapters, so')


def test_an_export_of_adapters_of_another_config(tmp_path, capfd, llama_run):
    change_config(llama_run, model={'lora_rank': 4})
    for verb in ('export', 'export-adapter'):
        capfd.readouterr()
        assert run(verb, f'--checkpoint={llama_run}', f'--output={tmp_path / "out"}') == EXIT_BAD_INPUT
        assert_error_line(capfd.readouterr().err, 'lora_a', 'config.json')
        assert not (tmp_path / 'out').exists()
