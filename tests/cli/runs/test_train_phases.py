"""Training phases, each a run that starts from the previous model: longer context, conversations, adapters."""

import json
import shutil

import numpy as np
import pytest

from maxlm.checkpoint.streaming import ParamsReader
from maxlm.cli.models import generate, hf
from maxlm.cli.setup import prepare
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.workdir.files import read_config
from tests.cli.runs.test_train import arguments, curve, params_of, run, same
from tests.huggingface.transformers_models import CASES, make_model
from tests.messages import assert_error_line
from tests.processes import Processes
from tests.starting import make_start

pytestmark = pytest.mark.usefixtures('shared_steps')

MODEL = {'model__family': 'llama', 'model__dropout': 0, 'model__tie_embeddings': 'false', 'eval__interval': 0}
MODEL |= {'optimizer__schedule': 'constant'}
SCHEDULE = '((16, 0.3), (32, 0.6))'
LONGER = {
    **MODEL,
    'data__seq_len': 64,
    'data__seq_len_schedule': SCHEDULE,
    'model__rope_scaling': 'yarn',
    'model__rope_scaling_factor': 4,
    'train__num_steps': 10,
}
# The first update has the learning rate 0, so the saved parameters equal the initial ones.
NO_UPDATE = {'train__num_steps': 1, 'optimizer__warmup_from_zero': True}
BYTES, TOKENS, ROWS = 257, 259, 264
CHAT = {**LONGER, 'data__seq_len_schedule': '()', 'model__vocab_size': ROWS, 'train__num_steps': 6}


@pytest.fixture(scope='module')
def base(dataset, tmp_path_factory):
    """Returns the workdir of a model with short sequences."""
    workdir = tmp_path_factory.mktemp('base') / 'run'
    assert run(dataset, workdir, **MODEL, train__num_steps=30) == EXIT_DONE
    return workdir


@pytest.fixture(scope='module')
def longer(dataset, base, tmp_path_factory):
    """Returns the workdir of `base` trained with sequences four times as long, and its settings."""
    workdir = tmp_path_factory.mktemp('longer') / 'run'
    settings = {**LONGER, 'train__init_from': base, 'checkpoint__save_interval_steps': 1, 'checkpoint__max_to_keep': 10}
    assert run(dataset, workdir, **settings) == EXIT_DONE
    return workdir, settings


@pytest.fixture(scope='module')
def chats(base, tmp_path_factory):
    """Returns a data set of conversations, prepared with the tokenizer of `base`."""
    folder = tmp_path_factory.mktemp('chats')
    rows = []
    for number in range(60):
        question, answer = f'What is {number}?', f'It is {number}.'
        messages = [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]
        rows.append(json.dumps({'messages': messages}) + '\n')
    (folder / 'chats.jsonl').write_text(''.join(rows))
    command = ['--input', folder / 'chats.jsonl', '--output', folder / 'data', '--tokenizer', base / 'tokenizer.json']
    command += ['--format', 'chat', '--pack-seq-len', 64, '--workers', 1, '--validation-fraction', 0.1, '--quiet']
    assert prepare.main([str(word) for word in command]) == EXIT_DONE
    return folder / 'data'


@pytest.fixture(scope='module')
def chat_model(longer, chats, tmp_path_factory):
    """Returns the workdir of a model trained on conversations."""
    workdir = tmp_path_factory.mktemp('chat_model') / 'run'
    assert run(chats, workdir, **CHAT, train__init_from=longer[0]) == EXIT_DONE
    return workdir


def log_of(workdir):
    return (workdir / 'run.log').read_text()


def tables(workdir, step):
    """Returns the embedding and the transposed output head, each of shape [V, D]."""
    reader = ParamsReader(workdir / 'checkpoints' / str(step))
    return reader.read('embedding'), reader.read('head.kernel').T


def assert_new_rows_are_means(before, after):
    for old, new in zip(before, after, strict=True):
        assert len(new) == ROWS
        np.testing.assert_array_equal(new[:BYTES], old[:BYTES])
        np.testing.assert_allclose(new[BYTES:], np.broadcast_to(old[:BYTES].mean(axis=0), new[BYTES:].shape), atol=1e-6)
        # Negative control: another mean is detected.
        assert np.abs(old[: BYTES - 1].mean(axis=0) - new[-1]).max() > 1e-5


def test_a_phase_with_longer_sequences(dataset, base, longer, tmp_path):
    workdir, settings = longer
    log = log_of(workdir)
    assert f'starting with the parameters of {base}/checkpoints/30/params and a fresh optimizer' in log
    assert log.count('sequence length: 16 in the checkpoint, 64 in this run (yarn ×4)') == 1
    assert 'step       4  the sequence length is now 32 tokens' in log
    assert 'step       7  the sequence length is now 64 tokens' in log
    assert read_config(workdir).model.original_max_positions == 16
    # Training continues from the parameters of the base instead of random ones.
    assert run(dataset, tmp_path / 'fresh', **LONGER) == EXIT_DONE
    assert curve(workdir)[1]['train/loss'] < curve(tmp_path / 'fresh')[1]['train/loss'] - 0.3
    assert 'sequence length: ' not in log_of(tmp_path / 'fresh')
    # A run resumed within the phase is equal, even if the base no longer exists.
    resumed = tmp_path / 'resumed'
    shutil.copytree(workdir, resumed)
    for step in range(6, 11):
        shutil.rmtree(resumed / 'checkpoints' / str(step))
    assert run(dataset, resumed, **{**settings, 'train__init_from': tmp_path / 'deleted'}) == EXIT_DONE
    assert curve(resumed) == curve(workdir)
    assert same(params_of(resumed, 10), params_of(workdir, 10))


def test_learned_positions_are_refused_for_longer_sequences(dataset, tmp_path, capsys):
    learned = {'model__family': 'gpt2', 'eval__interval': 0, 'train__num_steps': 1}
    make_start(tmp_path / 'first', dataset / 'tokenizer.json', model__family='gpt2')
    longer = {**learned, 'data__seq_len': 64, 'train__init_from': tmp_path / 'first'}
    assert run(dataset, tmp_path / 'second', **longer) == EXIT_BAD_INPUT
    parts = (f'train.init_from={tmp_path}/first', 'learned positions for 16 tokens', 'model.max_positions=16')
    assert_error_line(capsys.readouterr().err, *parts)
    assert not (tmp_path / 'second' / 'config.json').exists()


def test_conversations_add_tokens(longer, chats, chat_model, tmp_path, capsys):
    log = log_of(chat_model)
    assert (
        f'vocabulary grows from {BYTES} to {TOKENS} tokens: new rows are initialized to the mean of the old rows' in log
    )
    unchanged = tmp_path / 'unchanged'
    assert run(chats, unchanged, **{**CHAT, **NO_UPDATE}, train__init_from=longer[0], mesh__tensor=2) == EXIT_DONE
    assert_new_rows_are_means(tables(longer[0], 10), tables(unchanged, 1))
    losses = curve(chat_model)
    assert losses[6]['train/loss'] < losses[1]['train/loss']
    # Other tokens are refused.
    capsys.readouterr()
    shutil.copytree(longer[0], tmp_path / 'other')
    tokenizer = tmp_path / 'other' / 'tokenizer.json'
    tokenizer.write_text(tokenizer.read_text().replace('<|endoftext|>', '<eos>'))
    assert run(chats, tmp_path / 'new', **CHAT, train__init_from=tmp_path / 'other') == EXIT_BAD_INPUT
    assert f"no token '<eos>'); prepare the data with --tokenizer {tokenizer}" in capsys.readouterr().err


def test_the_chat_template_is_copied(chats, chat_model, tmp_path, capsys):
    template = (chats / 'chat_template.jinja').read_text()
    assert (chat_model / 'chat_template.jinja').read_text() == template
    command = [f'--checkpoint={chat_model}', '--prompt=What is 7?', '--max-tokens=20', '--temperature=1']
    assert exit_code(generate.main, [*command, '--chat']) == EXIT_DONE
    answered = capsys.readouterr().out
    assert answered.startswith('What is 7?\n\n')
    assert exit_code(generate.main, command) == EXIT_DONE
    # Negative control: without the template, the prompt is different.
    assert capsys.readouterr().out.removeprefix('What is 7?') != answered.removeprefix('What is 7?\n\n')
    argv = ['export', f'--checkpoint={chat_model}', f'--output={tmp_path}/exported', '--dtype=float32']
    assert exit_code(hf.main, argv) == EXIT_DONE
    generation = json.loads((tmp_path / 'exported' / 'generation_config.json').read_text())
    assert generation['eos_token_id'] == [256, TOKENS - 1]
    assert (tmp_path / 'exported' / 'chat_template.jinja').read_text() == template
    argv = ['import', f'--input={tmp_path}/exported', f'--output={tmp_path}/imported']
    assert exit_code(hf.main, argv) == EXIT_DONE
    assert (tmp_path / 'imported' / 'chat_template.jinja').read_text() == template
    command[0] = f'--checkpoint={tmp_path}/imported'
    capsys.readouterr()
    assert exit_code(generate.main, [*command, '--chat']) == EXIT_DONE
    assert capsys.readouterr().out == answered


def test_chat_requires_a_template(base, capsys):
    command = [f'--checkpoint={base}', '--prompt=What?', '--chat', '--max-tokens=4']
    assert exit_code(generate.main, command) == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, f'--chat: {base} has no usable chat_template.jinja')


def test_a_phase_with_adapters(chat_model, chats, tmp_path, capsys):
    lora = {**CHAT, 'model__lora_rank': 2}
    assert run(chats, tmp_path / 'lora', **lora, train__init_from=chat_model) == EXIT_DONE
    before, after = (ParamsReader(workdir / 'checkpoints' / '6') for workdir in (chat_model, tmp_path / 'lora'))
    for name in before.shapes:
        np.testing.assert_array_equal(after.read(name), before.read(name), err_msg=name)
    adapters = after.shapes.keys() - before.shapes.keys()
    assert {name.rpartition('.')[2] for name in adapters} == {'lora_a', 'lora_b'}
    assert all(np.any(after.read(name)) for name in adapters)
    # The next phase starts with the adapters; a phase without adapters is refused.
    assert run(chats, tmp_path / 'more', **{**lora, **NO_UPDATE}, train__init_from=tmp_path / 'lora') == EXIT_DONE
    more = ParamsReader(tmp_path / 'more' / 'checkpoints' / '1')
    assert all(np.array_equal(more.read(name), after.read(name)) for name in after.shapes)
    capsys.readouterr()
    assert run(chats, tmp_path / 'without', **CHAT, train__init_from=tmp_path / 'lora') == EXIT_BAD_INPUT
    assert 'maxlm checkpoints merge' in capsys.readouterr().err


def test_the_vocabulary_of_a_transformers_model_grows(chats, base, tmp_path):
    case = CASES['llama']
    make_model(case._replace(settings={**case.settings, 'vocab_size': BYTES})).save_pretrained(tmp_path / 'model')
    shutil.copy(base / 'tokenizer.json', tmp_path / 'model')
    argv = ['import', f'--input={tmp_path}/model', f'--output={tmp_path}/imported']
    assert exit_code(hf.main, argv) == EXIT_DONE
    sizes = {'num_layers': 2, 'dim': 32, 'num_heads': 4, 'num_kv_heads': 2, 'ffn_dim': 56, 'norm_epsilon': 1e-6}
    settings = {**MODEL, **{f'model__{name}': value for name, value in sizes.items()}, 'data__seq_len': 64}
    settings |= {'model__vocab_size': ROWS, 'train__init_from': tmp_path / 'imported'}
    assert run(chats, tmp_path / 'unchanged', **{**settings, **NO_UPDATE}) == EXIT_DONE
    assert_new_rows_are_means(tables(tmp_path / 'imported', 0), tables(tmp_path / 'unchanged', 1))
    # Negative control: a step with a nonzero learning rate changes the rows of its tokens.
    assert run(chats, tmp_path / 'changed', **settings, train__num_steps=2) == EXIT_DONE
    with pytest.raises(AssertionError):
        assert_new_rows_are_means(tables(tmp_path / 'imported', 0), tables(tmp_path / 'changed', 2))
    # The export keeps the keys of the imported config.json except those that have changed.
    argv = ['export', f'--checkpoint={tmp_path}/changed', f'--output={tmp_path}/exported']
    assert exit_code(hf.main, argv) == EXIT_DONE
    original, exported = (json.loads((tmp_path / name / 'config.json').read_text()) for name in ('model', 'exported'))
    ids = {'bos_token_id', 'eos_token_id', 'pad_token_id'}
    assert exported | {key: original.get(key) for key in ids} == original | {'vocab_size': ROWS}
    card = (tmp_path / 'exported' / 'README.md').read_text()
    assert '"num_steps": 2' in card
    assert len(card.splitlines()) < 150


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_two_processes_start_with_equal_parameters(longer, chats, tmp_path):
    settings = {**CHAT, **NO_UPDATE, 'mesh__tensor': 2, 'train__init_from': longer[0]}
    words = arguments(chats, tmp_path / 'two', **settings)
    with Processes(2, 4, words, logs=tmp_path / 'logs') as processes:
        assert processes.wait(100) == [EXIT_DONE] * 2, processes.output(0) + processes.output(1)
    assert_new_rows_are_means(tables(longer[0], 10), tables(tmp_path / 'two', 1))
