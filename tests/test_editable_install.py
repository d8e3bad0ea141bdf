"""An editable installation: type checkers resolve maxlm in the folder of a user, and report wrong calls.

Type checkers read the paths in .pth files, but do not execute import hooks.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = """\
import maxlm

config = maxlm.Config.get('tiny', {'train.num_steps': 20})
model = maxlm.load('runs/first')
reveal_type(model.generate('a', temperature=0.5, stop=['b']))
reveal_type(model.chat([{'role': 'user', 'content': 'a'}], top_k=5))
reveal_type(config.train.num_steps)
model.generate('a', temp=1)
model.generate('a', temperature='hot')
next(model.stream('a', tok_k=1))
config.lr = 3
config.train.num_steps = 3
"""
# Line → the part of a message of mypy that names the type or the problem.
MYPY = {
    5: 'Revealed type is "str"',
    6: 'Revealed type is "str"',
    7: 'Revealed type is "int"',
    8: 'Unexpected keyword argument "temp" for "generate" of "Model"',
    9: 'Argument "temperature" to "generate" of "Model" has incompatible type "str"; expected "float"',
    10: 'Unexpected keyword argument "tok_k" for "stream" of "Model"',
    11: '"Config" has no attribute "lr"',
    12: 'Property "num_steps" defined in "TrainConfig" is read-only',
}
# The same lines for pyright.
PYRIGHT = {
    5: 'is "str"',
    6: 'is "str"',
    7: 'is "int"',
    8: 'No parameter named "temp"',
    9: 'cannot be assigned to parameter "temperature" of type "float"',
    10: 'No parameter named "tok_k"',
    11: 'Attribute "lr" is unknown',
    12: 'Attribute "num_steps" is read-only',
}


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
    """Copies the files that an installation reads."""
    checkout = tmp_path_factory.mktemp('checkout')
    for name in ('pyproject.toml', 'setup.py', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, checkout)
    for name in ('maxlm', 'configs'):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns('__pycache__'))
    # Directories of a checkout that are no packages of the installation.
    for name in ('tests', 'tools', 'runs', 'data'):
        (checkout / name).mkdir()
    return checkout


@pytest.fixture(scope='module')
def environment(checkout, tmp_path_factory):
    """Returns an environment with an editable installation, without its dependencies."""
    environment = tmp_path_factory.mktemp('environment')
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', environment], check=True)
    pip = [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-build-isolation', '--ignore-installed']
    command = [*pip, '--disable-pip-version-check', f'--prefix={environment}', '--editable', checkout]
    subprocess.run(command, check=True)
    return environment


def run(*command, cwd):
    """Returns the output of a command that does not find this checkout."""
    variables = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False).stdout


@pytest.mark.multiprocess
def test_the_installation_is_a_path(environment, checkout):
    (path,) = environment.glob('lib/python*/site-packages/*maxlm*.pth')
    assert path.read_text().split() == [str(checkout)]
    code = 'import maxlm; print(maxlm.__file__)'
    found = run(environment / 'bin/python', '-c', code, cwd=environment)
    assert found == f'{checkout / "maxlm/__init__.py"}\n'
    assert (environment / 'bin/maxlm').is_file()


@pytest.mark.multiprocess
def test_mypy_checks_a_script_of_a_user(environment, tmp_path):
    (tmp_path / 'script.py').write_text(SCRIPT)
    # The libraries that maxlm uses are not in the environment, which saves most of the time.
    options = [f'--python-executable={environment / "bin/python"}', '--no-error-summary', '--cache-dir=/dev/null']
    output = run(sys.executable, '-m', 'mypy', *options, 'script.py', cwd=tmp_path)
    assert re.findall(r'^(?!script\.py).*: error: .*', output, re.MULTILINE) == []
    # Other notes name the definition of a function.
    lines = re.findall(r'^script\.py:(\d+): (error: .*|note: Revealed .*)', output, re.MULTILINE)
    assert [int(number) for number, _ in lines] == [*MYPY], output
    for number, message in lines:
        assert MYPY[int(number)] in message


@pytest.mark.multiprocess
def test_pyright_checks_a_script_of_a_user(environment, tmp_path):
    (tmp_path / 'script.py').write_text(SCRIPT)
    options = ['--outputjson', '--pythonpath', environment / 'bin/python']
    output = run(sys.executable, '-m', 'basedpyright', *options, 'script.py', cwd=tmp_path)
    found = {
        entry['range']['start']['line'] + 1: entry['message']
        for entry in json.loads(output)['generalDiagnostics']
        if entry['severity'] in ('error', 'information')
    }
    assert list(found) == [*PYRIGHT], output
    for number, message in found.items():
        assert PYRIGHT[number] in message
