"""Tests that hostile grammars delay no other request, exhaust no memory and are errors of their own request."""

import contextlib
import http.client
import json
import threading
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.hostile_schemas import HOSTILE_SCHEMAS
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.inference.engine import grammar as grammar_module
from maxlm.inference.load import LoadedModel
from maxlm.serving import grammar_queue
from maxlm.serving.limits import ServerLimits
from maxlm.serving.request_parsing import ServedModel
from tests.inference.engines import DEAD_END, FAMILIES, MODEL, new_engine
from tests.parameters import random_params
from tests.serving.fake_engine import DETAILS, chat_tokenizer
from tests.serving.serving_thread import ServerThread, request_bytes
from tests.small import small_config, small_layout
from tests.waiting import until

COMPLETIONS, CHAT = '/v1/completions', '/v1/chat/completions'
PLAIN = {'prompt': 'hi', 'max_tokens': 2}
SLOW = HOSTILE_SCHEMAS['multipleOf 62615533']
# The prompt contains the schemas of tools.
LONG = 'context_length_exceeded'
MAX_GROWTH = 600 * 2**20


@pytest.fixture(scope='module')
def engine():
    config = small_config(**MODEL | FAMILIES['llama, grouped'] | {'model__max_positions': 2048})
    layout = small_layout(config)
    params = random_params(config, layout, std=0.4)
    model = LoadedModel(config, layout, params, chat_tokenizer(), Path('tokenizer.json'), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_module, 'LIMITS', grammar_module.LIMITS._replace(cpu_seconds=0.5))
        yield new_engine(model, num_slots=4)


@pytest.fixture(scope='module')
def server(engine):
    tokenizer = chat_tokenizer()
    served = ServedModel(
        'tiny', 1, tokenizer, ChatEncoder(tokenizer, ChatTemplate(CHATML, name='test')), engine, DETAILS
    )
    with ServerThread(served, limits=ServerLimits(drain_seconds=1, request_timeout=100)) as server:
        assert post(server, PLAIN)[0] == 200
        assert post(server, constrained({'type': 'integer'}))[0] == 200
        yield server


def constrained(schema, **fields):
    """Returns a completion request with a JSON schema."""
    response_format = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': schema}}
    return {'prompt': 'hi', 'max_tokens': 8, 'response_format': response_format, **fields}


def with_tools(*schemas, **fields):
    """Returns a chat request with a function for each schema of arguments."""
    tools = [
        {'type': 'function', 'function': {'name': f'f{i}', 'parameters': schema}} for i, schema in enumerate(schemas)
    ]
    return {'messages': [{'role': 'user', 'content': 'hi'}], 'tools': tools, 'max_tokens': 8, **fields}


def post(server, body, path=COMPLETIONS):
    """Returns the status and the JSON of a response."""
    connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=120)
    with contextlib.closing(connection):
        connection.request('POST', path, json.dumps(body), {'content-type': 'application/json'})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def get(server, path):
    connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request('GET', path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def total_memory():
    """Returns the resident memory of this process and its descendants."""
    total = psutil.Process().memory_info().rss
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def check(status, content, param):
    """Raises unless a response is complete or an error of the parameter."""
    if status == 200:
        return
    error = content['error']
    assert '\n' not in error['message']
    assert len(error['message']) < 600
    assert '%llguidance' not in error['message']
    if status == 500:
        assert error['code'] == 'grammar'
    else:
        assert status == 400, content
        assert (error['param'] or param).startswith(param) or error['code'] in ('invalid_json', LONG), error['message']


def test_hostile_schemas_are_errors_in_bounded_memory(server):
    before, most, waits = total_memory(), 0, []
    names = [name for name in HOSTILE_SCHEMAS if not name.startswith('multipleOf 6') or name == 'multipleOf 62615533']
    for name in names:
        schema = HOSTILE_SCHEMAS[name]
        is_done, results = threading.Event(), []

        def send(schema=schema, is_done=is_done, results=results):
            results.append(post(server, constrained(schema, n=16)))
            is_done.set()

        thread = threading.Thread(target=send)
        thread.start()
        # Other requests are answered meanwhile.
        while True:
            start = time.monotonic()
            assert post(server, PLAIN)[0] == 200
            waits.append(time.monotonic() - start)
            most = max(most, total_memory())
            if is_done.wait(0.05):
                break
        thread.join()
        check(*results[0], 'response_format')
        # A client that repeats the request gets the same kind of response.
        again = post(server, constrained(schema, n=1))
        check(*again, 'response_format')
        assert (again[0] == 400) == (results[0][0] == 400) or results[0][0] == 500
    assert most - before < MAX_GROWTH
    assert max(waits) < 20
    assert get(server, '/health') == (200, '{"status":"ok"}')


def test_a_normal_grammar_still_works(server):
    schema = {'type': 'object', 'properties': {'a': {'enum': [1, 2]}}, 'required': ['a'], 'additionalProperties': False}
    status, content = post(server, constrained(schema, max_tokens=20))
    assert status == 200
    assert json.loads(content['choices'][0]['text'])['a'] in (1, 2)
    assert content['choices'][0]['finish_reason'] == 'stop'
    # A text that ends at the limit although it is complete.
    assert post(server, constrained(schema, max_tokens=7))[1]['choices'][0]['finish_reason'] == 'stop'
    assert post(server, constrained(schema, max_tokens=6))[1]['choices'][0]['finish_reason'] == 'length'


@pytest.mark.parametrize(
    ('schemas', 'param'),
    [
        ([{'type': 'object'}, {'type': 'nothing'}], 'tools[1].function.parameters'),
        ([{'type': 'object', 'properties': {'a': {'pattern': '('}}}], 'tools[0].function.parameters'),
        ([{'$ref': '#/nowhere'}, {}], 'tools[0].function.parameters'),
        ([{}, {'const': 'a' * 200_000}], 'tools[1].function.parameters'),
        ([{'enum': []}], 'tools[0].function.parameters'),
        ([SLOW], 'tools[0].function.parameters'),
        ([SLOW, {}], 'tools'),
    ],
)
def test_errors_of_tools_name_the_function(server, schemas, param):
    for _ in range(2):
        status, content = post(server, with_tools(*schemas), CHAT)
        assert (status, content['error']['param']) == (400, param)
        assert content['error']['message'].startswith(f'{param}: ')
        assert '%llguidance' not in content['error']['message']
        assert 'response_format' not in content['error']['message']
    assert post(server, with_tools({'type': 'object'}), CHAT)[0] == 200


def test_a_failure_in_a_stream_is_an_event(server):
    body = constrained(DEAD_END, n=8, max_tokens=30, stream=True, temperature=1, seed=1)
    connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request('POST', COMPLETIONS, json.dumps(body), {'content-type': 'application/json'})
        events = connection.getresponse().read().decode().strip().split('\n\n')
    error = json.loads(events[-1].removeprefix('data: '))['error']
    assert (error['code'], 'the schema allows no token' in error['message']) == ('grammar', True)
    assert 'maxlm_grammars_total{result="failed"}' in get(server, '/metrics')[1]


def test_equal_grammars_compile_once_and_a_full_queue_is_an_error(server, engine, monkeypatch):
    """Blocks the only thread, then fills the queue."""
    queue, gate, compiled = server.running.service.grammars, threading.Event(), []
    prepare = engine.prepare

    def slow(request, is_cancelled=None):
        if not request.grammar or is_cancelled is None or is_cancelled():
            return prepare(request, is_cancelled)
        compiled.append(request.grammar)
        gate.wait(60)
        return prepare(request, is_cancelled)

    monkeypatch.setattr(engine, 'prepare', slow)
    monkeypatch.setattr(grammar_queue, 'MAX_QUEUE_SIZE', 2)
    results = []
    schemas = [{'const': 1001}, {'const': 1001}, {'const': 1002}, {'const': 1003}]
    threads = []
    for number, schema in enumerate(schemas):
        thread = threading.Thread(target=lambda schema=schema: results.append(post(server, constrained(schema))[0]))
        thread.start()
        threads.append(thread)
        if number == 0:
            until(lambda: compiled)
    until(lambda: queue._queue.num_waiting == 2)
    assert get(server, '/health') == (200, '{"status":"degraded","reason":"the queue of grammars is full"}')
    assert 'maxlm_grammar_queue 2.0' in get(server, '/metrics')[1]
    status, content = post(server, constrained({'const': 1004}))
    assert (status, content['error']['code']) == (429, 'queue_full')
    assert post(server, PLAIN)[0] == 200
    # A client that leaves removes its grammar from the queue.
    monkeypatch.setattr(grammar_queue, 'MAX_QUEUE_SIZE', 3)
    with server.connect() as connection:
        connection.sendall(request_bytes(COMPLETIONS, constrained({'const': 1005})))
        until(lambda: queue._queue.num_waiting == 3)
    until(lambda: queue._queue.num_waiting == 2)
    monkeypatch.setattr(grammar_queue, 'STUCK_SECONDS', 0.0)
    assert 'a grammar has been compiling for' in get(server, '/health')[1]
    gate.set()
    for thread in threads:
        thread.join(60)
    assert results == [200] * 4
    assert len(compiled) == len(set(compiled)) == 3


def test_a_client_that_leaves_ends_the_compilation(server, engine):
    queue, refused = server.running.service.grammars, len(engine._grammars._refused)
    with server.connect() as connection:
        connection.sendall(request_bytes(COMPLETIONS, constrained({'type': 'integer', 'multipleOf': 62615777})))
        until(lambda: queue._queue.busy_seconds)
    until(lambda: not queue._queue.busy_seconds and not queue._compilations)
    # It did not reach a limit.
    assert len(engine._grammars._refused) == refused
    assert post(server, PLAIN)[0] == 200


@pytest.mark.parametrize(('schema', 'later'), [({'const': 2001}, 200), ({'type': 'unknown-2001'}, 400)])
def test_health_names_a_process_that_cannot_start(server, engine, monkeypatch, schema, later):
    monkeypatch.setattr('maxlm.sandbox.limited_process._SERVER', 'maxlm.nothing:serve')
    engine._grammars._host.close()
    status, content = post(server, constrained(schema))
    assert (status, content['error']['code']) == (503, 'grammars_unavailable')
    status, text = get(server, '/health')
    assert status == 200
    assert json.loads(text)['status'] == 'degraded'
    assert 'cannot start its process' in text
    assert post(server, PLAIN)[0] == 200
    monkeypatch.undo()
    assert post(server, constrained(schema))[0] == later
    assert get(server, '/health')[1] == '{"status":"ok"}'


NAMES = st.sampled_from(['a', 'b', 'größe', '"', 'a' * 100])
NUMBERS = st.sampled_from([-1, 0, 1, 7, 10**6, 10**18, 10**30, 0.1, 1e-9, 1.5, True, None])
PATTERNS = st.sampled_from(
    ['a*', '(a|b)*a(a|b){50}', '(', '^$', '[^\\d]{1,1000}', '(a{50}){50}', '.*a.*b.*', '\\p{L}+']
)
LEAVES = st.one_of(
    st.booleans(),
    st.fixed_dictionaries({}, optional={'const': st.one_of(NAMES, NUMBERS)}),
    st.fixed_dictionaries({'enum': st.lists(st.one_of(NAMES, NUMBERS), max_size=4)}),
    st.fixed_dictionaries(
        {'type': st.sampled_from(['integer', 'number'])},
        optional={name: NUMBERS for name in ('multipleOf', 'minimum', 'maximum', 'exclusiveMinimum')},
    ),
    st.fixed_dictionaries(
        {'type': st.just('string')},
        optional={
            **{name: NUMBERS for name in ('minLength', 'maxLength')},
            'pattern': PATTERNS,
            'format': st.sampled_from(['date-time', 'uuid', 'uri', 'nothing']),
        },
    ),
    st.fixed_dictionaries({'$ref': st.sampled_from(['#', '#/$defs/a', '#/nowhere', 'http://a/b'])}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.fixed_dictionaries(
            {'type': st.just('object')},
            optional={
                'properties': st.dictionaries(NAMES, children, max_size=3),
                'required': st.lists(NAMES, max_size=3),
                'additionalProperties': children,
                'patternProperties': st.dictionaries(PATTERNS, children, max_size=2),
            },
        ),
        st.fixed_dictionaries(
            {'type': st.just('array')},
            optional={
                'items': children,
                'prefixItems': st.lists(children, max_size=3),
                'minItems': NUMBERS,
                'maxItems': NUMBERS,
            },
        ),
        *(st.fixed_dictionaries({name: st.lists(children, max_size=3)}) for name in ('anyOf', 'allOf', 'oneOf')),
        st.fixed_dictionaries({'$ref': st.just('#/$defs/a'), '$defs': st.fixed_dictionaries({'a': children})}),
    ),
    max_leaves=8,
).filter(lambda schema: isinstance(schema, dict))


def seeds(test):
    """Adds the known hostile schemas to a test, except those that take long."""
    for name, schema in HOSTILE_SCHEMAS.items():
        if not name.startswith('multipleOf 6') and name != 'intersections':
            test = example(schema)(test)
    return test


@pytest.mark.slow
@seeds
@given(SCHEMAS)
def test_no_schema_of_a_response_breaks_the_server(server, schema):
    check(*post(server, constrained(schema, n=2, temperature=1)), 'response_format')
    assert post(server, PLAIN)[0] == 200


@pytest.mark.slow
@seeds
@given(SCHEMAS)
def test_no_schema_of_a_tool_breaks_the_server(server, schema):
    check(*post(server, with_tools({}, schema, tool_choice='required'), CHAT), 'tools')
    assert post(server, PLAIN)[0] == 200
