"""Tests the loading of configs: files, variants, overrides and errors."""

import dataclasses
import json

import pytest
from ml_collections import ConfigDict

from maxlm.config import loading
from maxlm.config.config_files import split_overrides
from maxlm.config.resolve import resolve
from maxlm.config.serialization import from_json, to_json
from maxlm.errors import InputError
from tests.messages import input_error

CONFIG = """
from maxlm.config.loading import default

def get_config(variant=''):
    config = default()
    config.model.num_layers = 24 if variant == 'big' else 2
    config.model.dim = 64
    config.model.num_heads = 4
    config.train.num_steps = 10
    config.train.global_batch_size = 8
    return config
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / 'base.py'
    path.write_text(CONFIG)
    return str(path)


def test_variant_and_overrides(config_file):
    config = loading.load(f'{config_file}:big', ['train.num_steps=1e3', 'model.use_bias=false', 'model.dropout=0.5'])
    assert (config.model.num_layers, config.train.num_steps) == (24, 1000)
    assert config.model.use_bias is False
    assert config.model.dropout == 0.5
    assert loading.load(config_file).model.num_layers == 2


def test_a_family_fills_only_unset_keys(config_file):
    gpt2 = loading.load(config_file).model
    assert (gpt2.norm, gpt2.position_embedding, gpt2.tie_embeddings) == ('layernorm', 'learned', True)
    llama = loading.load(config_file, ['model.family=llama', 'model.norm=layernorm']).model
    assert (llama.norm, llama.position_embedding, llama.tie_embeddings) == ('layernorm', 'rotary', False)


def test_an_overridden_length_replaces_the_length_in_the_file(config_file):
    train = loading.load(config_file, ['train.num_tokens=1e6']).train
    assert (train.num_steps, train.num_tokens) == (0, 1_000_000)


def test_split_overrides():
    overrides, rest = split_overrides(
        ['--config=a.py', '--config.train.num_steps=2', '--workdir', 'x', '--config.model.dim', '64']
    )
    assert overrides == ['train.num_steps=2', 'model.dim=64']
    assert rest == ['--config=a.py', '--workdir', 'x']


def test_json_round_trip(config_file):
    config = loading.load(config_file, ['optimizer.learning_rate=1e-3'])
    assert from_json(to_json(config)) == config
    assert from_json(to_json(config)) != loading.load(config_file)


@pytest.mark.parametrize(
    ('override', 'fragments'),
    [
        ('train.num_step=5', ['train.num_step', "'num_steps'"]),
        ('train.learning_rate=1', ["'optimizer.learning_rate'"]),
        ('trian.num_steps=5', ["'trian'", "'train'"]),
        ('train.num_steps=ten', ['train.num_steps', "'ten'", 'integer']),
        ('train.num_steps=1.5', ["'1.5'", 'integer']),
        ('train.num_steps=inf', ["'inf'", 'integer']),
        ('model.use_bias=maybe', ["'maybe'", 'true or false']),
        ('model.dropout=nan', ['model.dropout', 'nan']),
        ('optimizer.learning_rate=fast', ["'fast'", 'a number']),
        ('model.family=lama', ["'lama'", "'llama'"]),
        ('model.remat_policy=some', ['model.remat_policy', 'none, dots']),
        ('model.num_heads=7', ['model.num_heads=7', 'model.dim=64', '8']),
        ('model.num_kv_heads=3', ['model.num_kv_heads=3', 'model.num_heads=4']),
        ('train.global_batch_size=0', ['exactly one of', 'train.global_batch_size_tokens']),
        ('train.global_batch_size_tokens=1000', ['data.seq_len=1024', '1024']),
        ('optimizer.min_learning_rate=1', ['optimizer.min_learning_rate', 'optimizer.learning_rate']),
        ('optimizer.adam_learning_rate=0.1', ['optimizer.adam_learning_rate=0.1', 'optimizer.name', 'muon']),
        (
            'optimizer.muon_momentum_warmup_steps=5',
            ['optimizer.muon_momentum_warmup_steps=5', 'optimizer.name', 'muon'],
        ),
        ('optimizer.muon_coefficients=polar_express', ['set it to newton_schulz, or set optimizer.name=muon']),
        ('optimizer.muon_beta2=0.9', ['optimizer.muon_beta2=0.9 has no effect with optimizer.name=adamw']),
        ("optimizer.groups=(('embedding', 'beta=0.9'),)", ["'beta=0.9'", "did you mean 'beta"]),
        ('optimizer.schedule=wds', ["'wds'", "'wsd'"]),
        ('mesh.data=-1', ['mesh.data', 'mesh.fsdp', '-1']),
        ('mesh.tensor=0', ['mesh.tensor=0']),
        ('model.max_positions=64', ['model.max_positions=64', 'data.seq_len=1024']),
    ],
)
def test_an_invalid_override_is_a_one_line_error(config_file, override, fragments):
    with input_error(*fragments):
        loading.load(config_file, [override])


def test_muon_keys_require_muon(config_file):
    muon = ['optimizer.name=muon', 'optimizer.adam_learning_rate=0.1', 'optimizer.muon_momentum_warmup_steps=5']
    assert loading.load(config_file, muon).optimizer.adam_learning_rate == 0.1
    with pytest.raises(
        InputError, match=r'optimizer\.muon_momentum=0\.5 is below 0\.85.* optimizer\.muon_momentum_warmup_steps'
    ):
        loading.load(config_file, [*muon, 'optimizer.muon_momentum=0.5'])
    assert (
        loading.load(config_file, ['optimizer.name=muon', 'optimizer.muon_momentum=0.5']).optimizer.muon_momentum == 0.5
    )


@pytest.mark.parametrize(
    ('text', 'fragments'),
    [
        ('x = (', ['base.py', 'SyntaxError']),
        ('def get_config():\n    return undefined', ['base.py:2', 'NameError']),
        ('import sys\nsys.exit(0)', ['base.py:2', 'SystemExit']),
        ('def get_config():\n    raise GeneratorExit', ['base.py:2', 'GeneratorExit']),
        ('x = 1', ['get_config']),
        ('def get_config():\n    return {}', ['dict', 'ConfigDict']),
        (CONFIG.replace('num_steps', 'num_stepz'), ['num_stepz', 'num_steps']),
        (CONFIG.replace('= 64', "= 'wide'"), ['base.py:7', 'TypeError']),
        (CONFIG.replace("variant=''", ''), ['base.py', 'NameError']),
    ],
)
def test_errors_in_a_config_file_name_the_file(tmp_path, text, fragments):
    path = tmp_path / 'base.py'
    path.write_text(text)
    with input_error(*fragments):
        loading.load(str(path))


def test_a_directory_is_rejected(tmp_path):
    with pytest.raises(InputError, match='is a directory'):
        loading.load(str(tmp_path))


def test_missing_file_and_unknown_variant(config_file):
    with pytest.raises(InputError, match=r'did you mean .*base\.py'):
        loading.load(config_file.replace('base', 'bass'))
    with open(config_file, 'a') as file:
        file.write('\ndef get_config():\n    return default()\n')
    with pytest.raises(InputError, match='no variants'):
        loading.load(f'{config_file}:big')


def test_unknown_sections_and_keys_of_an_unlocked_config_are_rejected():
    values = loading.default()
    with values.unlocked():
        values.train.surprise = 1
    with pytest.raises(InputError, match=r'train\.surprise'):
        loading.build(values)
    with pytest.raises(InputError, match='extra'):
        loading.build(ConfigDict({'extra': {}}))


def test_a_key_without_its_section_is_suggested_with_it():
    with pytest.raises(InputError, match=r"section 'num_layers' does not exist; did you mean 'model\.num_layers'\?"):
        loading.load('tiny', ['num_layers=3'])
    with pytest.raises(InputError, match=r"did you mean 'model'\?"):
        loading.load('tiny', ['modle.num_layers=3'])


@pytest.fixture
def run_file(config_file, tmp_path):
    """Returns the path of the config.json of a run on eight GPUs, and its config."""
    overrides = [
        'train.num_epochs=2',
        'train.global_batch_size_tokens=16384',
        'model.dim=128',
        'optimizer.learning_rate=1',
    ]
    config = loading.load(config_file, [*overrides, 'optimizer.warmup_tokens=99999', 'model.family=llama'])
    config = resolve(config, platform='gpu', num_devices=8, vocab_size=100, windows=800)
    path = tmp_path / 'config.json'
    path.write_text(to_json(config))
    return str(path), config


def test_the_config_of_a_run_keeps_resolved_values(run_file):
    path, run = run_file
    config = loading.load(path)
    assert (run.train.num_steps, run.train.num_epochs) == (100, 2)
    assert (run.train.global_batch_size, run.train.global_batch_size_tokens) == (16, 16384)
    assert (run.optimizer.warmup_steps, run.optimizer.warmup_tokens) == (7, 99999)
    assert (config.train.num_steps, config.train.num_epochs) == (100, 0)
    assert (config.train.global_batch_size, config.train.global_batch_size_tokens) == (16, 0)
    assert (config.optimizer.warmup_steps, config.optimizer.warmup_tokens) == (7, 0)
    assert config.mesh == run.mesh
    assert config.mesh.fsdp == 8
    # The attention kernel is chosen for the current devices.
    assert run.model.attention == 'cudnn'
    assert config.model == dataclasses.replace(run.model, attention='auto')
    # With the same data, the config resolves to that of the run.
    resolved = resolve(config, platform='gpu', num_devices=8, vocab_size=100, windows=800)
    assert resolved.model == run.model
    assert (resolved.train.num_steps, resolved.train.per_device_batch_size) == (
        run.train.num_steps,
        run.train.per_device_batch_size,
    )
    assert resolve(config, platform='cpu', num_devices=8, vocab_size=100, windows=1).model.attention == 'xla'


def test_overrides_apply_to_the_config_of_a_run(run_file):
    path, run = run_file
    config = loading.load(path, ['train.num_tokens=1e6', 'optimizer.warmup_tokens=5000', 'model.attention=xla'])
    assert (config.train.num_steps, config.train.num_tokens, config.train.num_epochs) == (0, 1_000_000, 0)
    assert (config.optimizer.warmup_steps, config.optimizer.warmup_tokens) == (0, 5000)
    assert config.model.attention == 'xla'
    assert config.model.norm == run.model.norm == 'rmsnorm'
    assert loading.load(path, ['train.num_steps=7']).train.num_steps == 7
    assert loading.load(path, ['train.global_batch_size_tokens=32768']).train.global_batch_size == 0


def test_the_mesh_of_a_run_on_another_machine(run_file):
    path, _ = run_file
    with pytest.raises(InputError, match=r'mesh .*fsdp=8.* needs 8 devices, but 2 are available; set one axis to -1'):
        resolve(loading.load(path), platform='cpu', num_devices=2, vocab_size=100, windows=800)
    config = loading.load(path, ['mesh.fsdp=-1'])
    assert resolve(config, platform='cpu', num_devices=2, vocab_size=100, windows=800).mesh.fsdp == 2


def test_a_family_cannot_change_a_complete_config(run_file, tmp_path):
    path, run = run_file
    with pytest.raises(InputError, match=r'--config\.model\.family=gpt2: .*config\.json already sets every key'):
        loading.load(path, ['model.family=gpt2'])
    assert loading.load(path, ['model.family=llama']).model.family == 'llama'
    # A file with missing keys is completed like a Python config.
    sections = json.loads(to_json(run))
    sections['model'] = {key: sections['model'][key] for key in ('num_layers', 'dim', 'num_heads')}
    (tmp_path / 'partial.json').write_text(json.dumps(sections))
    assert loading.load(str(tmp_path / 'partial.json')).model.norm == 'layernorm'
    assert loading.load(str(tmp_path / 'partial.json'), ['model.family=llama']).model.norm == 'rmsnorm'


@pytest.mark.parametrize(
    ('change', 'fragments'),
    [
        (lambda sections: [], ['object of sections']),
        (lambda sections: {**sections, 'model': 3}, ['object of sections']),
        (lambda sections: {**sections, 'trian': {}}, ["'trian'", "'train'"]),
        (lambda sections: {**sections, 'model': {'num_layer': 2}}, ['model.num_layer', "'num_layers'"]),
        (lambda sections: {**sections, 'model': {'num_layers': '2'}}, ['model.num_layers="2"', 'an integer']),
        (lambda sections: {**sections, 'model': {'num_layers': 2.5}}, ['model.num_layers=2.5', 'an integer']),
        (lambda sections: {**sections, 'model': {'num_layers': True}}, ['model.num_layers=true', 'an integer']),
        (lambda sections: {**sections, 'model': {'num_layers': None}}, ['model.num_layers=null', 'an integer']),
        (lambda sections: {**sections, 'model': {'norm_use_scale': 1}}, ['model.norm_use_scale=1', 'true or false']),
        (lambda sections: {**sections, 'model': {'norm': ['rmsnorm']}}, ['model.norm=["rmsnorm"]', 'a string']),
        (lambda sections: {**sections, 'model': {'dropout': '0'}}, ['model.dropout="0"', 'a number']),
    ],
)
def test_an_invalid_config_json_is_a_one_line_error(run_file, change, fragments):
    path, run = run_file
    text = json.dumps(change(json.loads(to_json(run))))
    with open(path, 'w') as file:
        file.write(text)
    with input_error(path, *fragments):
        loading.load(path)
    # The value is also invalid in the config of a workdir.
    with pytest.raises(ValueError):
        from_json(text)


@pytest.mark.parametrize('content', [b'{', b'', b'\xff\xfe{}', b'{"model": {"dim": NaN}}', b'[' * 100_000])
def test_invalid_json_is_a_one_line_error(tmp_path, content):
    (tmp_path / 'config.json').write_bytes(content)
    with pytest.raises(InputError, match=r'config\.json: ') as error:
        loading.load(str(tmp_path / 'config.json'))
    assert '\n' not in str(error.value)


def test_values_of_a_config_json_are_validated(run_file):
    path, run = run_file
    text = to_json(run)
    with open(path, 'w') as file:
        file.write(text.replace('"num_heads": 4', '"num_heads": 7').replace('"num_kv_heads": 4', '"num_kv_heads": 3'))
    with pytest.raises(InputError, match=r'model\.num_kv_heads=3 does not divide model\.num_heads=7'):
        loading.load(path)
    # A key for a float accepts an integer.
    with open(path, 'w') as file:
        file.write(text.replace('"dropout": 0.0', '"dropout": 0'))
    assert loading.load(path).model.dropout == 0.0
    assert isinstance(loading.load(path).model.dropout, float)


def test_a_config_json_has_no_variants_and_must_exist(run_file, tmp_path):
    path, _ = run_file
    with pytest.raises(InputError, match=r"config\.json has no variants, but variant 'big' was requested"):
        loading.load(f'{path}:big')
    with pytest.raises(InputError, match=r'--config=.*confg\.json: file not found; did you mean .*config\.json'):
        loading.load(str(tmp_path / 'confg.json'))


BASE = {'num_layers': 3, 'dim': 96, 'num_heads': 6, 'vocab_size': 500, 'family': 'llama', 'attention': 'xla'}


@pytest.fixture
def base(tmp_path):
    """Returns a workdir that contains only the config of a run of another shape than `config_file`."""
    config = loading.load('tiny', [f'model.{key}={value}' for key, value in BASE.items()])
    (tmp_path / 'base').mkdir()
    (tmp_path / 'base/config.json').write_text(to_json(config))
    return tmp_path / 'base'


@pytest.mark.parametrize('reference', ['{}', '{}/', '{}@300', '{}@best', '{}/checkpoints/300', '~/base', 'file://{}'])
def test_the_model_of_the_base(config_file, base, reference, monkeypatch):
    monkeypatch.setenv('HOME', str(base.parent))
    overrides = [f'train.init_from={reference.format(base)}', 'model.dropout=0.5']
    config = loading.load(config_file, [*overrides, 'train.init_model_config=true'])
    found = {key: getattr(config.model, key) for key in BASE}
    # The kernel is that of this machine.
    assert found == {**BASE, 'attention': 'auto'}
    # Options of the command line and all other sections are those of the run.
    assert (config.model.dropout, config.train.num_steps, config.train.init_model_config) == (0.5, 10, False)
    # The model can be changed again, as by a caller of the Python API.
    assert loading.override(config, ['model.num_layers=5']).model.num_layers == 5
    # Control: without the key, the file determines the model.
    assert loading.load(config_file, overrides).model.dim == 64


def test_adapters_of_the_config_are_kept(base):
    names = ('lora_rank', 'lora_alpha', 'dim')
    for spec, overrides, expected in (
        ('finetune', [], (0, 16.0, 96)),
        ('finetune:lora', [], (16, 16.0, 96)),
        ('finetune', ['model.lora_rank=4', 'model.lora_alpha=8'], (4, 8.0, 96)),
    ):
        model = loading.load(spec, [f'train.init_from={base}', *overrides]).model
        assert tuple(getattr(model, name) for name in names) == expected
    # The adapters of a base stay.
    adapted = loading.load('tiny', ['model.lora_rank=2', 'model.lora_alpha=3'])
    (base / 'config.json').write_text(to_json(adapted))
    model = loading.load('finetune', [f'train.init_from={base}']).model
    assert (model.lora_rank, model.lora_alpha) == (2, 3.0)


def test_a_base_without_a_config(config_file, base):
    for overrides, parts in (
        ([], ["train.init_from is ''", '--config.train.init_from=WORKDIR']),
        (
            [f'train.init_from={base}/no'],
            [f'train.init_from={base}/no', 'No such file', '--config=WORKDIR/config.json'],
        ),
    ):
        with input_error(*parts):
            loading.load('finetune', overrides)
    # The second file is one of Transformers.
    for content in ('{', '{"model_type": "llama"}'):
        (base / 'config.json').write_text(content)
        with pytest.raises(InputError, match=rf'config\.json: .*`maxlm hf import --input={base} --output=WORKDIR`'):
            loading.load('finetune', [f'train.init_from={base}'])
    (base.parent / 'model.gguf').write_text('GGUF')
    with pytest.raises(InputError, match=r'model\.gguf: is a model of another program; import it'):
        loading.load('finetune', [f'train.init_from={base.parent}/model.gguf'])
