"""Tests the startup of JAX in a separate process."""

import os

import pytest

from maxlm.diagnostics.checks.jax_startup import evaluate_cache, evaluate_jax
from maxlm.diagnostics.jax_subprocess import JaxStart, exit_reason, start_jax, with_package
from maxlm.diagnostics.result import CheckStatus
from maxlm.installation import pip_install
from tests.diagnostics.machines import CPU, TPU, gpus

ONE = JaxStart(platform='cpu', kinds=('cpu',), cache_dir='/home/me/programs')


@pytest.mark.parametrize(
    ('start', 'machine', 'status', 'words'),
    [
        (ONE, CPU, 'ok', 'starts on cpu: 1 × cpu'),
        (ONE, gpus(), 'failure', 'runs on cpu (1 × cpu), but this machine has 2 × NVIDIA H100'),
        (ONE, TPU, 'failure', pip_install('tpu')),
        (ONE._replace(platform='gpu', kinds=('H100', 'H100')), gpus(), 'ok', '2 × H100'),
        (ONE._replace(platform='gpu', kinds=('H100',)), gpus(), 'warning', 'sees 1 × H100 of 2 GPUs'),
        (ONE._replace(seconds=100.0), CPU, 'warning', 'after 100 s'),
        (ONE._replace(error='Unknown flags in XLA_FLAGS: --x'), CPU, 'failure', 'remove these flags from XLA_FLAGS'),
        (ONE._replace(error='JAX has not found its devices after 180 s'), CPU, 'failure', 'does not start'),
    ],
)
def test_jax(start, machine, status, words):
    found = evaluate_jax(start, machine)
    assert found.status == status
    assert words in f'{found.message} {found.remedy}'


def test_cache():
    assert evaluate_cache(ONE, True, None).message == 'kept in /home/me/programs'
    assert evaluate_cache(ONE, False, None).status is CheckStatus.OK
    assert evaluate_cache(ONE, True, '').message == 'by JAX_COMPILATION_CACHE_DIR: /home/me/programs'
    result = evaluate_cache(ONE._replace(cache_warning='not kept: Read-only file system'), True, None)
    assert (result.status, result.message) == (CheckStatus.WARNING, 'not kept: Read-only file system')
    assert evaluate_cache(JaxStart('no'), True, None).status is CheckStatus.SKIPPED


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if name != 'JAX_COMPILATION_CACHE_DIR'}
    return {**kept, 'JAX_PLATFORMS': 'cpu', **changes}


@pytest.mark.multiprocess
def test_a_real_start_with_a_cache_that_others_can_write_to(tmp_path):
    """Starts JAX, which is slow."""
    tmp_path.chmod(0o777)
    start = start_jax(str(tmp_path), environment(XLA_FLAGS='--xla_force_host_platform_device_count=3'))
    assert (start.error, start.platform, start.kinds) == ('', 'cpu', ('cpu', 'cpu', 'cpu'))
    assert start.cache_dir == ''
    assert f'{tmp_path} is writable by other users' in start.cache_warning


@pytest.mark.multiprocess
def test_a_real_start_with_an_unknown_flag():
    """Starts JAX, which is slow and aborts its process on an unknown flag."""
    start = start_jax('', environment(XLA_FLAGS='--xla_no_such_flag=1'))
    assert start.error.startswith('Unknown flag')
    assert '--xla_no_such_flag=1' in start.error


def test_a_start_that_hangs():
    assert 'has not found its devices after 0.01 s' in start_jax('', environment(), seconds=0.01).error


def test_reasons_of_a_process_exit():
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\nRuntimeError: no   device\n'
    assert exit_reason(trace, 1) == 'RuntimeError: no device'
    assert exit_reason('error: mesh.data=3 is wrong\n', 2) == 'mesh.data=3 is wrong'
    assert exit_reason('', -9) == 'it exited with signal 9 and no message'


def test_processes_find_this_package():
    paths = with_package({'PYTHONPATH': '/other'})['PYTHONPATH'].split(os.pathsep)
    assert paths[-1] == '/other'
    assert os.path.isdir(f'{paths[0]}/maxlm')
