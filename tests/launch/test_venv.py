"""Tests launch/venv.sh with a lock file: pip checks hashes, and installs again when the lock file changes."""

import shutil

import pytest

from tests.conftest import ROOT

PIP = 'python -m pip'
INSTALL = f'{PIP} install --disable-pip-version-check --progress-bar off'


@pytest.fixture
def install(programs, tmp_path):
    """Returns a function that creates the environment and returns the commands of pip."""
    (tmp_path / 'launch').mkdir()
    shutil.copy(ROOT / 'launch/venv.sh', tmp_path / 'launch')
    (tmp_path / 'pyproject.toml').write_text('[project]\n')
    (tmp_path / 'requirements.lock').write_text('a==1\n')
    (tmp_path / '.venv/bin').mkdir(parents=True)
    (tmp_path / '.venv/bin/python').symlink_to(shutil.which('python', path=programs.environment['PATH']))

    def run(**environment):
        before = len(programs.lines('python'))
        done = programs.run('bash', '-ec', '. launch/venv.sh; maxlm_venv dev', cwd=tmp_path, **environment)
        return done.returncode, [line for line in programs.lines('python')[before:] if line.startswith(PIP)]

    return run


def test_lock_file_is_installed_with_hashes(install, tmp_path):
    locked = [
        f'{INSTALL} --no-deps --require-hashes -r requirements.lock',
        f'{INSTALL} --no-deps --no-build-isolation --editable .',
        f'{PIP} check',
    ]
    assert install(MAXLM_LOCK='requirements.lock') == (0, locked)
    assert install(MAXLM_LOCK='requirements.lock') == (0, [])
    (tmp_path / 'requirements.lock').write_text('a==2\n')
    assert install(MAXLM_LOCK='requirements.lock') == (0, locked)
    # Control: without a lock file, pyproject.toml decides.
    assert install() == (0, [f'{INSTALL} --editable .[dev]'])


def test_without_a_terminal_the_installation_prints_a_line_every_ten_seconds(programs, tmp_path):
    (tmp_path / 'log').write_text('Collecting a\nCollecting b\n')
    # A clock that advances by 5 s per call and ends the loop after 22 s. After `unset`, SECONDS does not follow time.
    clock = 'unset SECONDS; SECONDS=0; sleep() { SECONDS=$((SECONDS + 5)); [ "$SECONDS" -le 22 ]; }'
    command = f'. {ROOT}/launch/venv.sh; {clock}; maxlm_install_progress log || true'
    assert programs.run('bash', '-ec', command, cwd=tmp_path).stdout.splitlines() == [
        '  resolving and downloading: 2 packages, 10 s',
        '  resolving and downloading: 2 packages, 20 s',
    ]
    (tmp_path / 'log').write_text('Collecting a\nInstalling collected packages: a, b, c\n')
    for package in ('a', 'b'):
        (tmp_path / f'.venv/lib/python3/site-packages/{package}.dist-info').mkdir(parents=True)
    first, _ = programs.run('bash', '-ec', command, cwd=tmp_path).stdout.splitlines()
    assert first == f'  installing [{"#" * 20}{"." * 10}] 2 of 3 packages, 10 s'


def test_failed_installation_ends_the_script(install, tmp_path):
    python = tmp_path / '.venv/bin/python'
    python.unlink()
    python.write_text('#!/bin/sh\necho x >>calls\nexit 3\n')
    python.chmod(0o755)
    assert install(MAXLM_LOCK='requirements.lock') == (3, [])
    assert (tmp_path / 'calls').read_text() == 'x\n'
    assert not (tmp_path / '.venv/installed').exists()
