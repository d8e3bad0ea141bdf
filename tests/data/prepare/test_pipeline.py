"""Tests the preparation pipeline. Other modules test the individual stages and the command."""

import pytest

from maxlm.data.dataset.records import load_manifest
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.executors.local_executor import InProcess
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.prepare import pipeline
from maxlm.data.prepare.existing_output import remove_leftovers
from maxlm.data.prepare.partitions import ReadSettings, make_partitions
from maxlm.data.prepare.pipeline import ExecutionOptions, PrepareConfig, prepare
from maxlm.data.prepare.scan import Cleaning
from maxlm.data.tokenizer.fim import FimConfig
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer

NOTHING = Cleaning((), 'none', 0.8)


@pytest.fixture
def make(tmp_path):
    """Returns a function that prepares a data set of four texts in `tmp_path / 'data'`."""
    texts, output = tmp_path / 'texts', tmp_path / 'data'
    texts.mkdir()
    output.mkdir()
    for i in range(4):
        (texts / f'{i}.txt').write_text(f'text {i // 2}')

    def make(tokenizer='bytes', cleaning=NOTHING, infill=None):
        reading = ReadSettings(ReadOptions(), skip_bad=False)
        recipe = PrepareConfig(tokenizer, reading, cleaning, 0.0, infill, 16, {'tokenizer': tokenizer})
        with InProcess() as engine:
            means = ExecutionOptions(engine, retries=0, skip_failed=False, show_progress=False)
            return prepare(recipe, make_partitions(find_inputs([texts]), []), output, means)

    return make


def test_only_leftovers_of_this_program_are_removed(make, tmp_path):
    dataset = make(cleaning=Cleaning((), 'exact', 0.8))
    output = tmp_path / 'data'
    assert (output / '.prepare').is_dir()
    for name in ('train-00009.arrayrecord', '.train-00001.arrayrecord.partial', 'notes.txt', '.hidden'):
        (output / name).write_text('x')
    remove_leftovers(dataset, cleaned=True)
    expected = {'dataset.json', 'tokenizer.json', 'cleaning.json', 'train-00000.arrayrecord', 'notes.txt', '.hidden'}
    assert {path.name for path in output.iterdir()} == expected
    # The report of an earlier run with other options does not belong to this data set.
    remove_leftovers(dataset, cleaned=False)
    assert {path.name for path in output.iterdir()} == expected - {'cleaning.json'}
    assert load_manifest(output) == dataset


@pytest.mark.parametrize(
    ('spec', 'kind'), [('bytes', 'bytes'), ('chars', 'chars'), ('bpe:300', 'bpe'), ('{}/tokenizer.json', 'file')]
)
def test_the_manifest_contains_the_kind_of_tokenizer(make, tmp_path, spec, kind):
    bytes_tokenizer().save(tmp_path / 'tokenizer.json')
    assert make(tokenizer=spec.format(tmp_path)).tokenizer == kind


def test_the_tokenizer_is_reused_for_the_same_options(make, monkeypatch):
    first = make()
    calls = []
    make_tokenizer = pipeline.make_tokenizer
    monkeypatch.setattr(
        pipeline, 'make_tokenizer', lambda *args, **options: [calls.append(args), make_tokenizer(*args, **options)][1]
    )
    assert make() == first
    assert calls == []
    assert make(tokenizer='chars').vocab_size != first.vocab_size
    assert len(calls) == 1


def test_infill_adds_tokens_to_the_tokenizer(make):
    assert make(infill=FimConfig()).vocab_size == 260
