"""Tests the detection of risky environment variables on the hardware that they affect."""

import pytest

from maxlm.diagnostics.checks.environment import RISKY_VARIABLES, check_environment, evaluate_environment
from maxlm.diagnostics.result import CheckStatus
from tests.diagnostics.machines import CPU, TPU, case_on, gpus

GPU = gpus()


@pytest.mark.parametrize(
    ('variables', 'machine', 'status'),
    [
        ({}, GPU, 'ok'),
        ({'JAX_PLATFORMS': 'cpu'}, GPU, 'failure'),
        ({'JAX_PLATFORMS': 'cpu'}, TPU, 'failure'),
        ({'JAX_PLATFORMS': 'cpu'}, CPU, 'ok'),
        ({'JAX_PLATFORMS': 'cuda,cpu'}, GPU, 'ok'),
        ({'CUDA_VISIBLE_DEVICES': ''}, GPU, 'failure'),
        ({'CUDA_VISIBLE_DEVICES': '-1'}, GPU, 'failure'),
        ({'CUDA_VISIBLE_DEVICES': '0,1'}, GPU, 'ok'),
        ({'CUDA_VISIBLE_DEVICES': ''}, CPU, 'ok'),
        ({'XLA_PYTHON_CLIENT_MEM_FRACTION': '.92'}, GPU, 'ok'),
        ({'XLA_PYTHON_CLIENT_MEM_FRACTION': '.99'}, GPU, 'warning'),
        ({'XLA_PYTHON_CLIENT_MEM_FRACTION': '.2'}, GPU, 'warning'),
        ({'XLA_PYTHON_CLIENT_MEM_FRACTION': '92'}, GPU, 'failure'),
        ({'XLA_PYTHON_CLIENT_MEM_FRACTION': 'most'}, GPU, 'failure'),
        ({'XLA_PYTHON_CLIENT_MEM_FRACTION': '92'}, CPU, 'ok'),
        ({'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}, GPU, 'warning'),
        ({'XLA_PYTHON_CLIENT_ALLOCATOR': 'platform'}, GPU, 'warning'),
        ({'NCCL_P2P_DISABLE': '1'}, GPU, 'warning'),
        ({'NCCL_P2P_DISABLE': '0'}, GPU, 'ok'),
        ({'JAX_DISABLE_JIT': 'true'}, CPU, 'failure'),
        ({'JAX_ENABLE_X64': '1'}, TPU, 'warning'),
        ({'MAXLM_COORDINATOR': 'a:1'}, CPU, 'failure'),
    ],
)
def test_risky_variables(variables, machine, status):
    found = evaluate_environment(variables, machine)
    assert found.status == status, found
    assert bool(found.remedy) == (status != 'ok')


def test_every_risky_variable_is_detected_and_named():
    for trap in RISKY_VARIABLES:
        machine = GPU if trap.platform == 'gpu' else CPU
        value = next(value for value in ('1', '0', '', 'platform') if trap.is_bad(value))
        assert trap.variable in evaluate_environment({trap.variable: value}, machine).message


def test_other_libraries_of_cuda(tmp_path):
    assert evaluate_environment({'LD_LIBRARY_PATH': f'{tmp_path}:/nowhere'}, GPU).status is CheckStatus.OK
    (tmp_path / 'libcudnn.so.9').touch()
    found = evaluate_environment({'LD_LIBRARY_PATH': f'/nowhere:{tmp_path}'}, GPU)
    assert (found.status, found.remedy) == (CheckStatus.WARNING, 'unset LD_LIBRARY_PATH')
    assert 'libcudnn.so.9' in found.message
    assert evaluate_environment({'LD_LIBRARY_PATH': str(tmp_path)}, CPU).status is CheckStatus.OK


def test_names_are_reported_and_values_are_not():
    found = check_environment(case_on(CPU, environment={'JAX_SECRET': 'hush', 'HOME': '/x'}))
    assert found.message == 'no problem with JAX_SECRET'
