"""Conversations with environments: turns, rewards, failures and time limits."""

import asyncio
import threading
import time

import pytest

from maxlm import EnvironmentStep
from maxlm.errors import InputError
from maxlm.rl.environments import calls
from maxlm.rl.environments.conversations import MAX_CHARACTERS, Conversations, SeededExample

SECONDS = 0.5
QUESTION = [{'role': 'user', 'content': 'Count.'}]


def turn(text):
    return {'role': 'assistant', 'content': text}


class Counter:
    """Asks for turns until `example['turns']`, with a reward of 0.5 for each; `example['bad']` replaces a method."""

    def __init__(self):
        self.bad, self.loops, self.weights = {}, [], {'done': 2.0, 'absent': 1.0}

    def reset(self, example, seed):
        self.turns, self.bad, self.seed = example.get('turns', 2), example.get('bad', {}), seed
        return self.bad['reset']() if 'reset' in self.bad else QUESTION

    async def step(self, messages):
        self.loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        if 'step' in self.bad:
            found = self.bad['step']()
            return await found if asyncio.iscoroutine(found) else found
        count = sum(message['role'] == 'assistant' for message in messages)
        messages.clear()
        return EnvironmentStep([{'role': 'user', 'content': f'{count}'}], 0.5, count == self.turns)

    def score(self, trajectory):
        assert len(set(self.loops)) <= 1
        if 'score' in self.bad:
            return self.bad['score']()
        return {'done': float(trajectory.done), 'seed': trajectory.seed, 'length': len(trajectory.messages)}


def start(*examples, seconds=SECONDS, max_turns=3, create=Counter):
    return Conversations(create, [SeededExample(one, 7) for one in examples], seconds=seconds, max_turns=max_turns)


def test_turns_rewards_and_scores():
    conversations = start({'turns': 1}, {'turns': 2}, {'turns': 9}, {'turns': 9})
    assert conversations.open() == [{'messages': QUESTION, 'tools': []}] * 4
    assert conversations.step({row: turn('a') for row in range(3)}) == {
        0: None,
        1: [{'role': 'user', 'content': '1'}],
        2: [{'role': 'user', 'content': '1'}],
    }
    assert conversations.step({1: turn('b'), 2: turn('b')})[1] is None
    # The limit on turns ends the third one.
    assert conversations.step({2: turn('c')}) == {2: None}
    found = conversations.close({3: turn('cut')})
    # Weights: 2 · done + steps; `seed` and `length` are metrics.
    assert [one['reward'] for one in found] == [2.5, 3.0, 1.5, 0.0]
    assert found[2]['scores'] == {'done': 0.0, 'seed': 7.0, 'length': 7.0, 'step_rewards': 1.5}
    assert found[3]['scores']['length'] == 2
    assert [one['unused_weights'] for one in found] == [['absent']] * 4


def test_conversations_run_at_the_same_time():
    barrier = threading.Barrier(8, timeout=60)

    def meet():
        barrier.wait()
        return EnvironmentStep([], 0.0, True)

    conversations = start(*[{'bad': {'step': meet}}] * 8, seconds=60)
    conversations.open()
    conversations.step(dict.fromkeys(range(8), turn('a')))
    assert [one.get('failure') for one in conversations.close({})] == [None] * 8


def fail():
    raise ZeroDivisionError('division')


def leave():
    raise SystemExit(3)


async def ignore_cancellation():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            time.sleep(0.01)


def user(content):
    return [{'role': 'user', 'content': content}]


BAD = {
    'exception': ('reset', fail, 'reset raised ZeroDivisionError: division'),
    'exit': ('step', leave, 'step raised SystemExit: 3'),
    'no messages': ('reset', list, 'reset returned no message for the model'),
    'text': ('reset', lambda: 'hi', 'reset returned a str as messages'),
    'not a message': ('reset', lambda: ['hi'], 'reset returned a str as a message'),
    'role': ('reset', lambda: [{'role': 'robot', 'content': 'x'}], 'reset returned a bad value'),
    'last': ('reset', lambda: [turn('x')], 'reset returned no message for the model'),
    'object': ('reset', lambda: user(object()), 'reset returned a bad value'),
    'surrogate': ('step', lambda: (user('\ud800'), 0, False), 'step returned a bad value'),
    'huge': ('step', lambda: (user('x' * (MAX_CHARACTERS + 1)), 0, False), 'step returned 1,000,001 characters'),
    'hang': ('step', lambda: asyncio.sleep(60), 'step took more than grpo.environment_timeout=0.5 s'),
    'blocked': ('step', lambda: time.sleep(5), 'step took more than grpo.environment_timeout=0.5 s'),
    'stubborn': ('step', ignore_cancellation, 'step took more than grpo.environment_timeout=0.5 s'),
    'none': ('step', lambda: None, 'step returned a NoneType; return (messages, reward, done)'),
    'nan': ('step', lambda: (user('x'), float('nan'), False), 'step returned the reward nan'),
    'reward': ('step', lambda: (user('x'), '1', False), "step returned the reward '1'"),
    'done': ('step', lambda: (user('x'), 1, 'no'), 'step returned a str as done'),
    'silence': ('step', lambda: ([], 1, False), 'step returned no messages although'),
    'model': ('step', lambda: ([turn('x')], 1, False), 'step returned a message of the assistant'),
    'score': ('score', lambda: 1.0, 'score returned a float'),
    'infinite': ('score', lambda: {'a': float('inf')}, 'score has a = inf'),
    'huge score': ('score', lambda: {'a': 2e9}, 'score has a = 2000000000.0'),
    'name': ('score', lambda: {'step_rewards': 1.0}, "score has the name 'step_rewards'"),
}


@pytest.mark.parametrize('name', BAD)
def test_a_failure_ends_one_conversation(name):
    method, bad, reason = BAD[name]
    conversations = start({'turns': 1}, {'bad': {method: bad}})
    opened = conversations.open()
    if method != 'reset':
        assert 'messages' in opened[1]
        assert conversations.step({0: turn('a'), 1: turn('a')})[0] is None
    found = conversations.close({})
    assert reason in found[1]['failure']
    assert '\n' not in found[1]['failure']
    # Negative control: the other conversation is not affected.
    assert 'failure' not in found[0]


def test_too_many_blocked_calls_end_the_run(monkeypatch):
    monkeypatch.setattr(calls, 'MAX_BLOCKED', 1)
    monkeypatch.setattr(calls, 'GRACE_SECONDS', 0.05)
    release = threading.Event()
    conversations = start(*[{'bad': {'step': lambda: release.wait(60)}}] * 2, seconds=0.05)
    conversations.open()
    with pytest.raises(InputError, match=r'2 calls still run after the limit of grpo.environment_timeout=0.05 s'):
        conversations.step({0: turn('a'), 1: turn('b')})
    release.set()
    monkeypatch.undo()
    conversations.close({})


def test_a_failing_constructor_and_close():
    class Closed(Counter):
        closed = 0

        def close(self):
            Closed.closed += 1
            fail()

    conversations = start({}, create=Closed)
    conversations.open()
    assert 'failure' not in conversations.close({})[0]
    assert Closed.closed == 1
    assert 'the constructor raised ZeroDivisionError' in start({}, create=fail).open()[0]['failure']


def test_environments_that_are_created_after_the_end_are_closed():
    entered, event = threading.Event(), threading.Event()

    class Slow(Counter):
        closed = 0

        def __init__(self):
            entered.set()
            assert event.wait(SECONDS)
            super().__init__()

        def close(self):
            Slow.closed += 1

    conversations = start({}, {}, create=Slow)
    thread = threading.Thread(target=conversations.open, daemon=True)
    thread.start()
    assert entered.wait(SECONDS)
    conversations.end()
    event.set()
    thread.join(SECONDS)
    assert Slow.closed == 2


def test_descriptions_of_tools_are_objects():
    class Tools(Counter):
        tools = ({'name': 'add', 'parameters': {}}, 'add')

    assert (
        "tools returned a bad value: 'tools[1]' is a text that is not JSON"
        in start({}, create=Tools).open()[0]['failure']
    )
    Tools.tools = Tools.tools[:1]
    (tool,) = start({}, create=Tools).open()[0]['tools']
    assert tool == {'type': 'function', 'function': {'name': 'add', 'parameters': {}}}


def test_too_many_threads_are_one_line(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, 'start', refuse)
    with pytest.raises(
        InputError, match=r"starts no more threads \(can't start new thread\), and 2 conversations need"
    ):
        start({}, {}).open()
