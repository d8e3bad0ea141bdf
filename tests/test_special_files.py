"""Special files in untrusted directories: each file that is read causes an error of one line."""

import contextlib
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from maxlm.checkpoint.checksums import corrupt_arrays
from maxlm.errors import InputError
from maxlm.huggingface.export_model import export_model
from maxlm.huggingface.import_model import import_model
from maxlm.inference.load import load_model
from maxlm.storage.check_directory import check_entries
from maxlm.workdir.step_dirs import to_path
from tests.huggingface.workdirs import make_workdir

STEP = 'run/checkpoints/0'
NOBODY = 65534


@pytest.fixture(scope='module')
def models():
    """Returns a directory with a workdir `run`, and its Transformers export in one file and in shards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_workdir(path / 'run', {'model__family': 'llama'})
        (path / 'run/chat_template.jinja').write_text('{{ messages }}')
        for name in ('one', 'shards'):
            export_model(
                f'{path}/run', f'{path}/{name}', architecture='auto', dtype='float32', max_shard_size=2**30, show=False
            )
        tensors = load_file(path / 'shards/model.safetensors')
        (path / 'shards/model.safetensors').rename(path / 'shards/model-1.safetensors')
        weights = dict.fromkeys(tensors, 'model-1.safetensors')
        (path / 'shards/model.safetensors.index.json').write_text(json.dumps({'weight_map': weights}))
        save_file(tensors, path / 'one/model.safetensors')
        # Allows access by unprivileged readers.
        for found in (path, *path.rglob('*')):
            found.chmod(0o777 if found.is_dir() else 0o644)
        yield path


def verify(step):
    lines, _ = corrupt_arrays(step)
    if lines:
        raise InputError(lines[0])


def open_all(models):
    """Returns (file, function that opens it) for each file of a model that is read."""
    texts = ('config.json', 'tokenizer.json', 'chat_template.jinja')
    kept = ('tokenizer_config.json', 'special_tokens_map.json', 'generation_config.json')
    params = models / STEP / 'params'
    files = (
        (params / 'd').iterdir(),
        params.rglob('*METADATA*'),
        params.rglob('array_metadatas/*'),
        [params / 'manifest.ocdbt'],
    )
    # Orbax writes these and does not read them.
    unread = ('_CHECKPOINT_METADATA', 'commit_success.txt')
    arrays = [path.relative_to(models) for found in files for path in found if path.name not in unread]
    for name in (*texts, *kept, 'model.safetensors'):
        yield f'one/{name}', lambda: import_model(f'{models}/one', f'{models}/new', show=False)
    for name in ('model.safetensors.index.json', 'model-1.safetensors'):
        yield f'shards/{name}', lambda: import_model(f'{models}/shards', f'{models}/new', show=False)
    for name in (*(f'run/{name}' for name in texts), *map(str, arrays)):
        yield name, lambda: load_model(f'{models}/run', num_devices=1)
    yield f'{STEP}/progress/metadata', lambda: verify(to_path(models / STEP))


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
        server.bind(path.name)


def make_sparse(path):
    path.touch()
    os.truncate(path, 2**40)


def make_unreadable(path):
    path.write_text('{}')
    path.chmod(0)


SPECIAL = {
    'FIFO': os.mkfifo,
    'socket': make_socket,
    'link to /dev/zero': lambda path: path.symlink_to('/dev/zero'),
    'directory': os.mkdir,
    'nothing, which is not a file': lambda path: path.symlink_to(path.with_name('nothing')),
    'outside its directory': lambda path: path.symlink_to('/etc/hostname'),
    'Permission denied': make_unreadable,
    'bytes': make_sparse,
}


@contextlib.contextmanager
def without_privileges():
    """Drops privileges, because root can read all files."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize('words', SPECIAL)
def test_special_files_are_one_line(models, in_time, words):
    for name, read in open_all(models):
        path, aside = models / name, models / 'aside'
        path.rename(aside)
        try:
            SPECIAL[words](path)
            with without_privileges(), pytest.raises(InputError) as info:
                read()
        finally:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            aside.rename(path)
        message = str(info.value)
        assert '\n' not in message
        # Array files may have any size, and Orbax detects directories in place of files.
        in_library = {
            'bytes': name.endswith('.safetensors') or '/d/' in name,
            'directory': name.startswith(STEP),
        }.get(words, False)
        assert f'{models}/' in message if in_library else (f'{path}: ' in message and words in message), message
        assert not (models / 'new').exists()


def test_unmodified_files_are_read(models):
    """Negative control: each reader reads all unmodified files."""
    import_model(f'{models}/one', f'{models}/new', show=False)
    shutil.rmtree(models / 'new')
    import_model(f'{models}/shards', f'{models}/new', show=False)
    shutil.rmtree(models / 'new')
    assert load_model(f'{models}/run', num_devices=1).step == 0
    verify(to_path(models / STEP))


def test_links_inside_of_a_directory_and_of_the_hubs_cache(tmp_path):
    blobs, snapshot = tmp_path / 'models--a--b/blobs', tmp_path / 'models--a--b/snapshots/c'
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / 'x').write_text('{}')
    (snapshot / 'config.json').symlink_to('../../blobs/x')
    (snapshot / 'same.json').symlink_to('config.json')
    check_entries(snapshot, ['config.json', 'same.json', 'absent.json'])
    # No link outside the cache, or starting in the cache, may lead out of the directory.
    (tmp_path / 'secret').write_text('x')
    (blobs / 'y').symlink_to(tmp_path / 'secret')
    (snapshot / 'tokenizer.json').symlink_to('../../blobs/y')
    with pytest.raises(InputError, match=r'tokenizer\.json: is a link to .*secret, outside its directory'):
        check_entries(snapshot, ['tokenizer.json'])
    (tmp_path / 'models--a--b').rename(tmp_path / 'a')
    with pytest.raises(InputError, match='outside its directory'):
        check_entries(tmp_path / 'a/snapshots/c', ['config.json'])
