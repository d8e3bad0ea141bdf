"""GRPO from the command line: learning, reference model, and errors."""

import json
import re
import shutil

import pytest

from maxlm.cli.runs import grpo, train
from maxlm.data.chat.template import CHATML
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.inference.tool_calls import ToolCall
from maxlm.rl.generation.tool_environment import ToolEnvironment
from tests.cli.runs.test_train import curve
from tests.conftest import ROOT
from tests.processes import Processes
from tests.small_posttraining import grpo_arguments, make_prompts
from tests.starting import make_start
from tests.user_modules import write_module

pytestmark = pytest.mark.usefixtures('shared_steps')


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    directory = tmp_path_factory.mktemp('start')
    make_prompts(directory)
    return directory


def run(start, workdir, **overrides):
    return exit_code(grpo.main, [*grpo_arguments(start, **overrides), f'--workdir={workdir}'])


@pytest.fixture(scope='module')
def finished(start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('finished') / 'run'
    assert run(start, workdir) == EXIT_DONE
    return workdir


def test_the_reward_increases(finished):
    lines = curve(finished)
    assert sorted(lines) == list(range(9))
    rewards = {step: line['rollout/reward'] for step, line in lines.items() if 'rollout/reward' in line}
    # Two steps train on each rollout.
    assert sorted(rewards) == [1, 3, 5, 7]
    assert rewards[7] > rewards[1] + 0.3
    assert lines[7]['rollout/mean_length'] < lines[1]['rollout/mean_length'] - 3
    # The responses are sampled from the model of the first step; before the second step, the model has changed.
    assert [lines[step]['train/approx_kl'] < 1e-9 for step in range(1, 9)] == [True, False] * 4
    assert all(lines[step]['train/approx_kl'] >= 0 for step in range(1, 9))
    # Cached decoding and the step differ by rounding, and the second step has another policy.
    assert all(0 <= lines[step]['train/logprob_difference'] < 1e-4 for step in (1, 3, 5, 7))
    assert all(lines[step]['train/logprob_difference'] > 1e-2 for step in (2, 4, 6, 8))
    wanted = {'eval/accuracy', 'eval/pass_at_1', 'eval/pass_at_k', 'eval/length', 'eval/loss'}
    assert [wanted <= lines[step].keys() for step in (0, 2, 4, 6, 8)] == [True, False, True, False, True]
    assert lines[8]['eval/loss'] == 1 - lines[8]['eval/accuracy']
    log = (finished / 'run.log').read_text()
    assert '32 responses to 4 prompts: reward' in log
    assert 'sample: abx ▮' in log
    assert (finished / 'report.html').stat().st_size > 1000


@pytest.fixture(scope='module')
def asynchronous(start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('asynchronous') / 'run'
    assert run(start, workdir, grpo__max_staleness=1) == EXIT_DONE
    return workdir


def test_asynchronous_rollouts_learn_from_older_responses(asynchronous, finished):
    lines, synchronous = curve(asynchronous), curve(finished)
    firsts = (1, 3, 5, 7)
    assert [lines[step]['rollout/staleness'] for step in firsts] == [0, 2, 2, 2]
    assert lines[7]['rollout/reward'] > lines[1]['rollout/reward'] + 0.2
    # The first two rollouts are generated with the initial parameters.
    same = [lines[step]['rollout/entropy'] == synchronous[step]['rollout/entropy'] for step in firsts]
    assert same == [True, False, False, False]
    # The importance weights of a rollout are those before its first step, in which no ratio is clipped.
    weights = [lines[step]['train/importance_weight'] for step in range(1, 9)]
    assert weights[:2] == pytest.approx([1, 1], abs=1e-4)
    assert all(abs(weight - 1) > 1e-3 for weight in weights[2:])
    assert [lines[step]['train/clip_fraction'] for step in firsts] == [0] * 4
    assert [lines[step]['train/approx_kl'] > 1e-6 for step in firsts] == [False, True, True, True]
    assert all(0 <= lines[step]['train/importance_truncated_fraction'] < 0.5 for step in range(1, 9))
    # Negative control: the second steps clip ratios, in both runs.
    assert lines[2]['train/clip_fraction'] == synchronous[2]['train/clip_fraction'] > 0
    assert 'train/importance_weight' not in synchronous[1]


def test_equal_rewards_change_no_parameters(start, tmp_path):
    """Negative control: without reward differences within groups, parameters do not change."""
    assert run(start, tmp_path, grpo__reward='0*length', eval__interval=0) == EXIT_DONE
    lines = curve(tmp_path)
    assert lines[1]['rollout/frac_reward_zero_std'] == 1
    assert [lines[step]['train/grad_norm'] for step in (1, 2)] == [0, 0]


def user_prompts(directory, *answers):
    lines = [json.dumps({'prompt': f'ab{n}', 'answer': answer, 'max_words': 1}) for n, answer in enumerate(answers)]
    (directory / 'mine.jsonl').write_text('\n'.join(lines))
    return {'grpo__prompts': directory / 'mine.jsonl', 'eval__interval': 0, 'train__num_steps': 2}


def test_the_documented_reward_of_the_user(start, tmp_path, monkeypatch):
    page = (ROOT / 'docs/posttraining.md').read_text().split('### Rewards of your own')[1]
    body = re.search(r'```\n(def .*?)```', page, re.DOTALL)[1]
    reward = re.search(r"--config.grpo.reward='(.*)'", page)[1]
    assert 'my_rewards:brevity' in reward
    write_module(tmp_path, monkeypatch, body, name='my_rewards')
    settings = user_prompts(tmp_path, *range(4))
    assert run(start, tmp_path / 'run', grpo__reward=reward, **settings) == EXIT_DONE
    line = curve(tmp_path / 'run')[1]
    assert line['rollout/reward/my_rewards:brevity'] == 1
    assert line['rollout/reward'] == pytest.approx(line['rollout/reward/numeric'] + 0.5)


@pytest.mark.parametrize('k', [0, 1])
def test_a_failing_reward_of_the_user_is_one_line(start, tmp_path, monkeypatch, capsys, k):
    body = 'def f(response, prompt):\n    return 1 / (prompt["answer"] + (response == "0"))'
    name = write_module(tmp_path, monkeypatch, body)
    settings = user_prompts(tmp_path, 1, 1, 0, 1) | {'grpo__max_staleness': k}
    assert run(start, tmp_path / 'run', grpo__reward=f'{name}:f', **settings) == EXIT_BAD_INPUT
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f'mine.jsonl:3: the reward {name}:f raised ZeroDivisionError' in error


@pytest.mark.multiprocess
def test_a_response_cannot_stop_a_run_with_rewards_in_the_sandbox(start, tmp_path, monkeypatch):
    body = 'import os\ndef f(response, prompt):\n    return 1.0 if response == "0" else os._exit(1)'
    name = write_module(tmp_path, monkeypatch, body)
    settings = user_prompts(tmp_path, 1, 1, 1, 1) | {'grpo__sandbox_functions': True}
    assert run(start, tmp_path / 'run', grpo__reward=f'{name}:f', **settings) == EXIT_DONE
    line = curve(tmp_path / 'run')[1]
    assert (line['rollout/reward'], line['rollout/reward_errors']) == (0, 1)
    log = (tmp_path / 'run/run.log').read_text()
    assert f'responses get reward 0: the reward {name}:f ended its process in the sandbox (exit code 1)' in log
    # A reward that fails for the first prompt stops the run before compilation.
    (tmp_path / f'{name}.py').write_text('def f(response, prompt):\n    return "text"')
    assert run(start, tmp_path / 'bad', grpo__reward=f'{name}:f', **settings) == EXIT_BAD_INPUT


@pytest.mark.multiprocess
def test_the_documented_tool(tmp_path, monkeypatch):
    page = (ROOT / 'docs/posttraining.md').read_text().split('### Tools')[1]
    body = re.search(r'```\n(def .*?)```', page, re.DOTALL)[1]
    tools = re.search(r'--config.grpo.tools=\"(.*)\" ', page)[1]
    write_module(tmp_path, monkeypatch, body, name='my_tools')
    tokenizer = bytes_tokenizer().with_special_tokens(['<|im_start|>', '<|im_end|>'])
    tokenizer.save(tmp_path / 'tokenizer.json')
    (tmp_path / 'chat_template.jinja').write_text(CHATML)
    make_start(tmp_path / 'sft', tmp_path / 'tokenizer.json', model__max_positions=576)
    (end,) = (index for index, token in tokenizer.special_tokens.items() if token.content == '<|im_end|>')
    call = ToolCall('', 'calculate', '{"expression": "6 * 7"}')
    # A random model writes no calls.
    monkeypatch.setattr(ToolEnvironment, '_calls', lambda _, turn: [call] if turn[-1] == end else [])
    settings = user_prompts(tmp_path, *range(4)) | {
        'grpo__tools': tools,
        'grpo__sandbox_functions': True,
        'grpo__reward': '0*format',
        'grpo__max_completion_length': 200,
        'grpo__max_tool_calls': 1,
        'data__seq_len': 576,
        'model__vocab_size': 0,
        'model__max_positions': 576,
        'train__num_steps': 1,
    }
    assert run(tmp_path, tmp_path / 'run', **settings) == EXIT_DONE
    line = curve(tmp_path / 'run')[1]
    assert 0 < line['rollout/tool_calls'] <= 1
    assert line['rollout/tool_errors'] == line['rollout/reward_errors'] == 0
    # The loss covers only tokens of the model.
    assert line['train/approx_kl'] < 1e-9


def test_the_reference_is_the_initial_model(start, tmp_path):
    settings = {'grpo__kl_coef': 0.5, 'eval__interval': 0}
    assert run(start, tmp_path / 'once', **settings) == EXIT_DONE
    lines = curve(tmp_path / 'once')
    # Initially the model equals its reference, then it diverges.
    assert abs(lines[1]['train/kl']) < 1e-9
    assert lines[2]['train/kl'] > 1e-6
    # A resumed run has the same reference.
    shutil.copytree(tmp_path / 'once', tmp_path / 'run')
    for step in (6, 8):
        shutil.rmtree(tmp_path / 'run/checkpoints' / str(step))
    assert run(start, tmp_path / 'run', **settings) == EXIT_DONE
    assert curve(tmp_path / 'run') == curve(tmp_path / 'once')
    # Checkpoints do not contain the reference.
    assert not [path for path in (tmp_path / 'run/checkpoints/8').iterdir() if 'reference' in path.name]


def test_another_mesh_learns_the_same(start, finished, tmp_path):
    settings = {'mesh__fsdp': 2, 'mesh__data': 4}
    assert run(start, tmp_path, train__num_steps=4, **settings) == EXIT_DONE
    lines, wanted = curve(tmp_path), curve(finished)
    for step in (1, 2):
        for name in ('train/loss', 'train/grad_norm', 'train/entropy'):
            assert lines[step][name] == pytest.approx(wanted[step][name], rel=1e-3, abs=1e-6), (step, name)
    assert lines[1]['rollout/reward'] == wanted[1]['rollout/reward']


@pytest.mark.multiprocess
@pytest.mark.nightly
@pytest.mark.parametrize('is_async', [False, True])
def test_two_processes_write_and_learn_the_same(start, finished, asynchronous, tmp_path, is_async):
    words = [*grpo_arguments(start, grpo__max_staleness=int(is_async)), f'--workdir={tmp_path / "run"}']
    with Processes(2, 4, words, logs=tmp_path, module='maxlm.grpo') as processes:
        codes = processes.wait()
        assert codes == [EXIT_DONE] * 2, processes.output(0) + processes.output(1)
    lines, wanted = curve(tmp_path / 'run'), curve(asynchronous if is_async else finished)
    assert lines.keys() == wanted.keys()
    for step, line in wanted.items():
        for name in ('train/loss', 'train/grad_norm', 'rollout/reward', 'rollout/mean_length', 'eval/accuracy'):
            if name in line:
                assert lines[step][name] == pytest.approx(line[name], rel=1e-3, abs=1e-5), (step, name)


@pytest.mark.parametrize(
    ('overrides', 'words'),
    [
        ({'train__objective': 'next_token'}, 'train.objective=next_token: maxlm grpo requires train.objective=grpo'),
        ({'train__init_from': ''}, "train.init_from='': maxlm grpo requires a value"),
        ({'train__init_from': '/nowhere'}, 'train.init_from'),
        ({'grpo__prompts': '/nowhere.jsonl'}, '/nowhere.jsonl'),
        ({'grpo__reward': 'lenght'}, 'lenght'),
        ({'grpo__reward': 'no_such_module:f'}, "no module 'no_such_module'"),
        ({'grpo__reward': 'no_such_module:f', 'grpo__sandbox_functions': True}, "no module 'no_such_module'"),
        ({'grpo__tools': "('calculate',)"}, "grpo.tools: 'calculate' is not the name of a function"),
        ({'grpo__tools': "('math:exp',)"}, "grpo.tools=('math:exp',): the model has no chat template"),
        ({'grpo__eval_reward': 'length + math:zzz'}, "has no 'zzz'"),
        ({'grpo__reward': 'numeric'}, "prompts.jsonl:1: the reward numeric requires the key 'answer'"),
        (
            {'grpo__max_completion_length': 24},
            'grpo.max_completion_length=24 leaves no tokens for a prompt in data.seq_len=24',
        ),
        ({'grpo__max_completion_length': 22}, 'prompts.jsonl'),
        (
            {'grpo__prompts_per_rollout': 5},
            'grpo.num_generations = 40 responses are not a multiple of train.global_batch_size=16',
        ),
        ({'grpo__prompts_per_rollout': 16}, 'has only 8 prompts'),
        ({'guard__spike_window': 64}, 'guard.spike_window=64: not supported by maxlm grpo; set it to 0'),
        ({'train__num_steps': 0, 'train__hours': 1}, 'train.hours=1.0: not supported by maxlm grpo'),
        (
            {'grpo__importance_sampling_cap': 3.0},
            'grpo.importance_sampling_cap=3 has no effect with grpo.max_staleness=0',
        ),
        ({'eval__interval': 3}, 'eval.interval=3 is not a multiple of 2, the number of steps per rollout'),
        ({'grpo__eval_prompts': ''}, "grpo.eval_prompts='' with eval.interval"),
        ({'mesh__stage': 2}, 'mesh.stage'),
    ],
)
def test_bad_input_is_one_line(start, tmp_path, capsys, overrides, words):
    assert run(start, tmp_path / 'run', **overrides) == EXIT_BAD_INPUT
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith('error: ')
    assert words in error
    assert not (tmp_path / 'run/checkpoints').exists()


def test_train_names_the_right_verb(start, tmp_path, capsys):
    assert exit_code(train.main, [*grpo_arguments(start), f'--workdir={tmp_path}']) == EXIT_BAD_INPUT
    assert 'use `maxlm grpo`' in capsys.readouterr().err
