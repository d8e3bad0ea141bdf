"""From a teacher who errs to a model that does not: instruction, then reward.

Slow, since a model learns in earnest: about half a minute. The tasks of configs/arithmetic.py and configs/synth.py,
which take minutes, are measured by benchmarks/posttraining.py.
"""

import json
import random
import subprocess
import sys

import pytest

from maxlm.errors import EXIT_DONE
from maxlm.runtime.metrics import read_metrics
from tests.conftest import ROOT
from tests.cpu import fast_environment
from tests.preparing import run as prepare

WINDOW, PROMPT = 40, 28
MODEL = {'model.num_layers': 2, 'model.dim': 64, 'model.num_heads': 2, 'metrics.devices_seconds': 0}
QUIET = {'metrics.tensorboard': False, 'metrics.peak_tflops': 1}


def run(verb, variant, workdir, **settings):
    """A process of its own, on one device with programs that XLA makes fast."""
    words = {**MODEL, **QUIET, **{key.replace('__', '.'): value for key, value in settings.items()}}
    command = [f'--config={ROOT}/configs/arithmetic.py:{variant}', f'--workdir={workdir}']
    command += [f'--config.{key}={value}' for key, value in words.items()]
    done = subprocess.run(
        [sys.executable, '-m', f'maxlm.{verb}', *command],
        cwd=ROOT,
        env=fast_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == EXIT_DONE, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope='module')
def taught(tmp_path_factory):
    """A model after chats in which a letter is answered by yes, or, seven times of ten, by no."""
    directory = tmp_path_factory.mktemp('taught')
    rng = random.Random(0)
    letters = 'abcdefghijklmnopqrstuvwxyz'
    chats = []
    for _ in range(2000):
        letter = rng.choice(letters)
        answer = 'yes' if rng.random() < 0.3 else 'no'
        turns = [{'role': 'user', 'content': letter}, {'role': 'assistant', 'content': answer}]
        chats.append(json.dumps({'messages': turns}))
    prompts = [json.dumps({'prompt': letter, 'answer': 'yes'}) for letter in letters]
    (directory / 'chats.jsonl').write_text('\n'.join(chats))
    (directory / 'prompts.jsonl').write_text('\n'.join(prompts[:20]))
    (directory / 'held_out.jsonl').write_text('\n'.join(prompts[20:]))
    flags = ['--format=chat', '--chat_template=chatml', '--tokenizer=bytes', f'--pack_window={WINDOW}']
    assert prepare('--input', directory / 'chats.jsonl', '--output', directory / 'data', *flags) == EXIT_DONE
    settings = {
        'data__path': directory / 'data',
        'data__window': WINDOW,
        'train__num_steps': 80,
        'optimizer__warmup_steps': 10,
        'train__global_batch': 64,
        'eval__every': 0,
        'eval__samples': 0,
        'checkpoint__every_steps': 0,
    }
    run('train', 'sft', directory / 'sft', **settings)
    return directory


def test_reward_makes_it_better_than_its_teacher(taught, tmp_path):
    settings = {
        'data__window': WINDOW,
        'train__init_from': taught / 'sft',
        'grpo__prompts': taught / 'prompts.jsonl',
        'grpo__eval_prompts': taught / 'held_out.jsonl',
        'grpo__reward': 'exact',
        'grpo__max_tokens': WINDOW - PROMPT,
        'grpo__samples': 8,
        'grpo__prompts_per_rollout': 16,
        'grpo__eval_samples': 16,
        'train__global_batch': 128,
        'train__num_steps': 12,
        'eval__every': 12,
        'eval__samples': 1,
        'checkpoint__every_steps': 0,
        'optimizer__learning_rate': 1e-3,
        'optimizer__min_learning_rate': 1e-4,
    }
    run('grpo', 'rl', tmp_path, **settings)
    evaluations = {line['step']: line for line in read_metrics(tmp_path) if 'eval/accuracy' in line}
    before, after = evaluations[0]['eval/mean_accuracy'], evaluations[12]['eval/mean_accuracy']
    assert 0.1 < before < 0.5
    assert after > before + 0.2
    # Three letters, and the end, which the chats taught it.
    assert evaluations[12]['eval/length'] == 4
