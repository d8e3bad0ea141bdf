"""Imports of models of the Hugging Face Hub, read from the cache of its client."""

import huggingface_hub
import pytest

from maxlm.cli.models import hf
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.workdir.files import read_config
from tests.starting import make_start

COMMIT = '0' * 40


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Returns the config of a model `org/small` in a cache without a network, in the layout of the client."""
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.chdir(tmp_path)
    bytes_tokenizer().save(tmp_path / 'tokenizer.json')
    make_start(tmp_path / 'base', tmp_path / 'tokenizer.json')
    assert hf.main(['export', '--checkpoint=base', '--output=model']) == EXIT_DONE
    repository = tmp_path / 'cache/models--org--small'
    snapshot = repository / 'snapshots' / COMMIT
    snapshot.mkdir(parents=True)
    (repository / 'refs').mkdir()
    (repository / 'refs/main').write_text(COMMIT)
    (repository / 'blobs').mkdir()
    for path in (tmp_path / 'model').iterdir():
        blob = repository / 'blobs' / path.name
        path.rename(blob)
        (snapshot / path.name).symlink_to(f'../../blobs/{path.name}')
    return read_config('base')


@pytest.mark.parametrize('name', ['org/small', f'org/small@{COMMIT}'])
def test_a_model_of_the_hub(cached, name):
    assert hf.main(['import', f'--input=hf:{name}', '--output=imported']) == EXIT_DONE
    assert read_config('imported').model.dim == cached.model.dim


def test_a_missing_model(cached, capsys, monkeypatch):
    assert exit_code(hf.main, ['import', '--input=hf:org/large', '--output=imported']) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert '--input=hf:org/large: the model cannot be downloaded' in error
    assert 'local directory' in error
    # Control: only the named files are requested, so weights of other frameworks are not downloaded.
    requested = {}

    def download(model, **options):
        requested.update(options, model=model)
        raise OSError('no network')

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
    assert exit_code(hf.main, ['import', '--input=hf:org/large@v1', '--output=imported']) == EXIT_BAD_INPUT
    assert requested == {
        'model': 'org/large',
        'revision': 'v1',
        'allow_patterns': ['*.json', '*.safetensors', '*.jinja'],
    }
