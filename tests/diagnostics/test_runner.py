"""Tests that checks run in order, even if one of them fails."""

import subprocess
import sys
import threading
import types

import pytest

from maxlm.diagnostics import jax_subprocess, runner
from maxlm.diagnostics.checks.all_checks import CHECKS, NAMES, choose
from maxlm.diagnostics.jax_subprocess import JaxStart
from maxlm.diagnostics.result import ok
from maxlm.diagnostics.runner import Check, run_checks
from maxlm.errors import InputError
from tests.conftest import ROOT
from tests.diagnostics.machines import CPU, case_on


@pytest.fixture
def checks(monkeypatch):
    """Returns a function that makes checks of functions."""
    module = types.SimpleNamespace()
    monkeypatch.setattr(runner.importlib, 'import_module', lambda name: module)

    def make(uses_devices=False, seconds=30, **functions):
        vars(module).update(functions)
        return [Check(name, f'any:{name}', seconds, f'what {name} is', uses_devices) for name in functions]

    return make


def broken(error):
    def check(case):
        raise error

    return check


def fine(case):
    return ok('fine')


def statuses(results):
    return {result.name: result.finding.status.value for result in results}


def test_a_check_that_raises_fails_and_the_next_one_runs(checks):
    made = checks(bad=broken(ZeroDivisionError('by nought')), missing=broken(ImportError('No module x')), good=fine)
    results = list(run_checks(made, case_on(CPU)))
    assert statuses(results) == {'bad': 'failure', 'missing': 'failure', 'good': 'ok'}
    assert results[0].finding.message == 'the check itself failed with ZeroDivisionError: by nought'
    assert results[1].finding.message == 'cannot run: No module x'


def test_system_exit_ends_only_its_check(checks):
    results = list(run_checks(checks(bad=broken(SystemExit(3)), good=fine), case_on(CPU)))
    assert statuses(results) == {'bad': 'failure', 'good': 'ok'}


def test_an_input_error_is_reported_unchanged(checks):
    (result,) = run_checks(checks(bad=broken(InputError('mesh.data=3 is\nwrong'))), case_on(CPU))
    assert result.finding.message == 'mesh.data=3 is wrong'


def test_a_check_that_hangs_fails_and_the_next_one_runs(checks):
    release = threading.Event()
    made = [*checks(hangs=lambda case: release.wait(30), seconds=0.05), *checks(good=fine)]
    results = list(run_checks(made, case_on(CPU)))
    release.set()
    assert statuses(results) == {'hangs': 'failure', 'good': 'ok'}
    assert results[0].finding.message == 'no answer after 0.05 s: what hangs is'
    assert '--skip=hangs' in results[0].finding.remedy


def test_device_checks_are_skipped_after_one_hangs(checks):
    release = threading.Event()
    made = [
        *checks(hangs=lambda case: release.wait(30), uses_devices=True, seconds=0.05),
        *checks(after=fine, uses_devices=True),
        *checks(other=fine),
    ]
    results = list(run_checks(made, case_on(CPU)))
    release.set()
    assert statuses(results) == {'hangs': 'failure', 'after': 'skipped', 'other': 'ok'}
    assert "'hangs' hangs" in results[1].finding.message


def test_device_checks_are_skipped_if_jax_does_not_start(checks):
    case = case_on(CPU, JaxStart('Unknown flags'))
    results = list(run_checks([*checks(uses=fine, uses_devices=True), *checks(other=fine)], case))
    assert statuses(results) == {'uses': 'skipped', 'other': 'ok'}
    assert results[0].finding.message == 'not run: Unknown flags'


def test_each_check_is_announced(checks):
    names = []
    list(run_checks(checks(one=fine, two=fine), case_on(CPU), on_begin=lambda check: names.append(check.name)))
    assert names == ['one', 'two']


@pytest.mark.parametrize('hangs', [False, True])
def test_a_hanging_thread_does_not_keep_the_process(monkeypatch, hangs):
    ended = []
    monkeypatch.setattr(runner.os, '_exit', ended.append)
    monkeypatch.setattr(runner, 'CLEANUP_SECONDS', 0.05)
    # Other children of this process belong to other tests.
    monkeypatch.setattr(runner, '_end_children', lambda: None)
    release = threading.Event()
    name = f'{runner.THREAD_PREFIX}x' if hangs else 'another'
    thread = threading.Thread(target=release.wait, name=name, daemon=True)
    thread.start()
    with pytest.raises(SystemExit):
        runner.exit_process(1)
    release.set()
    thread.join()
    assert ended == ([1] if hangs else [])


BROKEN_OFF = """
import subprocess, sys, threading
from maxlm.diagnostics.runner import THREAD_PREFIX, exit_process

def check():
    subprocess.run(['sleep', '60'])
    print('tidied up')

threading.Thread(target=check, name=f'{THREAD_PREFIX}x', daemon=True).start()
exit_process(130)
"""


@pytest.mark.multiprocess
def test_an_interrupted_check_cleans_up():
    done = subprocess.run([sys.executable, '-c', BROKEN_OFF], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, 'tidied up\n', '')


def test_every_check_is_registered():
    for check in CHECKS:
        module, _, function = check.function_path.partition(':')
        assert callable(getattr(__import__(f'maxlm.diagnostics.checks.{module}', fromlist=[function]), function))
    assert len(set(NAMES)) == len(NAMES)
    assert [check.uses_devices for check in CHECKS] == sorted(check.uses_devices for check in CHECKS)
    assert NAMES.index('trial') < min(NAMES.index(check.name) for check in CHECKS if check.uses_devices)


def test_choosing():
    assert [check.name for check in choose(['links', 'python'], [])] == ['python', 'links']
    assert [check.name for check in choose([], NAMES[1:])] == ['python']
    assert len(choose([], [])) == len(CHECKS)
    with pytest.raises(InputError, match="--skip=pyton: unknown check; did you mean 'python'"):
        choose([], ['pyton'])
    with pytest.raises(InputError, match='no check is left'):
        choose(['disk'], ['disk'])


def test_the_platform_is_fixed_to_cpu_once_it_is_known(monkeypatch):
    updates = []
    monkeypatch.setattr('jax.config.update', lambda *setting: updates.append(setting))
    jax_subprocess.disable_accelerator_search(JaxStart(platform='gpu'))
    assert updates == []
    jax_subprocess.disable_accelerator_search(JaxStart(platform='cpu'))
    assert updates == [('jax_platforms', 'cpu')]
