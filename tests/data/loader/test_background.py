"""Tests the preparation of Hugging Face data sets in the background of a run."""

import signal
import subprocess

import pytest

from maxlm.config.schema import DataConfig
from maxlm.data.dataset.records import load_manifest
from maxlm.data.formats import hf_datasets
from maxlm.data.loader import background
from maxlm.data.loader.background import background_preparation, hub_entries
from maxlm.data.loader.dataset import open_training_data
from maxlm.data.loader.source import hub_directory, source_name
from maxlm.errors import InputError
from tests.preparing import contents, run
from tests.waiting import until


@pytest.fixture
def config(tmp_path):
    """Returns the config of a data set of the hub that is in a local directory."""
    datasets = pytest.importorskip('datasets', reason='the extra hub')
    texts = [' '.join(str(number) for number in range(place, place + 80)) for place in range(40)]
    datasets.Dataset.from_dict({'text': texts}).to_json(tmp_path / 'corpus' / 'train-00000-of-00001.jsonl')
    return DataConfig(
        path=f'hf:{tmp_path}/corpus', tokenizer='bytes', cache_dir=str(tmp_path / 'cache'), seq_len=16, shuffle_shards=2
    )


@pytest.mark.multiprocess
def test_the_data_equal_those_of_prepare(config, tmp_path, monkeypatch):
    directory = hub_directory(config.path, config)
    with pytest.raises(InputError, match=rf'{config.path} is not prepared: {directory} contains no data set; train'):
        open_training_data(config)
    with background_preparation(config):
        assert open_training_data(config).first.is_streamed
        until(lambda: (directory / 'dataset.json').exists() and not (directory / '.preparing').exists())
    options = ['--tokenizer', 'bytes', '--stream', '--quiet']
    assert run('--input', config.path, '--output', tmp_path / 'expected', *options) == 0
    assert contents(directory) == {**contents(tmp_path / 'expected'), 'hub.txt': f'{config.path}\n'.encode()}
    # A complete data set starts no process.
    monkeypatch.setattr(subprocess, 'Popen', None)
    with background_preparation(config):
        assert open_training_data(config).first == load_manifest(directory)


def prepare_and_open(config):
    with background_preparation(config):
        open_training_data(config)


@pytest.mark.multiprocess
def test_a_preparation_that_cannot_start_is_reported(config, tmp_path):
    (tmp_path / 'corpus' / 'train-00000-of-00001.jsonl').write_text('{"content": "no text"}\n')
    # Depending on the time of the failure, the message contains the directory instead of the name.
    with pytest.raises(InputError, match=r"the preparation of \S*corpus\S* failed: .*no column 'text'"):
        prepare_and_open(config)


@pytest.mark.multiprocess
def test_the_process_ends_with_the_run(config, tmp_path, monkeypatch):
    slow = background._PREPARE.replace("runpy.run_module('maxlm.prepare', run_name='__main__', alter_sys=True)", 'WAIT')
    assert slow != background._PREPARE
    started = tmp_path / 'started'
    wait = f"open({str(started)!r}, 'w').close(); import time; time.sleep(60)"
    monkeypatch.setattr(background, '_PREPARE', slow.replace('WAIT', wait))
    with background._process(config.path, hub_directory(config.path, config), 'bytes') as process:
        until(started.exists)
        assert process.poll() is None
    assert process.returncode == -signal.SIGINT


def test_the_commit_is_resolved_once(tmp_path, monkeypatch):
    commits = iter('ab')
    monkeypatch.setattr(hf_datasets, 'pin', lambda given: f'{given}@{next(commits)}')
    found = [background._pinned('hf:org/name', tmp_path / name) for name in ('first', 'first', 'second')]
    assert found == ['hf:org/name@a', 'hf:org/name@a', 'hf:org/name@b']


def test_entries_of_the_hub():
    sources = (('data/web', 1), ('hf:org/code#train', 2))
    assert hub_entries(DataConfig(sources=sources, tokenizer='bytes')) == ['hf:org/code#train']
    assert hub_entries(DataConfig(path='data/web')) == []
    with pytest.raises(InputError, match=r"data\.tokenizer='': hf:org/code#train is prepared during the run and needs"):
        hub_entries(DataConfig(sources=sources))
    names = [source_name(entry) for entry in ('hf:org/code:all@main#train', 'data/web', 'data/web#books', 'gs://b/c/')]
    assert names == ['code', 'web', 'books', 'c']
    directories = {hub_directory('hf:org/code', DataConfig(tokenizer=name)) for name in ('bytes', 'bpe:300')}
    assert len(directories) == 2
