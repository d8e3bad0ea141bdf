"""Tests the Dockerfile: hadolint, its stages and files, and the commands of its images, without Docker."""

import re
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from maxlm.cli.commands import COMMANDS
from tests.conftest import ROOT
from tests.launch.images import (
    ARGUMENTS,
    DOCKERFILE,
    STAGES,
    context_files,
    exec_form,
    health_check,
    read_stages,
    values,
)
from tests.launch.parsing import parse

TARGETS = ('cpu', 'cuda12', 'tpu', 'serve')


def hadolint(path):
    program = shutil.which('hadolint', path=Path(sys.executable).parent) or shutil.which('hadolint')
    assert program, 'hadolint comes with the extra dev'
    return subprocess.run([program, '--no-color', str(path)], capture_output=True, text=True).stdout


def test_hadolint(tmp_path):
    assert hadolint(DOCKERFILE) == ''
    planted = tmp_path / 'Dockerfile'
    # hadolint also checks the shell code.
    planted.write_text('FROM python\nRUN pip install uv && rm $1\n')
    assert {'DL3006', 'DL3013', 'SC2086'} <= set(re.findall(r'(?:DL|SC)\d+', hadolint(planted)))


def test_stages():
    assert set(TARGETS) <= set(STAGES)
    assert ARGUMENTS['HARDWARE'] in TARGETS
    # Each stage starts from the base image, which has a version, or from an earlier stage.
    earlier = {f'${{{name}}}' for name in ARGUMENTS}
    for name, stage in STAGES.items():
        assert stage.base in earlier or re.fullmatch(r'python:3\.12-slim-\w+', stage.base), name
        earlier.add(name)


@pytest.mark.parametrize('target', TARGETS)
def test_images(target):
    assert values(target, 'USER')[-1] == '${UID}'
    assert int(ARGUMENTS['UID']) > 0
    # The manifests of launch/k8s and compose.yaml start commands of the repository in this directory.
    assert values(target, 'WORKDIR') == ['/maxlm']
    hardware = ARGUMENTS['HARDWARE'] if target == 'serve' else target
    assert values(target, 'COPY') == [f'--from={hardware}-packages /opt/venv /opt/venv', '. .']
    assert values(target, 'ENTRYPOINT')[-1].startswith('["maxlm"')


def test_installed_extras():
    extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
    for hardware, own in (('cpu', set()), ('cuda12', {'cuda12'}), ('tpu', {'tpu'})):
        [command] = [value for _, value in STAGES[f'{hardware}-packages'].instructions]
        [listed] = re.findall(r'"\.\[(.*)\]"', command)
        names = set(listed.replace('${EXTRAS}', ARGUMENTS['EXTRAS']).split(','))
        assert names == own | {'gcs', 's3'}
        assert names <= extras.keys()
        # The versions and hashes of all packages, and of the build backend, are those of the lock file.
        assert '--constraint requirements.lock --build-constraint requirements.lock' in command


def test_copied_files_exist_and_are_not_ignored():
    files = context_files()
    sources = {
        word
        for stage in STAGES.values()
        for name, value in stage.instructions
        if name == 'COPY' and '--from' not in value
        for word in value.split()[:-1]
    }
    assert sources >= {'.', 'pyproject.toml', 'requirements.lock'}
    assert sources - {'.'} <= files


def test_context():
    files = context_files()
    package = {str(path.relative_to(ROOT)) for path in (ROOT / 'maxlm').rglob('*') if path.is_file()}
    package = {name for name in package if '__pycache__' not in name}
    assert package - files == set()
    assert {'launch/gpu_node.sh', 'launch/commands.sh', 'configs/1b.py', 'examples/tasks/__main__.py'} <= files
    assert [name for name in files if name.startswith(('tests/', 'docs/', '.git', 'data/', 'runs/'))] == []


def test_context_has_no_secrets_and_data(tmp_path):
    wanted = {'maxlm/train.py', 'launch/gpu_node.sh'}
    ignored = {'.env', 'maxlm/.env', 'launch/.venv/x', '.git/config', 'data/a', 'runs/b', 'maxlm/__pycache__/c.pyc'}
    for name in wanted | ignored:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert context_files(tmp_path) == wanted


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_an_installation_without_source_finds_the_source_that_is_copied_later(tmp_path):
    [names, *_] = [value for name, value in STAGES['dependencies'].instructions if name == 'COPY']
    repository, prefix = tmp_path / 'maxlm', tmp_path / 'venv'
    repository.mkdir()
    for name in names.split()[:-1]:
        shutil.copy(ROOT / name, repository)
    [_, make] = [value for name, value in STAGES['dependencies'].instructions if name == 'RUN']
    subprocess.run(['bash', '-euc', make], cwd=repository, check=True)
    pip = [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-build-isolation', '--ignore-installed']
    subprocess.run([*pip, f'--prefix={prefix}', '--editable', '.'], cwd=repository, check=True)
    [packages] = prefix.glob('lib/python*/site-packages')
    # Without the site packages of the tests, which may contain maxlm.
    code = (
        f'import site; site.addsitedir({str(packages)!r}); from maxlm import errors; raise SystemExit(errors.EXIT_DONE)'
    )
    find = [sys.executable, '-ISc', code]
    # Control: only the empty package is installed.
    assert subprocess.run(find, cwd='/', stderr=subprocess.DEVNULL).returncode == 1
    shutil.copytree(ROOT / 'maxlm', repository / 'maxlm', dirs_exist_ok=True)
    assert subprocess.run(find, cwd='/').returncode == 0
    assert (prefix / 'bin/maxlm').is_file()


def test_entry_points():
    assert [exec_form(target, 'ENTRYPOINT') for target in TARGETS[:3]] == [['maxlm']] * 3
    scripts = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['scripts']
    assert 'maxlm' in scripts
    server = exec_form('serve', 'ENTRYPOINT')
    assert server[1] in COMMANDS
    options = parse([*server[1:], '--checkpoint=runs/tiny'])
    assert (options.host, options.port) == ('0.0.0.0', 8000)
    assert values('serve', 'EXPOSE') == ['8000']


class Answers(BaseHTTPRequestHandler):
    """Answers to /health with the status of its server."""

    def do_GET(self):
        assert self.path == '/health'
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.multiprocess
@pytest.mark.parametrize(('status', 'is_healthy'), [(200, True), (503, False), (None, False)])
def test_health_check(status, is_healthy):
    with HTTPServer(('127.0.0.1', 0), Answers) as server:
        server.status = status
        command = [sys.executable, *health_check('serve')[1:]]
        assert '127.0.0.1:8000/health' in command[-1]
        command[-1] = command[-1].replace(':8000', f':{server.server_port}')
        if status:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        else:
            # Nothing listens on the port.
            server.server_close()
        code = subprocess.run(command, stderr=subprocess.DEVNULL).returncode
        if status:
            server.shutdown()
    assert (code == 0) == is_healthy


def test_reader_of_stages(tmp_path):
    path = tmp_path / 'Dockerfile'
    path.write_text('ARG A=1\nFROM x:1 AS one\n# comment\nRUN a \\\n    b\nFROM one AS two\nUSER me\n')
    arguments, stages = read_stages(path)
    assert arguments == {'A': '1'}
    assert stages == {'one': ('x:1', [('RUN', 'a     b')]), 'two': ('one', [('USER', 'me')])}
