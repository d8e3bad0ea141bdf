"""Tests reading prompts from JSON lines and writing responses."""

import json
import types

import pytest

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer, make_tokenizer
from maxlm.errors import InputError
from maxlm.inference.engine.batch_io import read_lines, write_completions
from maxlm.inference.engine.requests import Completion, GeneratedToken

MODEL = types.SimpleNamespace(tokenizer=make_tokenizer('bytes', [], infill=True), chat=None, tokenizer_path=None)


def lines_of(tmp_path, *lines):
    path = tmp_path / 'prompts.jsonl'
    path.write_text('\n'.join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding='utf-8')
    return path


def test_lines_keep_their_fields(tmp_path):
    path = lines_of(tmp_path, {'prompt': 'né', 'id': 7}, '', {'prompt': 'a', 'suffix': 'b'})
    first, second = read_lines(path, MODEL)
    assert first.ids == list('né'.encode())
    prefix, middle, suffix = MODEL.tokenizer.infill_ids
    assert second.ids == [prefix, ord('a'), suffix, ord('b'), middle]
    assert (first.name, second.name) == (f'{path}:1', f'{path}:3')
    output = tmp_path / 'out.jsonl'
    token = GeneratedToken(1, 0.0, ())
    rows = [[Completion('x', (token,), 'stop')], [Completion('“y”', (), 'length'), Completion('z', (), 'stop')]]
    write_completions(output, [first, second], lambda: rows)
    assert [json.loads(line) for line in output.read_text(encoding='utf-8').splitlines()] == [
        {'prompt': 'né', 'id': 7, 'completions': [{'text': 'x', 'finish_reason': 'stop'}]},
        {
            'prompt': 'a',
            'suffix': 'b',
            'completions': [{'text': '“y”', 'finish_reason': 'length'}, {'text': 'z', 'finish_reason': 'stop'}],
        },
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ['out.jsonl', 'prompts.jsonl']
    with pytest.raises(InputError, match='file already exists'):
        write_completions(output, [first], lambda: pytest.fail('the model was called'))


def test_messages_and_tools_are_rendered_as_in_the_server(tmp_path):
    turns = [{'role': 'user', 'content': 'x'}, {'role': 'tool', 'content': {'a': 1}}]
    tools = [{'name': 'f'}]
    path = lines_of(tmp_path, {'messages': turns, 'tools': tools, 'prompt': None}, {'messages': json.dumps(turns)})
    tokenizer = bytes_tokenizer().with_special_tokens(['<|im_start|>', '<|im_end|>'])
    chat = ChatEncoder(tokenizer, ChatTemplate(CHATML, name='test'))
    model = types.SimpleNamespace(tokenizer=tokenizer, chat=chat, tokenizer_path=None)
    text = '<|im_start|>user\nx<|im_end|>\n<|im_start|>tool\n{"a": 1}<|im_end|>\n<|im_start|>assistant\n'
    shown = '<|im_start|>system\nTools:\n{"type": "function", "function": {"name": "f"}}\n<|im_end|>\n'
    assert [tokenizer.decode(line.ids) for line in read_lines(path, model)] == [shown + text, text]
    with pytest.raises(InputError, match=r"prompts\.jsonl:1: 'tools' must be a list"):
        read_lines(lines_of(tmp_path, {'messages': turns, 'tools': 3}), model)


def test_incomplete_files_are_removed(tmp_path):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_completions(tmp_path / 'out.jsonl', [], fail)
    assert list(tmp_path.iterdir()) == []
    # The path is checked before the model is called.
    with pytest.raises(InputError, match='nowhere'):
        write_completions(tmp_path / 'nowhere' / 'out.jsonl', [], lambda: pytest.fail('the model was called'))


@pytest.mark.parametrize(
    ('line', 'fragments'),
    [
        ('{', 'not JSON'),
        ('[' * 100_000, 'not JSON'),
        ('[1]', 'must be an object with "prompt" or "messages", not list'),
        ({'text': 'x'}, 'must be an object with either "prompt" or "messages"'),
        ({'prompt': 'x', 'messages': []}, 'must be an object'),
        ({'prompt': 1}, '"prompt" and "suffix" must be strings'),
        ({'prompt': 'x', 'suffix': 3}, 'must be strings'),
        ({'prompt': 'x', 'completions': []}, 'already has "completions"'),
        ({'messages': 'x'}, "'messages' must be a list of objects"),
        ({'messages': [], 'suffix': 'x'}, '"suffix" requires "prompt"'),
        ({'messages': [{'role': 'user', 'content': 'x'}]}, 'chat_template'),
    ],
)
def test_bad_lines_are_named(tmp_path, line, fragments):
    model = MODEL
    model.tokenizer_path = tmp_path / 'tokenizer.json'
    path = lines_of(tmp_path, {'prompt': 'fine'}, line)
    with pytest.raises(InputError) as info:
        read_lines(path, model)
    assert str(info.value).startswith(f'{path}:2: ')
    assert fragments in str(info.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match='No such file'):
        read_lines(tmp_path / 'none', MODEL)
    (tmp_path / 'bytes').write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(InputError, match='not UTF-8'):
        read_lines(tmp_path / 'bytes', MODEL)
    plain = types.SimpleNamespace(tokenizer=bytes_tokenizer())
    with pytest.raises(InputError, match='the tokenizer has no fill-in-the-middle tokens'):
        read_lines(lines_of(tmp_path, {'prompt': 'a', 'suffix': 'b'}), plain)
