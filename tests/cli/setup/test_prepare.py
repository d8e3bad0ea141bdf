"""`maxlm prepare` from the command line to the records, and its errors."""

import json
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from maxlm.data.dataset.records import load_manifest, verify
from maxlm.data.prepare import existing_output, partitions, pipeline
from maxlm.data.prepare.existing_output import locked
from maxlm.data.prepare.write_shards import WriteShards
from maxlm.data.tokenizer.library import encode_batch
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from tests.messages import assert_error_line
from tests.preparing import contents, documents_of, ids_of, run, write_texts


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / 'texts')


@pytest.fixture
def small_partitions(monkeypatch):
    """Splits a few kilobytes into at least ten partitions."""
    monkeypatch.setattr(partitions, 'MIN_GROUP_BYTES', 1000)


@pytest.mark.parametrize('spec', ['bytes', 'chars', 'bpe:300'])
def test_records_contain_all_text(texts, tmp_path, spec, small_partitions):
    arguments = ['--input', texts, '--tokenizer', spec, '--validation-fraction', 0.2, '--workers', 1]
    assert run(*arguments, '--output', tmp_path / 'data') == 0
    dataset = load_manifest(tmp_path / 'data')
    verify(dataset)
    # Line ends are not converted.
    expected = [path.read_bytes().decode() for path in texts.glob('*.txt') if path.stat().st_size]
    expected += [json.loads(line)['text'] for line in (texts / 'web.jsonl').read_text().split('\n') if line]
    train, validation = documents_of(dataset, 'train'), documents_of(dataset, 'validation')
    if spec == 'chars':  # a character that occurs only in validation is unknown
        assert len(train) + len(validation) == len(expected)
        assert set(train) <= set(expected)
    else:
        assert sorted(train + validation) == sorted(expected)
    assert 2 <= len(validation) < len(train)
    for name, found in (('train', train), ('validation', validation)):
        split = dataset.splits[name]
        assert split.documents == len(found)
        assert split.tokens == sum(shard.tokens for shard in split.shards)
        if spec == 'bytes':
            assert split.text_bytes == sum(len(text.encode()) for text in found) == split.tokens - split.documents
            _, counts = np.unique([byte for text in found for byte in text.encode()], return_counts=True)
            p = np.append(counts, split.documents) / split.tokens
            assert split.unigram_entropy == pytest.approx(-(p * np.log(p)).sum())
        assert sum(source.share for source in split.sources.values()) == pytest.approx(1)


@pytest.mark.multiprocess
def test_any_number_of_workers_gives_the_same_bytes(texts, tmp_path, small_partitions):
    arguments = ['--input', texts, '--tokenizer', 'bpe:300']
    assert run(*arguments, '--workers', 1, '--output', tmp_path / 'one') == 0
    assert run(*arguments, '--workers', 2, '--output', tmp_path / 'two') == 0
    expected = contents(tmp_path / 'one')
    assert len([name for name in expected if name.startswith('train-')]) > 3
    assert expected == contents(tmp_path / 'two')
    assert run(*arguments, '--workers', 1, '--block', 64, '--output', tmp_path / 'other') == 0
    assert expected != contents(tmp_path / 'other')


@pytest.mark.parametrize('done', [0, 1, 4])
def test_an_interrupted_run_resumes(texts, tmp_path, small_partitions, monkeypatch, done):
    arguments = ['--input', texts, '--tokenizer', 'bpe:300', '--workers', 1, '--quiet']
    assert run(*arguments, '--output', tmp_path / 'expected') == 0
    written = []
    write = WriteShards.run

    def interrupt_after(task, report):
        if len(written) == done:
            (task.output / '.train-00099.arrayrecord.partial').write_text('half')
            raise KeyboardInterrupt
        written.append(task.partition.number)
        write(task, report)

    monkeypatch.setattr(WriteShards, 'run', interrupt_after)
    assert run(*arguments, '--output', tmp_path / 'data') == 130
    assert not list((tmp_path / 'data').glob('.*.partial'))
    with pytest.raises(InputError, match='contains no data set'):
        load_manifest(tmp_path / 'data')

    def record(task, report):
        written.append(task.partition.number)
        write(task, report)

    monkeypatch.setattr(WriteShards, 'run', record)
    # The tokenizer is trained only once.
    monkeypatch.setattr(pipeline, 'make_tokenizer', lambda *_, **__: pytest.fail('the tokenizer exists'))
    assert run(*arguments, '--output', tmp_path / 'data') == 0
    assert written == list(range(len(written)))  # no shard was written twice
    assert contents(tmp_path / 'data') == contents(tmp_path / 'expected')


def test_an_interrupted_run_of_other_text_is_not_reused(texts, tmp_path, small_partitions, monkeypatch):
    arguments = ['--input', texts, '--tokenizer', 'bytes', '--workers', 1, '--output', tmp_path / 'data']
    monkeypatch.setattr(pipeline, 'assemble', lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(*arguments) == 130
    monkeypatch.undo()
    (texts / '0.txt').write_text('changed')
    assert run(*arguments) == 0
    dataset = load_manifest(tmp_path / 'data')
    assert 'changed' in documents_of(dataset, 'train') + documents_of(dataset, 'validation')
    # With one partition instead of many, the files of the first run are deleted.
    named = {shard.name for split in dataset.splits.values() for shard in split.shards}
    assert set(contents(tmp_path / 'data')) == named | {'dataset.json', 'tokenizer.json'}


def test_a_finished_data_set_is_unchanged(texts, tmp_path, capsys):
    arguments = ['--input', texts, '--output', tmp_path / 'data', '--tokenizer', 'bytes']
    assert run(*arguments) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / 'data').iterdir()}
    capsys.readouterr()
    assert run(*arguments, '--workers', 1) == 0
    assert 'already prepared' in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / 'data').iterdir()} == before
    assert run(*arguments, '--tokenizer', 'chars', '--block', 64) == 2
    error = capsys.readouterr().err
    assert 'tokenizer bytes, not chars' in error
    assert 'block 2048, not 64' in error
    (texts / '0.txt').write_text('changed')
    assert run(*arguments) == 2
    assert 'other input files' in capsys.readouterr().err


def test_validation_paths(texts, tmp_path):
    held_out = tmp_path / 'held_out'
    held_out.mkdir()
    (held_out / 'a.txt').write_text('held out')
    assert run('--input', texts, '--validation', held_out, '--output', tmp_path / 'data', '--tokenizer', 'bytes') == 0
    dataset = load_manifest(tmp_path / 'data')
    assert documents_of(dataset, 'validation') == ['held out']
    assert dataset.splits['train'].documents == 50


def test_skip_bad_records_skips_and_lists(texts, tmp_path, capsys):
    (texts / 'bad.txt').write_bytes(b'\xff')
    (texts / 'web.jsonl').write_text('{"text": "fine"}\n{"text": \n')
    arguments = ['--input', texts, '--output', tmp_path / 'data', '--tokenizer', 'bpe:300']
    assert run(*arguments) == 2
    assert run(*arguments, '--skip-bad-records') == 0
    dataset = load_manifest(tmp_path / 'data')
    assert [entry['name'] for entry in dataset.left_out] == ['bad.txt', 'web.jsonl:2']
    assert 'byte 0 is not UTF-8' in dataset.left_out[0]['reason']
    assert 'skipped: 2' in capsys.readouterr().out
    assert sum(split.documents for split in dataset.splits.values()) == 41


def test_a_text_with_a_tokenizer_panic_is_named_or_skipped(texts, tmp_path, monkeypatch, capsys):
    class PanicException(BaseException):
        """Exception with the name of PyO3's."""

    def encode(text):
        if text == 'bad':
            raise PanicException('index out of bounds')
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    class Library:
        encode_batch_fast = staticmethod(lambda texts, **_: [types.SimpleNamespace(ids=encode(text)) for text in texts])

    monkeypatch.setattr(Tokenizer, '_fast', property(lambda self: None))
    monkeypatch.setattr(Tokenizer, 'encode_batch_by_library', lambda self, texts: encode_batch(Library, texts))
    (texts / '7.txt').write_text('bad')
    arguments = ['--input', texts, '--output', tmp_path / 'data', '--tokenizer', 'bytes', '--workers', 1]
    assert run(*arguments) == 2
    assert_error_line(capsys.readouterr().err, '7.txt: ', 'the tokenizers library panicked: index out of bounds')
    assert run(*arguments, '--skip-bad-records') == 0
    dataset = load_manifest(tmp_path / 'data')
    assert [entry['name'] for entry in dataset.left_out] == ['7.txt']
    assert sum(split.documents for split in dataset.splits.values()) == 49


@pytest.mark.parametrize('count', [1, 2, 3])
def test_one_to_three_documents(tmp_path, capsys, count):
    (tmp_path / 'texts').mkdir()
    for i in range(count):
        (tmp_path / 'texts' / f'{i}.txt').write_text(f'text {i}')
    assert run('--input', tmp_path / 'texts', '--output', tmp_path / 'data', '--tokenizer', 'bytes') == 0
    dataset = load_manifest(tmp_path / 'data')
    assert dataset.splits['validation'].documents == min(count - 1, 1)
    assert dataset.splits['train'].documents == max(count - 1, 1)
    assert ('validation: empty' in capsys.readouterr().out) == (count == 1)


@pytest.mark.parametrize(('count', 'fraction', 'is_rough'), [(46, 0.01, True), (46, 0.4, False)])
def test_a_rough_validation_loss_is_announced(tmp_path, capsys, count, fraction, is_rough):
    (tmp_path / 'texts').mkdir()
    for i in range(count):
        (tmp_path / 'texts' / f'{i}.txt').write_text(f'text {i}')
    arguments = ['--input', tmp_path / 'texts', '--tokenizer', 'bytes', '--validation-fraction', fraction]
    assert run(*arguments, '--output', tmp_path / 'data') == 0
    assert (load_manifest(tmp_path / 'data').splits['validation'].documents < 10) == is_rough
    message = 'fewer than 10 documents, so the validation loss is a rough estimate'
    assert (message in capsys.readouterr().out) == is_rough
    # The user chose these documents.
    (tmp_path / 'held-out.txt').write_text('held out')
    assert run(*arguments[:-2], '--validation', tmp_path / 'held-out.txt', '--output', tmp_path / 'other') == 0
    assert message not in capsys.readouterr().out


LINES = ''.join(f'line {number} of the text\n' for number in range(100))


@pytest.mark.parametrize(
    ('texts', 'share', 'expected'),
    [
        # One long document: its last lines are for validation, about the requested fraction.
        ([LINES], 0.01, LINES[-40:]),
        ([LINES], 0.5, LINES[-1000:]),
        # Few documents: the fraction of all text is taken from the longest one.
        ([LINES, 'short'], 0.01, LINES[-40:]),
        ([LINES] * 10, 0.01, LINES[-200:]),
        # Without lines, the text is split at a space; without spaces, anywhere.
        (['word ' * 100], 0.1, 'word ' * 10),
        (['ü' * 1000], 0.1, 'ü' * 100),
        # Trailing whitespace is no validation text.
        (['word ' * 100 + '\n' * 200], 0.1, 'word ' * 14 + '\n' * 200),
        # No validation split.
        ([LINES], 0.0, None),
        (['one line'], 0.01, None),
    ],
)
def test_few_documents_are_split_within_one(tmp_path, capsys, texts, share, expected):
    (tmp_path / 'texts').mkdir()
    for number, text in enumerate(texts):
        (tmp_path / 'texts' / f'{number}.txt').write_text(text)
    arguments = ['--input', tmp_path / 'texts', '--tokenizer', 'bytes', '--validation-fraction', share]
    assert run(*arguments, '--output', tmp_path / 'data') == 0
    out = capsys.readouterr().out
    dataset = load_manifest(tmp_path / 'data')
    train, validation = documents_of(dataset, 'train'), documents_of(dataset, 'validation')
    if expected is None:
        assert (validation, train) == ([], texts)
        assert 'validation: empty' in out
        assert ('too few to split; add text' in out) == (share > 0)
        return
    assert abs(len(expected.strip()) - share * len(''.join(texts))) <= 32
    assert validation == [expected]
    assert sorted(train) == sorted([texts[0].removesuffix(expected), *texts[1:]])
    assert 'the end of 0.txt, from character' in out
    assert dataset.made_from[pipeline.VALIDATION_NOTE] in out
    # Negative control: with more documents, complete ones are used for validation.
    for number in range(60):
        (tmp_path / 'texts' / f'more {number}.txt').write_text(LINES)
    assert run(*arguments, '--output', tmp_path / 'other') == 0
    assert not {*documents_of(load_manifest(tmp_path / 'other'), 'validation')} - {LINES, *texts}


@pytest.mark.parametrize(('name', 'tokens'), [('x.npz', 500), ('x.bin', 500), ('x.npy', 40)])
def test_a_token_document_is_split(tmp_path, capsys, name, tokens):
    ids = np.arange(tokens, dtype=np.uint16)
    path = tmp_path / name
    {'x.npz': np.savez, 'x.bin': lambda at, array: array.tofile(at), 'x.npy': np.save}[name](path, ids)
    arguments = ['--input', path, '--output', tmp_path / 'data', '--tokenizer', 'ids:512']
    assert run(*arguments, *(['--token-dtype', 'uint16'] if name == 'x.bin' else [])) == 0
    dataset = load_manifest(tmp_path / 'data')
    train, validation = ([part.tolist() for part in ids_of(dataset, split)] for split in ('train', 'validation'))
    if tokens < 64:
        assert (train, validation) == ([ids.tolist()], [])
        assert 'has 40 tokens, too few to split' in capsys.readouterr().out
    else:
        assert (train, validation) == ([ids[:-32].tolist()], [ids[-32:].tolist()])


def test_a_split_document_is_the_same_after_an_interruption(tmp_path, monkeypatch):
    (tmp_path / 'x.txt').write_text(LINES)
    arguments = ['--input', tmp_path / 'x.txt', '--tokenizer', 'bpe:300', '--quiet', '--output']
    assert run(*arguments, tmp_path / 'expected') == 0
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, 'assemble', lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(*arguments, tmp_path / 'data') == 130
    monkeypatch.setattr(pipeline, 'choose_validation', lambda *_: pytest.fail('the choice exists'))
    assert run(*arguments, tmp_path / 'data') == 0
    assert contents(tmp_path / 'data') == contents(tmp_path / 'expected')


BAD = {
    'missing input': (lambda at: None, ['--input', '{}/nothing'], ['/nothing', 'No such file']),
    'empty directory': (lambda at: (at / 'x').mkdir(), ['--input', '{}/x'], ['/x contains no text', '.jsonl']),
    'only empty files': (lambda at: (at / 'x.txt').touch(), ['--input', '{}/x.txt'], ['--input contains no text']),
    'not UTF-8': (lambda at: (at / 'x.txt').write_bytes(b'a\xff'), ['--input', '{}/x.txt'], ['/x.txt', 'byte 1']),
    'dangling link': (
        lambda at: [(at / 'd').mkdir(), (at / 'd' / 'x.txt').symlink_to('nothing')],
        ['--input', '{}/d'],
        ['/d/x.txt', 'No such file'],
    ),
    'bad line': (lambda at: (at / 'x.jsonl').write_text('{"text": "a"}\n{'), ['--input', '{}/x.jsonl'], ['/x.jsonl:2']),
    'no key': (
        lambda at: (at / 'x.jsonl').write_text('{"body": "a"}'),
        ['--input', '{}/x.jsonl'],
        [':1', '--text-field'],
    ),
    'bad tokenizer': (lambda at: None, ['--input', '{}', '--tokenizer', 'bpe:100'], ['bpe:100', '257']),
    'no tokenizer': (lambda at: None, ['--input', '{}', '--tokenizer', 'words'], ['words', 'bpe:N']),
    'bad share': (lambda at: None, ['--input', '{}', '--validation-fraction', '1'], ['--validation-fraction']),
    'text option that is not UTF-8': (
        lambda at: None,
        ['--input', '{}', '--text-field', 'a\udcff'],
        ['--text-field', 'byte 1 of the value is not UTF-8'],
    ),
    'bad limit': (
        lambda at: None,
        ['--input', '{}', '--max-record-mib', '0'],
        ['--max-record-mib=0', 'must be at least 1'],
    ),
    'bad role': (lambda at: None, ['--input', '{}', '--roles', 'human=user'], ['--roles=human=user', 'ROLE=NAME']),
    'validation in the input': (
        lambda at: (at / 'x.txt').write_text('text'),
        ['--input', '{}', '--validation', '{}/x.txt'],
        ['x.txt', '--validation'],
    ),
    'bad workers': (lambda at: None, ['--input', '{}', '--workers', '0'], ['--workers']),
    'bad block': (lambda at: None, ['--input', '{}', '--block', 'x'], ['--block']),
    'abbreviated': (lambda at: None, ['--inp', '{}'], ['--input']),
    'no input': (lambda at: None, [], ['--input']),
    'output is a file': (
        lambda at: [(at / 'x.txt').write_text('text'), (at / 'data').write_text('')],
        ['--input', '{}/x.txt'],
        ['/data', 'directory'],
    ),
    'output below a file': (
        lambda at: (at / 'x.txt').write_text('text'),
        ['--input', '{}/x.txt', '--output', '{}/x.txt/data'],
        ['/x.txt/data', 'Not a directory'],
    ),
    'malformed data set': (
        lambda at: [
            (at / 'x.txt').write_text('t'),
            (at / 'data').mkdir(),
            (at / 'data' / 'dataset.json').write_text('{'),
        ],
        ['--input', '{}/x.txt'],
        ['/data/dataset.json', 'not JSON'],
    ),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_input_is_one_line_and_can_be_corrected(tmp_path, capsys, case):
    make, arguments, parts = BAD[case]
    at = tmp_path / 'at'
    at.mkdir()
    make(at)
    command = ['--output', at / 'data', '--workers', 1, *(a.replace('{}', str(at)) for a in arguments)]
    assert run('--tokenizer', 'bpe:300', *command) == 2
    assert_error_line(capsys.readouterr().err, *parts)
    if not case.startswith(('output', 'malformed')):
        (at / 'good.txt').write_text('good')
        assert run('--input', at / 'good.txt', '--output', at / 'data', '--tokenizer', 'bytes') == 0


@pytest.mark.multiprocess
def test_bad_files_in_worker_processes(texts, tmp_path, capsys, small_partitions):
    (texts / '7.txt').write_bytes(b'\xff')
    # The byte tokenizer needs no training text, so a worker reads the bad file.
    assert run('--input', texts, '--output', tmp_path / 'data', '--tokenizer', 'bytes', '--workers', 2) == 2
    assert_error_line(capsys.readouterr().err, '7.txt: byte 0 is not UTF-8')
    (texts / '7.txt').write_text('repaired')
    assert run('--input', texts, '--output', tmp_path / 'data', '--tokenizer', 'bytes', '--workers', 2) == 0
    assert not [name for name in contents(tmp_path / 'data') if name.startswith(('.', 'group'))]


def test_two_runs_do_not_write_into_one_directory(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(existing_output, 'LOCK_SECONDS', 0.1)
    with locked(tmp_path / 'data'):
        assert run('--input', texts, '--output', tmp_path / 'data', '--tokenizer', 'bytes') == 2
    assert 'another maxlm prepare' in capsys.readouterr().err
    assert run('--input', texts, '--output', tmp_path / 'data', '--tokenizer', 'bytes') == 0


def test_a_run_waits_for_the_workers_of_a_killed_run_to_exit(texts, tmp_path):
    other = locked(tmp_path / 'data')
    other.__enter__()
    release = threading.Timer(0.3, other.__exit__, (None, None, None))
    release.start()
    assert run('--input', texts, '--output', tmp_path / 'data', '--tokenizer', 'bytes') == 0
    release.join()


@pytest.mark.multiprocess
def test_the_command(texts, tmp_path, capfd):
    arguments = ['--input', texts, '--output', tmp_path / 'data']
    command = [sys.executable, '-m', 'maxlm.prepare', *arguments, '--tokenizer', 'bpe:300']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 'train: ' in done.stdout
    assert done.stderr == ''
    capfd.readouterr()
    assert run(*arguments, '--tokenizer', 'bytes') == 2
    assert capfd.readouterr().err.count('\n') == 1
    assert run(*arguments, '--tokenizer', 'bpe:300', '--quiet') == 0
    assert capfd.readouterr() == ('', '')
