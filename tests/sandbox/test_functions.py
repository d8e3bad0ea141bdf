"""Tests functions of the user in the sandbox: results, isolation, limits and errors."""

import re

import pytest

from maxlm.errors import InputError
from maxlm.sandbox.functions import FunctionCall, FunctionPool, UserFunction
from maxlm.sandbox.limits import MIB, SandboxLimits
from tests.user_modules import write_module

pytestmark = pytest.mark.multiprocess

LIMITS = SandboxLimits(wall_seconds=1.0, cpu_seconds=20.0, memory_bytes=512 * MIB)
# `helper` is imported at the first call, when the program is isolated.
BODY = """
import os, socket, time
import numpy as np
print('a module may print')
def add(a, b=1):
    print('a function may print')
    from helper import zero
    return np.float32(a + b + zero())
def describe(**given):
    return {'given': given}
def read(path):
    return open(path).read()
def write(path):
    open(path, 'w').write('x')
def connect():
    socket.socket(socket.AF_INET, socket.SOCK_STREAM).connect(('127.0.0.1', 1))
def environment():
    return sorted(os.environ)
def sleep():
    time.sleep(60)
def allocate():
    return len(bytearray(1 << 30))
def die():
    os._exit(0)
def leave():
    raise SystemExit(0)
def fail():
    raise ValueError('no\\nway')
def execute(text):
    exec(text)
    return 0.5
"""
ALL_DESCRIPTORS = 'import os\nfor n in range(64):\n    try: os.write(n, b\'[1.0, "", ""]\')\n    except OSError: pass\n'
INVALID = 'has an invalid result in the sandbox: '
ENDED = 'ended its process in the sandbox (exit code '
# Texts that `execute` runs → the beginning of the error; '' if the result is that of the function.
FORGERIES = {
    'import os; os.write(1, b\'[1.0, "", ""]\'); os._exit(0)': f'{ENDED}0)',
    'import sys; print([1.0, "", ""]); sys.__stdout__.flush(); __import__("os")._exit(0)': f'{ENDED}0)',
    f'{ALL_DESCRIPTORS}os._exit(0)': f'{INVALID}the output must begin with the token',
    ALL_DESCRIPTORS: f'{INVALID}the output must begin with the token',
    f'import atexit\natexit.register(exec, {ALL_DESCRIPTORS!r})': '',
    'import os\nif child := os.fork():\n    os.waitpid(child, 0)': INVALID,
    'import os, time\nif os.fork() == 0:\n    time.sleep(0.1)\n    os.write(1, b"[]")\n    os._exit(0)': '',
    'import os; os.close(1); os.close(2)': '',
    'import os; os.dup2(os.open("f", os.O_CREAT | os.O_WRONLY), 1); print("x")': '',
    'import os; os.closerange(0, 64)': ENDED,
    'import os; os.kill(os.getpid(), 9)': f'{ENDED}-9)',
    'import os; os.kill(os.getpid(), 15)': f'{ENDED}-15)',
    'import os; os.abort()': f'{ENDED}-6)',
    'import ctypes; ctypes.string_at(0)': f'{ENDED}-11)',
    'import os; os._exit(256 + 7)': f'{ENDED}7)',
    'raise KeyboardInterrupt': f'{ENDED}1)',
    'import sys; sys.exit("[1.0]")': 'raised SystemExit: [1.0] at <string>:1',
    'f = lambda f: f(f)\nf(f)': 'raised RecursionError: ',
    'class E(Exception):\n    __str__ = None\nraise E': 'raised E at <string>:3',
    'raise Exception("\\x1b[2J\\ud800\\r\\n\\0 x")': r'raised Exception: \x1b[2J\ud800 \x00 x at <string>:1',
    'raise type("E" * 10000, (Exception,), {})': f'raised {"E" * 100} at',
    'print("x" * (2 << 20))': 'printed more than 1 MiB in the sandbox',
    'import sys; sys.stdout = sys.stderr = None': '',
    'import sys; sys.stdout.close()': '',
    'import json; json.dumps = lambda *_: "[5]"': f'{INVALID}the result must be a list',
    'import json; json.dumps = lambda *_: "[" * 10000': f'{INVALID}arrays or objects are nested deeper',
    'import json; json.dumps = lambda *_: "[1," * 300000': f'{INVALID}arrays or objects are nested deeper',
    'import json; json.dumps = lambda *_: "9" * 10000': f'{INVALID}Exceeds the limit',
}
# Executed texts that choose the result. The documentation says so.
CHOSEN = (
    'import json; json.dumps = lambda *_: \'[1.0, "", ""]\'',
    'import os, sys\nframe = sys._getframe()\nwhile "call" not in frame.f_locals: frame = frame.f_back\n'
    'os.write(frame.f_locals["output"], (frame.f_locals["call"]["token"] + \' [1.0, "", ""]\').encode())\nos._exit(0)',
)
NAMES = ('add', 'describe', 'read', 'write', 'connect', 'environment', 'sleep', 'allocate', 'die', 'leave', 'fail')


@pytest.fixture(scope='module')
def module(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # Programs of another user must be able to read the module that is imported later.
        directory = tmp_path_factory.mktemp('user')
        directory.chmod(0o755)
        patch.setenv('SECRET_OF_USER', 'x')
        patch.setenv('PYTHONDONTWRITEBYTECODE', '1')
        (directory / 'helper.py').write_text('def zero():\n    return 0\n')
        yield write_module(directory, patch, BODY), directory


@pytest.fixture(scope='module')
def pool(module):
    name, _ = module
    functions = [UserFunction(f'{name}:{one}', 'reward') for one in ('environment', 'fail')]
    with FunctionPool(functions, workers=2, limits=LIMITS) as pool:
        yield lambda function, *arguments, **keywords: pool.call(
            [FunctionCall(f'{name}:{function}', arguments, keywords)]
        )[0]


def test_functions_return_numbers_and_texts(pool):
    assert pool('add', 2, b=3) == (5.0, '5.0', '')
    assert pool('describe', x=[1, 'é']) == (None, '{"given": {"x": [1, "é"]}}', '')


def test_functions_have_no_access_to_this_machine(pool, module):
    _, directory = module
    secret = directory.parent / 'secret.txt'
    secret.write_text('x')
    secret.chmod(0o644)
    for path in (str(secret), '/etc/hostname', '/proc/1/environ'):
        assert 'raised' in pool('read', path).error, path
    # Negative control: the directory of the module is readable, but not writable.
    assert 'def zero' in pool('read', str(directory / 'helper.py')).text
    assert re.match('raised (PermissionError|OSError)', pool('write', str(directory / 'new')).error)
    assert not (directory / 'new').exists()
    assert re.match('raised (PermissionError|OSError)', pool('connect').error)
    assert 'SECRET_OF_USER' not in pool('environment').text


def test_limits_and_exceptions_are_errors_of_the_call(pool):
    assert pool('sleep').error == 'exceeded 20 s of CPU time or 1 s in the sandbox'
    assert pool('allocate').error.startswith('raised MemoryError')
    assert pool('die').error == 'ended its process in the sandbox (exit code 0)'
    assert re.fullmatch(r'raised SystemExit: 0 at .*\.py:26', pool('leave').error)
    assert re.fullmatch(r'raised ValueError: no way at .*\.py:28', pool('fail').error)


@pytest.mark.parametrize('text', FORGERIES, ids=range(len(FORGERIES)))
def test_an_executed_text_without_the_token_is_a_failed_call(pool, text):
    result, error = pool('execute', text), FORGERIES[text]
    if error:
        assert result.error.startswith(error)
    else:
        assert result == (0.5, '0.5', '')


@pytest.mark.parametrize('text', CHOSEN)
def test_an_executed_text_can_choose_the_result(pool, text):
    assert pool('execute', text) == (1.0, '', '')


@pytest.mark.parametrize(
    ('body', 'function', 'message'),
    [
        ('def f(a): pass', 'f', r'reward \w+:f: .*\.py: f\(a\) must accept the arguments \(response, prompt\)'),
        ('1/0', 'f', r'the import of \w+ failed with ZeroDivisionError: division by zero at .*\.py:1; fix the module'),
        ('', 'f', "has no 'f'; define it"),
    ],
)
def test_a_module_that_cannot_be_imported(tmp_path, monkeypatch, body, function, message):
    name = write_module(tmp_path, monkeypatch, body)
    with pytest.raises(InputError, match=message) as info:
        FunctionPool([UserFunction(f'{name}:{function}', 'reward', ('response', 'prompt'))], workers=1)
    assert '\n' not in str(info.value)


def test_the_home_directory_is_not_shown(tmp_path, monkeypatch):
    name = write_module(tmp_path, monkeypatch, 'def f(): pass')
    monkeypatch.setenv('HOME', str(tmp_path))
    with pytest.raises(InputError, match=f'would show all files below {tmp_path} .*; move them'):
        FunctionPool([UserFunction(f'{name}:f', 'tool')])


def test_a_missing_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"reward no_module:f: no module 'no_module' in {tmp_path}"):
        FunctionPool([UserFunction('no_module:f', 'reward')])
