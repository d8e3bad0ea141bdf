"""Tests `maxlm train --gcs-credentials`."""

import json
import os

import pytest

from maxlm.cli.execution.credentials import VARIABLE, use_credentials
from maxlm.cli.runs.train import main
from maxlm.errors import EXIT_DONE, InputError
from tests.conftest import ROOT

SECRET = 'a-private-key-7c0e'


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    # The test removes it from the environment of later tests.
    monkeypatch.setenv(VARIABLE, 'before')


@pytest.mark.parametrize('content', ['', 'text', '[]', f'{{"private_key": "{SECRET}"}}', '{"type": 3}', b'\xff\xfe'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / 'key.json'
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match='is not a key file of Google Cloud') as caught:
        use_credentials(str(path))
    assert SECRET not in str(caught.value)
    assert os.environ[VARIABLE] == 'before'


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r'none\.json: .*; give the key file'):
        use_credentials(str(tmp_path / 'none.json'))


def test_the_option_sets_the_variable_that_all_libraries_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'key.json').write_text(json.dumps({'type': 'service_account', 'private_key': SECRET}))
    arguments = ['--gcs-credentials=key.json', '--dry-run=elsewhere', '--config.data.path=/mnt/data']
    assert main([f'--config={ROOT}/configs/tiny.py', *arguments]) == EXIT_DONE
    assert os.environ[VARIABLE] == str(tmp_path / 'key.json')
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err
