"""The wheel: what it contains, and that its commands work in an empty directory without the checkout."""

import os
import subprocess
import sys
import zipfile

import pytest

from maxlm.config.loading import find_config, load, shipped_configs
from maxlm.errors import InputError
from tests.conftest import ROOT

NAMES = {path.stem for path in (ROOT / 'configs').glob('*.py')}


@pytest.fixture(scope='module')
def unpacked(tmp_path_factory):
    """Builds the wheel of the sources of the project and unpacks it, as an installation does."""
    folder = tmp_path_factory.mktemp('wheel')
    sources = folder / 'sources'
    listed = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, check=False).stdout.decode()
    if not listed:
        pytest.fail('the sources of the wheel are those that git lists; run this test in a checkout')
    for name in listed.split('\0'):
        if name.startswith(('maxlm/', 'configs/')) or (name and '/' not in name):
            target = sources / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        '-m',
        'pip',
        'wheel',
        '--no-deps',
        '--no-build-isolation',
        '--wheel-dir',
        folder,
        sources,
    ]
    subprocess.run([*command, '--quiet', '--disable-pip-version-check'], check=True)
    (wheel,) = folder.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / 'site')
    return folder / 'site'


def run(unpacked, cwd, *words):
    environment = {**os.environ, 'PYTHONPATH': str(unpacked)}
    command = [sys.executable, '-m', 'maxlm', *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_it_contains_the_configs_the_chat_page_and_the_templates_of_the_report(unpacked):
    assert {path.stem for path in (unpacked / 'maxlm/shipped_configs').glob('*.py')} == NAMES
    for name in ('serving/page', 'reporting/assets', 'reporting/templates'):
        files = {path.name for path in (ROOT / 'maxlm' / name).iterdir()}
        assert files == {path.name for path in (unpacked / 'maxlm' / name).iterdir()}
    assert {path.name for path in unpacked.iterdir() if not path.name.endswith('.dist-info')} == {'maxlm'}


@pytest.mark.multiprocess
def test_a_shipped_config_works_in_an_empty_directory(unpacked, tmp_path):
    listed = run(unpacked, tmp_path, 'configs')
    assert listed.returncode == 0, listed.stderr
    assert {line.split()[0] for line in listed.stdout.splitlines() if line[0] != ' '} == NAMES
    shown = run(unpacked, tmp_path, 'configs', 'show', 'tiny')
    assert shown.stdout == (ROOT / 'configs/tiny.py').read_text()
    planned = run(unpacked, tmp_path, 'plan', '--config=neox:production', '--target=h100:8', '--estimate')
    assert planned.returncode == 0, planned.stderr
    assert '1,414,455,296 parameters' in planned.stdout


def test_names_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped_configs().keys() == NAMES
    assert find_config('tiny') == ROOT / 'configs/tiny.py'
    assert load('code:13b').model.num_layers == 40
    # A path is never replaced by a shipped config.
    assert str(find_config('configs/tiny')) == 'configs/tiny'
    assert str(find_config('tiny.py')) == 'tiny.py'
    with pytest.raises(InputError, match=r"tinny: file not found; did you mean 'tiny'"):
        load('tinny')
