"""Tests when known answers are computed: on which platforms, how often, and what all processes do about a mistake."""

import types

import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.runtime.compilation_cache import CompilationCache
from maxlm.training.known_answers import check
from maxlm.training.known_answers.check import check_kernels, warn_of_known_faults

GPU = {'index': 0, 'kind': 'NVIDIA H100', 'uuid': 'GPU-1'}
IDENTITY = {'driver': '580.65.06', 'cuda': '13.0', 'cudnn': '9.25.1', 'devices': [GPU]}


class Machine:
    """A stand-in for a machine with a GPU, and for the tests of its kernels."""

    def __init__(self, monkeypatch, cache):
        self.identity, self.problem, self.cache, self.runs, self.platform = dict(IDENTITY), '', cache, 0, 'gpu'
        self.mesh = types.SimpleNamespace(shape={'data': 1}, devices=np.array([self], object))
        self.process_index, self.about, self.untested = 0, 'config', []
        monkeypatch.setattr(check, 'identify', lambda: self.identity)
        monkeypatch.setattr(check, 'wrong_kernel', self._wrong_kernel)
        monkeypatch.setattr(check, 'wrong_collective', lambda mesh: '')

    def _wrong_kernel(self, answers, devices, on_untested):
        self.runs += 1
        for reason in self.untested:
            on_untested(reason)
        assert devices == [self]
        return self.problem

    def check(self):
        """Returns the number of times that the tests ran."""
        before = self.runs
        check_kernels(list, self.about, self.mesh, cache=self.cache)
        return self.runs - before


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, CompilationCache(tmp_path))


def test_cpus_are_not_tested(machine):
    machine.platform = 'cpu'
    assert machine.check() == 0


def test_tests_run_once_for_each_device_and_version(machine, monkeypatch):
    assert [machine.check(), machine.check()] == [1, 0]
    for key, value in (('driver', '590.1'), ('cudnn', '9.26.0'), ('devices', [{**GPU, 'uuid': 'GPU-2'}])):
        machine.identity = {**IDENTITY, key: value}
        assert [machine.check(), machine.check()] == [1, 0], key
    machine.identity, machine.about = IDENTITY, 'another config'
    assert [machine.check(), machine.check()] == [1, 0]
    machine.about = 'config'
    monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_autotune_level=0')
    assert [machine.check(), machine.check()] == [1, 0]
    # A day later.
    now = check.time.time()
    monkeypatch.setattr(check.time, 'time', lambda: now + check.VALID_SECONDS)
    assert machine.check() == 1


def test_tests_run_at_each_start_without_a_uuid_or_a_cache(machine):
    machine.identity = {**IDENTITY, 'devices': [{'index': 0, 'kind': 'TPU v5e'}]}
    assert [machine.check(), machine.check()] == [1, 1]
    machine.identity, machine.cache = IDENTITY, None
    assert [machine.check(), machine.check()] == [1, 1]


def test_mistakes_and_corrupt_files_are_not_cached(machine, tmp_path):
    machine.problem = 'layernorm computes wrong results'
    for _ in range(2):
        with pytest.raises(InputError, match='layernorm computes wrong results'):
            machine.check()
    assert machine.runs == 2
    machine.problem = ''
    assert [machine.check(), machine.check()] == [1, 0]
    (file,) = tmp_path.glob('known-answers-*')
    file.write_bytes(file.read_bytes()[:-1])
    assert [machine.check(), machine.check()] == [1, 0]


def test_untested_kernels_do_not_stop_a_run_and_are_tested_at_the_next_start(machine, caplog):
    caplog.set_level('WARNING', logger='maxlm')
    machine.untested = ['layernorm is not tested']
    assert [machine.check(), machine.check()] == [1, 1]
    assert 'layernorm is not tested' in caplog.text
    machine.untested = []
    assert [machine.check(), machine.check()] == [1, 0]


def test_the_message_names_a_way_to_start_anyway(machine):
    machine.problem = 'layernorm computes wrong results'
    with pytest.raises(InputError, match=r'to start without the tests, set train\.check_kernels=false'):
        machine.check()


def test_the_result_of_another_process_stops_this_one(machine, monkeypatch):
    votes = iter(['', 'process 1: all-reduce is wrong'])
    monkeypatch.setattr(check, 'agree', lambda problem: problem or next(votes))
    with pytest.raises(InputError, match='process 1: all-reduce is wrong'):
        machine.check()
    # This process has passed, but another one has not.
    monkeypatch.setattr(check, 'agree', lambda problem: problem)
    assert [machine.check(), machine.check()] == [1, 0]
    votes = iter(['process 1: not tested', '', ''])
    monkeypatch.setattr(check, 'agree', lambda problem: problem or next(votes))
    assert machine.check() == 1


def test_known_faults_are_logged_on_gpus(monkeypatch, caplog):
    caplog.set_level('WARNING', logger='maxlm')
    monkeypatch.setattr(check, 'cudnn_version', lambda: '9.22.0')
    warn_of_known_faults(has_document_lists=True)
    assert caplog.text == ''
    monkeypatch.setattr(check.jax, 'default_backend', lambda: 'gpu')
    warn_of_known_faults(has_document_lists=True)
    assert 'entries of length 0' in caplog.text
    assert 'cudnn-frontend/issues/943' in caplog.text
