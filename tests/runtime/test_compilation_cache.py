"""Tests that later processes reuse cached executables bit for bit, and never run damaged or untrusted ones."""

import json
import os
import random
import shutil
import stat
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from maxlm.cli.execution import plan as commands_plan
from maxlm.cli.setup import plan
from maxlm.errors import InputError
from maxlm.runtime.compilation_cache import SUFFIX, CompilationCache, enable_compilation_cache, enabled_cache
from tests.cli.runs.test_train import arguments, curve
from tests.conftest import ROOT
from tests.forking import forking

SETTINGS = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
    'jax_persistent_cache_min_entry_size_bytes',
    'jax_persistent_cache_enable_xla_caches',
)


@pytest.fixture
def reset_cache_dir(monkeypatch):
    """Resets JAX's cache directory, and restores all settings afterwards."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setattr(compilation_cache, 'get_file_cache', compilation_cache.get_file_cache)
    jax.config.update('jax_compilation_cache_dir', None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def cache_dir():
    return jax.config.jax_compilation_cache_dir


def files(directory):
    return sorted(directory.glob(f'*{SUFFIX}*'))


def compile_something(factor):
    return jax.jit(lambda x: jnp.sin(x) * factor)(jnp.arange(4.0))


def test_damaged_entry_is_a_miss(tmp_path):
    programs = CompilationCache(tmp_path)
    program = bytes(range(200))
    for position in range(232):
        programs.put('key', program)
        (path,) = files(tmp_path)
        content = path.read_bytes()
        assert programs.get('key') == program
        changed = bytearray(content)
        changed[position] ^= 1
        for damaged in (bytes(changed), content[:position], content + b'\0'):
            path.write_bytes(damaged)
            assert programs.get('key') is None
            # The damaged file is deleted, so that the next compilation stores it again.
            assert files(tmp_path) == []
    programs.put('key', program)
    files(tmp_path)[0].rename(tmp_path / f'other{SUFFIX}')
    assert programs.get('other') is None
    assert programs.get('key') is None


def test_entry_belongs_to_one_user_and_one_cpu_type(tmp_path):
    programs = CompilationCache(tmp_path, host='-avx2')
    programs.put('key', b'program')
    assert stat.S_IMODE(files(tmp_path)[0].stat().st_mode) == 0o600
    assert programs.get('key') == b'program'
    assert CompilationCache(tmp_path, host='-avx512').get('key') is None


def test_least_recently_used_entries_are_evicted(tmp_path):
    programs = CompilationCache(tmp_path, capacity=400)
    (tmp_path / 'notes.txt').write_bytes(bytes(1000))
    for number, key in enumerate('abc'):
        programs.put(key, bytes(68))
        os.utime(tmp_path / f'{key}{SUFFIX}', (number, number))
    # A killed process left this file.
    (tmp_path / f'tmp{SUFFIX}.part').write_bytes(bytes(50))
    os.utime(tmp_path / f'tmp{SUFFIX}.part', (9, 9))
    assert programs.get('a')
    programs.put('d', bytes(68))
    # The least recently read executable is b. Other files are never deleted.
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        'a.program',
        'c.program',
        'd.program',
        'notes.txt',
        'tmp.program.part',
    ]
    programs.put('e', bytes(300))
    assert [path.name for path in files(tmp_path)] == ['e.program']
    programs.put('f', bytes(401))
    assert [path.name for path in files(tmp_path)] == ['e.program']


def test_removed_directory_is_reported_once(tmp_path, caplog):
    directory = tmp_path / 'programs'
    directory.mkdir()
    programs = CompilationCache(directory)
    programs.put('key', b'program')
    shutil.rmtree(directory)
    assert programs.get('key') is None
    assert caplog.messages == []
    programs.put('key', b'program')
    programs.put('other', b'program')
    assert caplog.messages == [f'compilation cache {directory}: writes disabled: No such file or directory']


def test_jax_stores_every_executable(tmp_path, reset_cache_dir):
    directory = tmp_path / 'a' / 'b'
    enable_compilation_cache(str(directory))
    assert cache_dir() == str(directory)
    assert isinstance(enabled_cache(), CompilationCache)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    compile_something(2)
    # The directory contains no other files, such as XLA's caches.
    assert files(directory) == sorted(directory.iterdir()) != []


@pytest.mark.parametrize(
    ('make', 'reason'),
    [
        (lambda path: path.write_text(''), 'File exists'),
        (lambda path: (path.mkdir(), path.chmod(0o770)), 'is writable by other users'),
        (lambda path: (path.mkdir(), path.chmod(0o702)), 'is writable by other users'),
        (lambda path: path.parent.joinpath('missing').symlink_to('nowhere') or path.symlink_to('missing/x'), 'File'),
    ],
)
def test_unsafe_or_unusable_directory_is_not_used(tmp_path, reset_cache_dir, caplog, make, reason):
    make(tmp_path / 'programs')
    enable_compilation_cache(str(tmp_path / 'programs'))
    assert cache_dir() is None
    (line,) = caplog.messages
    assert reason in line
    assert str(tmp_path / 'programs') in line
    assert 'train.compilation_cache_dir' in line
    # Control: a directory with correct permissions is used, even if others can read it.
    (tmp_path / 'good').mkdir(mode=0o755)
    enable_compilation_cache(str(tmp_path / 'good'))
    assert cache_dir() == str(tmp_path / 'good')
    assert len(caplog.messages) == 1


def test_parent_writable_by_others_is_not_used(tmp_path, reset_cache_dir, caplog):
    parent = tmp_path / 'parent'
    (parent / 'programs').mkdir(parents=True, mode=0o700)
    (tmp_path / 'link').symlink_to(parent / 'programs')
    parent.chmod(0o777)
    for given in (parent / 'programs', tmp_path / 'link'):
        enable_compilation_cache(str(given))
        assert cache_dir() is None
    assert all(f'chmod go-w {parent}' in line for line in caplog.messages)
    assert len(caplog.messages) == 2
    # Control: in a sticky directory, users cannot replace directories of others.
    parent.chmod(0o1777)
    enable_compilation_cache(str(parent / 'programs'))
    assert cache_dir() == str(parent / 'programs')


def test_directory_of_another_user_is_not_used(tmp_path, reset_cache_dir, caplog, monkeypatch):
    monkeypatch.setattr('maxlm.runtime.compilation_cache.os.geteuid', lambda: tmp_path.stat().st_uid + 1)
    enable_compilation_cache(str(tmp_path))
    assert cache_dir() is None
    assert 'belongs to another user' in caplog.text


def test_read_only_disk_is_not_used(tmp_path, reset_cache_dir, caplog, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, 'Read-only file system')

    monkeypatch.setattr('maxlm.runtime.compilation_cache.tempfile.TemporaryFile', refuse)
    enable_compilation_cache(str(tmp_path))
    assert cache_dir() is None
    assert 'Read-only file system' in caplog.text


def test_user_without_a_home_directory(reset_cache_dir, caplog, monkeypatch):
    def fail(path):
        raise RuntimeError('Could not determine home directory.')

    monkeypatch.setattr('maxlm.runtime.compilation_cache.Path.expanduser', fail)
    enable_compilation_cache('~/programs')
    assert cache_dir() is None
    assert 'the user has no home directory' in caplog.text


def test_settings_of_the_user_take_precedence(tmp_path, reset_cache_dir, caplog):
    enable_compilation_cache('')
    assert enabled_cache() is None
    assert cache_dir() is None
    # JAX_COMPILATION_CACHE_DIR sets the option in this way; an empty value disables the cache.
    for configured in (str(tmp_path / 'theirs'), ''):
        jax.config.update('jax_compilation_cache_dir', configured)
        enable_compilation_cache(str(tmp_path / 'ours'))
        assert cache_dir() == configured
    assert not (tmp_path / 'ours').exists()
    assert caplog.messages == []
    with pytest.raises(
        InputError, match=r'train\.compilation_cache_dir=gs://bucket/programs: must be a local directory'
    ):
        enable_compilation_cache('gs://bucket/programs')


def test_unsupported_jax_version_disables_the_cache(tmp_path, reset_cache_dir, caplog, monkeypatch):
    monkeypatch.delattr(compilation_cache, 'get_file_cache')
    enable_compilation_cache(str(tmp_path))
    assert cache_dir() is None
    assert f'jax {jax.__version__} does not support a custom cache' in caplog.text


def test_plan_uses_the_cache_for_this_machine_only(monkeypatch, tmp_path):
    class CacheEnabledError(Exception):
        pass

    def enable(directory):
        raise CacheEnabledError(directory)

    monkeypatch.setattr(commands_plan, 'enable_compilation_cache', enable)
    command = [
        f'--config={ROOT}/configs/tiny.py',
        f'--config.train.compilation_cache_dir={tmp_path}',
        '--vocab-size=64',
    ]
    small = ['--config.model.num_layers=1', '--config.model.dim=16', '--config.data.seq_len=16', '--estimate', '--json']
    assert plan.main([*command, *small, '--target=v4:2x2x1']) == 0
    with pytest.raises(CacheEnabledError, match=str(tmp_path)):
        plan.main([*command, *small, '--target=cpu:1'])


@pytest.mark.multiprocess
def test_next_process_reuses_executables_and_recompiles_damaged_ones(tmp_path):
    directory = tmp_path / 'programs'
    environment = {**dict.fromkeys(name for name in os.environ if name.startswith('JAX_')), 'JAX_PLATFORMS': 'cpu'}
    with forking('tests.runtime.programs_pair:compile_and_print', environment=environment) as parent:

        def printed(name):
            process = parent.start([directory], tmp_path / name)
            assert (process.wait(), process.stderr) == (0, '')
            return process.stdout

        cold = printed('cold')
        # Control: the executables differ.
        assert len(set(cold.splitlines())) == 2
        inodes = {path: path.stat().st_ino for path in files(directory)}
        assert len(inodes) >= 2
        assert printed('warm') == cold
        # Each executable was found, and none was written.
        assert {path: path.stat().st_ino for path in files(directory)} == inodes
        for number, path in enumerate(inodes):
            content = path.read_bytes()
            path.write_bytes([bytes([content[0] ^ 1]) + content[1:], content[: len(content) // 2], b''][number % 3])
        assert printed('damaged') == cold
    for path in inodes:
        key, dash, host = path.name.removesuffix(SUFFIX).rpartition('-')
        assert CompilationCache(directory, host=dash + host).get(key)


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_runs_reuse_executables_of_other_runs(dataset, tmp_path):
    home_directory = tmp_path / 'home'
    directory = home_directory / '.cache' / 'maxlm' / 'programs'

    def train(parent, name, **overrides):
        settings = {'train__num_steps': 2, 'eval__interval': 2, **overrides}
        process = parent.start(arguments(dataset, tmp_path / name, **settings), tmp_path / 'logs' / name)
        assert process.wait() == 0, process.stderr
        # A damaged executable causes no message. XLA may warn about slow compilation.
        assert 'cache' not in process.stderr
        if name == 'warm':
            # There is also no message about an executable from another process.
            assert process.stderr == ''
        return curve(tmp_path / name)

    unset = dict.fromkeys(name for name in os.environ if name.startswith('JAX_'))
    with forking('maxlm.train', environment={**unset, 'HOME': str(home_directory), 'JAX_PLATFORMS': 'cpu'}) as parent:
        check_runs(partial(train, parent), directory)


def check_runs(train, directory):
    # Control: another seed gives another loss, and a run without a cache writes no files.
    other = train('other', train__seed=1, train__compilation_cache_dir='')
    assert not directory.exists()
    cold = train('cold')
    assert cold[2]['train/loss'] != other[2]['train/loss']
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    inodes = {path: path.stat().st_ino for path in files(directory)}
    assert {'jit_train_step', 'jit_eval_step', 'jit_init'} <= {path.name.partition('-')[0] for path in inodes}
    assert train('warm') == cold
    # Each executable was found, and none was written.
    assert {path: path.stat().st_ino for path in files(directory)} == inodes

    rng = random.Random(0)
    for number, path in enumerate(inodes):
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes([content, content[: len(content) // 2], b''][number % 3])
    assert train('damaged') == cold
    assert {path.name for path in files(directory)} == {path.name for path in inodes}
    for path in inodes:
        key, dash, host = path.name.removesuffix(SUFFIX).rpartition('-')
        assert CompilationCache(directory, host=dash + host).get(key)


@pytest.mark.multiprocess
def test_processes_use_the_cache_only_in_a_shared_directory(tmp_path):
    with forking('tests.runtime.programs_pair:main', environment={'JAX_COMPILATION_CACHE_DIR': None}) as parent:
        pair = parent.start_run(2, [tmp_path], tmp_path / 'logs')
        assert [process.wait() for process in pair] == [0, 0], pair[0].stderr + pair[1].stderr
    for process in pair:
        chosen, names = json.loads(process.stdout.splitlines()[-1])
        assert chosen == {
            'each its own': None,
            'not the first': None,
            'not the second': None,
            'none': None,
            'the same': str(tmp_path / 'shared'),
        }
        assert len(names) >= 1
    # The first process logs one line for each case without a common directory.
    outputs = [process.stdout + process.stderr for process in pair]
    assert outputs[0].count('is not the same directory for all processes') == 2
    assert outputs[0].count('compilation cache disabled') == 3
    assert outputs[1].count('compilation cache disabled') == 0
