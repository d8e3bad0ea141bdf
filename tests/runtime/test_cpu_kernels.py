"""Tests how the kernels for CPUs are compiled, kept and refused."""

import functools
import itertools
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from maxlm.runtime import cpu_kernels
from maxlm.runtime.compilation_cache import CompilationCache


@pytest.fixture
def warnings(monkeypatch):
    """Returns a list of the warnings that are logged."""
    found = []
    monkeypatch.setattr(cpu_kernels, 'logger', type('Logger', (), {'warning': staticmethod(found.append)}))
    return found


@pytest.fixture
def register(monkeypatch, request):
    """Returns the function as in a new process."""
    handlers = tuple(cpu_kernels.HANDLERS.values())
    numbers = itertools.count()

    def run():
        # JAX accepts one library for each name in a process, so the functions get other names.
        names = [f'{request.node.name}_{next(numbers)}' for _ in handlers]
        monkeypatch.setattr(cpu_kernels, 'HANDLERS', dict(zip(names, handlers, strict=True)))
        return cpu_kernels._register.__wrapped__()

    return run


def test_they_are_compiled_once(warnings, register, monkeypatch, tmp_path):
    cache = CompilationCache(tmp_path)
    monkeypatch.setattr(cpu_kernels, 'enabled_cache', lambda: cache)
    assert register()
    assert len(list(tmp_path.iterdir())) == 1
    # The next process needs no compiler.
    monkeypatch.setenv('CXX', 'no-such-compiler')
    assert register()
    assert not warnings


def test_threads_register_them_once(monkeypatch):
    calls = []

    def slow():
        calls.append(1)
        time.sleep(0.05)
        return True

    monkeypatch.setattr(cpu_kernels, '_register', functools.cache(slow))
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(lambda _: cpu_kernels.register_cpu_kernels(), range(3)))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ('variables', 'message'),
    [
        ({'CXX': 'no-such-compiler'}, 'no C++ compiler found (no-such-compiler); install one'),
        ({'CXX': '', 'PATH': '/nowhere'}, 'no C++ compiler found (c++, g++, clang++); install one'),
        ({'CXX': 'false'}, 'failed with exit code 1: no message'),
        ({'CXX': 'env false -O1'}, 'env false -O1 failed with exit code 1: no message'),
        ({'CXX': '"g++'}, 'CXX="g++: No closing quotation; set it to a C++ compiler'),
    ],
)
def test_without_a_compiler_there_is_a_warning(warnings, register, monkeypatch, variables, message):
    monkeypatch.setattr(cpu_kernels, 'enabled_cache', lambda: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not register()
    (warning,) = warnings
    assert warning.startswith('products with inputs in 8 bits run through XLA, which is several times slower: ')
    assert message in warning


def test_an_error_of_the_compiler_is_shown(warnings, register, monkeypatch, tmp_path):
    source = tmp_path / 'kernels.cc'
    source.write_text('#error "unsupported here"')
    monkeypatch.setattr(cpu_kernels, 'SOURCE', source)
    monkeypatch.setattr(cpu_kernels, 'enabled_cache', lambda: None)
    assert not register()
    assert 'unsupported here' in warnings[0]


def test_a_compiler_that_hangs_ends(warnings, register, monkeypatch):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options['timeout'])

    monkeypatch.setattr(cpu_kernels, 'enabled_cache', lambda: None)
    monkeypatch.setattr(subprocess, 'run', run)
    assert not register()
    assert 'did not end within 300 s' in warnings[0]


def test_wrong_values_are_noticed(warnings, register, monkeypatch, tmp_path):
    text = cpu_kernels.SOURCE.read_text()
    source = tmp_path / 'kernels.cc'
    source.write_text(text.replace('kOffset * x->sums', '3 * x->sums'))
    assert source.read_text() != text
    monkeypatch.setattr(cpu_kernels, 'SOURCE', source)
    monkeypatch.setattr(cpu_kernels, 'enabled_cache', lambda: None)
    assert not register()
    assert 'wrong values on this processor' in warnings[0]
