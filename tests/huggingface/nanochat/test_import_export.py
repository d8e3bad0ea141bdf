"""Checkpoints of nanochat are imported with equal logits, and exported with equal files."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from maxlm.api.dataset import Dataset
from maxlm.cli.models import hf
from maxlm.cli.setup import prepare
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.dataset.token_reader import TokenReader
from maxlm.data.documents.messages import parse_messages
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, exit_code
from maxlm.huggingface.nanochat.model_versions import model_config
from maxlm.inference.load import load_model
from maxlm.inference.prompts import text_prompt
from maxlm.model.layers.kv_cache import init_caches
from maxlm.model.smear import NO_TOKEN
from maxlm.workdir.files import read_config
from tests.huggingface.nanochat.files import Reference, save, save_tokenizer
from tests.huggingface.workdirs import MODELS, make_workdir
from tests.messages import assert_error_line
from tests.parameters import decoder_graph, logits
from tests.small import model_keys, small_config

FIRST, PRESENT = Reference('first'), Reference('present')
IDS = '--tokenizer=ids:70'
NEW = {'rope_theta': 100_000.0, 'relative_attention_multiplier': 1.44}


@pytest.fixture
def refused(capfd, tmp_path):
    """Returns a function that runs a failing command. It must print one line with all parts and write no files."""

    def refused(command, *argv, parts):
        before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob('*')}
        capfd.readouterr()
        assert exit_code(hf.main, [command, f'--output={tmp_path / "new"}', *argv]) == EXIT_BAD_INPUT
        assert_error_line(capfd.readouterr().err, *parts)
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob('*')} == before

    return refused


def run(command, *argv):
    assert exit_code(hf.main, [command, *map(str, argv)]) == EXIT_DONE


def imported(source, output, *argv):
    run('import', f'--input={source}', f'--output={output}', *argv)
    return output


def logits_of(workdir, ids):
    """Returns the logits of a workdir for rows of ids."""
    model = load_model(str(workdir), num_devices=1)
    graph = decoder_graph(model.config.model)
    return np.asarray(jax.jit(lambda params: logits(graph, params, ids.astype(np.int32)))(model.params))


@pytest.fixture(scope='module')
def first(tmp_path_factory):
    """Returns the directory of a checkpoint of 2025 with a tokenizer of 70 ids."""
    directory = tmp_path_factory.mktemp('first')
    save(directory, FIRST)
    return directory, imported(directory, directory / 'run', IDS)


def test_logits_of_2025_are_those_of_nanochat(first):
    _, workdir = first
    expected = FIRST.arrays['logits']
    assert expected.std() > 0.3, 'logits near zero would agree with anything'
    assert read_config(workdir).model.dtype == 'float32'
    np.testing.assert_allclose(logits_of(workdir, FIRST.arrays['ids']), expected, atol=1e-5)


@pytest.fixture(scope='module')
def present(tmp_path_factory):
    """Returns the directory of a checkpoint of 2026 with a tokenizer of 64 ids."""
    directory = tmp_path_factory.mktemp('present')
    save(directory, PRESENT)
    return directory, imported(directory, directory / 'run', '--tokenizer=ids:64')


def test_the_config_of_2026(present):
    _, workdir = present
    model = read_config(workdir).model
    found = (model.attention_pattern, model.sliding_window, model.backout_layer, model.value_embedding_pattern)
    assert found == ('SLL', 129, 1, 'NV')


def test_logits_of_2026_are_those_of_nanochat(present):
    _, workdir = present
    expected = PRESENT.arrays['logits']
    assert expected.std() > 0.3, 'logits near zero would agree with anything'
    np.testing.assert_allclose(logits_of(workdir, PRESENT.arrays['ids']), expected, atol=1e-5)


def test_logits_of_2026_beyond_the_window_with_and_without_a_cache(present):
    _, workdir = present
    ids, expected = PRESENT.arrays['ids_long'].astype(np.int32), PRESENT.arrays['logits_long_last8'][0]
    model = load_model(str(workdir), num_devices=1)
    config = model.config.model
    # The last one is a negative control: the window matters.
    graphs = [decoder_graph(config), decoder_graph(dataclasses.replace(config, sliding_window=300))]

    @jax.jit
    def compute(params):
        def step(carry, token):
            previous, position, cache = carry
            decoder = nnx.merge(graphs[0], params)
            one = token[None, None], position[None, None], previous[None, None]
            hidden, cache, _ = decoder(one[0], positions_BT=one[1], previous_BT=one[2], cache=cache)
            return (token, position + 1, cache), decoder.logits(hidden)[0, 0]

        cache = init_caches(config, 1, ids.shape[1])
        _, by_token = jax.lax.scan(step, (jnp.int32(NO_TOKEN), jnp.int32(0), cache), ids[0])
        return by_token, *(logits(graph, params, ids)[0] for graph in graphs)

    by_token, whole, wide = (np.asarray(found)[-8:] for found in compute(model.params))
    np.testing.assert_allclose(by_token, expected, atol=1e-5)
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    assert np.abs(wide - expected).max() > 1e-3


@pytest.mark.parametrize('name', ['first', 'present'])
def test_an_export_has_the_same_tensors_and_config(name, tmp_path, request):
    directory, workdir = request.getfixturevalue(name)
    reference, size = {'first': (FIRST, 70), 'present': (PRESENT, 64)}[name]
    run('export-nanochat', f'--checkpoint={workdir}', f'--output={tmp_path / "exported"}')
    before = torch.load(directory / 'model_000010.pt', weights_only=True)
    after = torch.load(tmp_path / 'exported' / 'model_000000.pt', weights_only=True)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        rows = size if name in ('transformer.wte.weight', 'lm_head.weight') else None
        assert torch.equal(after[name][:rows], tensor[:rows]), name
        assert after[name].shape == tensor.shape
        assert rows is None or not after[name][rows:].any()
    meta = json.loads((tmp_path / 'exported' / 'meta_000000.json').read_text())
    # The pattern of three layers is SL followed by L for the last layer.
    pattern = {'window_pattern': 'SLL'} if reference is PRESENT else {}
    assert meta == {'step': 0, 'model_config': {**reference.config, **pattern}}
    again = imported(tmp_path / 'exported', tmp_path / 'again', f'--tokenizer=ids:{size}')
    assert read_config(again) == read_config(workdir)


def test_compiled_bfloat16_and_unpadded_files(first, tmp_path):
    _, workdir = first
    unpadded = Reference('first')
    for name in ('transformer.wte.weight', 'lm_head.weight'):
        unpadded.weights[name] = unpadded.weights[name][:70]
    path = save(tmp_path, unpadded, prefix='_orig_mod.', dtypes={'transformer.wte.weight': torch.bfloat16})
    # A second, newer step is not used if the path names a file.
    (tmp_path / 'model_000020.pt').write_bytes(b'')
    new = imported(path, tmp_path / 'run', IDS)
    assert read_config(new).model.dtype == 'bfloat16'
    found, expected = load_model(str(new), num_devices=1).params, load_model(str(workdir), num_devices=1).params
    rounded = torch.from_numpy(np.array(expected['embedding'])).bfloat16().float().numpy()
    np.testing.assert_array_equal(found['embedding'], rounded)
    np.testing.assert_array_equal(found['head']['kernel'], expected['head']['kernel'])


def test_the_newest_step_of_a_directory_is_imported(tmp_path):
    save(tmp_path, FIRST, step=999_999)
    changed = Reference('first')
    changed.weights['lm_head.weight'] = 2 * changed.weights['lm_head.weight']
    save(tmp_path, changed, step=1_000_000)
    workdir = imported(tmp_path, tmp_path / 'run', IDS)
    found = load_model(str(workdir), num_devices=1).params['head']['kernel']
    np.testing.assert_array_equal(found, changed.weights['lm_head.weight'][:70].T)


@pytest.fixture(scope='module')
def with_tokenizer(tmp_path_factory):
    """Returns a checkpoint in the directories of nanochat, its workdir, and the encoding of its tokenizer."""
    base = tmp_path_factory.mktemp('base')
    directory = base / 'base_checkpoints' / 'd2'
    directory.mkdir(parents=True)
    (base / 'tokenizer').mkdir()
    wide = Reference('first')
    for name in ('transformer.wte.weight', 'lm_head.weight'):
        wide.weights[name] = np.resize(wide.weights[name], (320, 16))
    save(directory, wide, config={'vocab_size': 300})
    made = save_tokenizer(base / 'tokenizer' / 'tokenizer.pkl')
    return directory, imported(directory, base / 'run'), made


def test_prompts_begin_with_bos(with_tokenizer):
    _, workdir, made = with_tokenizer
    tokenizer = Tokenizer.load(workdir / 'tokenizer.json')
    assert text_prompt(tokenizer, "I'm here") == [291, *made.encode_ordinary("I'm here")]
    assert tokenizer.context_free_prefix == [291]


def test_one_bos_separates_the_documents_of_a_data_set(with_tokenizer, tmp_path):
    _, workdir, made = with_tokenizer
    (tmp_path / 'texts').mkdir()
    for name in ('a', 'b'):
        (tmp_path / 'texts' / f'{name}.txt').write_text('the text')
    options = [
        f'--input={tmp_path / "texts"}',
        f'--output={tmp_path / "data"}',
        '--validation-fraction=0',
        '--workers=1',
    ]
    assert exit_code(prepare.main, [*options, f'--tokenizer={workdir / "tokenizer.json"}']) == EXIT_DONE
    dataset = Dataset.open(tmp_path / 'data')
    assert dataset.manifest.beginning_of_document == ()
    (shard,) = dataset.manifest.splits['train'].shards
    tokens = TokenReader(dataset.manifest, (shard,)).read(0, 0, shard.tokens)
    assert tokens.tolist() == 2 * [*made.encode_ordinary('the text'), 291]
    # A run that starts from the data set begins prompts with the token.
    assert Tokenizer.load(dataset.manifest.tokenizer_path).beginning_of_document == (291,)


def test_conversations_have_the_tokens_of_nanochat(with_tokenizer):
    _, workdir, made = with_tokenizer
    chat = ChatEncoder.load(workdir)
    messages = [('system', 'Be nice.'), ('user', ' Hi <|bos|>'), ('assistant', 'Ho\n'), ('user', '?')]
    turns = parse_messages([{'role': role, 'content': content} for role, content in messages], 'messages')
    text = made.encode_ordinary
    # As RustBPETokenizer.render_for_completion of nanochat.
    user, answer = [292, *text('Be nice.\n\n Hi <|bos|>'), 293], [294, *text('Ho\n'), 295]
    assert chat.encode_prompt(turns).tolist() == [291, *user, *answer, 292, *text('?'), 293, 294]
    assert chat.end_of_turn == 295


def test_an_export_has_the_tokenizer(with_tokenizer, tmp_path):
    directory, workdir, _ = with_tokenizer
    run('export-nanochat', f'--checkpoint={workdir}', f'--output={tmp_path / "exported"}', '--dtype=bfloat16')
    again = imported(tmp_path / 'exported', tmp_path / 'again')
    assert (again / 'tokenizer.json').read_bytes() == (workdir / 'tokenizer.json').read_bytes()
    assert (again / 'text_boundaries.json').read_bytes() == (workdir / 'text_boundaries.json').read_bytes()
    # A tokenizer of another place, and none.
    other = imported(directory, tmp_path / 'other', f'--tokenizer={tmp_path / "exported"}')
    assert (other / 'tokenizer.json').read_bytes() == (workdir / 'tokenizer.json').read_bytes()
    numbers = imported(directory, tmp_path / 'numbers', '--tokenizer=ids:300:291')
    assert Tokenizer.load(numbers / 'tokenizer.json').end_of_document == 291


def test_an_import_without_a_tokenizer_says_so(tmp_path, capfd):
    save(tmp_path, FIRST)
    workdir = imported(tmp_path, tmp_path / 'run')
    assert not (workdir / 'tokenizer.json').exists()
    assert 'has no tokenizer.pkl' in ' '.join(capfd.readouterr())


@pytest.mark.parametrize(
    ('config', 'parts'),
    [
        ({'n_layer': 3}, ['n_layer=3', 'the tensors have 2 layers']),
        ({'n_layer': 10**9}, ['n_layer=1000000000: must be an integer']),
        ({'n_layer': True}, ['n_layer=True']),
        ({'n_embd': 16.0}, ['n_embd=16.0']),
        ({'n_embd': float('nan')}, ['n_embd=nan']),
        ({'n_embd': 2**18}, ['wte.weight has shape (128, 16), but (128, 262144)']),
        ({'n_embd': -16}, ['n_embd=-16']),
        ({'n_head': 0}, ['n_head=0']),
        ({'n_head': 3}, ['n_head=3: must divide n_embd=16']),
        ({'n_kv_head': 3}, ['num_kv_heads=3']),
        ({'vocab_size': '70'}, ["vocab_size='70'"]),
        ({'vocab_size': 200}, ['has shape (128, 16), but (256, 16)']),
        ({'vocab_size': 2**31 - 1}, ['has shape (128, 16), but (2147483648, 16)']),
        ({'sequence_len': None}, ['sequence_len=None']),
        ({'window_pattern': 'SL'}, ["window_pattern='SL': not a pattern of nanochat of 2025"]),
        ({'window_pattern': ''}, ['window_pattern=']),
        ({'n_experts': 4}, ["'n_experts', which maxlm does not know"]),
    ],
)
def test_strange_numbers_of_the_meta_file_are_refused(tmp_path, refused, config, parts):
    save(tmp_path, FIRST, config=config)
    refused('import', f'--input={tmp_path}', IDS, parts=['meta_000010.json', *parts])


@pytest.mark.parametrize(
    ('meta', 'parts'),
    [
        (None, ['meta_000010.json: no such file; copy it']),
        ('', ['not valid JSON']),
        ('[]', ['contains a list']),
        ('{}', ['has no model_config']),
        ('{"model_config": {"n_layer": 2}}', ['model_config has no sequence_len']),
    ],
)
def test_damaged_meta_files_are_refused(tmp_path, refused, meta, parts):
    save(tmp_path, FIRST)
    path = tmp_path / 'meta_000010.json'
    path.unlink() if meta is None else path.write_text(meta)
    refused('import', f'--input={tmp_path}', IDS, parts=parts)


def test_other_tensors_are_refused(tmp_path, refused):
    changed = Reference('first')
    del changed.weights['transformer.h.1.mlp.c_fc.weight']
    save(tmp_path, changed)
    refused('import', f'--input={tmp_path}', IDS, parts=['transformer.h.1.mlp.c_fc.weight has shape none (missing)'])
    changed = Reference('first')
    changed.weights['extra'] = np.zeros(3, np.float32)
    save(tmp_path, changed)
    refused('import', f'--input={tmp_path}', IDS, parts=['tensor extra has shape (3,), but none (not in the model)'])
    changed = Reference('first')
    changed.weights['lm_head.weight'] = np.full_like(changed.weights['lm_head.weight'], np.nan)
    save(tmp_path, changed)
    refused('import', f'--input={tmp_path}', IDS, parts=['lm_head.weight has values that are not finite'])


def test_checkpoints_between_the_two_layouts_are_refused_by_name(tmp_path, refused):
    changed = Reference('present')
    for name in ('smear_gate.weight', 'smear_lambda', 'backout_lambda'):
        del changed.weights[name]
    save(tmp_path, changed)
    refused('import', f'--input={tmp_path}', IDS, parts=['resid_lambdas', 'between 2026-01-11 and 2026-03-14'])
    changed = Reference('present')
    gate = 'transformer.h.0.attn.ve_gate.weight'
    changed.weights[gate] = np.zeros((2, 32), np.float32)
    save(tmp_path, changed)
    refused('import', f'--input={tmp_path}', IDS, parts=[f'{gate} has shape (2, 32), but (2, 12)'])


def test_forged_files_are_refused_and_not_run(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, FIRST)

    class Forged:
        def __reduce__(self):
            return eval, ("open('executed', 'w')",)

    torch.save({'a': Forged()}, path)
    refused('import', f'--input={tmp_path}', IDS, parts=['model_000010.pt', 'builtin', 'eval, which is not allowed'])


@pytest.mark.parametrize(
    ('argv', 'parts'),
    [
        (['--tokenizer=ids:71'], ['has 71 ids, but the model has vocab_size=70']),
        (['--tokenizer=ids:x'], ['must be ids:N']),
        (['--tokenizer=missing'], ['--tokenizer=missing: no such file or directory']),
    ],
)
def test_other_tokenizers_are_refused(tmp_path, refused, argv, parts):
    save(tmp_path, FIRST)
    refused('import', f'--input={tmp_path}', *argv, parts=parts)


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path, refused):
    save(tmp_path, FIRST)
    save_tokenizer(tmp_path / 'tokenizer.pkl')
    refused('import', f'--input={tmp_path}', parts=['tokenizer.pkl: has 300 ids, but the model has vocab_size=70'])


def test_directories_without_a_model_name_their_files(tmp_path, refused):
    folder = tmp_path / 'folder'
    folder.mkdir()
    refused('import', f'--input={folder}', parts=['config.json: No such file; found an empty directory'])
    (folder / 'a.txt').touch()
    (folder / 'pytorch_model.bin').touch()
    refused('import', f'--input={folder}', parts=['found pytorch_model.bin, a.txt;', 'model_NNNNNN.pt'])
    refused(
        'import',
        f'--input={folder}',
        '--tokenizer=x',
        parts=['--tokenizer=x: applies only to GGUF files and checkpoints of nanochat'],
    )


def test_models_that_nanochat_cannot_express_are_not_exported(tmp_path, refused):
    cases = {
        'model.activation=swiglu': {'activation': 'swiglu', 'ffn_dim': 128},
        'model.rope_theta=20000.0': {'rope_theta': 20_000.0},
        'model.attention_pattern=SL': {'attention_pattern': 'SL', 'sliding_window': 5},
        'model.norm_epsilon=0.001': {'norm_epsilon': 1e-3},
        'model.logit_softcap=14.0': {'logit_softcap': 14.0},
        'model.embedding_residual=False': {**NEW, 'residual_scale': True},
        'model.residual_scale=False': {**NEW, 'smear_channels': 24},
    }
    for part, settings in cases.items():
        with pytest.raises(InputError, match=f'{re.escape(part)}: nanochat .* has '):
            model_config(small_config(**model_keys(family='nanochat', vocab_size=61, **settings)).model)
    make_workdir(tmp_path / 'run', MODELS['llama'])
    refused('export-nanochat', f'--checkpoint={tmp_path / "run"}', parts=['nanochat of 2025 has', 'another format'])


def test_a_model_with_a_base_is_exported():
    settings = {'family': 'nanochat', 'vocab_size': 61}
    with_base = small_config(**model_keys(**settings, base_dim=16, base_num_layers=1)).model
    assert model_config(with_base) == model_config(small_config(**model_keys(**settings)).model)


def test_a_model_trained_here_is_exported(tmp_path, caplog):
    make_workdir(tmp_path / 'run', MODELS['nanochat'], step=3)
    run('export-nanochat', f'--checkpoint={tmp_path / "run"}', f'--output={tmp_path / "exported"}')
    assert sorted(path.name for path in (tmp_path / 'exported').iterdir()) == ['meta_000003.json', 'model_000003.pt']
    imported(tmp_path / 'exported', tmp_path / 'again', '--tokenizer=ids:260')
    found, expected = (load_model(str(tmp_path / name), num_devices=1).params for name in ('again', 'run'))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
