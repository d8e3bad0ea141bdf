"""Tests a real server with OpenAI's client and an engine that emits given text."""

import collections
import concurrent.futures
import contextlib
import json
import socket
from functools import partial

import httpx
import openai
import pytest

from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.inference.sampling import Sampling
from maxlm.serving.limits import ServerLimits
from tests.serving.fake_engine import DETAILS, REPLY, FakeEngine, chat_tokenizer, served_by
from tests.serving.serving_thread import ServerThread, client_of, request_bytes
from tests.waiting import until

HELLO = [{'role': 'user', 'content': 'Hello'}]


@pytest.fixture
def ask(client):
    """Returns a function that requests a chat response or a completion."""

    def ask(kind, **given):
        given = {'model': 'tiny', 'max_tokens': 30, 'temperature': 0, **given}
        if kind == 'chat':
            return client.chat.completions.create(messages=given.pop('messages', HELLO), **given)
        return client.completions.create(prompt=given.pop('prompt', 'Once'), **given)

    return ask


def text_of(choice):
    return choice.text if hasattr(choice, 'text') else choice.message.content


def streamed(stream):
    """Returns text, finish reason and usage of a stream, by choice."""
    texts, ends, usage = {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            new = choice.text if hasattr(choice, 'text') else choice.delta.content
            texts[choice.index] = texts.get(choice.index, '') + (new or '')
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return texts, ends, usage


def refused(kind, status, call):
    with pytest.raises(kind) as info:
        call()
    assert info.value.status_code == status
    assert set(info.value.body) == {'message', 'type', 'param', 'code'}
    return info.value


@pytest.mark.parametrize('kind', ['chat', 'completion'])
def test_an_answer(ask, kind):
    answer = ask(kind)
    assert text_of(answer.choices[0]) == REPLY[:30]
    assert answer.choices[0].finish_reason == 'length'
    assert (answer.model, answer.system_fingerprint) == ('tiny', 'step-7')
    assert answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 30
    # ChatML adds to the word: two special tokens and the role, and the prefix of the response.
    assert answer.usage.prompt_tokens == (3 + len('user\nHello\nassistant\n') if kind == 'chat' else 4)


@pytest.mark.parametrize('kind', ['chat', 'completion'])
@pytest.mark.parametrize('settings', [{}, {'n': 3, 'temperature': 1, 'seed': 5}, {'stop': ['fox', 'jumps']}])
def test_a_stream_equals_the_complete_answer(ask, kind, settings):
    complete = ask(kind, **settings)
    texts, ends, usage = streamed(ask(kind, stream=True, stream_options={'include_usage': True}, **settings))
    assert [texts[choice.index] for choice in complete.choices] == [text_of(choice) for choice in complete.choices]
    assert [ends[choice.index] for choice in complete.choices] == [choice.finish_reason for choice in complete.choices]
    assert usage == complete.usage
    # Control: other parameters give another text.
    assert text_of(ask(kind, temperature=1, seed=9).choices[0]) not in texts.values()
    assert streamed(ask(kind, stream=True))[2] is None


@pytest.mark.parametrize('kind', ['chat', 'completion'])
def test_all_chunks_have_the_field_usage_if_it_is_requested(ask, kind):
    """As in OpenAI's API: it is null before the last chunk, which has no choices."""
    *chunks, last = ask(kind, stream=True, stream_options={'include_usage': True})
    assert all('usage' in chunk.model_fields_set and chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], 30)
    assert all('usage' not in chunk.model_fields_set for chunk in ask(kind, stream=True))


@pytest.mark.parametrize('kind', ['chat', 'completion'])
def test_stop(ask, kind):
    for stop in ('fox', ['none', 'fox']):
        answer = ask(kind, stop=stop)
        assert text_of(answer.choices[0]) == REPLY.partition('fox')[0]
        assert answer.choices[0].finish_reason == 'stop'


@pytest.mark.parametrize('kind', ['chat', 'completion'])
def test_samples_and_seed(ask, kind):
    def texts(**settings):
        return [text_of(choice) for choice in ask(kind, temperature=1, **settings).choices]

    first = texts(n=3, seed=4)
    assert len(set(first)) == 3
    assert texts(n=3, seed=4) == first
    assert texts(n=3, seed=40) != first
    # Without a seed responses differ. Of 79 possible texts, three responses are the same once in 6000 runs.
    assert len({*texts(), *texts(), *texts()}) > 1


def test_several_prompts(client):
    answer = client.completions.create(model='tiny', prompt=['a', 'bc'], n=2, max_tokens=3, seed=1, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:-3] for choice in answer.choices] == ['a', 'a', 'bc', 'bc']
    assert answer.choices[0].text[-3:] != answer.choices[1].text[-3:]
    assert answer.usage.prompt_tokens == 3
    ids = client.completions.create(model='tiny', prompt=[[97], [98, 99]], max_tokens=3, seed=1, echo=True)
    assert [choice.text for choice in ids.choices] == [answer.choices[0].text, answer.choices[2].text]
    one = client.completions.create(model='tiny', prompt=[98, 99], max_tokens=3, seed=1, echo=True)
    assert one.choices[0].text == ids.choices[1].text


def test_log_probabilities(ask):
    logprobs = ask('completion', logprobs=2, max_tokens=4).choices[0].logprobs
    assert logprobs.tokens == ['T', 'h', 'e', ' ']
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs[0] == {'T': -0.5, 'U': -1.5}
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert ask('completion').choices[0].logprobs is None
    content = ask('chat', logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content
    logprobs = [(token.token, token.bytes, token.logprob) for token in content[:2]]
    assert logprobs == [('T', [84], -0.5), ('h', [104], -0.5)]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [('T', -0.5), ('U', -1.5)]
    chunks = [chunk.choices[0] for chunk in ask('completion', logprobs=2, max_tokens=4, stream=True)]
    assert [token for chunk in chunks for token in chunk.logprobs.tokens] == ['T', 'h', 'e', ' ']
    assert [offset for chunk in chunks for offset in chunk.logprobs.text_offset] == [0, 1, 2, 3]


def test_echo_with_log_probabilities(ask):
    prompt = {
        'tokens': ['O', 'n', 'c', 'e'],
        'token_logprobs': [None, -1.0, -2.0, -3.0],
        # The token itself is the second most likely one.
        'top_logprobs': [None, {'m': -0.5, 'n': -1.0}, {'b': -1.5, 'c': -2.0}, {'d': -2.5, 'e': -3.0}],
        'text_offset': [0, 1, 2, 3],
    }
    answer = ask('completion', echo=True, logprobs=2, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ('Once', 'length')
    assert answer.choices[0].logprobs.model_dump() == prompt
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 0)
    choice = ask('completion', echo=True, logprobs=2, max_tokens=2).choices[0]
    assert (choice.text, choice.logprobs.tokens) == ('OnceTh', ['O', 'n', 'c', 'e', 'T', 'h'])
    assert choice.logprobs.token_logprobs == [*prompt['token_logprobs'], -0.5, -0.5]
    assert choice.logprobs.top_logprobs == [*prompt['top_logprobs'], {'T': -0.5, 'U': -1.5}, {'h': -0.5, 'i': -1.5}]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    # The log-probability of the token itself is always returned, and the limit of the most likely tokens is the same.
    assert ask('completion', echo=True, logprobs=0, max_tokens=0).choices[0].logprobs.top_logprobs[1] == {'n': -1.0}
    assert len(ask('completion', echo=True, logprobs=20, max_tokens=0).choices[0].logprobs.top_logprobs[1]) == 20
    plain = ask('completion', echo=True, max_tokens=0).choices[0]
    assert (plain.text, plain.logprobs, plain.finish_reason) == ('Once', None, 'length')


@pytest.mark.parametrize('settings', [{'max_tokens': 0}, {'max_tokens': 3}, {'max_tokens': 3, 'n': 2, 'seed': 1}])
@pytest.mark.parametrize('prompt', ['Once', ['a', 'bc'], [97, 98], [[97], [98, 99]]])
def test_a_stream_of_an_echo_equals_the_complete_answer(client, prompt, settings):
    settings = {'model': 'tiny', 'prompt': prompt, 'echo': True, 'logprobs': 1, 'temperature': 0, **settings}
    complete = client.completions.create(**settings).choices
    texts, lists = collections.defaultdict(str), collections.defaultdict(lambda: collections.defaultdict(list))
    for chunk in client.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            for name, values in choice.logprobs.model_dump().items():
                lists[choice.index][name] += values
    assert [texts[choice.index] for choice in complete] == [choice.text for choice in complete]
    assert [lists[choice.index] for choice in complete] == [choice.logprobs.model_dump() for choice in complete]
    assert all(choice.logprobs.token_logprobs[0] is None for choice in complete)
    # Without an echo there is nothing about the prompt.
    alone = client.completions.create(**settings | {'echo': False, 'max_tokens': 3}).choices[0].logprobs
    assert (len(alone.tokens), None in alone.token_logprobs) == (3, False)


def test_names_of_special_tokens_are_text_unless_requested(client, engine):
    end, start = chat_tokenizer().end_of_document, 257
    name, parsed = '<|im_start|>a<|endoftext|>', (start, 97, end)
    body = {'model': 'tiny', 'prompt': name, 'max_tokens': 1, 'echo': True}

    def ask(some, extra=(), **settings):
        answer = some.completions.create(**body | settings, extra_body=dict(extra))
        assert answer.choices[0].text.startswith(name)

    ask(client)
    assert engine.last_request.prompt == tuple(name.encode())
    ask(client, {'parse_special': True})
    assert engine.last_request.prompt == parsed
    other = FakeEngine(max_context=3)
    with ServerThread(served_by(other, parse_special=True)) as server, client_of(server) as some:
        with pytest.raises(openai.BadRequestError, match='the prompt has 3 and max_tokens=1'):
            ask(some)
        # The number of bytes does not limit a text with names of special tokens.
        ask(some, max_tokens=0)
        assert other.last_request.prompt == parsed
        with pytest.raises(openai.BadRequestError, match='26 bytes'):
            ask(some, {'parse_special': False})
        post = partial(httpx.post, f'{server.url}/tokenize')
        assert post(json={'prompt': name}).json()['tokens'] == list(parsed)
        assert post(json={'prompt': name, 'parse_special': False}).json()['count'] == len(name)
        answer = post(json={'messages': HELLO, 'parse_special': True})
        assert (answer.status_code, answer.json()['error']['param']) == (400, 'parse_special')


def test_a_partial_character_is_reported_as_bytes(ask):
    place = REPLY.index('“')
    content = ask('chat', logprobs=True, max_tokens=place + 3).choices[0].logprobs.content
    assert bytes(byte for token in content for byte in token.bytes).decode() == REPLY[: place + 1]
    assert content[-1].token == '\ufffd'


def test_the_default_limit_is_the_remaining_context(client, engine):
    answer = client.chat.completions.create(model='tiny', messages=HELLO, temperature=0)
    assert answer.usage.total_tokens == engine.max_context


def test_content_in_parts_and_all_roles(ask):
    messages = [{'role': role, 'content': role} for role in ('system', 'developer', 'user', 'assistant')]
    parts = [{'type': 'text', 'text': 'Hel'}, {'type': 'text', 'text': 'lo'}]
    assert ask('chat', messages=[*messages, *HELLO]).usage.prompt_tokens > ask('chat').usage.prompt_tokens
    assert ask('chat', messages=[{'role': 'user', 'content': parts}]).usage == ask('chat').usage


def test_fill_in_the_middle(ask):
    engine = FakeEngine()
    tokenizer = bytes_tokenizer(infill=True)
    with (
        ServerThread(served_by(engine, chat=False)._replace(tokenizer=tokenizer)) as server,
        client_of(server) as client,
    ):
        body = {'model': 'tiny', 'prompt': 'def f(', 'max_tokens': 3, 'temperature': 0}
        assert client.completions.create(**body, suffix='return 1', echo=True).choices[0].text == 'def f(The'
        prefix, middle, suffix = tokenizer.infill_ids
        assert engine.last_request.prompt == (prefix, *b'def f(', suffix, *b'return 1', middle)
        client.completions.create(**body)
        assert engine.last_request.prompt == tuple(b'def f(')
        call = partial(client.completions.create, **body | {'prompt': [1]}, suffix='x')
        assert refused(openai.BadRequestError, 400, call).param == 'suffix'
    error = refused(openai.BadRequestError, 400, lambda: ask('completion', suffix='x'))
    assert 'the tokenizer has no fill-in-the-middle tokens' in error.body['message']


def test_parameters_reach_the_engine(ask, engine):
    """Every parameter reaches the engine."""
    sampling = {
        'temperature': 0.5,
        'top_p': 0.9,
        'top_k': 7,
        'min_p': 0.1,
        'repetition_penalty': 1.2,
        'presence_penalty': 0.3,
        'frequency_penalty': -0.4,
    }
    extra = {name: sampling[name] for name in ('top_k', 'min_p', 'repetition_penalty')}
    plain = {name: value for name, value in sampling.items() if name not in extra}
    for kind in ('chat', 'completion'):
        ask(kind, **plain, seed=11, n=2, stop='x', max_tokens=4, extra_body={**extra, 'ignore_eos': True})
        request = engine.last_request
        assert request.sampling == Sampling(**sampling)
        assert (request.seed, request.num_samples, request.stops, request.max_tokens) == (11, 2, ('x',), 4)
        assert request.ignore_eos
        ask(kind, temperature=1)
        assert engine.last_request.sampling == Sampling()
        assert (engine.last_request.stops, engine.last_request.ignore_eos) == ((), False)
    # OpenAI's seeds have 64 bits.
    for seed, of_engine in {-1: 2**32 - 1, -(2**63): 0, 2**63 - 1: 2**32 - 1, 5 * 2**32 + 3: 3}.items():
        ask('chat', seed=seed, max_tokens=1)
        assert engine.last_request.seed == of_engine
    ask('chat', max_tokens=None, max_completion_tokens=9)
    assert engine.last_request.max_tokens == 9


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.step, model.chat) == ('tiny', 'maxlm', 7, True)
    assert (model.max_model_len, model.max_tokens, model.vocab_size) == (512, None, 259)
    assert {name: getattr(model, name) for name in DETAILS._fields} == DETAILS._asdict()
    assert client.models.retrieve('tiny').id == 'tiny'
    assert refused(openai.NotFoundError, 404, lambda: client.models.retrieve('other')).code == 'model_not_found'


TOOLS = [{'type': 'function', 'function': {'name': 'f'}}]


@pytest.mark.parametrize(
    ('kind', 'settings', 'param', 'fragments'),
    [
        ('chat', {'temperature': -1}, 'temperature', 'greater than or equal to 0'),
        ('chat', {'temperature': 1e-9}, 'temperature', '0.001'),
        ('chat', {'top_p': 0}, 'top_p', 'greater than 0'),
        ('chat', {'n': 129}, 'n', 'less than or equal to 128'),
        ('chat', {'n': 0}, 'n', 'greater than or equal to 1'),
        ('chat', {'seed': 2**63}, 'seed', 'less than 9223372036854775808'),
        ('chat', {'max_tokens': 10**6}, 'messages', 'the context length is 512 tokens'),
        ('chat', {'max_tokens': 3, 'max_completion_tokens': 4}, 'max_tokens', 'differ'),
        ('chat', {'messages': []}, 'messages', 'at least 1 item'),
        ('chat', {'messages': [{'role': 'robot', 'content': 'x'}]}, 'messages[0].role', 'must be one of'),
        ('chat', {'messages': [{'role': 'user', 'content': None}]}, 'messages[0].content', 'must be a string'),
        (
            'chat',
            {'messages': [{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'x'}}]}]},
            'messages[0].content[0]',
            "found type 'image_url'",
        ),
        ('chat', {'tools': [{'type': 'function'}]}, 'tools[0].function', 'field required'),
        ('chat', {'tools': [{'type': 'x', 'function': {'name': 'f'}}]}, 'tools[0].type', 'must be function'),
        ('chat', {'tools': [{'type': 'function', 'function': {'name': 'a b'}}]}, 'tools[0].function.name', 'up to 64'),
        ('chat', {'tools': 2 * TOOLS}, 'tools[1].function.name', 'must be a new name'),
        ('chat', {'tools': 129 * TOOLS}, 'tools', 'at most 128'),
        ('chat', {'tool_choice': 'required'}, 'tool_choice', 'requires tools'),
        ('chat', {'tools': TOOLS, 'tool_choice': 'always'}, 'tool_choice', 'must be none'),
        (
            'chat',
            {'tools': TOOLS, 'tool_choice': {'type': 'function', 'function': {'name': 'g'}}},
            'tool_choice',
            'must name',
        ),
        (
            'chat',
            {'tools': TOOLS, 'tool_choice': {'type': 'function', 'function': {'name': {}}}},
            'tool_choice',
            'must name',
        ),
        ('chat', {'tools': TOOLS, 'response_format': {'type': 'json_object'}}, 'tools', 'remove one of them'),
        (
            'chat',
            {'messages': [{'role': 'assistant', 'tool_calls': [{'function': {'name': 'f', 'arguments': '1'}}]}]},
            'messages[0].tool_calls[0]',
            'a string with a JSON object',
        ),
        ('completion', {'extra_body': {'tools': TOOLS}}, 'tools', 'is not supported'),
        ('chat', {'response_format': {'type': 'xml'}}, 'response_format.type', "found 'xml'"),
        ('chat', {'response_format': {'type': 'json_schema'}}, 'response_format.json_schema', 'with a JSON schema'),
        (
            'chat',
            {'response_format': {'type': 'json_object'}, 'extra_body': {'ignore_eos': True}},
            'response_format',
            'not supported with',
        ),
        ('chat', {'logit_bias': {'1': 5}}, 'logit_bias', 'is not supported'),
        ('chat', {'top_logprobs': 2}, 'top_logprobs', 'requires logprobs'),
        ('chat', {'stop': ['']}, 'stop', 'none of them empty'),
        ('chat', {'stop': ['a'] * 17}, 'stop', 'at most 16'),
        ('chat', {'stream_options': {'include_usage': True}}, 'stream_options', 'requires stream'),
        ('completion', {'prompt': ''}, 'prompt', 'the prompt is empty'),
        ('completion', {'prompt': 'x' * 600}, 'prompt', 'the prompt has 600'),
        ('completion', {'prompt': [300]}, 'prompt', 'from 0 to 258'),
        ('completion', {'prompt': ['a', 1]}, 'prompt', 'must be a string'),
        ('completion', {'prompt': ['a'] * 65, 'n': 2}, 'prompt', 'send at most 64'),
        ('completion', {'best_of': 4}, 'best_of', 'is not supported'),
        ('completion', {'max_tokens': 0}, 'max_tokens', 'requires echo=true'),
        ('completion', {'max_tokens': -1, 'echo': True}, 'max_tokens', 'greater than or equal to 0'),
        ('chat', {'max_tokens': 0}, 'max_tokens', 'greater than or equal to 1'),
        ('completion', {'prompt': 'x' * 513, 'echo': True, 'max_tokens': 0}, 'prompt', 'exceeds it'),
        ('completion', {'prompt': 'x' * 512, 'echo': True, 'max_tokens': 1}, 'prompt', 'and max_tokens=1'),
        ('completion', {'prompt': 128 * ['x' * 482], 'echo': True, 'logprobs': 16}, 'logprobs', 'send fewer prompts'),
        ('completion', {'suffix': 'x', 'echo': True, 'logprobs': 0}, 'echo', 'remove one of them'),
        ('completion', {'suffix': 'x', 'extra_body': {'parse_special': True}}, 'parse_special', 'with suffix'),
        ('completion', {'extra_body': {'parse_special': 'yes'}}, 'parse_special', 'valid boolean'),
        ('chat', {'extra_body': {'parse_special': True}}, 'parse_special', 'is not supported'),
        ('completion', {'logprobs': 21}, 'logprobs', 'less than or equal to 20'),
    ],
)
def test_bad_requests(ask, kind, settings, param, fragments):
    error = refused(openai.BadRequestError, 400, lambda: ask(kind, **settings))
    assert (error.param, error.type) == (param, 'invalid_request_error')
    assert fragments in error.body['message']


def test_parameters_without_effect_are_accepted(ask):
    settings = {'user': 'somebody', 'tools': [], 'logit_bias': {}, 'response_format': {'type': 'text'}, 'store': False}
    assert text_of(ask('chat', **settings).choices[0]) == REPLY[:30]
    extra = {'top_k': 5, 'min_p': 0.1, 'repetition_penalty': 1.1, 'ignore_eos': True, 'unknown': 1}
    assert text_of(ask('chat', extra_body=extra).choices[0]) == REPLY[:30]


def test_errors_outside_of_the_body(server, ask):
    with httpx.Client(base_url=server.url) as http:
        for method, path, status in [
            ('GET', '/nowhere', 404),
            ('GET', '/docs', 404),
            ('GET', '/openapi.json', 404),
            ('GET', '/v1/completions', 405),
            ('DELETE', '/health', 405),
            ('POST', '/v1/completions', 415),
        ]:
            answer = http.request(method, path)
            assert (answer.status_code, set(answer.json())) == (status, {'error'}), path
            assert set(answer.json()['error']) == {'message', 'type', 'param', 'code'}
        assert http.get('/v1/completions').headers['allow'] == 'POST'
    assert refused(openai.NotFoundError, 404, lambda: ask('chat', model='gpt-9')).code == 'model_not_found'


def test_a_model_without_a_chat_template():
    with ServerThread(served_by(FakeEngine(), chat=False)) as server, client_of(server) as client:
        call = partial(client.chat.completions.create, model='tiny', messages=HELLO)
        error = refused(openai.BadRequestError, 400, call)
        assert '/v1/completions' in error.body['message']
        assert client.completions.create(model='tiny', prompt='a', max_tokens=3, temperature=0).choices[0].text == 'The'
        assert not client.models.list().data[0].chat


def test_fifty_at_once(ask, engine):
    prompts = [f'{number} ' * (number % 5 + 1) for number in range(50)]

    def generate(number):
        settings = {'prompt': prompts[number], 'seed': number, 'temperature': 1, 'max_tokens': 10 + number}
        if number % 2:
            return streamed(ask('completion', stream=True, **settings))[0][0]
        return text_of(ask('completion', **settings).choices[0])

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(generate, range(50)))
    # Each request gets its own text, without incomplete characters.
    replies = [REPLY[number:] + REPLY[:number] for number in range(50)]
    assert texts == [replies[number].encode()[: 10 + number].decode(errors='ignore') for number in range(50)]
    assert (engine.state.running, engine.state.waiting) == (0, 0)


def test_the_api_key():
    with ServerThread(served_by(FakeEngine()), api_key='secret') as server:
        for key in ('wrong', 'secre', 'secret2', 'Bearer'):
            with client_of(server, key) as client:
                error = refused(openai.AuthenticationError, 401, client.models.list)
                assert error.code == 'invalid_api_key'
        with client_of(server, 'secret') as client:
            assert client.models.list().data
        with httpx.Client(base_url=server.url) as http:
            assert http.get('/health').status_code == http.get('/').status_code == 200
            assert http.get('/metrics').status_code == http.get('/nowhere').status_code == 401
            assert http.post('/v1/completions', json={'prompt': 'a'}).status_code == 401


def test_other_origins_are_refused(server):
    local = server.url.removeprefix('http://')
    port = local.rpartition(':')[2]
    with httpx.Client(base_url=server.url) as http:
        for headers, status in [
            ({}, 200),
            ({'Origin': server.url}, 200),
            ({'Host': f'localhost:{port}'}, 200),
            ({'Host': f'[::1]:{port}'}, 200),
            ({'Host': '127.1.2.3'}, 200),
            ({'Host': f'localhost:{port}', 'Origin': server.url}, 403),
            ({'Origin': 'http://evil.example'}, 403),
            ({'Origin': 'null'}, 403),
            # A foreign domain that resolves to this machine.
            ({'Host': f'evil.example:{port}', 'Origin': f'http://evil.example:{port}'}, 403),
            ({'Host': f'evil.example:{port}'}, 403),
            ({'Host': f'127.0.0.1.evil.example:{port}'}, 403),
            *(
                ({'Host': host}, 403)
                for host in (
                    *('[', '', '127.0.0.1?.evil.example', '127.0.0.1#.evil.example', '127.0.0.1/.evil.example'),
                    *(
                        'evil.example@127.0.0.1',
                        '127.0.0.1@evil.example',
                        '127.0.0.1:x',
                        '127.0.0.1:80:80',
                        '127.1',
                        '::1',
                    ),
                    *('127.0.0.1\\.evil.example', '127.0.0.1 evil.example', '127.0.0.1\tevil', 'localhost.', '[::1]x'),
                    *('[::1%25lo]', '[::1', 'a,localhost', '0x7f.1', '2130706433', '0.0.0.0'),
                )
            ),
            ({'Host': 'LOCALHOST:1'}, 200),
            ({'Host': f'127.0.0.1:{port}', 'Origin': f'{server.url}?.evil.example'}, 403),
            ({'Host': f'127.0.0.1:{port}', 'Origin': f'ftp://127.0.0.1:{port}'}, 403),
            # Without a proxy, these headers do not name the host.
            ({'Host': 'evil.example', 'X-Forwarded-Host': 'localhost', 'Forwarded': 'host=localhost'}, 403),
        ]:
            answer = http.get('/v1/models', headers=headers)
            assert answer.status_code == status, headers
            assert 'access-control-allow-origin' not in answer.headers


def test_allowed_origins():
    origin = 'https://chat.example.org'
    with (
        ServerThread(served_by(FakeEngine()), origins=[origin], api_key='secret') as server,
        httpx.Client(base_url=server.url) as http,
    ):
        headers = {'Origin': origin, 'Access-Control-Request-Method': 'POST'}
        assert http.options('/v1/completions', headers=headers).headers['access-control-allow-origin'] == origin
        # Errors carry CORS headers too.
        for key, status in {'wrong': 401, 'secret': 200}.items():
            headers = {'Origin': origin, 'Host': 'chat.example.org', 'Authorization': f'Bearer {key}'}
            answer = http.get('/v1/models', headers=headers)
            assert (answer.status_code, answer.headers['access-control-allow-origin']) == (status, origin)
        other = {'Origin': 'https://other.example.org', 'Authorization': 'Bearer secret'}
        assert http.get('/v1/models', headers=other).status_code == 403
        assert 'access-control-allow-origin' not in http.get('/v1/models', headers=other).headers


def test_a_full_queue():
    engine = FakeEngine(num_slots=1, max_queue_size=2)
    engine.open.clear()
    limits = ServerLimits(max_queue_size=2, drain_seconds=1)
    with (
        ServerThread(served_by(engine), limits=limits) as server,
        client_of(server) as client,
        contextlib.ExitStack() as stack,
    ):
        for number in range(3):
            connection = stack.enter_context(server.connect())
            connection.sendall(request_bytes('/v1/completions', {'prompt': 'a', 'max_tokens': 5}))
            until(lambda number=number: (engine.state.running, engine.state.waiting) == (1, number))
        error = refused(
            openai.RateLimitError, 429, lambda: client.completions.create(model='tiny', prompt='a', max_tokens=5)
        )
        assert error.code == 'queue_full'
        assert 1 <= int(error.response.headers['retry-after']) <= 60
        # The slot and the queue cannot take all three prompts now.
        engine.open.set()
        until(lambda: engine.state.running == 0)
        engine.open.clear()
        call = partial(client.completions.create, model='tiny', prompt=['a'] * 3, max_tokens=5)
        refused(openai.RateLimitError, 429, call)
        until(lambda: (engine.state.running, engine.state.waiting) == (0, 0))
        # Four prompts exceed the capacity of the slot and the queue.
        call = partial(client.completions.create, model='tiny', prompt=['a'] * 4, max_tokens=5)
        assert refused(openai.BadRequestError, 400, call).param == 'n'


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_disconnects_frees_its_slot(stream):
    engine = FakeEngine(num_slots=1)
    engine.open.clear()
    with ServerThread(served_by(engine)) as server:
        for waiting in (0, 1):
            # The engine has one slot, so a second request waits.
            connections = [server.connect() for _ in range(waiting + 1)]
            for connection in connections:
                body = {'prompt': 'a', 'max_tokens': 400, 'stream': stream, 'n': 1}
                connection.sendall(request_bytes('/v1/completions', body))
            until(lambda waiting=waiting: (engine.state.running, engine.state.waiting) == (1, waiting))
            for connection in connections:
                connection.close()
            until(lambda: (engine.state.running, engine.state.waiting) == (0, 0))
        until(lambda: 'path="/v1/completions",status="499"} 3.0' in httpx.get(f'{server.url}/metrics').text or stream)


def test_an_abort_of_the_client(server, ask, engine):
    engine.seconds = 0.002
    with ask('chat', stream=True, max_tokens=400) as stream:
        next(iter(stream))
        until(lambda: engine.state.running == 1)
    until(lambda: engine.state.running == 0)
    engine.seconds = 0
    assert text_of(ask('chat').choices[0]) == REPLY[:30]


def test_a_client_that_does_not_read_frees_its_slot():
    engine = FakeEngine(max_context=10**6)
    with ServerThread(served_by(engine), limits=ServerLimits(stall_seconds=0.3, drain_seconds=1)) as server:
        # Accepted connections inherit the buffer size, and a small buffer fills quickly.
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with server.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = {'prompt': 'a', 'max_tokens': 900_000, 'stream': True, 'logprobs': 5}
            connection.sendall(request_bytes('/v1/completions', body))
            until(lambda: engine.state.running == 1)
            until(lambda: engine.state.running == 0)
        assert engine.state.generated_tokens < 900_000


def test_the_timeout_of_a_request():
    engine = FakeEngine()
    engine.open.clear()
    limits = ServerLimits(request_timeout=0.5, drain_seconds=1)
    with ServerThread(served_by(engine), limits=limits) as server, client_of(server) as client:
        ask = {'model': 'tiny', 'prompt': 'a', 'max_tokens': 5}
        error = refused(openai.InternalServerError, 504, lambda: client.completions.create(**ask))
        assert error.code == 'timeout'
        until(lambda: engine.state.running == 0)
        # The status of a stream is already sent, so the error is the last event.
        with pytest.raises(openai.APIError, match='longer than'):
            list(client.completions.create(**ask, stream=True))
        until(lambda: engine.state.running == 0)
        engine.open.set()
        assert client.completions.create(**ask).choices[0].finish_reason == 'length'


def test_metrics(server, ask):
    def read():
        lines = httpx.get(f'{server.url}/metrics').text.splitlines()
        return {line.rpartition(' ')[0]: float(line.rpartition(' ')[2]) for line in lines if not line.startswith('#')}

    before = read()
    ask('completion', prompt='abc')
    with contextlib.suppress(openai.BadRequestError):
        ask('completion', prompt='')
    httpx.get(f'{server.url}/nowhere-{id(before)}')
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert grown['maxlm_tokens_total{kind="prompt"}'] == 3
    assert grown['maxlm_tokens_total{kind="drawn"}'] == 30
    assert grown['maxlm_requests_total{path="/v1/completions",status="200"}'] == 1
    assert grown['maxlm_requests_total{path="/v1/completions",status="400"}'] == 1
    assert grown['maxlm_requests_total{path="other",status="404"}'] == 1
    for name in ('first_token', 'output_token', 'request'):
        assert grown[f'maxlm_{name}_seconds_count'] == 1
    assert (after['maxlm_slots'], after['maxlm_running'], after['maxlm_waiting']) == (8, 0, 0)


def test_events_are_complete_lines_of_json(server):
    body = {'prompt': 'a', 'max_tokens': 70, 'stream': True, 'temperature': 0}
    with httpx.stream('POST', f'{server.url}/v1/completions', json=body) as answer:
        assert answer.headers['content-type'] == 'text/event-stream; charset=utf-8'
        events = b''.join(answer.iter_raw()).split(b'\n\n')
    assert events[-2:] == [b'data: [DONE]', b'']
    chunks = [json.loads(event.removeprefix(b'data: ')) for event in events[:-2]]
    assert len({chunk['id'] for chunk in chunks}) == 1
    # The stream contains complete characters only.
    assert ''.join(chunk['choices'][0]['text'] for chunk in chunks) == REPLY.encode()[:70].decode(errors='ignore')
