"""`Next: …` lines of `prepare`, `hf import`, `train` and `grpo`: each runs as printed."""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from maxlm.cli.commands import module_of
from maxlm.cli.hints import HINTS
from maxlm.cli.models import hf
from maxlm.cli.runs import grpo
from maxlm.cli.setup import prepare
from maxlm.cli.training_hint import training_command
from maxlm.config.loading import load
from maxlm.config.sections.optimizer import GuardConfig
from maxlm.data.chat.template import CHATML
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer
from maxlm.errors import EXIT_DONE
from maxlm.workdir.files import CHAT_TEMPLATE, read_config
from tests.conftest import ROOT
from tests.documentation import command_lines
from tests.starting import make_start

TEXT, CHAT, PAIR, LABEL = 'a.txt', 'chats.jsonl', 'pairs.jsonl', 'labels.jsonl'
LINES = {
    CHAT: {'messages': [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]},
    PAIR: {'prompt': '1 + 1?', 'chosen': '2', 'rejected': '3'},
    LABEL: {'prompt': '1 + 1?', 'completion': '2', 'label': True},
}
PACKED = ('--pack-seq-len', 64)
# Shortens a run with configs/tiny.py.
SMALL = ['model.num_layers=1', 'model.dim=32', 'model.ffn_dim=64', 'train.num_steps=1', 'optimizer.warmup_steps=0']
SMALL += ['eval.interval=0', 'data.seq_len=64']


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Returns the working directory, with inputs and a trained model `base` of bytes without a chat template."""
    monkeypatch.delenv(HINTS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / TEXT).write_text('some text\n' * 200)
    for name, line in LINES.items():
        (tmp_path / name).write_text(f'{json.dumps(line)}\n' * 40)
    bytes_tokenizer().save(tmp_path / 'tokenizer.json')
    make_start(tmp_path / 'base', tmp_path / 'tokenizer.json', data__seq_len=64, train__num_steps=1)
    # The tests have more devices than the run that made the model.
    config = json.loads((tmp_path / 'base/config.json').read_text())
    config['mesh']['fsdp'], config['train']['per_device_batch_size'] = -1, 0
    (tmp_path / 'base/config.json').write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def run(capsys):
    """Returns a function that runs a command and returns the words of its `Next:` line."""

    def run(main, *argv):
        assert main(list(map(str, argv))) == EXIT_DONE
        *_, last = capsys.readouterr().err.splitlines()
        return shlex.split(last.removeprefix('Next: '))

    return run


def follow(run, words, *more):
    assert words[0] == 'maxlm'
    return run(module_of(words[1]).main, *words[2:], *more)


def prepared(run, name, *options):
    return run(prepare.main, '--input', name, '--workers', 1, '--output', 'data', *options)


@pytest.mark.slow
def test_text_trains_a_new_model(run):
    words = prepared(run, TEXT, '--tokenizer', 'bytes')
    assert words[2:4] == ['--config=tiny', '--workdir=runs/data']
    words = follow(run, words, *(f'--config.{key}' for key in SMALL))
    assert words == ['maxlm', 'generate', '--checkpoint=runs/data', '--prompt=Hello']
    assert follow(run, words, '--max-tokens=2') == ['maxlm', 'serve', '--checkpoint=runs/data']


@pytest.mark.slow
@pytest.mark.parametrize('name', [CHAT, PAIR, LABEL])
def test_posttraining_starts_from_the_model_of_the_tokenizer(run, name, shared_steps):
    words = prepared(run, name, '--tokenizer', 'base/tokenizer.json', *PACKED)
    assert words[2:4] == [f'--config=finetune{"" if name == CHAT else ":dpo"}', '--workdir=runs/data']
    assert '--config.train.init_from=base' in words
    assert ('--config.dpo.loss_type=kto' in words) == (name == LABEL)
    # The chat template adds tokens to the tokenizer.
    vocab_size = Tokenizer.load('data/tokenizer.json').vocab_size
    assert vocab_size > read_config_of('base').model.vocab_size
    words = follow(run, words)
    assert words == ['maxlm', 'generate', '--checkpoint=runs/data', '--chat', '--prompt=Hello']
    found = read_config_of('runs/data')
    assert found.model.vocab_size == vocab_size
    assert found.data.seq_len == 64
    # The base has another shape than the config named before.
    base = read_config_of('base').model
    assert (found.model.num_layers, found.model.dim, found.model.family) == (base.num_layers, base.dim, base.family)
    follow(run, words, '--max-tokens=2')


def test_the_tokenizer_of_the_data_finds_the_newest_run(run, directory):
    # The reader gives the tokenizer of the data set instead of that of the model.
    for name in ('older', 'newer'):
        shutil.copytree('base', f'runs/{name}')
        os.utime(f'runs/{name}/tokenizer.json', (0, 1 if name == 'older' else 2))
    words = prepared(run, CHAT, '--tokenizer', 'tokenizer.json', *PACKED)
    assert words[2] == '--config=finetune'
    assert words[-1] == '--config.train.init_from=runs/newer'
    # Control: a run with another tokenizer is no base.
    chars = Path('tokenizer.json').read_bytes() + b' '
    for name in ('older', 'newer'):
        Path(f'runs/{name}/tokenizer.json').write_bytes(chars)
    assert training_command('data', 'chat', 64, tokenizer='tokenizer.json')[2] == '--config=tiny'


def test_conversations_without_a_model_train_a_new_one(run):
    words = prepared(run, CHAT, '--tokenizer', 'bytes', *PACKED)
    assert words[2] == '--config=tiny'
    assert not [word for word in words if 'init_from' in word]
    # Control: pairs are compared with the answers of a model.
    assert training_command('data', 'preference', 64)[-1] == '--config.train.init_from=WORKDIR'


@pytest.mark.slow
def test_an_imported_model(run, directory, shared_steps):
    """Transformers directory → import → SFT → GRPO, each with the printed or the documented command."""
    chat_tokens = bytes_tokenizer().with_special_tokens(('<|im_start|>', '<|im_end|>'))
    chat_tokens.save(directory / 'chat.json')
    make_start(directory / 'chat', directory / 'chat.json', data__seq_len=64)
    (directory / 'chat' / CHAT_TEMPLATE).write_text(CHATML)
    run(hf.main, 'export', '--checkpoint=chat', '--output=model')
    words = prepared(run, CHAT, '--tokenizer', 'model/tokenizer.json', *PACKED)
    assert words == ['maxlm', 'hf', 'import', '--input=model', '--output=runs/model']
    words = follow(run, words)
    assert words == ['maxlm', 'generate', '--checkpoint=runs/model', '--chat', '--prompt=Hello']
    follow(run, words, '--max-tokens=2')
    words = run(
        prepare.main,
        '--input',
        CHAT,
        '--output',
        'more',
        '--workers',
        1,
        '--tokenizer',
        'runs/model/tokenizer.json',
        *PACKED,
    )
    assert words[2] == '--config=finetune'
    assert not [word for word in words if 'vocab_size' in word]
    follow(run, words)
    (directory / 'prompts.jsonl').write_text('{"prompt": "Hi", "answer": "Hello"}\n' * 8)
    page = (ROOT / 'docs/posttraining.md').read_text()
    (argv,) = (words[3:] for words in command_lines(page) if '--workdir=runs/imported-rl' in words)
    # Fewer and shorter responses of another model.
    settings = {
        'train.init_from': 'runs/model',
        'train.num_steps': 2,
        'train.global_batch_size': 8,
        'data.seq_len': 64,
        'grpo.reward': 'exact',
        'grpo.max_completion_length': 4,
        'grpo.num_generations': 4,
    }
    argv = ['--config=runs/model/config.json', *argv[1:], *(f'--config.{key}={settings[key]}' for key in settings)]
    words = run(grpo.main, *argv)
    assert words == ['maxlm', 'generate', '--checkpoint=runs/imported-rl', '--chat', '--prompt=Hello']
    found = read_config_of('runs/imported-rl')
    assert (found.grpo.prompts_per_rollout, found.guard.spike_window, found.guard.max_rollbacks) == (2, 0, 0)


def test_the_run_of_the_model_does_not_determine_the_next_one(directory):
    """Objective, mixture and schedules of the model's own run would refuse the new data."""
    make_start(
        directory / 'other',
        directory / 'tokenizer.json',
        data__sources=(('a', 1.0),),
        data__seq_len_schedule=((8, 0.5),),
        model__weight_quantization='int8',
        model__lora_rank=2,
        train__init_from='elsewhere',
    )
    words = training_command('data', 'preference', 64, tokenizer='other/tokenizer.json')
    config = load(words[2].removeprefix('--config='), [word.removeprefix('--config.') for word in words[4:]])
    assert (config.data.path, config.data.sources, config.data.seq_len_schedule) == ('data', (), ())
    assert (config.train.objective, config.train.init_from) == ('dpo', 'other')
    # Control: the model is that of the run.
    assert (config.model.lora_rank, config.model.weight_quantization) == (2, 'int8')


def test_grpo_has_defaults_of_its_own():
    settings = ['train.num_steps=1', 'train.global_batch_size=24', 'grpo.num_generations=16', 'model.family=llama']
    settings += ['model.num_layers=1', 'model.dim=16', 'model.num_heads=2']
    found = load('tiny', [*settings, 'train.objective=grpo'])
    assert (found.grpo.prompts_per_rollout, found.guard.spike_window, found.guard.max_rollbacks) == (3, 0, 0)
    given = load('tiny', [*settings, 'train.objective=grpo', 'grpo.prompts_per_rollout=6', 'guard.spike_window=64'])
    assert (given.grpo.prompts_per_rollout, given.guard.spike_window) == (6, 64)
    # Control: other objectives keep the guard.
    other = load('tiny', settings)
    assert (other.guard, other.grpo.prompts_per_rollout) == (GuardConfig(), 0)


def test_unpacked_conversations_are_reported(capsys, run):
    prepare.main(['--input', CHAT, '--output', 'cut', '--workers', '1', '--tokenizer', 'bytes'])
    assert '--pack-seq-len N' in capsys.readouterr().out
    prepare.main(
        ['--input', CHAT, '--output', 'kept', '--workers', '1', '--tokenizer', 'bytes', '--pack-seq-len', '64']
    )
    assert '--pack-seq-len' not in capsys.readouterr().out


def read_config_of(workdir):
    return read_config(Path(workdir))
