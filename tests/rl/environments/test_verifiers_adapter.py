"""Environments of verifiers, with a stand-in for the package and with the package itself where it is installed."""

import importlib
import importlib.util
import sys

import pytest

from maxlm.errors import InputError
from maxlm.rl.environments.conversations import Conversations, SeededExample
from maxlm.rl.environments.verifiers_adapter import load_verifiers
from tests.rl.environments import verifiers_environments
from tests.rl.environments.verifiers_stand_in import make_package

KINDS = ['stand-in', *(['verifiers'] if importlib.util.find_spec('verifiers') else [])]
CALL = {'id': 'call00000', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1, "b": 2}'}}


@pytest.fixture(params=KINDS)
def load(request, monkeypatch):
    """Returns a function that loads an environment of `verifiers_environments`."""
    found = {}
    if request.param == 'stand-in':
        for name, module in make_package(found).items():
            monkeypatch.setitem(sys.modules, name, module)
        dataset = list
    else:
        monkeypatch.setattr(importlib.import_module('verifiers'), 'load_environment', lambda name: found[name]())
        dataset = importlib.import_module('datasets').Dataset.from_list
    package = sys.modules['verifiers']

    def load(name):
        found[name] = lambda: getattr(verifiers_environments, name)(package, dataset)
        return load_verifiers(f'verifiers:{name}', {})

    return load


def turn(content, **fields):
    return {'role': 'assistant', 'content': content, **fields}


def converse(create, *rows, max_turns=8):
    """Returns the opened conversations, the answers to the turns of each round, and the results."""
    (example, *_) = create().examples('train')
    conversations = Conversations(create, [SeededExample(example, 0)] * len(rows), seconds=60, max_turns=max_turns)
    opened = conversations.open()
    rounds = []
    for number in range(max(map(len, rows))):
        turns = {row: texts[number] for row, texts in enumerate(rows) if number < len(texts)}
        rounds.append(conversations.step(turns))
    return opened, rounds, conversations


def test_a_single_turn(load):
    opened, rounds, conversations = converse(load('single_turn'), [turn('a')], [turn('bb')])
    assert opened == [{'messages': [{'role': 'user', 'content': 'Say a.'}], 'tools': []}] * 2
    assert rounds == [{0: None, 1: None}]
    found = conversations.close({})
    # The length has weight 0 in the rubric.
    assert [one['reward'] for one in found] == [1.0, 0.0]
    assert [(one['scores']['exact'], one['scores']['length']) for one in found] == [(1, 1), (0, 2)]


def test_several_turns_limits_and_errors(load):
    rows = [[turn('x')] * 3, [turn('x')], [turn('fail')], []]
    _, rounds, conversations = converse(load('multi_turn'), *rows)
    assert rounds[0] == {
        0: [{'role': 'user', 'content': 'turn 1'}],
        1: [{'role': 'user', 'content': 'turn 1'}],
        2: None,
    }
    assert rounds[2] == {0: None}
    found = conversations.close({1: turn('cut'), 3: turn('cut')})
    # Unfinished turns count too.
    assert [one.get('reward') for one in found] == [3.0, 2.0, None, 1.0]
    assert 'RuntimeError: no network' in found[2]['failure']


def test_tools(load):
    opened, rounds, conversations = converse(load('tools'), [turn('', tool_calls=[CALL]), turn('It is 3.')])
    (tool,) = opened[0]['tools']
    assert (tool['type'], tool['function']['name']) == ('function', 'add')
    assert tool['function']['description'] == 'Adds two numbers.'
    (result,) = rounds[0][0]
    assert (result['role'], result['content'], result['tool_call_id']) == ('tool', '3', CALL['id'])
    assert rounds[1] == {0: None}
    assert conversations.close({})[0]['reward'] == 1.0


def test_a_missing_or_newer_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, 'verifiers', None)
    with pytest.raises(InputError, match=r'the package verifiers cannot be imported .*; run: pip install .*verifiers'):
        load_verifiers('verifiers:words', {})
    package = make_package({})['verifiers']
    del package.load_environment
    package.__version__ = '0.4.0'
    monkeypatch.setitem(sys.modules, 'verifiers', package)
    with pytest.raises(InputError, match=r'verifiers 0\.4\.0 has no load_environment; run: pip install'):
        load_verifiers('verifiers:words', {})
