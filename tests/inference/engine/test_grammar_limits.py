"""Tests that a grammar that exceeds a limit fails alone, and that its processes always end."""

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.inference.engine import grammar as grammar_module
from maxlm.inference.engine.grammar import (
    Grammars,
    GrammarsBusyError,
    GrammarsUnavailableError,
    TooComplexError,
    json_grammar,
)
from maxlm.inference.engine.json_schemas import MAX_ELEMENTS, MAX_SCHEMA_CHARACTERS, MAX_STRING_CHARACTERS
from maxlm.inference.engine.requests import Request
from maxlm.sandbox.limited_process import RequestCancelledError
from tests.conftest import ROOT
from tests.inference.engines import PROMPTS, engine, generate, requests_of
from tests.waiting import has_ended, until

SLOW = json_grammar({'type': 'integer', 'multipleOf': 62615533})
ARRAY = json_grammar({'type': 'array', 'items': {'type': 'integer'}, 'minItems': 30})


@pytest.fixture
def grammars(monkeypatch):
    monkeypatch.setattr(grammar_module, 'LIMITS', grammar_module.LIMITS._replace(cpu_seconds=0.3))
    tokenizer = bytes_tokenizer()
    grammars = Grammars(tokenizer, [tokenizer.end_of_document])
    yield grammars
    grammars.close()


def host_pid(grammars):
    """Returns the process that knows the vocabulary."""
    cells = grammars._host._running.end_process.__closure__
    (process,) = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, subprocess.Popen)]
    return process.pid


def test_a_slow_compilation_is_stopped_and_remembered(grammars, monkeypatch):
    with pytest.raises(TooComplexError, match=r'its compilation (takes more than 0\.3 s|needs more than)'):
        grammars.compile(SLOW)
    # The second attempt starts no process.
    with monkeypatch.context() as patch:
        patch.setattr(grammars, '_fork', None)
        with pytest.raises(TooComplexError, match='its compilation'):
            grammars.compile(SLOW)
    monkeypatch.setattr(grammar_module, 'REFUSED_SECONDS', -1.0)
    grammars._refused.clear()
    for _ in range(2):
        with pytest.raises(TooComplexError):
            grammars.compile(SLOW)
    assert grammars.compile(ARRAY).first_mask.any()


def test_a_crash_of_the_compiler_is_an_error_of_the_grammar(grammars):
    # The library overflows its stack.
    deep = 'start: ' + '(' * 100_000 + '"a"' + ')' * 100_000
    with pytest.raises(InputError, match='grammar: '):
        grammars.compile(deep)
    assert grammars.compile(ARRAY).first_mask.any()


def test_a_cancelled_compilation_ends_and_is_not_remembered(grammars):
    with pytest.raises(RequestCancelledError):
        grammars.compile(SLOW, lambda: True)
    event = threading.Event()
    threading.Timer(0.05, event.set).start()
    with pytest.raises((RequestCancelledError, TooComplexError)):
        grammars.compile(SLOW, event.is_set)
    assert grammars.compile(ARRAY) is grammars.compile(ARRAY)


def test_the_number_of_processes_is_bounded(grammars, monkeypatch):
    monkeypatch.setattr(grammar_module, 'MAX_IDLE_GRAMMARS', 2)
    monkeypatch.setattr(grammar_module, 'MAX_GRAMMARS', 4)
    schemas = [json_grammar({'const': number}) for number in range(6)]
    for schema in schemas:
        grammars.compile(schema)
    host = psutil.Process(host_pid(grammars))
    until(lambda: len(host.children()) == 2)
    used = [grammars.compile(schema) for schema in schemas[:4]]
    with pytest.raises(GrammarsBusyError):
        grammars.compile(schemas[4])
    # A grammar in use is shared.
    assert grammars.compile(schemas[3]) is used[3]
    used.clear()
    until(lambda: len(host.children()) == 2)
    grammars.compile(schemas[4])
    grammars.close()
    assert not psutil.pid_exists(host.pid)


def test_a_killed_process_is_replaced(grammars):
    before = grammars.compile(ARRAY).first_mask
    os.kill(host_pid(grammars), signal.SIGKILL)
    assert (grammars.compile(json_grammar({'type': 'array'})).first_mask == before).all()


def test_a_killed_process_of_a_grammar_is_not_the_fault_of_the_schema():
    some = engine('llama, grouped')
    # Compilation would count as waiting for the suspended process.
    generate(some, PROMPTS[:1])
    request = Request(tuple(PROMPTS[0]), 20, grammar=json_grammar({'type': 'array', 'minItems': 43}))
    process, deltas = suspended(some, request)
    some.step()
    process.kill()
    while some.step():
        pass
    assert (deltas[-1].finish_reason, 'was killed; send the request again' in deltas[-1].error) == ('failed', True)
    # Idle processes are replaced without an error.
    assert some.complete([request])[0][0].finish_reason == 'length'
    host = psutil.Process(host_pid(some._grammars))
    for child in (*host.children(), host):
        child.kill()
        until(lambda child=child: has_ended(child))
    assert some.complete([request])[0][0].finish_reason == 'length'


@pytest.mark.parametrize('function', ['socketpair', 'Popen'])
def test_a_system_without_processes_or_descriptors(grammars, monkeypatch, function):
    def fail(*_, **__):
        raise BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable')

    if function == 'Popen':
        grammars.close()
    monkeypatch.setattr(socket if function == 'socketpair' else subprocess, function, fail)
    with pytest.raises(GrammarsUnavailableError, match='cannot start its process'):
        grammars.compile(ARRAY)
    monkeypatch.undo()
    assert grammars.compile(ARRAY).first_mask.any()


def test_a_process_that_cannot_start(grammars, monkeypatch):
    monkeypatch.setattr('maxlm.sandbox.limited_process._SERVER', 'maxlm.nothing:serve')
    with pytest.raises(GrammarsUnavailableError, match='cannot start its process'):
        grammars.compile(ARRAY)
    monkeypatch.undo()
    assert grammars.compile(ARRAY).first_mask.any()


def test_the_processes_end_with_their_owner(grammars):
    tokenizer = bytes_tokenizer()
    owned = Grammars(tokenizer, [tokenizer.end_of_document])
    compiled = owned.compile(ARRAY)
    host = psutil.Process(host_pid(owned))
    children = host.children()
    assert len(children) == 1
    del owned, compiled
    gc.collect()
    for process in (host, *children):
        until(lambda process=process: has_ended(process))
    program = (
        'import os, psutil, signal\n'
        'from maxlm.data.tokenizer.tokenizer import bytes_tokenizer\n'
        'from maxlm.inference.engine.grammar import Grammars, json_grammar\n'
        "compiled = Grammars(bytes_tokenizer(), [256]).compile(json_grammar({'type': 'array'}))\n"
        'print(*[each.pid for each in psutil.Process().children(recursive=True)], flush=True)\n'
        'os.kill(os.getpid(), signal.SIGKILL)\n'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 1, done.stderr
    for pid in pids:
        until(lambda pid=pid: not psutil.pid_exists(pid))


def suspended(some, request):
    """Submits a request with a grammar, suspends the process of the grammar, and returns the process and the deltas."""
    prepared = some.prepare(request)
    host = psutil.Process(host_pid(some._grammars))
    newest = max(host.children(), key=lambda each: each.pid)
    deltas = []
    some.submit(prepared, deltas.append)
    newest.suspend()
    return newest, deltas


def test_other_samples_do_not_wait_for_a_mask():
    some = engine('llama, grouped')
    alone = generate(some, PROMPTS[:2])
    request = Request(tuple(PROMPTS[0]), 20, grammar=json_grammar({'type': 'array', 'minItems': 40}))
    expected = some.complete([request])[0][0]
    process, deltas = suspended(some, request)
    beside = {number: [] for number in range(2)}
    for number, other in enumerate(requests_of(PROMPTS[:2])):
        some.submit(other, beside[number].append)
    try:
        deadline = time.monotonic() + 60
        while not all(parts and parts[-1].finish_reason for parts in beside.values()):
            some.step()
            assert time.monotonic() < deadline
    finally:
        process.resume()
    assert [[token.id for delta in parts for token in delta.tokens] for parts in beside.values()] == alone
    # The sample with the grammar has only its first token, and continues as if nothing had happened.
    assert sum(len(delta.tokens) for delta in deltas) == 1
    while some.step():
        pass
    assert tuple(token.id for delta in deltas for token in delta.tokens) == tuple(expected.ids)
    assert deltas[-1].finish_reason == expected.finish_reason


def test_a_mask_without_an_end_fails_the_sample_alone(monkeypatch):
    some = engine('llama, grouped')
    alone = generate(some, PROMPTS[:1])
    monkeypatch.setattr('maxlm.inference.engine.compiled_grammar.MASK_WALL_SECONDS', 0.3)
    grammar = json_grammar({'type': 'array', 'minItems': 41})
    process, deltas = suspended(some, Request(tuple(PROMPTS[0]), 20, grammar=grammar))
    beside = []
    some.submit(*requests_of(PROMPTS[:1]), beside.append)
    before = time.process_time()
    while some.step():
        pass
    assert time.process_time() - before < 20
    assert [token.id for delta in beside for token in delta.tokens] == alone[0]
    assert deltas[-1].finish_reason == 'failed'
    assert 'the next token takes more than 0.3 s; simplify it' in deltas[-1].error
    assert has_ended(process)
    with pytest.raises(TooComplexError):
        some.prepare(Request((1,), 20, grammar=grammar))


def test_cancelling_the_last_sample_ends_a_busy_process():
    some = engine('llama, grouped')
    request = Request(tuple(PROMPTS[0]), 20, num_samples=2, grammar=json_grammar({'type': 'array', 'minItems': 42}))
    prepared = some.prepare(request)
    process = max(psutil.Process(host_pid(some._grammars)).children(), key=lambda each: each.pid)
    deltas = []
    handle = some.submit(prepared, deltas.append)
    process.suspend()
    for _ in range(5):
        some.step()
    handle.cancel()
    while some.step():
        pass
    assert {delta.finish_reason for delta in deltas if delta.finish_reason} == {'cancelled'}
    until(lambda: has_ended(process))
    # The grammar is not refused.
    assert some.complete([request])[0][0].ids


@pytest.mark.parametrize(
    ('schema', 'message'),
    [
        ({'const': 'a' * (MAX_STRING_CHARACTERS + 1)}, f"'const' in the schema has {MAX_STRING_CHARACTERS + 1} char"),
        ({'required': ['a'] * (MAX_ELEMENTS + 1)}, f"'required' in the schema has {MAX_ELEMENTS + 1} elements"),
        ({'properties': {'a' * 9000: {}}}, "'properties' in the schema has 9000 characters in a name"),
        ({'enum': ['a' * 8000] * 40}, f'the limit is {MAX_SCHEMA_CHARACTERS}'),
        ({'const': float('nan')}, 'must be valid JSON'),
    ],
)
def test_large_schemas_are_refused_early(schema, message):
    with pytest.raises(InputError, match=r'^grammar: ') as info:
        json_grammar(schema)
    assert message in str(info.value)


def test_deep_schemas_are_refused_early():
    schema = {}
    for depth in range(2000):
        schema = {'items': schema}
        if depth in (150, 1999):
            with pytest.raises(InputError, match=r'nested deeper|must be valid JSON'):
                json_grammar(schema)


def test_the_largest_schema_is_accepted():
    assert json_grammar({'enum': ['a' * MAX_STRING_CHARACTERS, *map(str, range(MAX_ELEMENTS - 1))]})
