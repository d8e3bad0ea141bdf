"""SFT on partly wrong answers, then GRPO, which removes the mistakes.

Nightly tests train for half a minute; otherwise both phases take a few steps. benchmarks/posttraining.py measures the
tasks of configs/arithmetic.py and configs/synth.py, which take minutes.
"""

import json
import random
import subprocess
import sys

import pytest

from maxlm.cli.runs import grpo, train
from maxlm.errors import EXIT_DONE
from maxlm.telemetry.metrics import read_metrics
from maxlm.workdir.files import read_config
from tests.conftest import ROOT
from tests.cpu import fast_environment
from tests.preparing import run as prepare

WINDOW, PROMPT = 40, 28
MODEL = {'model.num_layers': 2, 'model.dim': 64, 'model.num_heads': 2, 'metrics.device_stats_interval_seconds': 0}
QUIET = {'metrics.tensorboard': False, 'metrics.peak_tflops': 1}


def arguments(variant, workdir, **settings):
    words = {**MODEL, **QUIET, **{key.replace('__', '.'): value for key, value in settings.items()}}
    command = [f'--config={ROOT}/configs/arithmetic.py:{variant}', f'--workdir={workdir}']
    return [*command, *(f'--config.{key}={value}' for key, value in words.items())]


def run(verb, variant, workdir, **settings):
    """Runs a separate process on one device with full XLA optimization."""
    command = [sys.executable, '-m', f'maxlm.{verb}', *arguments(variant, workdir, **settings)]
    done = subprocess.run(command, cwd=ROOT, env=fast_environment(), capture_output=True, text=True)
    assert done.returncode == EXIT_DONE, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope='module')
def data_directory(tmp_path_factory):
    """Writes prompts, and chats in which a letter is answered by yes, or by no in seven of ten cases."""
    directory = tmp_path_factory.mktemp('data')
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
    flags = ['--format=chat', '--chat-template=chatml', '--tokenizer=bytes', f'--pack-seq-len={WINDOW}']
    assert prepare('--input', directory / 'chats.jsonl', '--output', directory / 'data', *flags) == EXIT_DONE
    return directory


def sft_settings(data_directory):
    return {
        'data__path': data_directory / 'data',
        'data__seq_len': WINDOW,
        'train__num_steps': 80,
        'optimizer__warmup_steps': 10,
        'train__global_batch_size': 64,
        'eval__interval': 0,
        'eval__num_samples': 0,
        'checkpoint__save_interval_steps': 0,
    }


def rl_settings(data_directory, sft):
    return {
        'data__seq_len': WINDOW,
        'train__init_from': sft,
        'grpo__prompts': data_directory / 'prompts.jsonl',
        'grpo__eval_prompts': data_directory / 'held_out.jsonl',
        'grpo__reward': 'exact',
        'grpo__max_completion_length': WINDOW - PROMPT,
        'grpo__num_generations': 8,
        'grpo__prompts_per_rollout': 16,
        'grpo__eval_num_generations': 16,
        'train__global_batch_size': 128,
        'train__num_steps': 12,
        'eval__interval': 12,
        'eval__num_samples': 1,
        'checkpoint__save_interval_steps': 0,
        'optimizer__learning_rate': 1e-3,
        'optimizer__min_learning_rate': 1e-4,
    }


def evaluations(workdir):
    return {line['step']: line for line in read_metrics(workdir) if 'eval/accuracy' in line}


def test_grpo_after_sft(data_directory, shared_steps, tmp_path):
    tiny = {'model__num_layers': 1, 'model__dim': 16, 'optimizer__warmup_steps': 0}
    sft, rl = tmp_path / 'sft', tmp_path / 'rl'
    settings = {**sft_settings(data_directory), **tiny, 'train__num_steps': 2, 'train__global_batch_size': 8}
    assert train.main(arguments('sft', sft, **settings)) == EXIT_DONE
    few = {'train__num_steps': 2, 'train__log_every': 1, 'eval__interval': 2, 'train__global_batch_size': 16}
    few |= {'grpo__num_generations': 4, 'grpo__prompts_per_rollout': 4, 'grpo__eval_num_generations': 2}
    assert grpo.main(arguments('rl', rl, **{**rl_settings(data_directory, sft), **tiny, **few})) == EXIT_DONE
    assert read_config(rl).model == read_config(sft).model
    assert f'starting with the parameters of {sft}/checkpoints/2/params' in (rl / 'run.log').read_text()
    assert (rl / 'chat_template.jinja').read_text() == (sft / 'chat_template.jinja').read_text()
    assert sorted(evaluations(rl)) == [0, 2]
    # After two steps the model gives no correct answer, so rewards have no effect.
    lines = {line['step']: line for line in read_metrics(rl) if 'train/loss' in line}
    assert lines[1]['train/grad_norm'] == 0


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_grpo_improves_the_sft_model(data_directory, tmp_path):
    run('train', 'sft', tmp_path / 'sft', **sft_settings(data_directory))
    run('grpo', 'rl', tmp_path / 'rl', **rl_settings(data_directory, tmp_path / 'sft'))
    found = evaluations(tmp_path / 'rl')
    before, after = found[0]['eval/pass_at_1'], found[12]['eval/pass_at_1']
    assert 0.1 < before < 0.5
    assert after > before + 0.2
    # The length is three letters and the end token, as in the chats.
    assert found[12]['eval/length'] == 4
