"""Files and output of a run contain no secrets of its environment."""

import os
import re
import subprocess
import sys

import pytest
import zstandard

from maxlm.cli.runs.report import main
from maxlm.config.loading import load
from maxlm.config.serialization import HIDDEN, public_json
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE
from maxlm.telemetry.metrics import read_metrics
from tests.cli.runs.test_train import arguments, run
from tests.conftest import ROOT
from tests.cpu import cpu_flags
from tests.faults import measured

# Each secret ends with a unique marker, so that parts of it are also found.
MARK = 'not-a-real-secret'
VARIABLES = {
    'HF_TOKEN': f'hf_{MARK}-1',
    'AWS_ACCESS_KEY_ID': f'AKIA{MARK}-2',
    'AWS_SECRET_ACCESS_KEY': f'{MARK}-3',
    'AWS_SESSION_TOKEN': f'{MARK}-4',
    'GOOGLE_AUTH_TOKEN_FOR_TESTING': f'ya29.{MARK}-5',
    'WANDB_API_KEY': f'{MARK}-6',
    # No server listens on this port.
    'ALERTS_URL': f'http://127.0.0.1:9/{MARK}-7',
}
# Commands can use variables instead, but users put secrets into them.
COMMAND = f'curl https://example.org/{MARK}-11'
FILES = {
    'GOOGLE_APPLICATION_CREDENTIALS': f'{{"type": "service_account", "private_key": "{MARK}-8"}}',
    'AWS_SHARED_CREDENTIALS_FILE': f'[default]\naws_secret_access_key = {MARK}-9\n',
    'NETRC': f'machine example.org login me password {MARK}-10\n',
}
ZSTANDARD_FRAME = re.escape(b'\x28\xb5\x2f\xfd')


@pytest.fixture
def secrets(tmp_path):
    """Returns the environment variables that contain a secret or name a file with a secret."""
    credentials = tmp_path / 'credentials'
    credentials.mkdir()
    files = {}
    for name, text in FILES.items():
        files[name] = str(credentials / name)
        (credentials / name).write_text(text)
    return {**VARIABLES, **files}


def contents(data):
    """Yields bytes and the decompressed contents within them."""
    yield data
    for match in re.finditer(ZSTANDARD_FRAME, data):
        try:
            yield zstandard.ZstdDecompressor().decompressobj().decompress(data[match.start() :])
        except zstandard.ZstdError:
            # Four bytes of an array look like a header by chance.
            continue


def leaks(directory):
    """Returns the files below a directory that contain a secret."""
    files = sorted(path for path in directory.rglob('*') if path.is_file())
    return [
        str(path.relative_to(directory))
        for path in files
        if any(MARK.encode() in text for text in contents(path.read_bytes()))
    ]


@pytest.mark.multiprocess
def test_files_and_output_contain_no_secret(dataset, tmp_path, secrets, monkeypatch, capfd, record_property):
    workdir = tmp_path / 'run'
    settings = {
        'alerts__webhook_env_var': 'ALERTS_URL',
        'alerts__file': 'alerts.jsonl',
        'alerts__command': COMMAND,
        'checkpoint__save_interval_steps': 1,
    }
    words = [str(word) for word in arguments(dataset, workdir, train__num_steps=2, **settings)]
    command = [sys.executable, '-m', 'maxlm.train', *words]
    environment = {**os.environ, 'XLA_FLAGS': cpu_flags(1), **secrets}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == EXIT_DONE, done.stderr
    # A second attempt in this process reads the files of the first. Only it imports TensorFlow.
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    assert run(dataset, workdir, train__num_steps=3, metrics__tensorboard='true', **settings) == EXIT_DONE
    assert MARK not in ''.join([done.stdout, done.stderr, *capfd.readouterr()])
    assert [line['step'] for line in read_metrics(workdir) if 'train/loss' in line] == [1, 2, 3]
    assert 'ALERTS_URL' in (workdir / 'config.json').read_text()
    assert main(['--output', str(tmp_path / 'report.html'), str(workdir)]) == EXIT_DONE
    page = (tmp_path / 'report.html').read_text()
    assert MARK not in page
    assert HIDDEN in page
    # Only the owner can read the file with which the run can resume.
    assert load(str(workdir / 'config.json')).alerts.command == COMMAND
    assert (workdir / 'config.json').stat().st_mode & 0o777 == 0o600
    assert MARK not in public_json((workdir / 'config.json').read_text())
    (workdir / 'config.json').unlink()
    names = {path.name for path in workdir.iterdir()}
    assert {'checkpoints', 'metrics.jsonl', 'run.log', 'tensorboard'} <= names
    assert leaks(workdir) == []
    searched = sum(path.is_file() for path in workdir.rglob('*'))
    # Negative control: planted secrets are found, including compressed ones.
    files = (workdir / 'checkpoints' / 'planted', workdir / 'plain')
    files[0].write_bytes(b'before' + zstandard.compress(VARIABLES['HF_TOKEN'].encode()))
    files[1].write_text(FILES['NETRC'])
    assert leaks(workdir) == ['checkpoints/planted', 'plain']
    planted = len(VARIABLES) + len(FILES) + 1
    measured(
        record_property, 'secrets', f'{planted} planted: 0 found in {searched} files and the output of two attempts'
    )


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('alerts__webhook_env_var', VARIABLES['ALERTS_URL']),
        ('data__path', f'http://me:{MARK}@127.0.0.1:9/data?token={MARK}'),
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(dataset, tmp_path, capfd, key, value):
    assert run(dataset, tmp_path / 'run', **{key: value}) == EXIT_BAD_INPUT
    out, err = capfd.readouterr()
    assert err.count('\n') == 1
    assert err.startswith('error: ')
    assert MARK not in out + err
    assert list(tmp_path.iterdir()) == []
