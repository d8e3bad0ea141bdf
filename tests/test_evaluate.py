"""`maxlm.evaluate` on a run of a few steps: the run's own numbers, on any number of devices."""

import json
import math
import sys

import jax
import pytest

from maxlm import evaluate, prepare, train
from maxlm.data.records import load_manifest
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.evaluation import assessment
from maxlm.inference.likelihood import Likelihood, Scorer
from maxlm.runtime.metrics import read_metrics
from tests.evaluation.engines import RecitingEngine
from tests.evaluation.harness_tasks import documents, write_tasks
from tests.test_train import arguments


@pytest.fixture(scope='module')
def workdir(dataset, tmp_path_factory):
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


def test_confidence_and_positions_are_told(run, measure):
    _, out, _ = run()
    _, confidence, positions = out.splitlines()
    low, high = (float(part) for part in confidence.removeprefix('  95 % confidence: loss ').split(' to '))
    assert low < measure()['loss'] < high
    assert positions.startswith('  by tokens seen, from: 1: ')
    assert ' 32: ' not in positions
    assert ' 16: ' in positions


def test_several_checkpoints_in_one_table(measure, run, workdir, tmp_path):
    other = f'--checkpoint={workdir}@10'
    values = measure(other, f'--output={tmp_path / "out"}')
    last, first = values['checkpoints']
    assert (last['name'], first['name']) == ('run@20', 'run@10')
    assert last['loss'] == measure()['loss']
    loss, *_ = values['table']
    assert loss['name'] == 'loss'
    assert loss['checkpoints'][1]['difference'] == pytest.approx(first['loss'] - last['loss'])
    # Of the same windows the difference is known better than either.
    (low, high), (lower, higher) = loss['checkpoints'][1]['difference_interval'], last['loss_interval']
    assert 0 < low < high
    assert high - low < higher - lower
    assert json.loads((tmp_path / 'out/evaluation.json').read_text()) == values
    _, table, _ = run(other)
    assert (tmp_path / 'out/table.txt').read_text() == table
    assert table.splitlines()[1].split()[:2] == ['loss', f'{last["loss"]:.4f}']
    assert (tmp_path / 'out/positions.png').stat().st_size > 5000


def test_hidden_facts(run, measure, tmp_path, workdir, monkeypatch):
    # Its context is 16 tokens: too few for any fact.
    assert '--needle_lengths: 512 is beyond the context of the model, 16' in refused(
        run, '--tasks=needle', '--needle_lengths=512'
    )
    monkeypatch.setattr(Scorer, 'max_length', property(lambda self: 300, lambda self, value: None), raising=False)
    monkeypatch.setattr(Scorer, 'score', lambda self, spans, show: [Likelihood(-1.0, True) for _ in spans])
    values = measure('--tasks=needle', '--needle_trials=1', f'--output={tmp_path}')
    (one,) = values['checkpoints']
    # Which number it is this model cannot tell.
    assert one['tasks']['needle/256/choice']['value'] == 0
    assert set(one['tasks']) == {f'needle/{n}/{kind}' for n in (256, 300) for kind in ('choice', 'retrieved')}
    # The loss was not asked for.
    assert 'loss' not in one
    assert (tmp_path / 'run@20/needle_20.png').stat().st_size > 5000


def test_programs(run, measure, tmp_path, monkeypatch):
    prompt = 'def one():\n'
    problem = {'task_id': 'x', 'prompt': prompt, 'entry_point': 'one', 'test': 'def check(f):\n    assert f() == 1\n'}
    (tmp_path / 'p.jsonl').write_text(json.dumps(problem))
    answers = {prompt: ['    return 1', '    return 2']}
    monkeypatch.setattr(assessment, 'Engine', lambda model, **_: RecitingEngine(model.tokenizer, answers))
    values = measure(f'--tasks=humaneval:{tmp_path / "p.jsonl"}', '--samples=10', f'--output={tmp_path / "out"}')
    (one,) = values['checkpoints']
    assert {name: part['value'] for name, part in one['tasks'].items()} == {
        'humaneval/pass@1': 0.5,
        'humaneval/pass@10': 1.0,
    }
    lines = (tmp_path / 'out/run@20/samples_humaneval_20.jsonl').read_text().splitlines()
    assert [json.loads(line)['passed'] for line in lines] == [True, False] * 5
    # Of a run on texts.
    tasks = f'--tasks=humaneval:{tmp_path / "p.jsonl"}'
    assert 'the checkpoint has no chat template' in refused(run, tasks, '--apply_chat_template')


def test_benchmarks_and_the_loss_in_one_table(run, measure, dataset, tmp_path):
    pytest.importorskip('lm_eval')
    tasks = write_tasks(tmp_path / 'tasks', documents(4), ['letters', 'rolling'])
    code, out, err = run(f'--tasks={tasks}', f'--data={dataset}', f'--output={tmp_path / "out"}', '--json')
    assert code == EXIT_DONE, err
    (one,) = json.loads(out)['checkpoints']
    assert one['loss'] == measure()['loss']
    assert {name.partition('/')[0] for name in one['tasks']} == {'local_letters', 'local_rolling'}
    results = json.loads((tmp_path / 'out/run@20/results_20.json').read_text())
    assert results['results']['local_letters']['acc,none'] == one['tasks']['local_letters/acc']['value']


def test_what_tasks_need_is_said(run, tmp_path, monkeypatch, workdir):
    assert '--tasks=a,,b: needs names' in refused(run, '--tasks=a,,b')
    assert 'No such file' in refused(run, f'--tasks=mbpp:{tmp_path / "none.jsonl"}')
    assert '--limit=0' in refused(run, '--limit=0')
    assert '--needle_lengths=x' in refused(run, '--tasks=needle', '--needle_lengths=x')
    assert 'given twice' in refused(run, f'--checkpoint={workdir}')
    monkeypatch.setitem(sys.modules, 'lm_eval', None)
    monkeypatch.setitem(sys.modules, 'lm_eval.tasks', None)
    assert "pip install 'maxlm[eval]'" in refused(run, '--tasks=arc_easy')
