"""`maxlm fetch` with emulated buckets."""

import os
import signal
import subprocess
import sys

import pytest
import tenacity

from maxlm.cli.setup import fetch
from maxlm.data.dataset.records import load_manifest, verify
from maxlm.errors import exit_code
from maxlm.storage import download, download_tree
from tests.conftest import ROOT
from tests.storage.test_download_tree import contents

# A shell starts background processes with SIGINT ignored.
FETCH = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from maxlm.cli.setup import fetch
from maxlm.storage import download
download.CHUNK_BYTES = 1000
fetch.run('fetch')
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(download, 'CHUNK_BYTES', 1000)
    monkeypatch.setattr(download_tree, 'POLL_SECONDS', 0.001)


@pytest.fixture
def remote_dataset(gcs, dataset):
    for path in dataset.iterdir():
        gcs.put('bucket', f'data/{path.name}', path.read_bytes())
    return dataset


def run(*arguments):
    return exit_code(fetch.main, [str(argument) for argument in arguments])


def test_a_prepared_data_set_is_verified_by_its_manifest(remote_dataset, gcs, tmp_path, capsys):
    output = tmp_path / 'data'
    assert run('--input', 'gs://bucket/data', '--output', output) == 0
    assert contents(output) == contents(remote_dataset)
    verify(load_manifest(output))
    files, size = len(contents(output)), sum(map(len, contents(output).values()))
    assert capsys.readouterr().out == f'{output}: {files} files, {size:,} bytes; {files} fetched, 0 already present\n'
    # The manifest is fetched last, because it marks the data set as complete.
    assert gcs.asked()[-1].name == 'data/dataset.json'
    # Only the manifest is verified with the bucket's checksum.
    shards = {f'data/{name}' for name in contents(output)} - {'data/dataset.json'}
    assert not shards & {request.name for request in gcs.asked('get')}

    assert run('--input', 'gs://bucket/data', '--output', output) == 0
    assert f'0 fetched, {files} already present' in capsys.readouterr().out
    assert run('--input', 'gs://bucket/data', '--output', output, '--quiet') == 0
    assert capsys.readouterr() == ('', '')


def test_a_damaged_shard_is_named(remote_dataset, gcs, tmp_path, capsys):
    name = next(path.name for path in remote_dataset.iterdir() if path.name.startswith('train-'))
    content = bytearray((remote_dataset / name).read_bytes())
    content[-1] ^= 1
    gcs.put('bucket', f'data/{name}', bytes(content))
    assert run('--input', 'gs://bucket/data', '--output', tmp_path / 'data') == 2
    error = capsys.readouterr().err
    assert error.startswith(f'error: gs://bucket/data/{name}: download damaged in two attempts: its sha256 is ')
    assert error.count('\n') == 1
    assert not (tmp_path / 'data' / 'dataset.json').exists()


def test_several_inputs_and_some_of_their_files(gcs, tmp_path, capsys):
    for name in ('one/a.txt', 'one/deep/b.txt', 'one/deep/b.zip', 'two/c.txt', 'two/d.txt'):
        gcs.put('bucket', name, name.encode())
    output = tmp_path / 'out'
    inputs = ['--input', 'gs://bucket/one', 'gs://bucket/two/*', '--output', output, '--include', '*.txt']
    assert run(*inputs) == 0
    assert contents(output) == {
        'a.txt': b'one/a.txt',
        'c.txt': b'two/c.txt',
        'd.txt': b'two/d.txt',
        'deep/b.txt': b'one/deep/b.txt',
    }
    assert run(*inputs[:-1], '*', '--max-files', 1, '--output', tmp_path / 'few') == 0
    assert sorted(contents(tmp_path / 'few')) == ['a.txt', 'c.txt']


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--input', 'gs://bucket/none'], 'gs://bucket/none: No such file or directory'),
        (['--input', 'gs://nobody/x'], 'gs://nobody/x: bucket nobody does not exist'),
        (['--input', 'nonsense://x'], '--input=nonsense://x: unknown protocol nonsense://; use gs:// or s3://'),
        (['--input', 'gs://bucket/x', '--threads', '0'], '--threads=0: must be at least 1'),
        (['--input', 'gs://bucket/x', '--max-files', '-1'], '--max-files=-1: must be at least 0'),
        (
            ['--input', 'gs://bucket/x', 'gs://bucket/y'],
            'gs://bucket/x/a and gs://bucket/y/a would both be OUT/a; use one --output for each',
        ),
        (
            ['--input', 'gs://bucket/clash'],
            'gs://bucket/clash/a and gs://bucket/clash/a/b would be a file and a folder of the same name, OUT/a; '
            'select one with --include',
        ),
        ([], 'the following arguments are required: --input (see maxlm fetch --help)'),
    ],
)
def test_bad_input_is_one_line(gcs, tmp_path, capsys, arguments, message):
    for name in ('x/a', 'y/a', 'clash/a', 'clash/a/b'):
        gcs.put('bucket', name, b'x')
    assert run(*arguments, '--output', tmp_path / 'out') == 2
    assert capsys.readouterr().err == f'error: {message}\n'.replace('OUT', str(tmp_path / 'out'))
    assert not (tmp_path / 'out').exists()


def test_alerts_are_printed(gcs, tmp_path, capsys, monkeypatch):
    gcs.put('bucket', 'x/a', b'content')
    gcs.fault(503, times=12)
    monkeypatch.setattr('maxlm.storage.retry.EXPONENTIAL_BACKOFF', tenacity.wait_none())
    assert run('--input', 'gs://bucket/x', '--output', tmp_path, '--quiet') == 0
    assert capsys.readouterr().err.splitlines() == [
        'fetch: gs://bucket/x/a: the server returned status 503; failure, retrying in 0 s',
        'fetch: gs://bucket/x/a: the server returned status 503; failure 2 in a row, retrying in 0 s',
        'fetch: gs://bucket/x/a: the bucket responds again',
    ]


@pytest.mark.multiprocess
@pytest.mark.parametrize(('number', 'code'), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_run_resumes(gcs, tmp_path, number, code):
    content = os.urandom(5500)
    gcs.put('bucket', 'x/a', content)
    gcs.fault('nothing', times=3)
    held = gcs.fault('hold', times=1)
    arguments = ['--input', 'gs://bucket/x', '--output', str(tmp_path / 'out')]
    command = [sys.executable, '-c', FETCH, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert held.reached.wait(60)
        process.send_signal(number)
        assert process.wait(60) == code
        assert process.stderr.read() == ('interrupted\n' if number == signal.SIGINT else '')
    assert contents(tmp_path / 'out') == {'.a.partial': content[:3000]}
    gcs.requests.clear()
    assert run(*arguments, '--quiet') == 0
    assert contents(tmp_path / 'out') == {'a': content}
    assert [(request.start, request.stop) for request in gcs.asked()] == [(3000, 4000), (4000, 5000), (5000, 5500)]


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        fetch.main(['--help'])
    assert ended.value.code == 0
    assert 'AWS_PROFILE' in capsys.readouterr().out
