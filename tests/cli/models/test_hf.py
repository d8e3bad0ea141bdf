"""`maxlm hf`: its output, and errors with one line, exit code 2 and no remaining files.

tests/huggingface tests the equality with Transformers.
"""

import json
import math
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxlm.cli.execution.hf import parse_size
from maxlm.cli.models import evaluate, hf
from maxlm.cli.runs import train
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, exit_code
from maxlm.formatting import format_bytes
from maxlm.telemetry.metrics import read_metrics
from tests.cli.runs.test_train import arguments
from tests.huggingface.workdirs import MODELS, make_workdir
from tests.messages import assert_error_line
from tests.starting import make_start


@pytest.fixture
def refused(capfd, tmp_path):
    """Returns a function that runs a failing command. It must print one line with all parts and change no files."""

    def refused(argv, *parts):
        before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob('*')}
        capfd.readouterr()
        assert exit_code(hf.main, [str(word) for word in argv]) == EXIT_BAD_INPUT
        assert_error_line(capfd.readouterr().err, *parts)
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob('*')} == before

    return refused


def run(*argv):
    assert exit_code(hf.main, [str(word) for word in argv]) == EXIT_DONE


# --- export


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('made') / 'run'
    make_workdir(workdir, MODELS['llama'], step=7)
    return workdir


@pytest.fixture
def workdir(made, tmp_path):
    """Returns a copy that a test may damage."""
    shutil.copytree(made, tmp_path / 'run')
    return tmp_path / 'run'


@pytest.mark.parametrize('checkpoint', ['{}', '{}@7', '{}/checkpoints/7'])
def test_export(made, tmp_path, capsys, checkpoint):
    output = tmp_path / 'output'
    run('export', f'--checkpoint={checkpoint.format(made)}', f'--output={output}', '--max-shard-size=20KB')
    assert sorted(path.name for path in output.iterdir() if 'model-' not in path.name) == [
        'README.md',
        'config.json',
        'generation_config.json',
        'model.safetensors.index.json',
        'special_tokens_map.json',
        'tokenizer.json',
        'tokenizer_config.json',
    ]
    parameters = sum(array.size for path in output.glob('*.safetensors') for array in load_file(path).values())
    expected = f'{output}: LlamaForCausalLM of {parameters:,} parameters, {format_bytes(2 * parameters)} in bfloat16\n'
    assert capsys.readouterr().out == expected
    assert json.loads((output / 'config.json').read_text())['torch_dtype'] == 'bfloat16'


def test_export_of_a_run(dataset, tmp_path):
    workdir, output = tmp_path / 'run', tmp_path / 'output'
    make_start(workdir, dataset / 'tokenizer.json', data__path=str(dataset))
    metrics = [{'step': 5, 'train/loss': 3.25}, {'step': 5, 'eval/loss': 3.5}]
    (workdir / 'metrics.jsonl').write_text(''.join(json.dumps({'time': 1.0, **line}) + '\n' for line in metrics))
    run('export', f'--checkpoint={workdir}', f'--output={output}', '--dtype=float32')
    card = (output / 'README.md').read_text()
    for part in (
        '| steps | 5 |',
        '| data | license, ',
        '| training loss | 3.25',
        '| validation loss | 3.5',
        '# output\n',
    ):
        assert part in card
    assert all(np.isfinite(array).all() for array in load_file(output / 'model.safetensors').values())
    assert Tokenizer.load(output / 'tokenizer.json').sha256 == Tokenizer.load(workdir / 'tokenizer.json').sha256


@pytest.mark.parametrize(
    ('option', 'parts'),
    [
        ('--output=az://bucket/model', ['--output=az://bucket/model', 'local directory']),
        ('--output={tmp}', ['--output={tmp}', 'new or empty']),
        ('--output={tmp}/run/config.json', ['config.json', 'is a file', 'give a directory']),
        ('--output={tmp}/run/config.json/x', ['config.json', 'not a directory']),
        ('--checkpoint={tmp}', ['--checkpoint={tmp}', 'no checkpoint']),
        ('--checkpoint={tmp}/run@8', ['run@8', "step '8' does not exist", 'steps: 7']),
        ('--dtype=int8', ['--dtype', 'int8', 'bfloat16']),
        ('--architecture=bert', ['--architecture', 'bert', 'gpt_neox']),
        ('--architecture=gpt2', ['model.position_embedding=rotary', 'GPT2LMHeadModel', '--architecture']),
        ('--max-shard-size=0', ['--max-shard-size=0', '500MB']),
        ('--max-shard-size=big', ['--max-shard-size=big', '500MB']),
        ('--max-shard-size=1XB', ['--max-shard-size=1XB']),
        ('--max-shard=1GB', ['--max-shard', '--help']),
        ('extra', ['extra']),
    ],
)
def test_options_of_export(workdir, tmp_path, refused, option, parts):
    argv = ['export', f'--checkpoint={workdir}', f'--output={tmp_path}/new', option.format(tmp=tmp_path)]
    refused(argv, *(part.format(tmp=tmp_path) for part in parts))


def test_sizes():
    assert parse_size('1GB') == 10**9
    assert parse_size('1.5 mb') == 1_500_000
    assert parse_size('2GiB') == 2**31
    assert parse_size('77') == 77
    for text in ('', '-1GB', '0.1', 'GB', '1GBs', '1 2'):
        with pytest.raises(InputError, match='--max-shard-size'):
            parse_size(text)


def test_a_model_without_a_matching_architecture(tmp_path, refused):
    make_workdir(tmp_path / 'run', MODELS['nanochat'])
    argv = ['export', f'--checkpoint={tmp_path}/run', f'--output={tmp_path}/new']
    refused(argv, 'model.activation=relu2', 'model.norm_use_scale=False', '--architecture=nanochat')
    run(*argv, '--architecture=nanochat')
    assert json.loads((tmp_path / 'new' / 'config.json').read_text())['model_type'] == 'nanochat'


def kernel(value):
    """Returns a changed parameter with one nonzero value."""
    shape = (2, 32, 40)
    array = np.zeros(shape, np.float32)
    array[1, 3, 5] = value
    return {'blocks.feedforward.up.kernel': array}


@pytest.mark.parametrize(
    ('value', 'dtype', 'parts'),
    [
        (np.nan, 'bfloat16', ['model.layers.1.mlp.up_proj.weight', 'not finite']),
        (np.inf, 'float32', ['model.layers.1.mlp.up_proj.weight', 'not finite']),
        (70_000, 'float16', ['model.layers.1.mlp.up_proj.weight', '70000', 'float16', '--dtype=']),
    ],
)
def test_values_outside_the_range_of_the_dtype(tmp_path, refused, value, dtype, parts):
    make_workdir(tmp_path / 'run', MODELS['llama'], changed=kernel(value))
    argv = ['export', f'--checkpoint={tmp_path}/run', f'--output={tmp_path}/deep/new', f'--dtype={dtype}']
    refused(argv, *parts)
    if np.isfinite(value):
        run(*argv[:-1], '--dtype=bfloat16')


def test_no_disk_space_for_an_export(workdir, tmp_path, refused, monkeypatch):
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: SimpleNamespace(free=10**7))
    argv = ['export', f'--checkpoint={workdir}', f'--output={tmp_path}/new']
    refused(argv, '--output', 'needs ', ' MiB of disk space, but only 9.54 MiB are free')


def test_a_config_of_another_model(workdir, tmp_path, refused):
    config = json.loads((workdir / 'config.json').read_text())
    argv = ['export', f'--checkpoint={workdir}', f'--output={tmp_path}/new']
    for key, value, parts in (
        ('ffn_dim', 41, ['blocks.feedforward.down.kernel', '(2, 40, 32)', '(2, 41, 32)']),
        ('num_layers', 3, ['blocks.attention.', '(2, ', '(3, ']),
        ('tie_embeddings', True, ['head.kernel', 'none']),
        ('use_bias', True, ['bias', 'missing']),
    ):
        changed = {**config, 'model': {**config['model'], key: value}}
        (workdir / 'config.json').write_text(json.dumps(changed))
        refused(argv, workdir / 'checkpoints' / '7', workdir / 'config.json', *parts)
    (workdir / 'config.json').write_text('{')
    refused(argv, workdir / 'config.json', 'not a valid config')
    (workdir / 'config.json').unlink()
    refused(argv, workdir / 'config.json')


@pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer_config.json', 'generation_config.json'])
def test_a_damaged_text_file(workdir, tmp_path, refused, name):
    (workdir / name).write_text('[')
    refused(['export', f'--checkpoint={workdir}', f'--output={tmp_path}/new'], workdir / name)


# --- import


SIZES = {
    'model__family': 'llama',
    'model__num_layers': 2,
    'model__dim': 32,
    'model__num_heads': 4,
    'model__num_kv_heads': 2,
    'model__ffn_dim': 56,
    'model__max_positions': 64,
    'model__norm_epsilon': 1e-6,
}


@pytest.fixture(scope='module')
def saved(tmp_path_factory, dataset):
    """Returns a Transformers directory in float32 with the tokenizer of the test data set."""
    folder = tmp_path_factory.mktemp('saved')
    make_workdir(folder / 'run', {**SIZES, 'model__vocab_size': 257})
    run('export', f'--checkpoint={folder}/run', f'--output={folder}/model', '--dtype=float32')
    for name in ('README.md', 'special_tokens_map.json', 'tokenizer_config.json'):
        (folder / 'model' / name).unlink()
    shutil.copy(dataset / 'tokenizer.json', folder / 'model')
    return folder / 'model'


@pytest.fixture
def model(saved, tmp_path):
    """Returns a copy that a test may damage."""
    shutil.copytree(saved, tmp_path / 'model')
    return tmp_path / 'model'


def command(tmp_path):
    return ['import', f'--input={tmp_path}/model', f'--output={tmp_path}/new']


def change_config(model, **keys):
    config = json.loads((model / 'config.json').read_text())
    (model / 'config.json').write_text(json.dumps({**config, **keys}))


def change_tensors(model, change):
    arrays = load_file(model / 'model.safetensors')
    change(arrays)
    save_file(arrays, model / 'model.safetensors')


def test_import(model, dataset, tmp_path, capsys):
    run(*command(tmp_path))
    parameters = sum(array.size for array in load_file(model / 'model.safetensors').values())
    assert capsys.readouterr().out == (
        f'{tmp_path}/new: LlamaForCausalLM of {parameters:,} parameters\n'
        '  end of text: `<|endoftext|>` (generation_config.json: eos_token_id)\n'
    )
    assert sorted(os.listdir(tmp_path / 'new')) == [
        'checkpoints',
        'config.json',
        'generation_config.json',
        'hf_config.json',
        'text_boundaries.json',
        'tokenizer.json',
    ]
    # Other verbs accept the imported workdir.
    argv = [f'--checkpoint={tmp_path}/new', f'--data={dataset}', '--json']
    assert exit_code(evaluate.main, argv) == EXIT_DONE
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated['step'] == 0

    # A run can start from it; with a learning rate of zero, the loss is unchanged.
    sizes = {**SIZES, 'model__tie_embeddings': 'false', 'model__dtype': 'float32', 'data__seq_len': 64}
    rates = {'optimizer__learning_rate': 1e-30, 'optimizer__min_learning_rate': 0, 'optimizer__warmup_steps': 0}
    overrides = {'train__num_steps': 1, 'eval__interval': 1, 'eval__num_batches': 0, **sizes, **rates}
    argv = arguments(dataset, tmp_path / 'run', **overrides, train__init_from=tmp_path / 'new')
    assert exit_code(train.main, argv) == EXIT_DONE
    assert read_metrics(tmp_path / 'run')[-1]['eval/loss'] == pytest.approx(evaluated['loss'], abs=1e-3)
    # Negative control: the loss differs from that of a new model with 257 ids.
    assert abs(evaluated['loss'] - math.log(257)) > 0.1


def test_an_import_without_a_tokenizer_is_reported(model, tmp_path, capsys):
    (model / 'tokenizer.json').unlink()
    (model / 'tokenizer.model').write_text('x')
    run(*command(tmp_path))
    warning, summary = capsys.readouterr().out.splitlines()
    assert f'{model} has tokenizer.model but no tokenizer.json' in warning
    assert 'LlamaForCausalLM' in summary
    assert not (tmp_path / 'new' / 'tokenizer.json').exists()


CONFIGS = [
    ({'model_type': 'dbrx'}, ['model_type=dbrx', 'mixtral']),
    ({'model_type': 'cohere'}, ['model_type=cohere', 'nanochat']),
    ({'model_type': 'bloom'}, ['ALiBi']),
    ({'num_local_experts': 8}, ['num_local_experts=8']),
    ({'quantization_config': {'bits': 8}}, ['quantization_config']),
    ({'rope_parameters': {'rope_type': 'longrope'}}, ['longrope']),
    ({'attention_bias': True}, ['q_proj.bias', 'missing']),
    ({'hidden_act': 'tanh'}, ['hidden_act', 'tanh']),
    ({'num_hidden_layers': 0}, ['num_hidden_layers=0']),
    # Mismatching files are detected by name before any file is read.
    ({'num_hidden_layers': 3}, ['model.layers.2.', 'missing', '9 in total']),
    ({'num_hidden_layers': 1}, ['model.layers.1.', 'does not belong to LlamaForCausalLM']),
    ({'hidden_size': 64}, ['(257, 32)', 'requires (257, 64)']),
    ({'vocab_size': 258}, ['model.embed_tokens.weight', '(257, 32)', 'requires (258, 32)']),
    ({'tie_word_embeddings': True}, ['lm_head.weight', 'differs from the embedding']),
    ({'attention_bias': True, 'mlp_bias': True}, ['bias', 'missing']),
    ({'model_type': 'qwen3', 'head_dim': 8}, ['q_norm.weight', 'missing']),
]


@pytest.mark.parametrize(('keys', 'parts'), CONFIGS, ids=[' '.join(parts) for _, parts in CONFIGS])
def test_configs_that_are_refused(model, tmp_path, refused, keys, parts):
    change_config(model, **keys)
    refused(command(tmp_path), model, *parts)


@pytest.mark.parametrize('content', ['{', '[]', '3', '\x00', '{}'])
def test_a_garbled_config(model, tmp_path, refused, content):
    (model / 'config.json').write_text(content)
    refused(command(tmp_path), model / 'config.json')


def test_a_missing_config(model, tmp_path, refused):
    (model / 'config.json').unlink()
    refused(command(tmp_path), model / 'config.json', 'No such file')


@pytest.mark.parametrize(
    ('source', 'parts'),
    [
        ('openai-community/gpt2', ['--input=openai-community/gpt2', 'download']),
        ('gs://bucket/model', ['--input=gs://bucket/model', 'local directory']),
    ],
)
def test_an_input_that_is_no_directory(tmp_path, refused, source, parts):
    refused(['import', f'--input={source}', f'--output={tmp_path}/new'], *parts)


@pytest.mark.parametrize('output', ['gs://bucket/x', '{tmp}', '{tmp}/model/config.json'])
def test_an_invalid_output(model, tmp_path, refused, output):
    output = output.format(tmp=tmp_path)
    refused(['import', f'--input={model}', f'--output={output}'], f'--output={output}')


TENSORS = [
    (lambda arrays: arrays.pop('model.norm.weight'), ['model.norm.weight', '(32,)', 'missing', '1 in total']),
    (lambda arrays: arrays.update({'model.extra': np.ones(3, np.float32)}), ['model.extra', '(3,)', 'not belong']),
    (
        lambda arrays: arrays.update({'model.norm.weight': np.ones(31, np.float32)}),
        ['model.norm.weight', '(31,)', 'requires (32,)'],
    ),
    (lambda arrays: arrays.update({'norm.weight': np.ones(32, np.float32)}), ['norm.weight', 'duplicate']),
    (lambda arrays: arrays.update({'model.norm.weight': np.ones(32, np.int8)}), ['model.norm.weight', 'I8', 'BF16']),
    (
        lambda arrays: arrays.update({'model.norm.weight': np.ones(32, np.float64)}),
        ['model.norm.weight', 'F64', 'F32'],
    ),
    (lambda arrays: arrays.clear(), ['missing']),
    (lambda arrays: arrays['model.norm.weight'].fill(np.nan), ['model.norm.weight', 'not finite']),
    (lambda arrays: arrays['model.norm.weight'].fill(-np.inf), ['model.norm.weight', 'not finite']),
]


@pytest.mark.parametrize(('change', 'parts'), TENSORS, ids=[' '.join(parts) for _, parts in TENSORS])
def test_tensors_that_do_not_fit(model, tmp_path, refused, change, parts):
    change_tensors(model, change)
    refused(command(tmp_path), model, *parts)


@pytest.mark.parametrize('num_layers', [10**9, 10**30])
def test_very_many_layers_are_refused_before_they_are_made(model, tmp_path, refused, num_layers):
    change_config(model, num_hidden_layers=num_layers)
    refused(command(tmp_path), f'num_hidden_layers={num_layers}', 'at most 1000')


def test_a_deeply_nested_config(model, tmp_path, refused):
    (model / 'config.json').write_text('[' * 100_000)
    refused(command(tmp_path), 'config.json', 'nested deeper')


def test_damaged_files(model, tmp_path, refused):
    path = model / 'model.safetensors'
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    refused(command(tmp_path), path, 'not a complete safetensors file')
    path.rename(model / 'pytorch_model.bin')
    refused(command(tmp_path), model, 'pytorch_model.bin', 'pickle')
    (model / 'pytorch_model.bin').unlink()
    refused(command(tmp_path), model, 'no model.safetensors')
    path.write_bytes(content)
    (model / 'tokenizer.json').write_text('{')
    refused(command(tmp_path), model / 'tokenizer.json', 'is not a tokenizer.json')
    (model / 'tokenizer.json').unlink()
    run(*command(tmp_path))


def test_a_missing_shard(model, tmp_path, refused):
    arrays = load_file(model / 'model.safetensors')
    (model / 'model.safetensors').unlink()
    weight_map = {name: f'model-0000{1 + number % 2}-of-00002.safetensors' for number, name in enumerate(arrays)}
    (model / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
    for file in set(weight_map.values()):
        save_file({name: arrays[name] for name in arrays if weight_map[name] == file}, model / file)
    shard = model / 'model-00002-of-00002.safetensors'
    content = shard.read_bytes()
    shard.unlink()
    refused(command(tmp_path), shard, 'missing')
    shard.write_bytes(content)
    run(*command(tmp_path))


def test_no_disk_space_for_an_import(model, tmp_path, refused, monkeypatch):
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: SimpleNamespace(free=10**7))
    refused(command(tmp_path), '--output', 'needs ', ' MiB of disk space, but only 9.54 MiB are free')


@pytest.mark.parametrize('argv', [[], ['convert'], ['export'], ['import', '--input=x'], ['export', '--checkpoint=x']])
def test_missing_options(tmp_path, refused, argv):
    refused(argv, '--help')
