"""Runs with several sources, with a sequence-length schedule, and with data in a bucket."""

import itertools
import json
import shutil
import threading

import pytest

from maxlm.cli.models import evaluate
from maxlm.cli.setup import prepare
from maxlm.config.schema import DataConfig
from maxlm.data.dataset import shard_cache
from maxlm.data.loader.dataset import open_training_data
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.telemetry.metrics import read_metrics
from maxlm.trainer.batch_source import TextBatches
from maxlm.workdir.files import read_config
from tests.buckets import gcs
from tests.cli.runs.test_train import curve, params_of, run, same
from tests.messages import assert_error_line
from tests.shards import write_dataset

pytestmark = pytest.mark.usefixtures('shared_steps')

NAMES = ('numbers', 'letters')


@pytest.fixture(scope='module')
def datasets(tmp_path_factory):
    """Returns prepared data sets of numbers and of letters; the numbers are few."""
    at = tmp_path_factory.mktemp('datasets')
    texts = {
        'numbers': [f'{i} plus {i} is {2 * i}. ' for i in range(12)],
        'letters': [f'letter {chr(97 + i % 26)} after {chr(97 + (i - 1) % 26)}, {"la " * (i % 7)}' for i in range(400)],
    }
    for name, lines in texts.items():
        (at / name).with_suffix('.jsonl').write_text('\n'.join(json.dumps({'text': line}) for line in lines))
        arguments = ['--input', at / f'{name}.jsonl', '--output', at / name, '--tokenizer', 'bytes', '--workers', 1]
        assert prepare.main([*map(str, arguments), '--validation-fraction', '0.1', '--quiet']) == 0
    return at


def sum_of_sources(line, part):
    """Returns the total loss computed from the losses of the sources."""
    tokens = [line[f'{part}/tokens/{name}'] for name in NAMES]
    losses = [line[f'{part}/loss/{name}'] for name in NAMES]
    return sum(count * loss for count, loss in zip(tokens, losses, strict=True)) / sum(tokens)


def sources(datasets, numbers, letters):
    return f"(('{datasets}/numbers', {numbers}), ('{datasets}/letters', {letters}))"


def test_a_weighted_mixture_is_reported_by_source(datasets, tmp_path, capsys):
    settings = {
        'train__num_steps': 40,
        'eval__interval': 20,
        'optimizer__schedule': 'constant',
        'eval__num_batches': 0,
        'checkpoint__save_interval_steps': 20,
        'checkpoint__max_to_keep': 5,
    }
    mixed = tmp_path / 'mixed'
    assert run('unused', mixed, data__sources=sources(datasets, 0.25, 0.75), **settings) == EXIT_DONE
    output = ''.join(capsys.readouterr())
    assert 'source numbers: share 25.00% requested' in output
    assert 'source numbers is repeated' in output
    assert 'source letters is repeated' not in output
    lines = curve(mixed)
    last = lines[40]
    assert last['data/fraction/numbers'] == pytest.approx(0.25, abs=0.1)
    assert last['data/fraction/numbers'] + last['data/fraction/letters'] == pytest.approx(1)
    assert last['data/epoch/numbers'] > 4 > last['data/epoch/letters']
    assert last['train/loss/numbers'] != last['train/loss/letters']
    low, high = sorted((last['eval/loss/numbers'], last['eval/loss/letters']))
    assert low < last['eval/loss'] < high
    for part in ('train', 'eval'):
        assert sum_of_sources(last, part) == pytest.approx(last[f'{part}/loss'], rel=1e-5)
        # Negative control: swapping the losses of the sources changes the sum.
        other = {**last, **{f'{part}/loss/{a}': last[f'{part}/loss/{b}'] for a, b in (NAMES, NAMES[::-1])}}
        assert sum_of_sources(other, part) != pytest.approx(last[f'{part}/loss'], rel=1e-3)
    # The rare source has a higher loss than in a run where it is most of the data.
    other = tmp_path / 'other'
    assert run('unused', other, data__sources=sources(datasets, 0.9, 0.1), **settings) == EXIT_DONE
    assert curve(other)[40]['eval/loss/letters'] > last['eval/loss/letters']

    # A resumed run is equal. Other weights are refused by name, unless they are forced.
    shutil.rmtree(mixed / 'checkpoints' / '40')
    assert run('unused', mixed, data__sources=sources(datasets, 0.3, 0.75), **settings) == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, 'weight numbers was 0.25 and is 0.3', 'data.allow_dataset_change')
    assert run('unused', mixed, data__sources=sources(datasets, 0.25, 0.75), **settings) == EXIT_DONE
    assert curve(mixed) == lines
    forced = {**settings, 'train__num_steps': 41, 'data__allow_dataset_change': 'true'}
    assert run('unused', mixed, data__sources=sources(datasets, 0.3, 0.75), **forced) == EXIT_DONE
    assert 'resuming with different data' in ''.join(capsys.readouterr())
    assert 41 in curve(mixed)

    assert exit_code(evaluate.main, [f'--checkpoint={mixed}@20', '--json']) == EXIT_DONE
    values = json.loads(capsys.readouterr().out)
    assert values['by_source'] == pytest.approx(
        {name: lines[20][f'eval/loss/{name}'] for name in ('numbers', 'letters')}, rel=1e-4
    )
    assert exit_code(evaluate.main, [f'--checkpoint={mixed}@20', f'--data={datasets}/letters']) == EXIT_DONE
    assert 'bits/byte' in capsys.readouterr().out


def test_weights_that_change_during_a_run(datasets, tmp_path, capsys):
    """Six steps; the weights change after step 3."""
    settings = {
        'train__num_steps': 6,
        'data__sources': sources(datasets, 0.9, 0.1),
        'data__sources_schedule': '(((0, 1), 0.5),)',
        'eval__interval': 0,
        'optimizer__schedule': 'constant',
        'checkpoint__save_interval_steps': 1,
        'checkpoint__max_to_keep': 6,
    }
    uninterrupted = tmp_path / 'uninterrupted'
    assert run('unused', uninterrupted, **settings) == EXIT_DONE
    assert 'source numbers: share 0.00% then 90.00% requested' in capsys.readouterr().out
    lines = curve(uninterrupted)
    assert lines[3]['data/fraction/numbers'] == 0 < 0.3 < lines[6]['data/fraction/numbers']
    assert read_config(uninterrupted).data.sources_schedule == (((0, 1), 0.5),)
    for step in (2, 3, 4):
        resumed = tmp_path / f'from_{step}'
        shutil.copytree(uninterrupted, resumed)
        for later in range(step + 1, 7):
            shutil.rmtree(resumed / 'checkpoints' / str(later))
        assert run('unused', resumed, data__num_workers=step % 2, **settings) == EXIT_DONE
        assert curve(resumed) == lines, step
        assert same(params_of(resumed, 6), params_of(uninterrupted, 6)), step
    # Another length moves the change, and thus the batches.
    assert run('unused', uninterrupted, **{**settings, 'train__num_steps': 8}) == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, 'weights until step 3 was [0, 1] and is None')
    # Negative control: other weights in the first stage give other losses in both stages.
    other = tmp_path / 'other'
    assert run('unused', other, **{**settings, 'data__sources_schedule': '(((1, 1), 0.5),)'}) == EXIT_DONE
    assert all(curve(other)[step]['train/loss'] != lines[step]['train/loss'] for step in (1, 6))


def test_a_run_with_rows_that_begin_at_documents_resumes_exactly(datasets, tmp_path, capsys):
    settings = {
        'train__num_steps': 4,
        'data__rows': 'documents',
        'data__seq_len': 32,
        'data__cache_dir': tmp_path / 'cache',
        'eval__interval': 4,
        'checkpoint__save_interval_steps': 1,
        'checkpoint__max_to_keep': 4,
    }
    uninterrupted, resumed = tmp_path / 'uninterrupted', tmp_path / 'resumed'
    assert run(datasets / 'letters', uninterrupted, **settings) == EXIT_DONE
    assert 'rows with data.rows=documents, ' in capsys.readouterr().out
    lines = curve(uninterrupted)
    shutil.copytree(uninterrupted, resumed)
    for later in (3, 4):
        shutil.rmtree(resumed / 'checkpoints' / str(later))
    # The index is also written again.
    settings['data__cache_dir'] = tmp_path / 'other'
    assert run(datasets / 'letters', resumed, data__num_workers=1, **settings) == EXIT_DONE
    assert curve(resumed) == lines
    assert same(params_of(resumed, 4), params_of(uninterrupted, 4))
    # The step is no position in other rows.
    assert run(datasets / 'letters', resumed, **{**settings, 'data__rows': 'stream'}) == EXIT_BAD_INPUT
    assert "rows was 'documents' and is None" in capsys.readouterr().err


def test_fill_in_the_middle_is_reported(datasets, tmp_path):
    fim = tmp_path / 'fim'
    arguments = ['--input', datasets / 'letters.jsonl', '--output', fim, '--tokenizer', 'bytes', '--workers', 1]
    assert prepare.main([*map(str, arguments), '--fim-rate', '0.5', '--quiet']) == 0
    settings = {'train__num_steps': 2, 'eval__interval': 0, 'data__seq_len': 64}
    assert run(fim, tmp_path / 'run', **settings) == EXIT_DONE
    # Documents are shorter than the sequences, so few of them are cut.
    for step in (1, 2):
        assert 0.3 < curve(tmp_path / 'run')[step]['data/fim_fraction'] < 0.7
    # Rows that begin at documents begin with an end-of-document token, which is no document.
    data = DataConfig(path=str(fim), seq_len=64, rows='documents', cache_dir=str(tmp_path))
    rows = open_training_data(data)
    batch, is_reordered = rows.train_batches(8)[0], []
    end, fim_ids = rows.first.end_of_document, set(rows.first.load_tokenizer().infill_ids)
    for tokens, segments in zip(batch['tokens'].tolist(), batch['segments'].tolist(), strict=True):
        assert tokens[0] == end
        for segment in range(2, max(segments) + 1):
            document = {token for token, number in zip(tokens, segments, strict=True) if number == segment}
            is_reordered.append(not fim_ids.isdisjoint(document))
    assert 0 < sum(is_reordered) < len(is_reordered)
    fraction = sum(is_reordered) / len(is_reordered)
    assert TextBatches(rows).batch_metrics(batch)['data/fim_fraction'] == fraction
    # Other data has no such metric.
    plain = open_training_data(DataConfig(path=str(datasets / 'letters'), seq_len=64))
    assert TextBatches(plain).batch_metrics(plain.train_batches(8)[0]).keys() == {'data/document_length'}


def test_bad_sources_are_refused_in_one_line(datasets, tmp_path, capsys):
    for value, part in {
        "(('a', 0),)": 'greater than 0',
        "(('nowhere', 1),)": 'nowhere contains no data set',
        f"(('{datasets}/numbers#words', 1),)": "no source 'words'",
    }.items():
        assert run('unused', tmp_path / 'run', data__sources=value) == EXIT_BAD_INPUT
        assert_error_line(capsys.readouterr().err, part)
    other = tmp_path / 'other'
    arguments = ['--input', datasets / 'numbers.jsonl', '--output', other, '--tokenizer', 'chars', '--quiet']
    assert prepare.main([*map(str, arguments)]) == 0
    mixed = f"(('{datasets}/numbers', 1), ('{other}', 1))"
    assert run('unused', tmp_path / 'run', data__sources=mixed) == EXIT_BAD_INPUT
    assert 'different tokenizers' in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()


SCHEDULE = '((4, 0.3), (8, 0.7))'


@pytest.mark.nightly
def test_sequence_length_schedule(dataset, tmp_path, capsys):
    """Ten steps with 16 tokens per row; the first 3 steps have 4 tokens and the next 4 have 8."""
    settings = {'train__num_steps': 10, 'checkpoint__save_interval_steps': 1, 'checkpoint__max_to_keep': 10}
    uninterrupted = tmp_path / 'uninterrupted'
    assert run(dataset, uninterrupted, data__seq_len_schedule=SCHEDULE, **settings) == EXIT_DONE
    output = capsys.readouterr().out
    assert 'step       4  the sequence length is now 8 tokens' in output
    assert 'step       8  the sequence length is now 16 tokens' in output
    lines = curve(uninterrupted)
    assert [lines[step]['data/seq_len'] for step in (3, 4, 7, 8, 10)] == [4, 8, 8, 16, 16]
    tokens = [lines[step]['train/tokens'] for step in range(1, 11)]
    assert [b - a for a, b in itertools.pairwise(tokens)] == [tokens[0]] * 9
    # The counted operations of a step increase with the sequence length.
    metrics = [line for line in read_metrics(uninterrupted) if 'perf/mfu' in line]
    flops = [line['perf/mfu'] * line['perf/step_time_seconds'] for line in metrics]
    assert flops[2] < flops[3] < flops[7]
    assert flops[0] == pytest.approx(flops[2], rel=1e-6)
    # Resumes at and after a change of the length.
    settings['checkpoint__save_interval_steps'] = 0
    for step in (3, 4):
        resumed = tmp_path / f'from_{step}'
        shutil.copytree(uninterrupted, resumed)
        for later in range(step + 1, 11):
            shutil.rmtree(resumed / 'checkpoints' / str(later))
        assert run(dataset, resumed, data__seq_len_schedule=SCHEDULE, **settings) == EXIT_DONE
        assert curve(resumed) == lines, step
        assert same(params_of(resumed, 10), params_of(uninterrupted, 10)), step
    plain = tmp_path / 'plain'
    assert run(dataset, plain, train__num_steps=10) == EXIT_DONE
    # Negative control: short sequences give another result on the same tokens.
    assert curve(plain)[1]['train/tokens'] == tokens[0]
    assert curve(plain)[1]['train/loss'] != lines[1]['train/loss']
    assert curve(plain)[10]['train/loss'] != lines[10]['train/loss']


@pytest.fixture(scope='module')
def bucket(tmp_path_factory):
    """Returns ten training shards and one validation shard at a URL."""
    texts = [[f'shard {shard}, text {i}: ' + 'abc ' * (shard + i) for i in range(8)] for shard in range(10)]
    return write_dataset(tmp_path_factory.mktemp('bucket') / 'data', texts, [['held out: ' + 'abc ' * 9]])


def cached(cache):
    return {path.name: path.stat().st_size for path in cache.rglob('*.arrayrecord')}


@pytest.mark.parametrize('workers', [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_training_from_a_bucket_equals_that_from_a_directory(bucket, tmp_path, capsys, workers):
    settings = {'data__shuffle_shards': 2, 'checkpoint__save_interval_steps': 10}
    local_run = tmp_path / 'local'
    assert run(bucket.path, local_run, **settings) == EXIT_DONE
    sizes = {shard.name: shard.bytes for split in bucket.splits.values() for shard in split.shards}
    largest = max(sizes.values())
    # The limit suffices for the validation shard and two pools of two shards, but not for all shards.
    gib = (sizes['validation-00000.arrayrecord'] + 5 * largest) / 2**30
    assert gib * 2**30 < sum(sizes.values())
    cache = tmp_path / 'cache'
    remote = {
        **settings,
        'data__num_workers': workers,
        'data__cache_dir': cache,
        'data__cache_limit_gib': gib,
        'data__download_threads': 2,
    }
    remote_run = tmp_path / 'remote'
    url = f'file://{bucket.path}'
    assert run(url, remote_run, **remote) == EXIT_DONE
    assert curve(remote_run) == curve(local_run)
    assert 'validation-00000.arrayrecord' in cached(cache)
    assert sum(cached(cache).values()) <= gib * 2**30
    if workers:
        # The following part does not depend on reader processes.
        return
    # Resuming needs shards that have been evicted.
    shutil.rmtree(remote_run / 'checkpoints' / '20')
    assert run(url, remote_run, **remote) == EXIT_DONE
    assert curve(remote_run) == curve(local_run)
    # Negative control: pools change the order.
    plain = tmp_path / 'plain'
    assert run(bucket.path, plain) == EXIT_DONE
    assert curve(plain)[1]['train/loss'] != curve(local_run)[1]['train/loss']
    capsys.readouterr()
    assert run(url, tmp_path / 'small', **{**remote, 'data__cache_limit_gib': largest / 2**30}) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert 'data.cache_limit_gib' in error
    assert 'too small' in error
    assert run(f'{url}x', tmp_path / 'none', **remote) == EXIT_BAD_INPUT
    assert 'datax' in capsys.readouterr().err


def test_evaluation_on_data_in_a_bucket(bucket, tmp_path, capsys):
    workdir = tmp_path / 'run'
    settings = {
        'train__num_steps': 2,
        'eval__interval': 2,
        'eval__num_batches': 0,
        'data__cache_dir': tmp_path / 'cache',
    }
    assert run(f'file://{bucket.path}', workdir, **settings) == EXIT_DONE
    shutil.rmtree(tmp_path / 'cache')
    capsys.readouterr()
    assert exit_code(evaluate.main, [f'--checkpoint={workdir}', '--json']) == EXIT_DONE
    values = json.loads(capsys.readouterr().out)
    assert values['loss'] == pytest.approx(curve(workdir)[2]['eval/loss'], rel=1e-4)
    assert set(cached(tmp_path / 'cache')) == {'validation-00000.arrayrecord'}


def test_training_continues_during_a_bucket_outage(bucket, tmp_path, capsys, monkeypatch):
    """The server is down after two pools are downloaded, and returns after training has requested a third."""
    settings = {'data__shuffle_shards': 2, 'data__prefetch_buffer_size': 1, 'data__num_threads': 1, 'eval__interval': 0}
    local_run = tmp_path / 'local'
    assert run(bucket.path, local_run, **settings) == EXIT_DONE
    with gcs.running(monkeypatch) as server:
        for path in bucket.path.iterdir():
            server.put('bucket', f'corpus/{path.name}', path.read_bytes())
        fetch_one = shard_cache.fetch_patiently
        fetched = []

        def fetch_and_stop(file, *arguments, **options):
            fetched.append(file.path.name)
            if len(fetched) == 5:
                server.vanish()
                # The server recovers after the alert.
                threading.Timer(0.5, server.appear).start()
            return fetch_one(file, *arguments, **options)

        monkeypatch.setattr(shard_cache, 'fetch_patiently', fetch_and_stop)
        remote = {**settings, 'data__cache_dir': tmp_path / 'cache', 'data__download_threads': 1}
        remote_run = tmp_path / 'remote'
        assert run('gs://bucket/corpus', remote_run, **remote) == EXIT_DONE
    assert curve(remote_run) == curve(local_run)
    output = ''.join(capsys.readouterr())
    assert 'no answer' in output
    assert 'the bucket responds again' in output
    assert len(fetched) > 5
