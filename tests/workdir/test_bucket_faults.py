"""Buckets that answer with errors, cut or wrong bytes during reads, uploads and restores.

A transient fault is retried. Otherwise the operation ends with one line that names the object. Wrong bytes are never
used, and nothing that is incomplete counts as complete.
"""

import dataclasses
import itertools
import json
import sys

import pytest

from maxlm.data.dataset.remote_manifest import with_checksums
from maxlm.data.dataset.shard_cache import fetch_manifest
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import read_documents, split_file
from maxlm.errors import InputError
from maxlm.storage.bucket import Bucket
from maxlm.storage.download_tree import fetch_tree, list_tree
from maxlm.storage.errors import TransientStorageError
from maxlm.workdir import upload_directory
from maxlm.workdir.bucket_steps import complete_steps, download_step, upload_step
from maxlm.workdir.run_storage import RunStorage
from maxlm.workdir.upload_directory import Upload
from tests.gcs_emulator import WireFault
from tests.shards import write_dataset
from tests.workdir.steps import content, write_step

pytestmark = pytest.mark.network_emulator

URL = 'gs://bucket/runs/one'
LINES = [json.dumps({'text': f'line {number} ' * 5}) for number in range(40)]
STATUSES = (400, 401, 403, 404, 408, 412, 429, 500, 502, 503, 504)
FAULTS = {
    **{str(status): {'status': status} for status in STATUSES},
    **{f'lost {when}': {'drop': when} for when in ('before', 'after')},
    **{answer: {'answer': answer} for answer in ('html', 'redirect', 'truncate', 'short', 'flip', 'drip', 'damage')},
}


class Operation:
    """An operation on a bucket that contains a data set, a step and a text file.

    Attributes:
        run: does it.
        check: asserts that its result is right.
        leftover: asserts that nothing wrong is left after an error.
    """

    def __init__(self, folder, server):
        self.folder, self.server = folder, server

    def leftover(self):
        pass


class PutStep(Operation):
    def run(self):
        folder = write_step(self.folder, 4)
        bucket = Bucket(URL)
        files = {name: bucket.describe(folder / name) for name in content(folder)}
        upload_step(bucket, 4, files, lambda num_bytes: None)

    def check(self):
        self.server.wire_faults.clear()
        assert complete_steps(Bucket(URL)) == [3, 4]
        self.leftover()

    def leftover(self):
        self.server.wire_faults.clear()
        if 4 in complete_steps(Bucket(URL)):
            download_step(Bucket(URL), 4, self.folder / 'back')
            assert content(self.folder / 'back') == content(self.folder / 'checkpoints' / '4')


class GetStep(Operation):
    def run(self):
        download_step(Bucket(URL), 3, self.folder / 'back')

    def check(self):
        assert content(self.folder / 'back') == content(self.folder.parent / 'run' / 'checkpoints' / '3')


class FetchRun(Operation):
    def run(self):
        (self.folder / 'run').mkdir()
        storage = RunStorage(self.folder / 'run', URL)
        storage.fetch(timeout_seconds=0)

    def check(self):
        assert content(self.folder / 'run' / 'checkpoints') == content(self.folder.parent / 'run' / 'checkpoints')
        assert (self.folder / 'run' / 'config.json').read_text() == 'config'

    def leftover(self):
        for name, content_ in content(self.folder / 'run').items():
            if name.startswith('checkpoints/'):
                assert content_ == (self.folder.parent / 'run' / name).read_bytes()


class PutData(Operation):
    def run(self):
        folder = self.folder / 'copy'
        folder.mkdir()
        for path in (self.folder.parent / 'data').iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        upload = Upload(
            '--output', 'gs://bucket/new', cache=str(self.folder / 'cache'), last='dataset.json', folder=folder
        )
        upload.check_new()
        upload.begin()
        upload.finish(show=False)

    def check(self):
        self.leftover(is_complete=True)

    def leftover(self, *, is_complete=False):
        found = {name.removeprefix('new/'): s.content for (_, name), s in self.server.objects.items() if 'new/' in name}
        if is_complete or 'dataset.json' in found:
            assert found == content(self.folder.parent / 'data')


class GetData(Operation):
    def run(self):
        files = list_tree('gs://bucket/data', self.folder / 'data')
        fetch_tree(
            with_checksums(files), threads=2, last='dataset.json', on_alarm=self.alarm, wait=lambda seconds: None
        )

    def alarm(self, line):
        assert '\n' not in line
        if 'failure 8' in line:
            raise InputError(line)

    def check(self):
        assert content(self.folder / 'data') == content(self.folder.parent / 'data')

    def leftover(self):
        if (self.folder / 'data' / 'dataset.json').exists():
            self.check()


class OpenData(Operation):
    def run(self):
        fetch_manifest('gs://bucket/data', self.folder / 'cache', on_warning=print)

    def check(self):
        data = self.folder.parent / 'data'
        for name in ('dataset.json', 'tokenizer.json'):
            assert (self.folder / 'cache' / name).read_bytes() == (data / name).read_bytes()


class ReadTexts(Operation):
    def run(self):
        try:
            self.read()
        except TransientStorageError:
            # `maxlm prepare` repeats such tasks.
            self.read()

    def on_bad(self, name, reason):
        if isinstance(error := sys.exception(), TransientStorageError):
            raise error
        raise InputError(reason)

    def read(self):
        found = find_inputs(['gs://bucket/texts'])
        ranges = [part for file in found for part in split_file(file, 10**9)]
        self.texts = [document.text for part in ranges for document in read_documents(part, ReadOptions(), self.on_bad)]

    def check(self):
        assert self.texts == [json.loads(line)['text'] for line in LINES]


OPERATIONS = {cls.__name__: cls for cls in (PutStep, GetStep, FetchRun, PutData, GetData, OpenData, ReadTexts)}


@pytest.fixture
def served(gcs, tmp_path, monkeypatch):
    """Returns the server with the objects that the operations read; requests are retried without pauses."""
    monkeypatch.setattr(upload_directory, 'TIMEOUT_SECONDS', 0.0)
    folder = write_step(tmp_path / 'run', 3)
    bucket = Bucket(URL)
    upload_step(bucket, 3, {name: bucket.describe(folder / name) for name in content(folder)}, lambda num_bytes: None)
    gcs.put('bucket', 'runs/one/config.json', b'config')
    data = write_dataset(tmp_path / 'data', [['a text', 'another'], ['a third text']], [['the last']]).path
    for path in data.iterdir():
        gcs.put('bucket', f'data/{path.name}', path.read_bytes())
    gcs.put('bucket', 'texts/a.jsonl', '\n'.join(LINES).encode())
    return gcs


def attempt(kind, served, folder, fault):
    """Runs an operation with a fault. Returns '' if it succeeded, or its error message."""
    folder.mkdir()
    objects = dict(served.objects)
    before = served.num_injected
    served.inject(fault)
    operation = OPERATIONS[kind](folder, served)
    try:
        operation.run()
    except InputError as error:
        message = str(error)
        assert 'gs://bucket/' in message, message
        assert len(message) < 1000
        operation.leftover()
    else:
        message = ''
        operation.check()
    served.wire_faults.clear()
    served.objects.clear()
    served.objects.update(objects)
    return message, served.num_injected - before


@pytest.mark.parametrize('kind', ['GetStep', 'OpenData', 'ReadTexts'])
@pytest.mark.parametrize('name', ['403', '503', 'html', 'short', 'flip'])
def test_faults_of_reads(kind, name, served, tmp_path):
    skip = 0 if kind == 'ReadTexts' else 1
    fault = WireFault('alt=media', **FAULTS[name], times=1, skip=skip)
    message, injected = attempt(kind, served, tmp_path / 'one', fault)
    assert injected == 1
    assert bool(message) == (name == '403'), message
    message, injected = attempt(kind, served, tmp_path / 'two', WireFault(**FAULTS[name]))
    assert injected
    assert message


@pytest.mark.parametrize('name', ['429', 'lost after', 'damage'])
def test_faults_of_uploads(name, served, tmp_path):
    for number, kind in enumerate(('PutStep', 'PutData')):
        fault = WireFault('^POST /upload.*', **FAULTS[name], times=1, skip=1)
        message, injected = attempt(kind, served, tmp_path / str(number), fault)
        assert injected == 1
        assert bool(message) == (name == 'damage'), message
        fault = WireFault('^POST /upload.*', **FAULTS[name], skip=1)
        assert attempt(kind, served, tmp_path / f'all{number}', fault)[0]


def test_outdated_listings(served, tmp_path):
    """A listing from before the upload hides the objects, so that the upload is not complete."""
    for number, kind in enumerate(('PutStep', 'PutData')):
        message, _ = attempt(kind, served, tmp_path / str(number), WireFault(r'^GET .*/o\?', answer='stale'))
        assert 'the uploaded content differs from the local file' in message


def test_manifest_with_a_flipped_bit_is_read_again(served, tmp_path):
    """The flipped bit is in a number, so that the manifest remains valid JSON."""
    objects = served.objects
    key = 'bucket', 'data/dataset.json'
    good = objects[key]
    damaged = dataclasses.replace(good, content=good.content.replace(b'"block": 32', b'"block": 33'))
    assert damaged.content != good.content
    # The cached checksums remain those of the original content.
    vars(damaged).update(crc32c=good.crc32c, md5=good.md5)
    objects[key] = damaged
    with pytest.raises(TransientStorageError, match=r'dataset\.json: its md5 differs'):
        fetch_manifest('gs://bucket/data', tmp_path / 'cache', on_warning=print)
    objects[key] = good
    fetch_manifest('gs://bucket/data', tmp_path / 'cache', on_warning=print)


@pytest.mark.nightly
@pytest.mark.parametrize('kind', OPERATIONS)
def test_all_faults_in_all_operations(kind, served, tmp_path):
    schedules = [*((1, skip) for skip in (0, 1, 2, 4, 8)), (10**9, 0), (10**9, 3)]
    for number, (name, (times, skip)) in enumerate(itertools.product(FAULTS, schedules)):
        fault = WireFault(**FAULTS[name], times=times, skip=skip)
        message, injected = attempt(kind, served, tmp_path / str(number), fault)
        assert injected or not message, (name, times, skip)
