"""Tests the tool calls of turns and their results."""

import pytest

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.rl.generation.tool_environment import open_tools
from tests.rl.generation.two_processes import fake_processes
from tests.user_modules import write_module

TOKENIZER = bytes_tokenizer().with_special_tokens(['<|im_start|>', '<|im_end|>'])
CHAT = ChatEncoder(TOKENIZER, ChatTemplate(CHATML, name='test'))
BODY = '''
calls = []
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    calls.append((a, b))
    return a + b
'''


def call(arguments):
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


def turn(text, end='<|im_end|>'):
    return [*TOKENIZER.encode_batch([text])[0].tolist(), *([CHAT.end_of_turn] if end else [])]


@pytest.fixture
def tools(tmp_path, monkeypatch):
    return open_tools(GrpoConfig(tools=(f'{write_module(tmp_path, monkeypatch, BODY)}:add',)), CHAT, None)


TURNS = [
    turn(f'I add.\n{call({"a": 1, "b": 2})}'.replace("'", '"')),
    turn('3'),
    turn(call('{"a": 1}') + '\n' + call('{"a": 2, "b": 2}')),
    turn(call('{"a": 1, "b": 2}'), end=''),
    turn(call('{"a": 1, "b": 2}') * 2),
    turn('<tool_call>\n{"name": </tool_call>'),
]
MOST = [1, 1, 2, 1, 1, 1]
ROWS = range(len(TURNS))


def test_replies(tools):
    first, _, third, *others = replies = tools.replies(ROWS, TURNS, MOST)
    assert TOKENIZER.decode(first.ids) == '\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n'
    assert first[1:] == (1, 0)
    text = TOKENIZER.decode(third.ids)
    assert text.startswith('\n<|im_start|>tool\nerror: TypeError: add() missing 1 required')
    assert text.endswith('<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n')
    assert third[1:] == (2, 1)
    # No call, no end of the turn, too many calls, invalid JSON.
    assert [replies[1], *others] == [None] * 4
    assert tools.replies([0], [TURNS[4]], [2])[0].num_calls == 2


def test_the_first_process_runs_the_tools_for_all(tools, monkeypatch):
    expected = tools.replies(ROWS, TURNS, MOST)
    for process in fake_processes(monkeypatch):
        if process:
            monkeypatch.setattr(tools._tools, 'run', None)
        assert tools.replies(ROWS, TURNS, MOST) == expected


def test_models_without_tools(tmp_path, monkeypatch):
    grpo = GrpoConfig(tools=(f'{write_module(tmp_path, monkeypatch, BODY)}:add',))
    with pytest.raises(InputError, match='has no chat template'):
        open_tools(grpo, TOKENIZER, None)
    silent = ChatEncoder(TOKENIZER, ChatTemplate(CHATML.replace('{%- if tools %}', '{%- if false %}'), name='test'))
    with pytest.raises(InputError, match='does not show tools'):
        open_tools(grpo, silent, None)
    assert open_tools(GrpoConfig(), TOKENIZER, None) is None
