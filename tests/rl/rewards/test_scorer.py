"""Tests scores of batches, validation of tasks, and pass@k."""

import itertools
import logging
import math
import sys

import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.rl.rewards import rewards
from maxlm.rl.rewards.prompts import Prompts
from maxlm.rl.rewards.rewards import user_function
from maxlm.rl.rewards.scorer import RewardScorer, accuracy, check_tasks, is_correct, mean_pass_at_k, pass_at_k
from maxlm.sandbox.functions import FunctionPool
from maxlm.sandbox.limits import SandboxLimits
from tests.user_modules import write_module


def prompts_of(*tasks):
    """Returns prompts of these tasks, on every second line."""
    return Prompts('p.jsonl', (np.zeros(1, np.uint32),) * len(tasks), tasks, tuple(range(1, 2 * len(tasks), 2)), 0)


def test_a_batch_is_scored():
    tasks = [{'answer': 42, 'target_length': 2}, {'answer': 43, 'target_length': 4}]
    with RewardScorer('numeric - 0.5*format + length', 'exact') as scorer:
        scores = scorer.score(['42', '#### 43', '#### 43', '42'], [*tasks, tasks[0], tasks[0]])
        assert scores.rewards.dtype == np.float32
        np.testing.assert_allclose(scores.rewards, [1.0, 1 - 0.5 - 0.75, -0.5 - 1, 1.0])
        assert {name: part.tolist() for name, part in scores.components.items()} == {
            'numeric': [1, 1, 0, 1],
            'format': [0, 1, 1, 0],
            'length': [0, -0.75, -1, 0],
        }
        assert all(part.dtype == np.float32 for part in scores.components.values())
        assert scorer.score(['42'], tasks[1:], reward='exact').rewards.tolist() == [0]
        assert scorer.score([], []).rewards.shape == (0,)
        with pytest.raises(KeyError):
            scorer.score(['42'], tasks[:1], reward='choice')
        with pytest.raises(ValueError, match='zip'):
            scorer.score(['42'], tasks)


def test_the_same_response_to_a_task_is_scored_once(monkeypatch):
    scored = []

    def count(response, task):
        scored.append((response, task['answer']))
        return rewards.exact(response, task)

    monkeypatch.setitem(rewards.REWARDS, 'exact', rewards.per_response(count))
    tasks = [{'answer': 'a'}] * 3 + [{'answer': 'b'}] * 2
    with RewardScorer('exact') as scorer:
        assert scorer.score(['a', 'b', 'a', 'b', 'a'], tasks).rewards.tolist() == [1, 0, 1, 1, 0]
    assert sorted(scored) == [('a', 'a'), ('a', 'b'), ('b', 'a'), ('b', 'b')]


@pytest.mark.multiprocess
def test_programs_share_one_sandbox(caplog):
    tasks = [{'tests': ['assert f(2) == 4', 'assert f(-2) == 4']}, {'tests': 'assert f(3) == 9'}]
    response = 'def f(x):\n    return x * abs(x)'
    with (
        caplog.at_level(logging.INFO, logger='maxlm'),
        RewardScorer('tests', 'all_tests', workers=2, limits=SandboxLimits(wall_seconds=30.0)) as scorer,
    ):
        assert scorer.score([response] * 2, tasks).rewards.tolist() == [0.5, 1.0]
        assert scorer.score([response] * 2, tasks, reward='all_tests').rewards.tolist() == [0.0, 1.0]
    (message,) = caplog.messages
    assert message.startswith('programs run in a sandbox with ')
    with pytest.raises(RuntimeError, match='the sandbox is closed'):
        scorer.score([response], tasks[:1])


def test_no_sandbox_is_started_without_programs(caplog):
    with caplog.at_level(logging.INFO, logger='maxlm'), RewardScorer('numeric + 0.1*syntax'):
        assert not caplog.messages
    with pytest.raises(InputError, match="unknown reward 'nmeric'"):
        RewardScorer('exact', 'nmeric')


@pytest.mark.parametrize(
    ('reward', 'task'),
    [
        ('exact + choice', {'answer': 'A'}),
        ('numeric', {'answer': '1/3', 'tolerance': 0.1}),
        ('format + syntax', {}),
        ('tests', {'tests': 'assert f(1)', 'prefix': 'x'}),
        ('all_tests', {'tests': ['def test_f():', '    assert f(1)']}),
        ('tests + 0.1*length', {'cases': [{'stdout': '1'}], 'target_length': 10}),
    ],
)
def test_valid_tasks_are_accepted(reward, task):
    check_tasks(prompts_of(task, task), reward)


@pytest.mark.parametrize(
    ('reward', 'task', 'message'),
    [
        ('exact', {'solution': 1}, "exact requires the key 'answer'; found keys: solution"),
        ('format + numeric', {'answer': 'many'}, 'requires a number as answer'),
        ('numeric', {'answer': 1, 'tolerance': 'x'}, "tolerance='x': must be"),
        ('choice', {'answer': 'AB'}, 'requires a letter'),
        ('length', {}, "requires the key 'target_length'"),
        ('tests', {'answer': 1}, 'must have tests or cases; found keys: answer'),
        ('all_tests', {'tests': []}, 'must have tests or cases'),
        ('tests', {'tests': 5}, "'tests' must be a string or a list of strings"),
        ('tests', {'tests': [5]}, "'tests' must contain only strings"),
        ('tests', {'tests': 'assert f('}, "'tests' cannot be parsed"),
        ('tests', {'tests': ['f(1)']}, "'tests' contains no test"),
        ('tests', {'tests': 'assert 1', 'prefix': 1}, "'prefix' must be a string"),
        ('tests', {'cases': {'stdout': '1'}}, "'cases' must be a list"),
        ('tests', {'cases': ['1']}, "'cases' must contain only objects"),
        ('tests', {'cases': [{'stdin': '1'}]}, "has no 'stdout'"),
        ('tests', {'cases': [{'stdin': 1, 'stdout': '1'}]}, "'stdin' of a case must be a string"),
    ],
)
def test_errors_name_the_line_of_an_invalid_task(reward, task, message):
    good = {'answer': 'A', 'tests': 'assert 1', 'target_length': 1}
    good = {**good, 'answer': 1} if 'numeric' in reward else good
    with pytest.raises(InputError, match=rf'p\.jsonl:3: .*{message}'):
        check_tasks(prompts_of(good, task), reward)


BRIEF = """
def brief(response, prompt):
    prompt['seen'] = True
    return len(response) <= prompt['limit']
"""


def test_a_reward_of_the_user_is_part_of_a_sum(tmp_path, monkeypatch):
    module = write_module(tmp_path, monkeypatch, BRIEF)
    tasks = [{'answer': 42, 'limit': 2}, {'answer': 42, 'limit': 9}]
    with RewardScorer(f'numeric - 0.5*{module}:brief') as scorer:
        scores = scorer.score(['#### 42', '#### 42'], tasks)
    assert scores.rewards.tolist() == [1.0, 0.5]
    assert scores.components[f'{module}:brief'].tolist() == [0.0, 1.0]
    # The function receives a copy.
    assert 'seen' not in tasks[0]


@pytest.mark.parametrize(
    ('body', 'message'),
    [
        ('return {}[response]', "raised KeyError: '0' at .*py:2; fix the function"),
        ('pass', "returned 'None'; return a number from -1e9 to 1e9"),
        ('return "1"', "returned '1'; return a number from -1e9 to 1e9"),
        ('return float("nan")', "returned 'nan'"),
        ('return float("-inf")', "returned '-inf'"),
        ('return 10**400', "returned '1000"),
        ('return [1.0]', "returned '.1.0.'"),
    ],
)
def test_a_failing_reward_of_the_user_names_the_prompt(tmp_path, monkeypatch, body, message):
    module = write_module(tmp_path, monkeypatch, f'def f(response, prompt):\n    {body}\n')
    with pytest.raises(InputError, match=rf'^p\.jsonl:1: the reward {module}:f {message}') as info:
        check_tasks(prompts_of({}, {}), f'format + 0.1*{module}:f')
    assert '\n' not in str(info.value)


def test_a_reward_of_the_user_is_called_once_before_training(tmp_path, monkeypatch):
    module = write_module(tmp_path, monkeypatch, 'calls = []\ndef f(*given):\n    calls.append(given)\n    return True')
    check_tasks(prompts_of({'a': 1}, {'a': 2}), f'{module}:f')
    assert sys.modules[module].calls == [('0', {'a': 1})]


SANDBOXED = """
import os
def f(response, prompt):
    prompt['seen'] = True
    if response == 'kill':
        os._exit(1)
    if response.startswith('/'):
        with open(response) as file:
            return len(file.read())
    return prompt['value'] / (int(response) or prompt.get('zero', 0))
"""


@pytest.mark.multiprocess
def test_rewards_of_the_user_in_the_sandbox(tmp_path, monkeypatch, caplog):
    name = f'{write_module(tmp_path, monkeypatch, SANDBOXED)}:f'
    (tmp_path.parent / 'secret').write_text('x')
    task = {'value': 6.0, 'zero': 1, 'target_length': 999}
    responses = ['2', str(tmp_path.parent / 'secret'), 'x', 'kill', '2']
    with (
        FunctionPool([user_function(name)], workers=2) as functions,
        RewardScorer(f'length + 0.5*{name}', functions=functions) as scorer,
    ):
        check_tasks(prompts_of(task), name, functions)
        with caplog.at_level(logging.WARNING, logger='maxlm'):
            scores = scorer.score(responses, [task] * 5)
        # Check before training: the response 0 divides by zero.
        with pytest.raises(
            InputError, match=rf'^p\.jsonl:1: the reward {name} raised ZeroDivisionError.*fix the function'
        ):
            check_tasks(prompts_of({'value': 1}), name, functions)
    assert scores.components[name].tolist() == [3.0, 0.0, 0.0, 0.0, 3.0]
    assert scores.rewards[0] == 1.5
    assert scores.failed.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert 'seen' not in task
    assert f'3 of 4 responses get reward 0: the reward {name} ' in caplog.text
    # The module is not imported in this process.
    assert name.partition(':')[0] not in sys.modules
    # Negative control: in this process, the same response reads the file.
    assert RewardScorer(name).score(responses[1:2], [task]).rewards.tolist() == [1.0]


def test_accuracy_counts_full_rewards():
    tenths = np.array([0.1, 0.2, 0.3, 0.4], np.float32).cumsum()
    assert is_correct(tenths).tolist() == [False, False, False, True]
    assert accuracy(np.array([1.0, 0.5, 0.999, 1.1], np.float32)) == 0.5
    with pytest.raises(ValueError, match='accuracy requires at least one response'):
        accuracy(np.zeros(0))


def test_pass_at_k_is_the_fraction_of_draws_with_a_correct_sample():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12), (n, c, k)
    # The plug-in estimate 1 - (1 - c/n)^k differs.
    assert abs(pass_at_k(4, 2, 2) - 0.75) > 0.05


def test_pass_at_k_of_many_samples():
    n, c, k = 10_000, 37, 5000
    exact = 1 - math.exp(
        math.lgamma(n - c + 1) - math.lgamma(n - c - k + 1) - math.lgamma(n + 1) + math.lgamma(n - k + 1)
    )
    assert pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-9)
    assert pass_at_k(10**6, 1, 1) == pytest.approx(1e-6, rel=1e-6)
    for n, c, k in ((0, 0, 1), (3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)):
        with pytest.raises(ValueError, match='pass@'):
            pass_at_k(n, c, k)


def test_the_mean_over_prompts():
    rewards_PS = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0.5, 0, 0.9, 0]])
    assert mean_pass_at_k(rewards_PS, 1) == pytest.approx((0.25 + 1 + 0) / 3)
    assert mean_pass_at_k(rewards_PS, 2) == pytest.approx((0.5 + 1 + 0) / 3)
