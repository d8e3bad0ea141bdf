"""`maxlm doctor`: its report on a machine and a run, and its exit code."""

import functools
import json
import math
import subprocess
import sys

import pytest

from maxlm.cli.setup import doctor
from maxlm.diagnostics.checks import trial_run
from maxlm.diagnostics.checks.all_checks import NAMES
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from tests.cli.runs.test_train import SMALL, TINY
from tests.conftest import ROOT
from tests.cpu import cpu_flags
from tests.processes import Processes


@pytest.fixture
def run(run_command):
    return functools.partial(run_command, doctor.main)


def test_the_machine_alone(run):
    code, out, err = run('--only=python,files,gpus,trial')
    assert (code, err) == (EXIT_DONE, '')
    assert out.splitlines()[0].split()[:2] == ['ok', 'python']
    assert 'no --config to run' in out


def test_a_failure_is_an_exit_code_and_a_remedy(run, dataset, tmp_path):
    words = (f'--config={TINY}', f'--workdir={tmp_path}', '--only=data')
    code, out, _ = run(*words, f'--config.data.path={tmp_path}/none', '--json')
    (check,) = json.loads(out)['checks']
    assert (code, check['name'], check['status']) == (EXIT_FAILED, 'data', 'failure')
    assert 'maxlm prepare' in check['remedy']
    # Negative control: the command succeeds with existing data; an override may be two words.
    code, out, _ = run(*words, '--config.data.path', str(dataset), '--json')
    assert (code, json.loads(out)['status']) == (EXIT_DONE, 'ok')


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--only=pyhton'], "error: --only=pyhton: unknown check; did you mean 'python'"),
        (['--skip=x'], 'error: --skip=x: unknown check'),
        (['--config=none.py'], 'error: --config=none.py: file not found'),
        (['--config.train.num_steps=1'], 'error: --config.train.num_steps=1: overrides a config; give one'),
        ([f'--config={TINY}', '--config.train.num_step=1'], "did you mean 'num_steps'"),
        (['--what'], 'error: unrecognized arguments: --what'),
    ],
)
def test_bad_input(run, words, message):
    code, out, err = run(*words)
    assert (code, out) == (EXIT_BAD_INPUT, '')
    assert message in err
    assert len(err.splitlines()) == 1


def test_every_check_is_in_the_help_and_on_the_page(capsys):
    with pytest.raises(SystemExit):
        doctor.main(['--help'])
    out = capsys.readouterr().out
    page = (ROOT / 'docs/doctor.md').read_text()
    for name in NAMES:
        assert f'\n  {name} ' in out
        assert f'\n| `{name}` |' in page


def test_other_processes_print_only_failures(run, monkeypatch, tmp_path):
    for name, value in (('COORDINATOR', 'a:1'), ('NUM_PROCESSES', '2'), ('PROCESS_ID', '1')):
        monkeypatch.setenv(f'MAXLM_{name}', value)
    config = (f'--config={TINY}', f'--config.data.path={tmp_path}/none')
    code, out, err = run('--only=python,data', *config)
    assert (code, out) == (EXIT_FAILED, '')
    assert all(line.startswith('[process 1] ') for line in err.splitlines())
    assert '] failure  data ' in err
    assert '] ok ' not in err


@pytest.mark.multiprocess
def test_two_steps_of_a_run(run, dataset, tmp_path, monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', cpu_flags(1))
    # A busy machine would wait for data, which the doctor would report.
    monkeypatch.setattr(trial_run, 'WAITING', math.inf)
    settings = [f'--config.{key}={value}' for key, value in {**SMALL, 'data.path': dataset}.items()]
    code, out, _ = run(f'--config={TINY}', f'--workdir={tmp_path / "run"}', *settings, '--only=trial', '--json')
    (check,) = json.loads(out)['checks']
    assert (code, check['status']) == (EXIT_DONE, 'ok'), check
    assert 'a step takes' in check['found']
    assert list(tmp_path.iterdir()) == []


BARE = """
import sys
for name in ('jax', 'jaxlib', 'rich', 'packaging', 'ml_collections', 'psutil', 'numpy'):
    sys.modules[name] = None
from maxlm.cli.setup import doctor
from maxlm.errors import exit_code
code = exit_code(doctor.main, ['--only=python,files,packages,ram'])
print('code', code)
print(exit_code(doctor.main, ['--config=x.py']))
"""


@pytest.mark.multiprocess
def test_it_reports_without_installed_packages():
    done = subprocess.run([sys.executable, '-S', '-c', BARE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 'files ' in done.stdout
    assert 'cannot run: ' in done.stdout
    assert 'code 1' in done.stdout
    assert 'run doctor without --config first' in done.stderr


@pytest.mark.multiprocess
def test_two_processes_are_checked_together(tmp_path):
    words = ['--only=python,processes,devices,links', '--json']
    with Processes(2, 2, words, logs=tmp_path / 'logs', module='maxlm.doctor') as processes:
        codes = processes.wait()
        outputs = [processes.output(number) for number in range(2)]
    assert codes == [EXIT_DONE] * 2, outputs
    for text in outputs:
        # JAX may print messages before and after the JSON.
        report, _ = json.JSONDecoder().raw_decode(text, text.index('{'))
        found = {check['name']: check['found'] for check in report['checks']}
        assert '2 processes are connected, their clocks within' in found['processes']
        assert found['devices'] == '4 × cpu in 2 processes'
        assert found['links'].startswith('fsdp=4: ')
