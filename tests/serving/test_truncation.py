"""Tests `truncation` of chat completions: the oldest turns are dropped if the conversation does not fit the context."""

import json

import httpx
import openai
import pytest

from maxlm.serving.limits import ServerLimits
from tests.serving.fake_engine import FakeEngine, served_by
from tests.serving.serving_thread import ServerThread, client_of

CONTEXT = 256
SYSTEM = {'role': 'system', 'content': 'Be brief.'}


@pytest.fixture(scope='module')
def engine():
    return FakeEngine(max_context=CONTEXT)


def turns(*contents):
    """Returns a conversation of these messages, of which the user wrote the first and the last."""
    return [{'role': ('user', 'assistant')[i % 2], 'content': content} for i, content in enumerate(contents)]


def ask(client, messages, **given):
    return client.chat.completions.create(
        model='tiny', messages=messages, temperature=0, **{'extra_body': {'truncation': 'auto'}, **given}
    )


def prompt_of(engine):
    return bytes(i for i in engine.last_request.prompt if i < 256).decode()


def test_the_oldest_turns_are_dropped(client, engine):
    messages = [SYSTEM, *turns('a' * 40, 'b' * 40, 'c' * 40, 'd' * 40, 'e' * 40)]
    answer = ask(client, messages, max_tokens=10)
    assert answer.dropped_messages == 2
    # A prompt without the dropped messages gives the same tokens.
    prompt = engine.last_request.prompt
    kept = ask(client, [SYSTEM, *messages[3:]], max_tokens=10)
    assert (kept.dropped_messages, engine.last_request.prompt) == (0, prompt)
    assert prompt_of(engine).startswith('system\nBe brief.\nuser\nccc')
    # Control: the former turn does not fit.
    with pytest.raises(openai.BadRequestError) as info:
        ask(client, messages, max_tokens=10, extra_body={'truncation': 'disabled'})
    assert info.value.code == 'context_length_exceeded'
    assert not hasattr(ask(client, turns('a'), max_tokens=10, extra_body={}), 'dropped_messages')


def test_the_room_for_the_answer(client, engine):
    """Without max_tokens, a quarter of the context is kept free; a single long message may use more."""
    messages = turns('a' * 60, 'b' * 20, 'c' * 100)
    assert ask(client, messages, max_tokens=10).dropped_messages == 0
    assert ask(client, messages).dropped_messages == 2
    assert engine.last_request.max_tokens == CONTEXT - len(engine.last_request.prompt)
    assert ask(client, turns('a', 'b', 'c' * 230)).dropped_messages == 2
    assert engine.last_request.max_tokens < CONTEXT // 4
    with pytest.raises(openai.BadRequestError, match='the prompt has'):
        ask(client, turns('a', 'b', 'c' * 260))


def test_a_server_limit_bounds_the_room():
    engine = FakeEngine(max_context=CONTEXT)
    with ServerThread(served_by(engine), limits=ServerLimits(max_tokens=16)) as server, client_of(server) as client:
        # With a quarter of the context, the first turn would not fit.
        assert ask(client, turns('a' * 60, 'b' * 20, 'c' * 100)).dropped_messages == 0


def test_more_messages_than_tokens_of_the_context(client, engine):
    answer = ask(client, turns(*['a'] * 601), max_tokens=10)
    assert 500 < answer.dropped_messages < 600
    assert len(engine.last_request.prompt) <= CONTEXT - 10


def test_each_chunk_of_a_stream_has_the_number(server):
    body = {'messages': turns('a' * 200, 'b', 'c'), 'max_tokens': 5, 'truncation': 'auto', 'stream': True}
    lines = httpx.post(f'{server.url}/v1/chat/completions', json=body).text.split('\n\n')
    chunks = [json.loads(line.removeprefix('data: ')) for line in lines if line.startswith('data: {')]
    assert [chunk['dropped_messages'] for chunk in chunks] == [0] * len(chunks)
    body['messages'] = turns('a' * 250, 'b', 'c')
    line, *_ = httpx.post(f'{server.url}/v1/chat/completions', json=body).text.split('\n\n')
    assert json.loads(line.removeprefix('data: '))['dropped_messages'] == 2


@pytest.mark.parametrize(('path', 'value'), [('chat/completions', 'newest'), ('completions', 'auto')])
def test_bad_values(server, path, value):
    body = {'prompt': 'a', 'messages': turns('a'), 'truncation': value}
    del body['messages' if path == 'completions' else 'prompt']
    answer = httpx.post(f'{server.url}/v1/{path}', json=body)
    assert (answer.status_code, answer.json()['error']['param']) == (400, 'truncation')
