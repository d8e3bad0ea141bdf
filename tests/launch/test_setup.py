"""Tests launch/setup.sh: the extras come from doctor, and doctor's checks end it."""

import shutil

import pytest

from tests.conftest import ROOT

# Records its arguments. Doctor finds a GPU, and a bucket in the options.
MAXLM = """#!/bin/sh
echo "maxlm $*" >>maxlm-calls
case "$*" in *--extras*gs://*) echo cuda12,gcs ;; *--extras*) echo cuda12 ;; *) exit {code} ;; esac
"""


@pytest.fixture
def setup(programs, tmp_path):
    """Returns a function that runs the script in an installed copy, and the calls of maxlm and of pip."""
    (tmp_path / 'launch').mkdir()
    for name in ('setup.sh', 'venv.sh', 'commands.sh'):
        shutil.copy(ROOT / 'launch' / name, tmp_path / 'launch')
    (tmp_path / 'pyproject.toml').write_text('[project]\n')

    def install():
        (tmp_path / '.venv/bin').mkdir(parents=True, exist_ok=True)
        (tmp_path / '.venv/bin/python').symlink_to(shutil.which('python', path=programs.environment['PATH']))
        (tmp_path / '.venv/installed').touch()

    def run(*options, code=0, **environment):
        if (tmp_path / '.venv/bin').exists():
            (tmp_path / '.venv/bin/maxlm').write_text(MAXLM.format(code=code))
            (tmp_path / '.venv/bin/maxlm').chmod(0o755)
        before = len(programs.lines('python'))
        done = programs.run('launch/setup.sh', *options, cwd=tmp_path, **environment)
        calls = tmp_path / 'maxlm-calls'
        found = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        installed = [line.split()[-1] for line in programs.lines('python')[before:] if '--editable' in line]
        return done, found, installed

    return install, run


def test_the_extras_of_machine_and_run_are_installed_before_the_checks(setup):
    install, run = setup
    install()
    done, calls, installed = run()
    assert done.returncode == 0, done.stderr
    assert (calls, installed) == (['maxlm doctor --extras', 'maxlm doctor'], ['.[cuda12]'])
    assert done.stdout.endswith('. .venv/bin/activate\n')
    options = ('--config=configs/1b.py', '--workdir=gs://bucket/run')
    _, calls, installed = run(*options)
    words = ' '.join(options)
    assert (calls, installed) == ([f'maxlm doctor --extras {words}', f'maxlm doctor {words}'], ['.[cuda12,gcs]'])
    # The same extras are not installed again, and a failed check is the result.
    done, _, installed = run(*options, code=1)
    assert (done.returncode, installed) == (1, [])
    assert 'activate' not in done.stdout


def test_uv_gets_a_python_if_that_of_the_machine_is_too_old(setup, programs, tmp_path):
    _, run = setup
    programs.plan(replies=[{'match': 'uv venv', 'code': 3}])
    done, _, installed = run(PYTHON='/bin/false')
    assert (done.returncode, installed) == (3, [])
    assert programs.lines('uv') == ['uv venv --quiet --seed --python 3.12 .venv']
