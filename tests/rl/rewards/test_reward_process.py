"""Rewards of the user in a process of their own."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.errors import InputError
from maxlm.rl.rewards.open_functions import open_functions, open_reward_processes
from maxlm.rl.rewards.reward_process import RewardProcess
from maxlm.rl.rewards.reward_processes import RewardProcesses
from maxlm.rl.rewards.rewards import UserRewardError, user_function
from maxlm.rl.rewards.scorer import RewardScorer
from maxlm.sandbox.functions import FunctionCall
from tests.user_modules import write_module

pytestmark = pytest.mark.multiprocess

BODY = """
import os, signal, threading

def reward(response, prompt):
    assert threading.current_thread() is threading.main_thread()
    signal.signal(signal.SIGALRM, stop)
    if response == 'slow':
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        while True:
            pass
    if response == 'end':
        os._exit(3)
    if response == 'process':
        return os.getpid()
    return len(response) / prompt['divisor']

def stop(*_):
    raise TimeoutError('too slow')
"""


@pytest.fixture
def name(tmp_path, monkeypatch):
    return f'{write_module(tmp_path, monkeypatch, BODY)}:reward'


def call(process, name, *responses):
    return process.call([FunctionCall(name, (response, {'divisor': 2})) for response in responses])


def test_rewards_run_in_the_main_thread_of_another_process(name):
    with RewardProcess([user_function(name)]) as process:
        found = []
        thread = threading.Thread(target=lambda: found.extend(call(process, name, 'abc', 'process')))
        thread.start()
        thread.join()
        assert found[0].number == 1.5
        assert found[1].number not in (os.getpid(), None)
        # Signals work, and a scheduler's SIGTERM does not end the process before the run does.
        assert 'raised TimeoutError: too slow' in call(process, name, 'slow')[0].error
        os.kill(int(found[1].number), signal.SIGTERM)
        assert call(process, name, 'ab')[0].number == 1


def test_errors_name_the_task(name):
    tasks = [{'divisor': divisor} for divisor in (1, 2, 0, 4)]
    with RewardProcess([user_function(name)]) as process, RewardScorer(f'0.5*{name}', functions=process) as scorer:
        scores = scorer.score(['abc', 'abc'], tasks[:2])
        np.testing.assert_array_equal(scores.rewards, [1.5, 0.75])
        with pytest.raises(UserRewardError, match=f'the reward {name} raised ZeroDivisionError') as caught:
            scorer.score(['a', 'b', 'c', 'd'], tasks)
        assert caught.value.task is tasks[2]
        with pytest.raises(UserRewardError, match=r'ended its process \(exit code 3\)') as caught:
            scorer.score(['a', 'end', 'd'], [tasks[0], tasks[1], tasks[3]])
        assert caught.value.task is tasks[1]


def test_a_wrong_import_is_one_line(tmp_path, monkeypatch, name):
    with pytest.raises(InputError, match="has no 'other'"):
        RewardProcess([user_function(name.replace(':reward', ':other'))])
    ending = write_module(tmp_path, monkeypatch, 'import os\nos._exit(5)')
    with pytest.raises(InputError, match=rf'{ending}:f: the import ended its process \(exit code 5\)'):
        RewardProcess([user_function(f'{ending}:f')])


def test_closing_ends_a_call(name):
    process = RewardProcess([user_function(name)])
    found = []
    thread = threading.Thread(target=lambda: found.extend(call(process, name, *['a'] * 100_000)))
    thread.start()
    process.close()
    thread.join(60)
    assert not thread.is_alive()
    assert found[-1].error


def test_the_process_ends_with_a_killed_parent(tmp_path, name):
    (tmp_path / 'endless.py').write_text('def reward(response, prompt):\n    while True:\n        pass')
    code = (
        'from maxlm.rl.rewards.reward_process import RewardProcess; from maxlm.rl.rewards.rewards import *; '
        'p = RewardProcess([user_function("endless:reward")]); print(p._process.pid, flush=True); '
        'p.call([FunctionCall("endless:reward", ("a", {}))])'
    )
    parent = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, cwd=tmp_path, text=True)
    with parent:
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
    deadline = time.monotonic() + 60
    while (is_alive := _exists(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive


def _exists(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_only_rewards_in_the_background_need_the_process(name):
    for settings in (
        {'reward': name},
        {'reward': 'exact', 'max_staleness': 1},
        {'reward': name, 'max_staleness': 1, 'sandbox_functions': True},
    ):
        assert open_reward_processes(GrpoConfig(**settings), None) is None


def test_a_sandbox_without_functions_is_refused():
    with pytest.raises(InputError, match=r"grpo.sandbox_functions=True has no effect with grpo.reward='exact'"):
        open_functions(GrpoConfig(sandbox_functions=True), None)
    assert open_functions(GrpoConfig(), None) is None


def test_several_processes_work_at_the_same_time(tmp_path, monkeypatch):
    body = """
import os, time

def meet(response, prompt):
    # Ends only if another process runs the other call.
    open(f'met{response}', 'w').close()
    while not os.path.exists('met0') or not os.path.exists('met1'):
        time.sleep(0.01)
    return float(response)

def slow_first(response, prompt):
    time.sleep(0.3 * (response == '0'))
    return 1 / (response not in ('0', '1'))
"""
    module = write_module(tmp_path, monkeypatch, body)
    names = [f'{module}:meet', f'{module}:slow_first']
    with RewardProcesses([user_function(name) for name in names], 2) as processes:
        found = processes.call([FunctionCall(names[0], (response, {})) for response in ('0', '1')])
        assert [result.number for result in found] == [0, 1]
        # The second call fails first, and the error of the first one is reported.
        tasks = [{'row': row} for row in range(3)]
        with RewardScorer(names[1], functions=processes) as scorer, pytest.raises(UserRewardError) as caught:
            scorer.score(['0', '1', '2'], tasks)
        assert caught.value.task is tasks[0]
        assert 'raised ZeroDivisionError' in str(caught.value)


def test_a_number_of_processes_without_effect_is_an_error():
    with pytest.raises(InputError, match='reward_processes=2 has no effect with grpo'):
        open_reward_processes(GrpoConfig(reward='exact', reward_processes=2), contextlib.ExitStack())
