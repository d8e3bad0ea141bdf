"""Data sets and exported models in buckets: files equal those in a directory; the marker file is uploaded last."""

import hashlib
import json

import pytest

from maxlm.cli.models import hf
from maxlm.cli.setup import prepare
from maxlm.data.dataset.manifest_files import MANIFEST_NAME
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.storage.bucket import Bucket
from maxlm.workdir import upload_directory as uploads
from tests.huggingface.workdirs import MODELS, make_workdir
from tests.messages import assert_error_line


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(uploads, 'TIMEOUT_SECONDS', 0.0)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def texts(tmp_path):
    (tmp_path / 'texts').mkdir()
    for number in range(30):
        (tmp_path / 'texts' / f'{number}.txt').write_text(f'text of number {number}')
    return tmp_path / 'texts'


def make(texts, output, *more):
    words = ['--input', texts, '--output', output, '--tokenizer=bytes', '--workers=1', '--cache=cache', *more]
    return exit_code(prepare.main, [str(word) for word in words])


def local_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def remote_files(server, prefix):
    return {name.removeprefix(prefix): stored.content for (_, name), stored in server.objects.items()}


def written(server):
    """Returns the names of uploaded objects in order, including repeated uploads."""
    return [request.name for request in server.asked('upload')]


def test_a_data_set_in_gcs_equals_one_in_a_directory(gcs, texts, tmp_path, capsys):
    assert make(texts, 'local', '--filter=gopher_repetition') == EXIT_DONE
    assert make(texts, 'gs://bucket/some/data', '--filter=gopher_repetition') == EXIT_DONE
    assert 'wrote gs://bucket/some/data: vocabulary' in capsys.readouterr().out
    assert remote_files(gcs, 'some/data/') == local_files(tmp_path / 'local')
    assert written(gcs)[-1] == f'some/data/{MANIFEST_NAME}'
    # The copy in the cache is deleted, and there are no other files.
    assert sorted(path.name for path in tmp_path.iterdir()) == ['cache', 'local', 'texts']
    assert not list((tmp_path / 'cache' / 'uploads').iterdir())


def test_a_data_set_in_s3_equals_one_in_a_directory(s3, texts, tmp_path):
    assert make(texts, 'local') == EXIT_DONE
    assert make(texts, 's3://bucket/data') == EXIT_DONE
    names = [entry['Key'] for entry in s3.list_objects_v2(Bucket='bucket')['Contents']]
    contents = {name: s3.get_object(Bucket='bucket', Key=name)['Body'].read() for name in names}
    assert contents == {f'data/{name}': content for name, content in local_files(tmp_path / 'local').items()}


def test_an_existing_data_set_is_not_prepared_again(gcs, texts, capsys):
    assert make(texts, 'gs://bucket/data') == EXIT_DONE
    before = written(gcs)
    assert make(texts, 'gs://bucket/data/') == EXIT_DONE
    assert 'gs://bucket/data/ is already prepared from these inputs' in capsys.readouterr().out
    assert make(texts, 'gs://bucket/data', '--block=7') == EXIT_BAD_INPUT
    assert_error_line(
        capsys.readouterr().err,
        'gs://bucket/data contains a data set made from block 2048, not 7; choose another --output',
    )
    assert written(gcs) == before


def test_an_interrupted_upload_resumes(gcs, texts, tmp_path, capsys):
    gcs.fault(403, 'data/validation*', requests='upload')
    assert make(texts, 'gs://bucket/data') == EXIT_BAD_INPUT
    assert capsys.readouterr().err.count('\n') == 1
    assert f'data/{MANIFEST_NAME}' not in {name for _, name in gcs.objects}
    assert 'data/tokenizer.json' in {name for _, name in gcs.objects}
    gcs.faults.clear()
    uploaded, before = {name for _, name in gcs.objects}, len(written(gcs))
    assert make(texts, 'gs://bucket/data') == EXIT_DONE
    # Completed uploads, including concurrent ones, are not repeated.
    assert {name for _, name in gcs.objects} == uploaded | set(written(gcs)[before:])
    assert not uploaded & set(written(gcs)[before:])
    assert make(texts, 'local') == EXIT_DONE
    assert remote_files(gcs, 'data/') == local_files(tmp_path / 'local')


def test_other_inputs_after_an_interrupted_upload(gcs, texts, tmp_path):
    gcs.fault(403, f'data/{MANIFEST_NAME}', requests='upload')
    assert make(texts, 'gs://bucket/data') == EXIT_BAD_INPUT
    gcs.faults.clear()
    assert make(texts, 'gs://bucket/data', '--block=7') == EXIT_DONE
    assert make(texts, 'local', '--block=7') == EXIT_DONE
    assert remote_files(gcs, 'data/') == local_files(tmp_path / 'local')


def test_a_damaged_upload_is_not_committed(gcs, texts, monkeypatch, capsys):
    put_file = Bucket.put_file

    def damage(self, name, path, on_bytes):
        put_file(self, name, path, on_bytes)
        if name.startswith('train'):
            gcs.put('bucket', f'data/{name}', bytes(path.stat().st_size))

    monkeypatch.setattr(Bucket, 'put_file', damage)
    assert make(texts, 'gs://bucket/data') == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert 'the uploaded content differs from the local file' in error
    assert 'run the same command again' in error
    assert f'data/{MANIFEST_NAME}' not in {name for _, name in gcs.objects}


def test_without_a_checksum_of_the_bucket_files_are_read_back(s3, tmp_path, monkeypatch):
    monkeypatch.setattr('maxlm.storage.bucket.PART_BYTES', 10)
    bucket = Bucket('s3://bucket/x')
    bucket.put('file', b'0123456789' * 3 + b'end')
    assert bucket.sha256('file', 33) == hashlib.sha256(b'0123456789' * 3 + b'end').hexdigest()
    assert bucket.sha256('file', 32) != hashlib.sha256(b'0123456789' * 3 + b'end').hexdigest()


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('made') / 'run'
    make_workdir(workdir, MODELS['llama'], step=7)
    return workdir


def export(workdir, output):
    return exit_code(hf.main, ['export', f'--checkpoint={workdir}', f'--output={output}', '--cache=cache'])


def test_a_model_in_gcs_equals_one_in_a_directory(gcs, workdir, tmp_path, capsys):
    assert export(workdir, 'model') == EXIT_DONE
    gcs.fault(403, 'some/model/model*.safetensors', requests='upload')
    assert export(workdir, 'gs://bucket/some/model') == EXIT_BAD_INPUT
    assert 'some/model/config.json' not in {name for _, name in gcs.objects}
    gcs.faults.clear()
    capsys.readouterr()
    assert export(workdir, 'gs://bucket/some/model') == EXIT_DONE
    assert 'gs://bucket/some/model: LlamaForCausalLM of' in capsys.readouterr().out
    assert remote_files(gcs, 'some/model/') == local_files(tmp_path / 'model')
    assert written(gcs)[-1] == 'some/model/config.json'
    assert export(workdir, 'gs://bucket/some/model') == EXIT_BAD_INPUT
    assert 'already exists' in capsys.readouterr().err
    # The export is refused if the prefix contains other objects.
    gcs.put('bucket', 'mine/notes.txt', b'x')
    assert export(workdir, 'gs://bucket/mine') == EXIT_BAD_INPUT
    assert sorted(path.name for path in tmp_path.iterdir()) == ['cache', 'model']


def test_a_model_in_s3_equals_one_in_a_directory(s3, workdir, tmp_path):
    assert export(workdir, 's3://bucket/model') == EXIT_DONE
    config = json.loads(s3.get_object(Bucket='bucket', Key='model/config.json')['Body'].read())
    assert config['model_type'] == 'llama'
