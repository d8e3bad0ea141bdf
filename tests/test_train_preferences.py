"""Preferences (DPO) from the command line: a run learns them, goes on exactly, and knows what it started from."""

import json
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from maxlm import train
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.runtime.checkpoint import saved_steps
from maxlm.runtime.workdir import read_config
from maxlm.training.state import abstract_state
from tests.conftest import ROOT
from tests.cpu import cpu_flags
from tests.preparing import run as prepare
from tests.small import small_layout
from tests.starting import MODEL, make_start
from tests.test_train import SMALL, curve, params_of, same

WINDOW = 64
SETTINGS = {
    'train.objective': 'dpo',
    'train.num_steps': 12,
    'train.global_batch': 16,
    'data.window': WINDOW,
    'model.dropout': 0.0,
    'eval.every': 6,
    'eval.num_batches': 0,
    'eval.samples': 1,
    'eval.sample_tokens': 4,
    'optimizer.learning_rate': 0.01,
    'optimizer.warmup_steps': 0,
    'checkpoint.every_steps': 6,
    'checkpoint.keep_last': 5,
}


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    """Pairs of which the answer with fewer z is the better one, and a random model with their tokenizer."""
    directory = tmp_path_factory.mktemp('start')
    rng = random.Random(0)
    lines = []
    for _ in range(400):
        prompt, chosen, rejected = (''.join(rng.choices(letters, k=3)) for letters in ('abc', 'abcxy', 'abcz'))
        lines.append(json.dumps({'prompt': prompt, 'chosen': chosen, 'rejected': f'z{rejected}'}))
    (directory / 'pairs.jsonl').write_text('\n'.join(lines))
    flags = ['--format=preference', '--tokenizer=bytes', f'--pack_window={WINDOW}', '--validation_share=0.2']
    assert prepare('--input', directory / 'pairs.jsonl', '--output', directory / 'data', *flags) == EXIT_DONE
    make_start(directory / 'sft', directory / 'data/tokenizer.json')
    return directory


def arguments(start, **overrides):
    settings = {
        **{key: value for key, value in SMALL.items() if key.startswith('metrics') or key == 'train.log_every'},
        **{key.replace('__', '.'): value for key, value in MODEL.items()},
        'data.path': start / 'data',
        'train.init_from': start / 'sft',
        **SETTINGS,
        **{key.replace('__', '.'): value for key, value in overrides.items()},
    }
    return ['--config=configs/tiny.py', *(f'--config.{key}={value}' for key, value in settings.items())]


def run(start, workdir, **overrides):
    return exit_code(train.main, [*arguments(start, **overrides), f'--workdir={workdir}'])


@pytest.fixture(scope='module')
def whole(start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('whole') / 'run'
    assert run(start, workdir) == EXIT_DONE
    return workdir


def test_it_learns_what_is_preferred(whole):
    lines = curve(whole)
    # The model is its reference at first: it prefers nothing.
    assert lines[1]['train/loss'] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(lines[1]['train/margin']) < 1e-6
    assert lines[12]['train/loss'] < lines[1]['train/loss'] - 0.01
    assert lines[12]['train/margin'] > 0.02
    assert lines[12]['train/chosen_reward'] - lines[12]['train/rejected_reward'] == pytest.approx(
        lines[12]['train/margin'], abs=1e-5
    )
    # On pairs that it has not seen; before an update there is no better one.
    assert lines[12]['eval/accuracy'] > 0.9 > lines[1]['train/accuracy']
    assert 'train/perplexity' not in lines[12]
    assert 'validation loss 0.4' in (whole / 'run.log').read_text()


def test_it_goes_on_exactly(start, whole, tmp_path):
    assert run(start, tmp_path, guard__max_hours=1e-9) == EXIT_DONE
    assert max(saved_steps(tmp_path)) < 12
    assert run(start, tmp_path) == EXIT_DONE
    assert curve(tmp_path) == curve(whole)
    assert same(params_of(tmp_path, 12), params_of(whole, 12))


@pytest.fixture(scope='module')
def chats(start, tmp_path_factory):
    """Conversations for a run of instruction."""
    directory = tmp_path_factory.mktemp('chats')
    turns = [[{'role': 'user', 'content': f'say {n}'}, {'role': 'assistant', 'content': str(n)}] for n in range(300)]
    (directory / 'chats.jsonl').write_text('\n'.join(json.dumps({'messages': messages}) for messages in turns))
    words = ['--format=chat', f'--tokenizer={start / "data/tokenizer.json"}', f'--pack_window={WINDOW}']
    words += ['--validation_share=0.2', '--output', directory / 'data']
    assert prepare('--input', directory / 'chats.jsonl', *words) == EXIT_DONE
    return directory / 'data'


@pytest.mark.parametrize('objective', ['next_token', 'dpo'])
def test_a_kill_changes_nothing(start, chats, tmp_path, objective):
    """Instruction and preferences, killed and started again, end bit for bit as without."""
    settings = {'data__path': chats} if objective == 'next_token' else {}
    words = arguments(start, train__objective=objective, checkpoint__every_steps=2, eval__samples=1, **settings)
    command = [sys.executable, '-m', 'tests.killing_training', str(tmp_path), '0', '1', 'train', *words]
    environment = {**os.environ, 'XLA_FLAGS': cpu_flags(8)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    met = json.loads(done.stdout.splitlines()[-1])
    assert sum(met['met'].values()) == 1
    lines = curve(tmp_path / '0')
    assert lines == curve(tmp_path / 'whole')
    assert same(params_of(tmp_path / '0', 12), params_of(tmp_path / 'whole', 12))
    # Control: the model has moved, so another one would be told apart.
    assert lines[12]['train/loss'] != lines[1]['train/loss']


def test_another_reference_is_refused(start, tmp_path, capsys):
    assert run(start, tmp_path / 'run', train__num_steps=6) == EXIT_DONE
    make_start(tmp_path / 'other', start / 'data/tokenizer.json', seed=1)
    settings = {'train__init_from': tmp_path / 'other', 'train__num_steps': 7, 'eval__every': 0}
    assert run(start, tmp_path / 'run', **settings) == EXIT_BAD_INPUT
    assert 'reference' in capsys.readouterr().err
    assert run(start, tmp_path / 'run', **{**settings, 'train__init_from': tmp_path / 'nowhere'}) == EXIT_BAD_INPUT
    assert 'train.init_from' in capsys.readouterr().err
    assert run(start, tmp_path / 'new', train__init_from='') == EXIT_BAD_INPUT
    assert "train.init_from is ''" in capsys.readouterr().err


def test_with_adapters_there_is_no_second_copy(start, tmp_path, whole):
    settings = {'model__lora_rank': 4, 'model__lora_alpha': 64}
    assert run(start, tmp_path / 'run', **settings) == EXIT_DONE
    lines = curve(tmp_path / 'run')
    assert lines[1]['train/loss'] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[12]['train/margin'] > 0.005
    config = read_config(tmp_path / 'run')
    assert abstract_state(config, small_layout(config)).reference is None
    # Control: without adapters there is one.
    config = read_config(whole)
    assert abstract_state(config, small_layout(config)).reference is not None
    before, after = (params_of(tmp_path / 'run', step) for step in (6, 12))
    origin = params_of(start / 'sft', 5)
    assert np.array_equal(after['embedding'], origin['embedding'])
    kernels = [tree['blocks']['attention']['query'] for tree in (origin, before, after)]
    assert all(np.array_equal(kernel['kernel'], kernels[0]['kernel']) for kernel in kernels)
    assert not np.array_equal(kernels[1]['lora_b'], kernels[2]['lora_b'])


@pytest.mark.parametrize('settings', [{'train__micro_batch': 1}, {'mesh__context': 2}, {'mesh__data': 4}])
def test_other_layouts_learn_the_same(start, whole, tmp_path, settings):
    assert run(start, tmp_path, eval__every=0, **settings) == EXIT_DONE
    lines, wanted = curve(tmp_path), curve(whole)
    for step in (1, 2, 4):
        for name in ('train/loss', 'train/margin', 'train/chosen_log_prob', 'train/grad_norm'):
            assert lines[step][name] == pytest.approx(wanted[step][name], rel=2e-4, abs=2e-6), (step, name)
