"""Wheel and source distribution: their contents, and the commands in an empty directory without the checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile

import pytest

from maxlm.config.config_files import find_config, shipped_configs
from maxlm.config.loading import load
from maxlm.errors import InputError
from tests.conftest import ROOT

NAMES = {path.stem for path in (ROOT / 'configs').glob('*.py')}


@pytest.fixture(scope='module')
def sources(tmp_path_factory):
    """Copies the files of the project that a package can contain."""
    sources = tmp_path_factory.mktemp('sources')
    listed = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, check=False).stdout.decode()
    if not listed:
        pytest.fail('the sources of the wheel are those that git lists; run this test in a checkout')
    for name in listed.split('\0'):
        if name.startswith(('maxlm/', 'configs/')) or (name and '/' not in name):
            target = sources / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return sources


@pytest.fixture(scope='module')
def unpacked(sources, tmp_path_factory):
    """Builds the wheel of the sources of the project and unpacks it, as an installation does."""
    folder = tmp_path_factory.mktemp('wheel')
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
    pages = ('serving/pages/chat', 'serving/pages/reference', 'reporting/assets', 'reporting/templates')
    for name in (*pages, 'data/compression/texts'):
        files = {path.name for path in (ROOT / 'maxlm' / name).iterdir()}
        assert files == {path.name for path in (unpacked / 'maxlm' / name).iterdir()}
    assert {path.name for path in unpacked.iterdir() if not path.name.endswith('.dist-info')} == {'maxlm'}
    # Type checkers use the annotations of the package.
    assert (unpacked / 'maxlm/py.typed').is_file()


def test_the_source_distribution_gives_the_same_wheel(sources, unpacked, tmp_path):
    # Without options, build makes the wheel from the source distribution.
    command = [sys.executable, '-m', 'build', '--no-isolation', '--outdir', tmp_path, sources]
    subprocess.run(command, check=True, capture_output=True)
    (distribution,), (wheel,) = tmp_path.glob('*.tar.gz'), tmp_path.glob('*.whl')
    with tarfile.open(distribution) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    assert {f'configs/{name}.py' for name in NAMES} <= names
    assert {'LICENSE', 'README.md', 'pyproject.toml', 'setup.py', 'maxlm/py.typed'} <= names
    with zipfile.ZipFile(wheel) as archive:
        built = set(archive.namelist())
    assert built == {path.relative_to(unpacked).as_posix() for path in unpacked.rglob('*') if path.is_file()}


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
    with pytest.raises(InputError, match=r'configs/1b.py: file not found; use --config=1b, a config of maxlm'):
        load('configs/1b.py')
    with pytest.raises(InputError, match=r"tinny: file not found; did you mean 'tiny'"):
        load('tinny')
