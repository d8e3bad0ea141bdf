"""Runs with pending rollouts that are killed by SIGKILL and resumed equal an uninterrupted run, bit for bit."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from maxlm.checkpoint.manager import saved_steps
from maxlm.cli.runs import grpo
from maxlm.data.chat.template import CHATML
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.rl.generation.tool_environment import ToolEnvironment
from maxlm.rl.rollouts import RolloutBatches
from maxlm.telemetry.goodput import read_goodput
from maxlm.telemetry.metrics import read_metrics
from tests.cli.runs.test_train import curve, params_of, same
from tests.conftest import ROOT
from tests.rl.killed_rollouts import calls_in_each_turn
from tests.small_posttraining import grpo_arguments, make_prompts
from tests.starting import make_start
from tests.user_modules import write_module

pytestmark = [pytest.mark.usefixtures('shared_steps'), pytest.mark.multiprocess]

LAST = 10
SETTINGS = {
    'train__num_steps': LAST,
    'eval__interval': 0,
    'checkpoint__save_interval_steps': 4,
    'checkpoint__max_to_keep': LAST,
}
# Slow enough that some pending rollouts are not scored at a save, and others are.
REWARD = """
import time

def closeness(response, prompt):
    time.sleep(0.002)
    return -abs(len(response) - 3) / 12
"""
TOOL = '''
def calculate(expression: str) -> str:
    """Calculates an arithmetic expression.

    Args:
        expression: the expression, e.g. "6 * 7".
    """
    return str(eval(expression))
'''

# Its rewards are unscored at some saves, and some of its conversations fail.
ENVIRONMENT = """
import time

class Echo:
    def examples(self, split):
        return [{'text': text} for text in 'abcdefgh']

    def reset(self, example, seed):
        self.seed = seed
        return [{'role': 'user', 'content': f'{example["text"]} {seed % 100}'}]

    async def step(self, messages):
        if self.seed % 5 == 0 and len(messages) > 2:
            raise ConnectionError('no network')
        return [{'role': 'user', 'content': f'{len(messages[-1]["content"])}'}], 0.1, False

    def score(self, trajectory):
        time.sleep(0.1)
        return {'turns': len(trajectory.rewards), f'seed{self.seed % 2}': len(trajectory.messages[-1]['content']) / 99}
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Returns a function (k, tools or environment) → words of `maxlm grpo` for a new run."""
    reward = write_module(tmp_path, monkeypatch, REWARD)
    tools = write_module(tmp_path, monkeypatch, TOOL, name='killed_tools')
    environment = write_module(tmp_path, monkeypatch, ENVIRONMENT, name='killed_environment')
    monkeypatch.setattr(ToolEnvironment, '_calls', calls_in_each_turn)

    def start(k, kind):
        make_prompts(tmp_path)
        settings = {**SETTINGS, 'grpo__max_staleness': k, 'grpo__reward': f'{reward}:closeness'}
        if kind != 'plain':
            shutil.rmtree(tmp_path / 'sft')
            bytes_tokenizer().with_special_tokens(['<|im_start|>', '<|im_end|>']).save(tmp_path / 'tokenizer.json')
            (tmp_path / 'chat_template.jinja').write_text(CHATML)
            make_start(tmp_path / 'sft', tmp_path / 'tokenizer.json', model__max_positions=640)
            settings |= {
                'grpo__max_completion_length': 200,
                'data__seq_len': 640,
                'model__vocab_size': 0,
                'model__max_positions': 640,
            }
        if kind == 'tools':
            settings |= {'grpo__tools': f"('{tools}:calculate',)", 'grpo__max_tool_calls': 1}
        if kind == 'environment':
            settings |= {'grpo__environment': f'{environment}:Echo', 'grpo__max_turns': 3, 'grpo__reward': 'exact'}
            settings |= {'grpo__prompts': '', 'grpo__eval_prompts': ''}
        return grpo_arguments(tmp_path, **settings)

    return start


@pytest.mark.parametrize(
    ('k', 'kind'),
    [
        (2, 'plain'),
        (2, 'environment'),
        *(pytest.param(k, 'plain', marks=pytest.mark.nightly) for k in (0, 1, 4)),
        *(pytest.param(k, 'tools', marks=pytest.mark.nightly) for k in (0, 1, 2, 4)),
        *(pytest.param(k, 'environment', marks=pytest.mark.nightly) for k in (0, 1, 4)),
    ],
)
def test_a_killed_run_resumes_exactly(start, tmp_path, monkeypatch, k, kind):
    words = start(k, kind)
    whole, killed = ([*words, f'--workdir={tmp_path / name}'] for name in ('whole', 'killed'))
    assert exit_code(grpo.main, whole) == EXIT_DONE
    command = [sys.executable, '-m', 'tests.rl.killed_rollouts', '7', *killed]
    environment = {**os.environ, 'PYTHONPATH': f'{ROOT}:{tmp_path}'}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == -9, done.stdout[-2000:] + done.stderr[-2000:]
    assert max(saved_steps(tmp_path / 'killed')) == 4
    found = []
    load = RolloutBatches.load_state_arrays
    monkeypatch.setattr(
        RolloutBatches, 'load_state_arrays', lambda self, arrays: found.append(arrays) or load(self, arrays)
    )
    assert exit_code(grpo.main, killed) == EXIT_DONE
    (arrays,) = found
    # Two steps train on each of five rollouts, and the rollouts 0 and 1 are over.
    numbers = np.arange(2, min(2 + k, 5))
    assert [row[:2] for row in np.array(arrays.get('numbers', [])).tolist()] == [
        [number, 2 * max(0, number - k)] for number in numbers
    ]
    if kind == 'environment':
        lines = [line for line in curve(tmp_path / 'whole').values() if 'rollout/reward' in line]
        assert sum(line['rollout/environment_failures'] for line in lines) > 0
        assert max(line['rollout/turns'] for line in lines) > 1
    if kind == 'tools':
        assert ('generated' in arrays) == (k > 0)
        assert all(
            line['rollout/tool_calls'] > 0 for line in curve(tmp_path / 'whole').values() if 'rollout/reward' in line
        )
    assert curve(tmp_path / 'killed') == curve(tmp_path / 'whole')
    assert same(params_of(tmp_path / 'killed', LAST), params_of(tmp_path / 'whole', LAST))
    # The ledger of the run has the waits of its rollouts.
    lines = [line for line in read_metrics(tmp_path / 'whole') if 'rollout/reward' in line]
    totals = read_goodput(tmp_path / 'whole').totals
    for name in ('reward_wait', 'tool_wait'):
        waits = [line.get(f'rollout/{name}_seconds', 0.0) for line in lines]
        assert totals[name] == pytest.approx(sum(waits), abs=0.05)
    assert all(line['rollout/train_seconds'] > 0 for line in lines[1:])
    if k == 0 and kind != 'environment':
        assert min(line['rollout/reward_wait_seconds'] for line in lines) > 0.05
    # Negative control: training changes the parameters.
    assert not same(params_of(tmp_path / 'whole', 4), params_of(tmp_path / 'whole', LAST))
