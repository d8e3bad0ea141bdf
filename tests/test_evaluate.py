"""`maxlm.evaluate` on a run of a few steps: the run's own numbers, on any number of devices."""

import json
import math

import jax
import pytest

from maxlm import evaluate, prepare, train
from maxlm.data.records import load_manifest
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.runtime.metrics import read_metrics
from tests.test_train import arguments


@pytest.fixture(scope='module')
def workdir(dataset, tmp_path_factory, compile_once):
    workdir = tmp_path_factory.mktemp('evaluate') / 'run'
    # The whole validation split, at both checkpoints.
    settings = {
        'train__num_steps': 20,
        'checkpoint__every_steps': 10,
        'eval__every': 10,
        'eval__num_batches': 0,
        'train__global_batch': 16,
        'train__micro_batch': 1,
        'optimizer__learning_rate': 1e-2,
    }
    assert train.main(arguments(dataset, workdir, **settings)) == EXIT_DONE
    return workdir


@pytest.fixture
def run(workdir, capfd):
    """Exit code, stdout and stderr of the verb."""

    def run(*options, checkpoint=workdir):
        capfd.readouterr()
        code = exit_code(evaluate.main, [f'--checkpoint={checkpoint}', *options])
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def measure(run):
    """What `--json` prints."""

    def measure(*options, **given):
        code, out, err = run('--json', *options, **given)
        assert (code, err) == (EXIT_DONE, '')
        assert out.count('\n') == 1
        return json.loads(out)

    return measure


def losses_of_the_run(workdir):
    return {line['step']: line['eval/loss'] for line in read_metrics(workdir) if 'eval/loss' in line}


def test_the_loss_is_the_one_that_training_measured(measure, workdir):
    losses = losses_of_the_run(workdir)
    assert sorted(losses) == [10, 20]
    assert measure()['loss'] == pytest.approx(losses[20], rel=1e-5)
    assert measure(checkpoint=f'{workdir}@10')['loss'] == pytest.approx(losses[10], rel=1e-5)
    # Control: the tolerance tells the two steps apart.
    assert losses[10] != pytest.approx(losses[20], rel=1e-3)


@pytest.mark.parametrize('num_devices', [1, 4])
def test_the_number_of_devices_does_not_matter(measure, workdir, monkeypatch, num_devices):
    monkeypatch.setattr(jax, 'device_count', lambda: num_devices)
    values = measure()
    assert values['loss'] == pytest.approx(losses_of_the_run(workdir)[20], rel=1e-5)


def test_fields(measure, dataset):
    values = measure()
    split = load_manifest(dataset).splits['validation']
    assert set(values) == {'step', 'loss', 'perplexity', 'bits_per_byte', 'unigram_entropy', 'tokens'}
    assert values['step'] == 20
    assert values['perplexity'] == pytest.approx(math.exp(values['loss']))
    assert values['unigram_entropy'] == split.unigram_entropy
    # All are predicted but the first of each window, document or shard; with 16 positions a window, nearly all.
    assert 0.85 * split.tokens < values['tokens'] < split.tokens
    # Nats per token → bits per token → bits per byte. With the bytes tokenizer, a token is a byte or an end.
    assert values['bits_per_byte'] == pytest.approx(
        values['loss'] / math.log(2) * (split.text_bytes + split.documents) / split.text_bytes
    )


def test_a_part_of_the_split(measure):
    whole, part = measure(), measure('--num_batches=1')
    assert part['tokens'] < whole['tokens']
    assert part['tokens'] <= 8 * 16
    assert part['loss'] != whole['loss']
    assert measure('--num_batches=100000') == whole


def test_lines_for_people(run, measure):
    code, out, err = run()
    assert (code, err) == (EXIT_DONE, '')
    assert out.startswith(f'step 20: loss {measure()["loss"]:.4f} nats/token')
    assert 'bits/byte' in out


def prepared(folder, text, *options):
    (folder / 'text').mkdir()
    for number in range(4):
        (folder / 'text' / f'{number}.txt').write_text(text * (number + 1))
    command = ['--input', str(folder / 'text'), '--output', str(folder / 'data'), '--workers', '1', '--quiet']
    assert prepare.main([*command, *options]) == 0
    return folder / 'data'


def test_other_data(measure, tmp_path):
    data = prepared(tmp_path, 'Everyone may do as they like. ', '--tokenizer', 'bytes')
    other = measure(f'--data={data}')
    assert other['unigram_entropy'] == load_manifest(data).splits['validation'].unigram_entropy
    assert other['loss'] != measure()['loss']


def test_the_same_tokenizer_written_in_another_way(measure, tmp_path):
    data = prepared(tmp_path, 'Everyone may do as they like. ', '--tokenizer', 'bytes')
    before = measure(f'--data={data}')
    tokenizer = data / 'tokenizer.json'
    text = json.dumps(json.loads(tokenizer.read_text()))
    assert text != tokenizer.read_text()
    tokenizer.write_text(text)
    assert measure(f'--data={data}') == before


def refused(run, *options, **given):
    code, out, err = run(*options, **given)
    assert (code, out) == (EXIT_BAD_INPUT, '')
    assert err.startswith('error: ')
    assert err.count('\n') == 1
    return err


def test_another_tokenizer_is_refused(run, tmp_path, workdir):
    data = prepared(tmp_path, 'Everyone may do as they like. ', '--tokenizer', 'chars')
    err = refused(run, f'--data={data}')
    assert str(data / 'tokenizer.json') in err
    assert f'--tokenizer {workdir / "tokenizer.json"}' in err


def test_what_is_not_there_is_named(run, tmp_path, workdir):
    assert f'no checkpoint in {tmp_path}' in refused(run, checkpoint=tmp_path)
    assert 'steps: 10, 20' in refused(run, checkpoint=f'{workdir}@15')
    assert str(tmp_path / 'nothing') in refused(run, f'--data={tmp_path / "nothing"}')


def test_a_negative_number_of_batches_is_refused(run):
    assert 'num_batches' in refused(run, '--num_batches=-1')
