"""Tests the check of the run's kernels, on a CPU that stands for a GPU."""

import jax
import pytest

from maxlm.config.loading import load
from maxlm.diagnostics.checks.kernels import check_kernels, evaluate_kernels
from maxlm.diagnostics.result import CheckStatus
from maxlm.hardware.known_faults import EMPTY_DOCUMENTS
from maxlm.training.known_answers import check
from tests.diagnostics.machines import CPU, case_on

SMALL = ('model.dim=32', 'model.num_heads=4', 'model.num_layers=1', 'data.seq_len=16', 'train.global_batch_size=8')


def test_cpus_have_no_kernels_to_test():
    assert check_kernels(case_on(CPU)).status is CheckStatus.SKIPPED


@pytest.fixture
def tested(monkeypatch):
    """Makes the CPU a TPU for the check, and records the tested kernels."""
    found = []
    monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
    monkeypatch.setattr(check, 'wrong_kernel', lambda answers, devices, on_untested: found.extend(answers) or '')
    return found


def test_the_kernels_of_the_config_are_tested(tested, monkeypatch):
    assert check_kernels(case_on(CPU)).message == 'no --config to test'
    config = load('configs/tiny.py', SMALL)
    result = check_kernels(case_on(CPU, config=config))
    assert (result.status, result.message) == (CheckStatus.OK, f'{len(tested)} kernels compute right results')
    assert tested[0].kernel == 'attention within documents (model.attention=xla)'
    monkeypatch.setattr('maxlm.training.known_answers.collectives.wrong_collective', lambda mesh: 'all-reduce is wrong')
    assert check_kernels(case_on(CPU, config=config)).status is CheckStatus.FAILURE


def test_faults_are_warnings_and_wrong_results_failures():
    fault = evaluate_kernels([EMPTY_DOCUMENTS], 0, [])
    assert (fault.status, fault.remedy) == (CheckStatus.WARNING, EMPTY_DOCUMENTS.remedy)
    assert evaluate_kernels([], 5, ['', ''], ['layernorm is not tested']).status is CheckStatus.WARNING
    wrong = evaluate_kernels([EMPTY_DOCUMENTS], 5, ['', 'layernorm computes wrong results'])
    assert wrong.status is CheckStatus.FAILURE
    assert wrong.message.startswith('layernorm computes wrong results; known fault: attention')
