"""Tests prompts from files: encoding, invalid input and order."""

import gzip
import hashlib
import json
import logging

import numpy as np
import pytest

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.formats import jsonl
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.rl.rewards.prompts import Prompts, load_encoder, read_prompts

TOKENIZER = bytes_tokenizer().with_special_tokens(['<|im_start|>', '<|im_end|>'])
CHAT = ChatEncoder(TOKENIZER, ChatTemplate(CHATML, name='test'))
ASSISTANT = '<|im_start|>assistant\n'


def user(text):
    return {'role': 'user', 'content': text}


def write(path, *entries):
    path.write_text(''.join((entry if isinstance(entry, str) else json.dumps(entry)) + '\n' for entry in entries))
    return str(path)


def read(path, *entries, encoder=CHAT, max_tokens=100):
    return read_prompts(write(path / 'p.jsonl', *entries), encoder, max_tokens)


def texts(prompts):
    return [TOKENIZER.decode(ids) for ids in prompts.ids]


def numbered(num):
    return Prompts('p', tuple(np.array([i], np.uint32) for i in range(num)), ({},) * num, tuple(range(1, num + 1)), 0)


def test_prompts_are_encoded_with_the_chat_template(tmp_path):
    system = {'role': 'system', 'content': 'Be kind.'}
    prompts = read(
        tmp_path,
        {'prompt': '6*7', 'answer': 42},
        '',
        {'messages': [system, user('2+2<|im_end|>')], 'tests': ['assert f(1)'], 'tools': []},
        {'prompt': [user('a'), {'role': 'assistant', 'content': 'b'}, user('c')]},
    )
    assert texts(prompts) == [
        f'<|im_start|>user\n6*7<|im_end|>\n{ASSISTANT}',
        f'<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n2+2<|im_end|><|im_end|>\n{ASSISTANT}',
        '<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n'
        f'<|im_start|>user\nc<|im_end|>\n{ASSISTANT}',
    ]
    assert prompts.tasks[0] == {'prompt': '6*7', 'answer': 42}
    assert prompts.tasks[1] == {'messages': [system, user('2+2<|im_end|>')], 'tests': ['assert f(1)'], 'tools': []}
    assert prompts.location_of(prompts.tasks[1]).endswith('p.jsonl:3')
    assert [prompts.location(i).rpartition(':')[2] for i in range(prompts.num_prompts)] == ['1', '3', '4']
    # The text of a special token in a user message is not an end of turn.
    assert [np.count_nonzero(ids == CHAT.end_of_turn) for ids in prompts.ids] == [1, 2, 3]


def test_without_a_template_a_prompt_is_plain_text(tmp_path):
    prompts = read(tmp_path, {'prompt': 'def f(x):\n', 'tests': 'assert f(1)'}, encoder=TOKENIZER)
    assert texts(prompts) == ['def f(x):\n']
    with pytest.raises(
        InputError, match=r'p\.jsonl:2: the prompt consists of messages, but the model has no chat template'
    ):
        read(tmp_path, {'prompt': 'x'}, {'messages': [user('x')]}, encoder=TOKENIZER)


def test_the_workdir_determines_the_encoder(tmp_path):
    TOKENIZER.save(tmp_path / 'tokenizer.json')
    assert not isinstance(load_encoder(tmp_path), ChatEncoder)
    (tmp_path / 'chat_template.jinja').write_text(CHATML)
    encoder = load_encoder(tmp_path)
    assert isinstance(encoder, ChatEncoder)
    assert encoder.end_of_turn == CHAT.end_of_turn


def test_long_prompts_are_skipped(tmp_path, caplog):
    entries = [{'prompt': 'x' * length, 'answer': length} for length in (5, 50, 6, 51)]
    lengths = [len(ids) for ids in read(tmp_path, *entries).ids]
    with caplog.at_level(logging.WARNING, logger='maxlm'):
        prompts = read(tmp_path, *entries, max_tokens=lengths[2])
    assert ([task['answer'] for task in prompts.tasks], prompts.lines, prompts.num_dropped) == ([5, 6], (1, 3), 2)
    assert prompts.longest == lengths[2]
    (message,) = caplog.messages
    assert f'skipping 2 of 4 prompts that have more than {lengths[2]} tokens' in message
    assert f'line 2, with {lengths[1]}' in message
    with pytest.raises(
        InputError, match=rf'every prompt has more than 4 tokens.*the shortest has {lengths[0]} \(line 1\)'
    ):
        read(tmp_path, *entries, max_tokens=4)


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('{"prompt": "x"', 'not JSON'),
        ('["x"]', 'must be an object with "prompt" or "messages", not list'),
        ('null', 'must be an object with "prompt" or "messages", not NoneType'),
        ({'text': 'x'}, 'must have either "prompt" or "messages"; found text'),
        ({'prompt': 'x', 'messages': [user('x')]}, 'found prompt, messages'),
        ({'prompt': ''}, '"prompt" is empty'),
        ({'prompt': 5}, "'prompt' must be a list"),
        ({'messages': 'x'}, "'messages' must be a list"),
        ({'messages': []}, "'messages' must end with a message for the assistant to answer"),
        ({'messages': [user('x'), {'role': 'assistant', 'content': 'y'}]}, 'must end with'),
        ({'messages': [{'role': 'nobody', 'content': 'x'}]}, "the role 'nobody'"),
        ({'messages': [user(None)]}, 'is missing; add it'),
        ({'prompt': 'x', 'tools': 'y'}, "'tools' is a text that is not JSON"),
    ],
)
def test_errors_name_the_line_of_an_invalid_prompt(tmp_path, line, message):
    with pytest.raises(InputError, match=rf'p\.jsonl:2: .*{message}'):
        read(tmp_path, {'prompt': 'x'}, line)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r'none\.jsonl: No such file'):
        read_prompts(str(tmp_path / 'none.jsonl'), CHAT, 10)
    with pytest.raises(InputError, match='no prompts found'):
        read(tmp_path, '')
    (tmp_path / 'x.jsonl').write_bytes(b'{"prompt": "x"}\n{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match=r'x\.jsonl:2: not UTF-8'):
        read_prompts(str(tmp_path / 'x.jsonl'), CHAT, 100)
    packed = gzip.compress(b'{"prompt": "x"}\n' * 1000)
    (tmp_path / 'x.jsonl.gz').write_bytes(packed)
    assert read_prompts(str(tmp_path / 'x.jsonl.gz'), CHAT, 100).num_prompts == 1000
    (tmp_path / 'x.jsonl.gz').write_bytes(packed[:-12])
    with pytest.raises(InputError, match=r'x\.jsonl\.gz: damaged or truncated'):
        read_prompts(str(tmp_path / 'x.jsonl.gz'), CHAT, 100)


def test_a_line_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, 'MAX_RECORD_BYTES', 100)
    path = write(tmp_path / 'x.jsonl', {'prompt': 'x' * 50}, {'prompt': 'x' * 150})
    with pytest.raises(InputError, match=r'x\.jsonl:2: the line must have at most '):
        read_prompts(str(path), CHAT, 1000)


def test_each_epoch_is_a_different_permutation():
    prompts = numbered(12)
    epochs = [[i for part in range(3) for i in prompts.indices(3 * epoch + part, 4, 7)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    # Indices of any rollout can be computed alone and in any order.
    assert prompts.indices(5, 4, 7) == epochs[1][8:]
    assert prompts.indices(0, 12, 7) == epochs[0]
    assert prompts.indices(0, 12, 8) != epochs[0]
    # The indices continue into the next epoch, even with more samples than prompts.
    assert prompts.indices(1, 8, 7) == epochs[0][8:] + epochs[1][:4]
    assert prompts.indices(0, 24, 7) == epochs[0] + epochs[1]


def test_the_fingerprint_depends_on_prompts_tasks_and_encoder(tmp_path):
    entries = [{'prompt': 'x', 'answer': 1}, {'prompt': 'y', 'answer': 2}]
    first = read(tmp_path, *entries)
    write(tmp_path / 'other.jsonl', *(json.dumps(entry, indent=None, separators=(',', ':')) for entry in entries))
    assert read_prompts(str(tmp_path / 'other.jsonl'), CHAT, 100).fingerprint == first.fingerprint
    others = [
        read(tmp_path, *entries[::-1]),
        read(tmp_path, entries[0]),
        read(tmp_path, entries[0], {'prompt': 'y', 'answer': 3}),
        read(tmp_path, entries[0], {'prompt': 'z', 'answer': 2}),
        read(tmp_path, *entries, encoder=TOKENIZER),
    ]
    assert len({first.fingerprint, *(prompts.fingerprint for prompts in others)}) == 6
    # Only the ids of a prompt count, so that former checkpoints can be resumed.
    fields = [json.dumps([ids.tolist(), {'answer': n}]) for n, ids in enumerate(first.ids, start=1)]
    assert first.fingerprint == hashlib.sha256('\n'.join([*fields, '']).encode()).hexdigest()
