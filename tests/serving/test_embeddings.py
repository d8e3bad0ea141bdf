"""Tests /v1/embeddings, /tokenize and /detokenize with OpenAI's client and an engine with known embeddings."""

import base64
import json
import threading

import httpx
import numpy as np
import pytest

from maxlm.serving.limits import ServerLimits
from tests.serving.fake_engine import FakeEngine, embedding_of, served_by
from tests.serving.serving_thread import ServerThread, request_bytes
from tests.waiting import until


@pytest.fixture(scope='module')
def engine():
    return FakeEngine(num_slots=2, max_queue_size=3)


@pytest.fixture
def post(server):
    """Returns a function that sends a request and returns its status and JSON."""

    def post(path, **body):
        answer = httpx.post(f'{server.url}{path}', json=body, timeout=30)
        return answer.status_code, answer.json()

    return post


def unit(text):
    vector = embedding_of(text.encode())
    return vector / np.linalg.norm(vector)


def test_each_input_has_an_embedding(client):
    # More inputs than slots and queue hold.
    texts = [chr(97 + i) * (i + 1) for i in range(20)]
    answer = client.embeddings.create(model='tiny', input=texts)
    assert [entry.index for entry in answer.data] == list(range(20))
    found = np.array([entry.embedding for entry in answer.data])
    np.testing.assert_allclose(found, [unit(text) for text in texts], rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)
    # Control: the inputs differ.
    assert len({tuple(row) for row in found.tolist()}) == 20
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (210, 210)
    assert (answer.object, answer.model) == ('list', 'tiny')


@pytest.mark.parametrize('given', ['ab', ['ab'], [97, 98], [[97, 98]]])
@pytest.mark.parametrize('encoding', ['float', 'base64', None])
def test_forms_of_inputs_and_encodings(post, given, encoding):
    status, answer = post('/v1/embeddings', input=given, encoding_format=encoding, dimensions=3, user='me')
    assert status == 200
    (entry,) = answer['data']
    value = entry['embedding']
    assert isinstance(value, str) == (encoding == 'base64')
    if encoding == 'base64':
        value = np.frombuffer(base64.b64decode(value), '<f4')
    np.testing.assert_array_equal(np.array(value, np.float32), unit('ab'))


@pytest.mark.parametrize(
    ('body', 'status', 'param', 'fragments'),
    [
        ({}, 400, 'input', 'required'),
        ({'input': ''}, 400, 'input', 'has 0 tokens'),
        ({'input': []}, 400, 'input', 'must be a string, strings'),
        ({'input': ['a', '']}, 400, 'input', 'input[1]: has 0 tokens'),
        ({'input': ['a', 1]}, 400, 'input', 'must be a string'),
        ({'input': [999]}, 400, 'input', 'from 0 to 258'),
        ({'input': ['a'] * 2049}, 400, 'input', 'send at most 2048'),
        ({'input': 'x' * 513}, 400, 'input', 'context length'),
        ({'input': [97] * 513}, 400, 'input', 'the context length is 512'),
        ({'input': 'a', 'encoding_format': 'hex'}, 400, 'encoding_format', "'float' or 'base64'"),
        ({'input': 'a', 'dimensions': 2}, 400, 'dimensions', 'must be 3'),
        ({'input': 'a', 'truncate_prompt_tokens': 9}, 400, 'truncate_prompt_tokens', 'not supported'),
        ({'input': 'a', 'model': 'other'}, 404, 'model', 'not available'),
    ],
)
def test_bad_embedding_requests(post, body, status, param, fragments):
    found, answer = post('/v1/embeddings', **body)
    assert (found, answer['error']['param']) == (status, param)
    assert fragments in answer['error']['message']


def test_a_full_context_can_be_embedded(post, engine):
    assert post('/v1/embeddings', input='x' * engine.max_context)[0] == 200


def test_a_completion_starts_between_the_inputs():
    engine = FakeEngine(num_slots=1, max_queue_size=2)
    engine.open.clear()
    with ServerThread(served_by(engine)) as server:
        finished = []

        def send(path, **body):
            answer = httpx.post(f'{server.url}{path}', json=body, timeout=30)
            finished.append((path, answer.status_code))

        threads = [threading.Thread(target=send, args=('/v1/embeddings',), kwargs={'input': ['a'] * 300})]
        threads[0].start()
        until(lambda: engine.state.running == 1)
        # Only as many inputs as slots are in the engine.
        assert engine.state.waiting == 0
        threads.append(
            threading.Thread(target=send, args=('/v1/completions',), kwargs={'prompt': 'b', 'max_tokens': 2})
        )
        threads[1].start()
        until(lambda: engine.state.waiting == 1)
        engine.open.set()
        for thread in threads:
            thread.join(30)
        assert finished == [('/v1/completions', 200), ('/v1/embeddings', 200)]


def test_a_full_queue_rejects_only_new_embedding_requests():
    engine = FakeEngine(num_slots=1, max_queue_size=1)
    engine.open.clear()
    with ServerThread(served_by(engine)) as server:
        answers = []

        def send(**body):
            answers.append(httpx.post(f'{server.url}/v1/embeddings', json=body, timeout=30).status_code)

        threads = [threading.Thread(target=send, kwargs={'input': ['a'] * 3}) for _ in range(2)]
        for number, thread in enumerate(threads):
            thread.start()
            until(lambda number=number: engine.state.running + engine.state.waiting == number + 1)
        answer = httpx.post(f'{server.url}/v1/embeddings', json={'input': 'b'})
        assert (answer.status_code, answer.json()['error']['code']) == (429, 'queue_full')
        engine.open.set()
        for thread in threads:
            thread.join(30)
        assert answers == [200, 200]


def test_a_disconnected_client_frees_its_slots(server, engine):
    engine.open.clear()
    with server.connect() as connection:
        connection.sendall(request_bytes('/v1/embeddings', {'input': ['a'] * 9}))
        until(lambda: engine.state.running == 2)
    until(lambda: engine.state.running == engine.state.waiting == 0)
    engine.open.set()


def test_the_timeout_of_embeddings():
    engine = FakeEngine()
    engine.open.clear()
    with ServerThread(served_by(engine), limits=ServerLimits(request_timeout=0.2, drain_seconds=1)) as server:
        answer = httpx.post(f'{server.url}/v1/embeddings', json={'input': 'a'})
        assert (answer.status_code, answer.json()['error']['code']) == (504, 'timeout')


def test_running_embeddings_finish_during_shutdown():
    engine, answers = FakeEngine(num_slots=1), []
    engine.open.clear()
    with ServerThread(served_by(engine), limits=ServerLimits(drain_seconds=30)) as server:
        body = {'input': ['a'] * 5}
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f'{server.url}/v1/embeddings', json=body, timeout=30))
        )
        thread.start()
        until(lambda: engine.state.running == 1)
        server.stop()
        until(lambda: httpx.get(f'{server.url}/health').status_code == 503)
        for path in ('/v1/embeddings', '/tokenize', '/detokenize'):
            assert httpx.post(f'{server.url}{path}', json={'input': 'b'}).json()['error']['code'] == 'draining'
        engine.open.set()
        thread.join(30)
        server.join()
    assert len(answers[0].json()['data']) == 5


def test_tokenize_a_text(post):
    expected = {'count': 2, 'max_model_len': 512, 'tokens': [104, 105], 'token_strs': None}
    assert post('/tokenize', prompt='hi') == (200, expected)
    given = {'model': 'tiny', 'add_special_tokens': True, 'return_token_strs': True}
    assert post('/tokenize', prompt='hi', **given)[1] == expected | {'token_strs': ['h', 'i']}
    # A text may be longer than the context.
    assert post('/tokenize', prompt='x' * 600)[1]['count'] == 600
    assert post('/tokenize', prompt='')[1]['tokens'] == []


def test_tokens_of_a_conversation_are_those_of_a_chat_request(post, client):
    messages = [{'role': 'user', 'content': 'Hello'}]
    count = post('/tokenize', messages=messages, add_generation_prompt=True)[1]['count']
    answer = client.chat.completions.create(model='tiny', messages=messages, max_tokens=1)
    assert answer.usage.prompt_tokens == count > 5


def test_options_of_the_chat_template(post, client):
    """The prompts of chat requests and /tokenize are those of `apply_chat_template` with the same options."""
    messages = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'It is '}]
    text = '<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nIt is '
    turn = '<|im_start|>assistant\n'
    expected = [
        ({}, f'{text}<|im_end|>\n{turn}'),
        ({'add_generation_prompt': False}, f'{text}<|im_end|>\n'),
        ({'add_generation_prompt': False, 'continue_final_message': True}, text),
        ({'continue_final_message': True}, text),
        ({'chat_template_kwargs': {'enable_thinking': False}}, f'{text}<|im_end|>\n{turn}'),
        ({'chat_template_kwargs': None, 'continue_final_message': None}, f'{text}<|im_end|>\n{turn}'),
    ]
    for options, prompt in expected:
        tokens = post('/tokenize', messages=messages, **options)[1]['tokens']
        assert post('/detokenize', tokens=tokens)[1]['prompt'] == prompt
        answer = client.chat.completions.create(model='tiny', messages=messages, max_tokens=1, extra_body=options)
        assert answer.usage.prompt_tokens == len(tokens)


@pytest.mark.parametrize('path', ['/tokenize', '/v1/chat/completions'])
@pytest.mark.parametrize(
    ('body', 'param', 'fragments'),
    [
        ({'add_generation_prompt': True, 'continue_final_message': True}, 'continue_final_message', 'set one'),
        ({'chat_template_kwargs': {'messages': []}}, 'chat_template_kwargs', 'messages: cannot be set'),
        ({'chat_template_kwargs': {'chat_template': 'x'}}, 'chat_template_kwargs', 'cannot be set'),
        ({'chat_template_kwargs': 'x'}, 'chat_template_kwargs', 'object'),
        ({'continue_final_message': 'yes'}, 'continue_final_message', 'boolean'),
    ],
)
def test_bad_options_of_the_chat_template(post, path, body, param, fragments):
    status, answer = post(path, messages=[{'role': 'user', 'content': 'a'}], **body)
    assert (status, answer['error']['param']) == (400, param)
    assert fragments in answer['error']['message']


def test_detokenize_inverts_tokenize(post):
    text = 'Straße 🦊'
    tokens = post('/tokenize', prompt=text)[1]['tokens']
    assert post('/detokenize', tokens=tokens) == (200, {'prompt': text})
    assert post('/detokenize', tokens=tokens[:-5])[1]['prompt'] != text


@pytest.mark.parametrize(
    ('path', 'body', 'param', 'fragments'),
    [
        ('/tokenize', {}, 'prompt', 'either prompt or messages'),
        ('/tokenize', {'prompt': 'a', 'messages': [{'role': 'user', 'content': 'a'}]}, 'prompt', 'either'),
        ('/tokenize', {'messages': [{'role': 'robot', 'content': 'a'}]}, 'messages[0].role', 'must be one of'),
        ('/tokenize', {'prompt': 'a', 'add_generation_prompt': 1}, 'add_generation_prompt', 'boolean'),
        ('/tokenize', {'prompt': 'a', 'chat_template': 'x'}, 'chat_template', 'not supported'),
        ('/tokenize', {'prompt': 5}, 'prompt', 'string'),
        ('/detokenize', {'tokens': [259]}, 'tokens', 'from 0 to 258'),
        ('/detokenize', {'tokens': [-1]}, 'tokens', 'from 0 to 258'),
        ('/detokenize', {'tokens': ['a']}, 'tokens[0]', 'integer'),
        ('/detokenize', {}, 'tokens', 'required'),
    ],
)
def test_bad_tokenization_requests(post, path, body, param, fragments):
    status, answer = post(path, **body)
    assert (status, answer['error']['param']) == (400, param)
    assert fragments in answer['error']['message']


def test_the_key_is_required():
    with ServerThread(served_by(FakeEngine()), api_key='secret') as server:
        bodies = {'/v1/embeddings': {'input': 'a'}, '/tokenize': {'prompt': 'a'}, '/detokenize': {'tokens': [1]}}
        for path, body in bodies.items():
            assert httpx.post(f'{server.url}{path}', json=body).status_code == 401
            headers = {'authorization': 'Bearer secret'}
            assert httpx.post(f'{server.url}{path}', json=body, headers=headers).status_code == 200


def test_metrics_count_the_new_paths(server, post):
    post('/tokenize', prompt='a')
    assert 'maxlm_requests_total{path="/tokenize",status="200"}' in httpx.get(f'{server.url}/metrics').text
    assert json.loads(httpx.get(f'{server.url}/health').text) == {'status': 'ok'}
