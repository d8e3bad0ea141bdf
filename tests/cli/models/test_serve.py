"""`maxlm serve` with a model: responses equal those of the engine; output and errors of the command."""

import concurrent.futures
import functools
import itertools
import json
import os
import re
import signal
import string
import subprocess
import sys
import threading

import httpx
import hypothesis
import hypothesis.strategies as st
import jax
import jsonschema
import numpy as np
import openai
import pytest
from flax import nnx

from maxlm.cli.models import serve
from maxlm.data.chat.template import CHATML
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, exit_code
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.requests import Request
from maxlm.inference.load import LoadedModel, load_model
from maxlm.inference.sampling import Sampling
from maxlm.serving.limits import ServerLimits
from maxlm.serving.request_parsing import ServedModel
from maxlm.training.state import abstract_model
from maxlm.workdir.files import CHAT_TEMPLATE
from tests.conftest import ROOT
from tests.cpu import cpu_flags
from tests.messages import assert_error_line
from tests.serving.fake_engine import DETAILS, chat_tokenizer
from tests.serving.hostile import MAX_BODY, Generator, Wire
from tests.serving.serving_thread import ServerThread, client_of, request_bytes
from tests.serving.test_hostile import check
from tests.starting import make_start
from tests.waiting import until

HELLO = [{'role': 'user', 'content': 'Hello'}]
CONTEXT = 768
SLOTS = 4
NUM_HOSTILE = 500


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp('serve')
    chat_tokenizer().save(folder / 'tokenizer.json')
    make_start(folder / 'tiny', folder / 'tokenizer.json', model__max_positions=CONTEXT, model__init_std=0.3)
    (folder / 'tiny' / CHAT_TEMPLATE).write_text(CHATML)
    return folder / 'tiny'


@pytest.fixture(scope='module')
def model(workdir):
    return load_model(str(workdir), num_devices=1)


@pytest.fixture(scope='module')
def engine(model):
    engine = Engine(model, num_slots=SLOTS, max_queue_size=400)
    engine.warm_up()
    return engine


@pytest.fixture(scope='module')
def generate(model):
    """Returns a function that samples without a server."""
    # With the number of slots of the server, the compiled programs are shared.
    engine = Engine(model, num_slots=SLOTS)
    lock = threading.Lock()

    def generate(prompt, max_tokens=12, *, stops=(), num_samples=1, seed=0, **sampling):
        request = Request(
            tuple(prompt),
            max_tokens,
            Sampling(**sampling),
            seed=seed,
            num_samples=num_samples,
            stops=stops,
            top_log_probs=2,
            ignore_eos=True,
        )
        with lock:
            return engine.complete([request])[0]

    return generate


@pytest.fixture(scope='module')
def server(model, engine):
    limits = ServerLimits(max_request_bytes=MAX_BODY, drain_seconds=5)
    details = DETAILS._replace(dim=model.config.model.dim)
    with ServerThread(
        ServedModel('tiny', model.step, model.tokenizer, model.chat, engine, details), limits=limits
    ) as server:
        yield server


@pytest.fixture(scope='module')
def client(server):
    with client_of(server) as client:
        yield client


@pytest.fixture
def complete(client):
    def complete(prompt, **given):
        extra = {'ignore_eos': True, **given.pop('extra_body', {})}
        return client.completions.create(
            **{'model': 'tiny', 'prompt': prompt, 'max_tokens': 12, **given}, extra_body=extra
        )

    return complete


def near(a, b):
    return a == pytest.approx(b, abs=1e-4)


def test_completions_equal_those_of_the_engine(complete, generate, model):
    greedy = generate(b'Once', temperature=0)[0]
    choice = complete('Once', temperature=0, logprobs=2).choices[0]
    assert (choice.text, choice.finish_reason) == (greedy.text, 'length')
    assert near(choice.logprobs.token_logprobs, [token.log_prob for token in greedy.tokens])
    assert len(choice.logprobs.top_logprobs[0]) == 2
    warm = {'temperature': 1.5, 'top_p': 0.95}
    drawn = complete('Once', n=3, seed=5, **warm)
    assert [choice.text for choice in drawn.choices] == [
        sample.text for sample in generate(b'Once', num_samples=3, seed=5, **warm)
    ]
    assert complete('Once', n=3, seed=6, **warm).choices[0].text != drawn.choices[0].text
    streamed = complete('Once', n=3, seed=5, stream=True, **warm)
    texts = ['', '', '']
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in drawn.choices]
    limited = complete('Once', temperature=1.5, seed=5, extra_body={'top_k': 1}).choices[0].text
    assert limited == greedy.text
    assert complete([*b'Once'], temperature=0).choices[0].text == greedy.text


def test_prefixes_are_not_shared_by_requests_without_a_common_salt(model):
    # The engine of the other tests has a thread.
    engine = Engine(model, num_slots=4)
    served = ServedModel(
        'tiny', model.step, model.tokenizer, model.chat, engine, DETAILS._replace(dim=model.config.model.dim)
    )
    prompt, message = 'A shared prefix of tokens. ' * 2, [{'role': 'user', 'content': 'A shared prefix of tokens.'}]

    def reused(client, **given):
        before = engine.state.cached_tokens
        if 'messages' in given:
            client.chat.completions.create(model='tiny', max_tokens=1, **given)
        else:
            client.completions.create(model='tiny', max_tokens=1, prompt=prompt, **given)
        return engine.state.cached_tokens - before > 0

    salted, other = ({'extra_body': {'cache_salt': salt}} for salt in ('a', 'b'))
    for shares in (True, False):
        with (
            ServerThread(served._replace(share_prefixes=shares)) as server,
            client_of(server) as client,
        ):
            for _ in range(2):
                reused(client)
            assert reused(client) == shares
            for _ in range(2):
                reused(client, messages=message)
            assert reused(client, messages=message) == shares
            assert [reused(client, **salt) for salt in (salted, salted, other, other)] == [False, True, False, True]
            # The samples of a request, and its prompts, share their prefix.
            assert reused(client, n=3)
            assert not reused(client, extra_body={'cache_salt': 'c'})


def test_embeddings_are_normalized_means_of_hidden_states(client, model):
    texts = ['Once', 'Twice upon a time', (string.ascii_letters * 15)[:CONTEXT]]
    answer = client.embeddings.create(model='tiny', input=texts)
    graph, _ = nnx.split(abstract_model(model.config, model.layout))
    decoder = nnx.merge(graph, model.params)
    for text, entry in zip(texts, answer.data, strict=True):
        hidden_1TD, _, _ = decoder(np.array([[*text.encode()]], np.int32))
        mean_D = np.asarray(hidden_1TD[0], np.float64).mean(axis=0)
        assert near(entry.embedding, (mean_D / np.linalg.norm(mean_D)).tolist())
    # Control: the embeddings differ, also from the hidden state of the last token.
    assert np.dot(answer.data[0].embedding, answer.data[1].embedding) < 0.999
    last_D = np.asarray(hidden_1TD[0, -1], np.float64)
    assert not near(answer.data[2].embedding, (last_D / np.linalg.norm(last_D)).tolist())


def test_a_stop_ends_a_text_before_it(complete, generate):
    text = generate(b'Once', 40, temperature=0)[0].text
    stop = text[10:13]
    choice = complete('Once', max_tokens=40, temperature=0, stop=[stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], 'stop')


def test_chat_equals_the_completion_of_the_rendered_template(client, generate, model):
    ids = model.chat.encode_prompt(HELLO).tolist()
    expected = generate(ids, temperature=0)[0]
    given = {'model': 'tiny', 'messages': HELLO, 'temperature': 0, 'max_tokens': 12, 'extra_body': {'ignore_eos': True}}
    answer = client.chat.completions.create(**given, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == len(ids)
    log_probs = [token.logprob for token in answer.choices[0].logprobs.content]
    assert near(log_probs, [token.log_prob for token in expected.tokens])
    pieces = [chunk.choices[0].delta.content or '' for chunk in client.chat.completions.create(**given, stream=True)]
    assert ''.join(pieces) == expected.text


def test_suffix_requires_fim_tokens(complete):
    with pytest.raises(openai.BadRequestError, match='the tokenizer has no fill-in-the-middle tokens') as info:
        complete('def f(', suffix='return 1')
    assert info.value.param == 'suffix'


def test_fifty_concurrent_requests(complete, generate, engine):
    prompts = [f'{number}: {"x" * (number % 7)}' for number in range(50)]

    def send(number):
        return complete(prompts[number], seed=number, max_tokens=5 + number % 9, temperature=1.3).choices[0].text

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(send, range(50)))
    for number in range(0, 50, 7):
        settings = {'seed': number, 'temperature': 1.3}
        assert texts[number] == generate(prompts[number].encode(), 5 + number % 9, **settings)[0].text
    assert len(set(texts)) > 40
    assert (engine.state.running, engine.state.waiting) == (0, 0)


LEAVES = st.one_of(
    st.sampled_from([{'type': 'boolean'}, {'type': 'null'}, {'const': 'é'}]),
    st.integers(-5, 5).map(lambda low: {'type': 'integer', 'minimum': low, 'maximum': low + 99}),
    st.integers(0, 4).map(lambda num: {'type': 'string', 'maxLength': num}),
    st.lists(st.text(max_size=4), min_size=1, max_size=3, unique=True).map(lambda values: {'enum': values}),
    st.just({'type': 'string', 'pattern': '^[a-f]{2}-[0-9]{1,3}$'}),
)


def object_of(fields):
    return {'type': 'object', 'properties': fields, 'required': [*fields], 'additionalProperties': False}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {'anyOf': options}),
        inner.map(lambda items: {'type': 'array', 'items': items, 'maxItems': 2}),
        st.dictionaries(st.text(min_size=1, max_size=3), inner, max_size=3).map(object_of),
    ),
    max_leaves=4,
)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_every_response_follows_its_schema(client, schema, seed):
    response_format = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': schema, 'strict': True}}
    response = client.chat.completions.create(
        model='tiny',
        messages=[{'role': 'user', 'content': 'JSON'}],
        response_format=response_format,
        seed=seed,
        max_tokens=200,
    )
    (choice,) = response.choices
    assert choice.finish_reason == 'stop'
    jsonschema.validate(json.loads(choice.message.content), schema)


def test_json_objects_and_streams(client):
    chat = functools.partial(
        client.chat.completions.create, model='tiny', messages=[{'role': 'user', 'content': 'JSON'}], temperature=0
    )
    assert chat(response_format={'type': 'json_object'}, max_tokens=20).choices[0].message.content.startswith('{')
    schema = {'type': 'array', 'items': {'enum': ['ä', 'b']}, 'minItems': 3, 'maxItems': 3}
    wanted = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': schema}}
    whole = chat(response_format=wanted).choices[0].message.content
    assert len(json.loads(whole)) == 3
    parts = [chunk.choices[0].delta.content or '' for chunk in chat(response_format=wanted, stream=True)]
    assert ''.join(parts) == whole
    # A second choice has a different text and follows the schema too.
    response = client.completions.create(
        model='tiny', prompt='a', n=8, seed=1, temperature=50, max_tokens=30, extra_body={'response_format': wanted}
    )
    texts = {choice.text for choice in response.choices}
    assert len(texts) > 1
    assert {len(json.loads(text)) for text in texts} == {3}


WEATHER = {
    'type': 'object',
    'properties': {'city': {'enum': ['Bonn', 'Köln']}, 'days': {'type': 'integer', 'minimum': 1, 'maximum': 9}},
    'required': ['city', 'days'],
    'additionalProperties': False,
}
TOOLS = [
    {'type': 'function', 'function': {'name': 'weather', 'description': 'Forecast', 'parameters': WEATHER}},
    {'type': 'function', 'function': {'name': 'time'}},
]


@pytest.fixture
def chat(client):
    return functools.partial(
        client.chat.completions.create, model='tiny', messages=HELLO, tools=TOOLS, seed=5, max_tokens=150
    )


@pytest.mark.parametrize('temperature', [0, 1, 30])
@pytest.mark.parametrize('choice', ['required', {'type': 'function', 'function': {'name': 'weather'}}])
def test_required_tool_calls_follow_their_schemas(chat, temperature, choice):
    response = chat(tool_choice=choice, temperature=temperature, parallel_tool_calls=False, n=4)
    for each in response.choices:
        assert each.finish_reason == 'tool_calls'
        assert each.message.content is None
        (call,) = each.message.tool_calls
        assert call.type == 'function'
        arguments = json.loads(call.function.arguments)
        if call.function.name == 'weather':
            jsonschema.validate(arguments, WEATHER)
        else:
            assert choice == 'required'
            assert (call.function.name, arguments) == ('time', {})


def test_streamed_tool_calls_equal_those_of_the_response(chat):
    settings = {'tool_choice': 'required', 'parallel_tool_calls': False, 'temperature': 1}
    (wanted,) = chat(**settings).choices[0].message.tool_calls
    chunks = list(chat(**settings, stream=True))
    (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert (call.index, call.type) == (0, 'function')
    assert call.function.model_dump() == wanted.function.model_dump()
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == 'tool_calls'


def test_tools_and_their_results_are_in_the_prompt(chat, model):
    arguments = {'city': 'Bonn', 'days': 2}

    def conversation(arguments):
        call = {'id': 'call_1', 'type': 'function', 'function': {'name': 'weather', 'arguments': arguments}}
        return [
            *HELLO,
            {'role': 'assistant', 'content': '', 'tool_calls': [call]},
            {'role': 'tool', 'tool_call_id': 'call_1', 'content': 'rain'},
        ]

    # Arguments are a string in the API and an object in templates.
    messages = conversation(json.dumps(arguments))
    rendered = model.chat.render_prompt(conversation(arguments), tools=TOOLS)
    assert '"description": "Forecast"' in rendered.text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>' in rendered.text
    response = chat(messages=messages, max_tokens=5)
    assert response.usage.prompt_tokens == len(model.chat.encode_rendered(rendered))
    # With tool_choice=none the tools are not shown.
    without = chat(messages=messages, max_tokens=5, tool_choice='none')
    assert without.usage.prompt_tokens < response.usage.prompt_tokens
    # This model writes no calls of its own.
    assert without.choices[0].message.tool_calls is response.choices[0].message.tool_calls is None


def test_invalid_schemas_are_named(client):
    for schema, words in (({'type': 'nothing'}, 'nothing'), ({'$ref': 'http://127.0.0.1:9/x'}, 'does not fetch')):
        response_format = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': schema}}
        with pytest.raises(openai.BadRequestError) as info:
            client.chat.completions.create(
                model='tiny', messages=[{'role': 'user', 'content': 'x'}], response_format=response_format
            )
        assert info.value.param == 'response_format'
        assert words in info.value.body['message']


@pytest.mark.parametrize('stream', [False, True])
def test_a_disconnected_client_frees_its_slots(server, engine, stream):
    before = engine.state.generated_tokens
    body = {'prompt': 'a', 'max_tokens': CONTEXT - 1, 'n': 64, 'stream': stream, 'ignore_eos': True}
    with server.connect() as connection:
        connection.sendall(request_bytes('/v1/completions', body))
        until(lambda: engine.state.running == SLOTS)
    until(lambda: (engine.state.running, engine.state.waiting) == (0, 0))
    assert engine.state.generated_tokens - before < 64 * (CONTEXT - 1)


def test_values_at_their_limits_are_accepted(server, engine):
    """Values at the limits of the schema do not affect requests in the same batch."""
    edges = {
        'temperature': (0, 1e-3, 100),
        'top_p': (1e-30, 1),
        'top_k': (0, 1, 2**31 - 1),
        'min_p': (0, 1),
        'repetition_penalty': (0.01, 100),
        'presence_penalty': (-2, 2),
        'frequency_penalty': (-2, 2),
        'seed': (0, 2**32 - 1),
        'logprobs': (0, 20),
    }
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for number, values in enumerate(itertools.zip_longest(*edges.values())):
            settings = {name: value for name, value in zip(edges, values, strict=True) if value is not None}
            for parameters in (settings, *({name: value} for name, value in settings.items())):
                answer = http.post('/v1/completions', json={'prompt': 'ab', 'max_tokens': 4, 'n': 2} | parameters)
                assert answer.status_code == 200, (number, parameters, answer.text)


def test_hostile_requests_do_not_affect_the_engine(server, complete, engine):
    before = complete('Once', temperature=0).choices[0].text
    wire = Wire(server.port)
    for hostile in itertools.islice(Generator(3), NUM_HOSTILE):
        check(hostile, wire.exchange(hostile))
    wire.close()
    until(lambda: (engine.state.running, engine.state.waiting) == (0, 0))
    assert complete('Once', temperature=0).choices[0].text == before


@pytest.mark.multiprocess
def test_the_command(workdir, model, tmp_path):
    num_parameters = sum(x.size for x in jax.tree.leaves(model.params))
    (tmp_path / 'key').write_text('secret\n')
    command = [
        f'--checkpoint={workdir}',
        '--port=0',
        '--slots=2',
        '--max-model-len=64',
        f'--api-key-file={tmp_path / "key"}',
    ]
    environment = {**os.environ, 'XLA_FLAGS': cpu_flags(1)}
    process = subprocess.Popen(
        [sys.executable, '-m', 'maxlm.serve', *command, '--served-model-name=mine', '--max-tokens=20', '--docs'],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := re.fullmatch(r'serving mine \(step 5\) at (http://127\.0\.0\.1:\d+)\n', line):
                break
        else:
            pytest.fail(''.join(lines))
        # The server is ready when it prints this line.
        assert httpx.get(f'{found[1]}/health').json() == {'status': 'ok'}
        with openai.OpenAI(base_url=f'{found[1]}/v1', api_key='secret', max_retries=0) as client:
            (served,) = client.models.list().data
            assert (served.id, served.max_model_len, served.max_tokens) == ('mine', 64, 20)
            assert served.num_parameters == num_parameters
            assert (served.dim, served.dtype, served.weight_quantization) == (16, 'float32', 'float')
            assert (served.vocab_size, served.kv_cache_dtype) == (259, 'model')
            assert httpx.get(f'{found[1]}/openapi.json').json()['info']['title'] == 'maxlm'
            answer = client.chat.completions.create(model='mine', messages=HELLO, extra_body={'ignore_eos': True})
            assert answer.usage.completion_tokens == 20
            with pytest.raises(openai.BadRequestError, match='at most 20'):
                client.chat.completions.create(model='mine', messages=HELLO, max_tokens=21)
        process.send_signal(signal.SIGTERM)
        output = process.stdout.read()
        assert process.wait(60) == EXIT_DONE
        assert 'SIGTERM: finishing running requests' in output
        assert 'Traceback' not in output


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (['--checkpoint=nowhere'], 'nowhere: no checkpoint in'),
        (['--port=70000'], '--port=70000: must be from 0 to 65535'),
        (['--host=256.1.1.1'], '--host=256.1.1.1'),
        (['--port=x'], "--port: invalid int value: 'x'"),
        (['--slots=0'], 'num_slots=0'),
        (['--max-model-len=769'], 'max_context=769'),
        (['--max-model-len=-1'], 'max_context=-1'),
        (['--kv-cache-dtype=float64'], "--kv-cache-dtype: invalid choice: 'float64'"),
        (['--num-draft-tokens=33'], 'num_draft_tokens=33: must be from 0 to 32'),
        (['--draft-model=nowhere'], '--draft-model=nowhere: no checkpoint in'),
        (['--max-tokens=-1'], '--max-tokens=-1: must be'),
        (['--max-queue-size=-1'], '--max-queue-size=-1: must be at least 0'),
        (['--request-timeout=0'], '--request-timeout=0.0: must be above 0'),
        (['--request-timeout=nan'], '--request-timeout=nan: must be above 0'),
        (['--max-request-bytes=0'], '--max-request-bytes=0: must be above 0'),
        (['--drain-seconds=-1'], '--drain-seconds=-1.0: must be'),
        (['--api-key-file=nowhere'], '--api-key-file=nowhere: No such file'),
        (['--api-key-file={empty}'], '/empty: the file is empty'),
        (['--api-key-file=/dev/null'], '--api-key-file=/dev/null: is a character device'),
        (['--allow-origin=chat.example.org'], '--allow-origin=chat.example.org: must be like'),
        (['--allow-origin=https://x.org/path'], '--allow-origin=https://x.org/path: must be like'),
        (['--chekpoint=x'], '--chekpoint=x'),
    ],
)
def test_bad_input_is_one_line(workdir, options, words, capfd, tmp_path):
    (tmp_path / 'empty').touch()
    options = [option.format(empty=tmp_path / 'empty') for option in options]
    given = options if options[0].startswith('--checkpoint') else [f'--checkpoint={workdir}', *options]
    given += [] if any(option.startswith('--port') for option in options) else ['--port=0']
    assert exit_code(serve.main, given) == EXIT_BAD_INPUT
    assert_error_line(capfd.readouterr().err, words)


def test_a_wrong_kernel_stops_the_server(workdir, monkeypatch, capfd):
    kernels = []

    def wrong(make, about, mesh, *, cache, way_out):
        kernels.extend(answer.kernel for answer in make())
        raise InputError('attention computes wrong results')

    monkeypatch.setattr('maxlm.cli.execution.serve.check_kernels', wrong)
    options = [f'--checkpoint={workdir}', '--port=0', '--kv-cache-dtype=int8']
    assert exit_code(serve.main, options) == EXIT_BAD_INPUT
    assert 'error: attention computes wrong results' in capfd.readouterr().err
    assert kernels[0] == 'attention to a cache of int8'

    def stop(*args, **kwargs):
        raise InputError('not tested')

    monkeypatch.setattr('maxlm.cli.execution.serve.Engine', stop)
    assert exit_code(serve.main, [*options, '--no-check-kernels']) == EXIT_BAD_INPUT
    assert 'error: not tested' in capfd.readouterr().err


def test_the_model_is_in_memory_once(workdir, model, monkeypatch):
    shape = model.params['blocks']['feedforward']['down']['kernel'].shape

    def stacked():
        return sum(array.shape == shape for array in jax.live_arrays())

    def start():
        """Returns the number of additional parameter arrays while the command serves."""
        before, found = stacked(), []
        # Compiling all programs takes long and does not change arrays.
        monkeypatch.setattr(Engine, 'warm_up', lambda self, on_program: None)
        monkeypatch.setattr(
            'maxlm.cli.execution.serve.serve_until_stopped', lambda _: found.append(stacked() - before) or EXIT_DONE
        )
        assert serve.main([f'--checkpoint={workdir}', '--port=0', f'--slots={SLOTS}']) == EXIT_DONE
        return found

    assert start() == [0]
    # Negative control: the arrays are found.
    monkeypatch.setattr(LoadedModel, 'without_params', lambda self: self)
    assert start() == [1]


def test_an_open_port_without_a_key_causes_a_warning(capfd, monkeypatch):
    monkeypatch.delenv(serve.API_KEY, raising=False)
    open_to_all = ['--checkpoint=nowhere', '--host=0.0.0.0', '--port=0']
    assert exit_code(serve.main, open_to_all) == EXIT_BAD_INPUT
    assert 'anyone who can reach this machine can use the model' in capfd.readouterr().out
    monkeypatch.setenv(serve.API_KEY, 'secret')
    assert exit_code(serve.main, open_to_all) == EXIT_BAD_INPUT
    assert 'anyone who' not in capfd.readouterr().out
    monkeypatch.setenv(serve.API_KEY, 'two words')
    assert exit_code(serve.main, open_to_all) == EXIT_BAD_INPUT
    assert f'{serve.API_KEY}: the API key must' in capfd.readouterr().err
