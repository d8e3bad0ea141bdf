"""Tests the installation of the GPU compiler with a fake pip; `test_plan_compiled` compiles with a real one."""

import fcntl
import os
import platform
import sys
import types
from importlib.metadata import version

import jax
import pytest

from maxlm.cli.setup import plan
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_INTERRUPTED, InputError, exit_code
from maxlm.planning import gpu_compiler
from maxlm.planning.gpu_compiler import OPTION, VARIABLE, add_compiler

PIP = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index('--target') + 1])
(folder / 'new').write_text(' '.join(sys.argv[1:]))
print('Downloading')
"""
NETWORK = """
sys.exit('''WARNING: Retrying (Retry(total=4)) after connection broken by 'Name resolution': /simple/jax/
ERROR: Could not find a version (from versions: none)''')
"""
NO_SUCH_VERSION = "sys.exit('WARNING: x\\nERROR: Could not find a version (from versions: 0.4)\\nERROR: No matching')"
NO_PIP = "sys.exit(f'{sys.executable}: No module named pip')"
INTERRUPT = 'os.kill(os.getppid(), signal.SIGINT); time.sleep(60)'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Returns the directory of compilers in a cache directory that does not exist yet."""
    monkeypatch.setattr(gpu_compiler, 'CACHE', str(tmp_path / 'cache/compilers'))
    return tmp_path / 'cache/compilers'


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Returns a function that adds final code to the fake pip."""
    (tmp_path / 'path/pip').mkdir(parents=True)
    (tmp_path / 'path/pip/__init__.py').touch()
    monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'path'))

    def write(ending=''):
        (tmp_path / 'path/pip/__main__.py').write_text(PIP + ending)

    write()
    return write


def contents(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob('*')}


def test_installed_once_and_found(cache, pip, capfd, monkeypatch):
    assert not add_compiler()
    assert exit_code(plan.main, [OPTION]) == EXIT_DONE
    out, err = capfd.readouterr()
    (folder,) = cache.iterdir()
    size = sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())
    assert out == ''
    assert err.splitlines() == [
        f'installing the compiler for GPUs of jaxlib {version("jaxlib")} into {folder} …',
        'Downloading',
        f'installed the compiler for GPUs: {size} B in {folder}',
    ]
    arguments = (folder / 'new').read_text()
    same = version('jaxlib')
    assert arguments.endswith(f' jax-cuda12-plugin=={same} jax-cuda12-pjrt=={same} nvidia-cuda-nvcc-cu12>=12.6')
    assert ' --no-deps ' in arguments
    assert [path.stat().st_mode & 0o777 for path in (cache, cache.parent)] == [0o700, 0o700]
    pip(NO_PIP)
    assert exit_code(plan.main, [OPTION]) == EXIT_DONE
    assert 'already installed' in capfd.readouterr().err
    monkeypatch.setattr(sys, 'path', list(sys.path))
    with monkeypatch.context() as patch:
        patch.setattr(jax, 'config', types.SimpleNamespace(jax_platforms=None))
        with pytest.raises(AssertionError, match='CUDA'):
            add_compiler()
    assert add_compiler()
    assert sys.path[-1] == str(folder)


def test_installed_before_the_plan(cache, pip, capfd):
    assert exit_code(plan.main, [OPTION, '--target=h100:8']) == EXIT_BAD_INPUT
    assert '--config' in capfd.readouterr().err
    assert not cache.exists()
    arguments = ['--config=configs/1b.py', '--target=h100:8', '--estimate', '--json']
    assert exit_code(plan.main, [OPTION, *arguments]) == EXIT_DONE
    assert capfd.readouterr().out.startswith('{')
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ('ending', 'code', 'message'),
    [
        (NETWORK, EXIT_BAD_INPUT, ": 'Name resolution': /simple/jax/\n"),
        (NO_SUCH_VERSION, EXIT_BAD_INPUT, ': Could not find a version (from versions: 0.4)\n'),
        (NO_PIP, EXIT_BAD_INPUT, ': No module named pip\n'),
        (INTERRUPT, EXIT_INTERRUPTED, 'interrupted\n'),
        ('', EXIT_DONE, ''),
    ],
    ids=['network', 'version', 'no_pip', 'interrupted', 'control'],
)
def test_an_older_compiler_stays_until_the_new_one_is_complete(
    tmp_path, monkeypatch, capfd, pip, ending, code, message
):
    folder = tmp_path / 'compilers/own'
    folder.mkdir(parents=True)
    (folder / 'installed').write_text('0.1\n')
    monkeypatch.setenv(VARIABLE, str(folder))
    with pytest.raises(InputError, match=f'own: contains the compiler for jaxlib 0.1, .* {OPTION}'):
        add_compiler()
    pip(ending)
    assert exit_code(plan.main, [OPTION]) == code
    # The output of pip, followed by one line.
    assert message in capfd.readouterr().err.removeprefix('installing').partition('Downloading\n')[2]
    assert contents(folder.parent) == {'own', 'own/installed'} | (set() if code else {'own/new'})
    assert ((folder / 'installed').read_text() == '0.1\n') == bool(code)


def test_refused(tmp_path, monkeypatch, capfd, pip):
    def refusal():
        assert exit_code(plan.main, [OPTION]) == EXIT_BAD_INPUT
        return capfd.readouterr().err

    folder = tmp_path / 'photos'
    folder.mkdir()
    (folder / 'a.png').touch()
    monkeypatch.setenv(VARIABLE, str(folder))
    assert refusal().startswith(f'error: {folder}: contains other files')
    assert contents(folder) == {'a.png'}
    monkeypatch.setenv(VARIABLE, str(tmp_path / 'new'))
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert 'another process is installing' in refusal()
    os.close(descriptor)
    monkeypatch.setenv(VARIABLE, str(folder / 'a.png' / 'x'))
    assert refusal() == f'error: {folder}/a.png/x: File exists; set {VARIABLE} to another directory\n'
    monkeypatch.setattr(platform, 'machine', lambda: 'i686')
    assert 'no compiler for NVIDIA GPUs on linux i686' in refusal()
    assert not (tmp_path / 'new').exists()
