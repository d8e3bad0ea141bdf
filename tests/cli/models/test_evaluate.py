"""`maxlm evaluate` on a run of a few steps: it reproduces the losses of the run on any number of devices."""

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import shutil
import sys

import jax
import pytest

from maxlm.cli.models import evaluate
from maxlm.cli.runs import train
from maxlm.cli.setup import prepare
from maxlm.data.dataset.records import load_manifest, save_manifest
from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult
from maxlm.data.filters.decontaminate import decontaminate
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.evaluation.tasks import runner
from maxlm.inference.scoring import Likelihood, LogprobScorer
from maxlm.installation import pip_install
from maxlm.telemetry.metrics import read_metrics
from tests.cli.runs.test_train import arguments
from tests.evaluation.engines import RecitingEngine
from tests.evaluation.harness_tasks import documents, write_tasks
from tests.messages import assert_error_line


@pytest.fixture(scope='module')
def workdir(dataset, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('evaluate') / 'run'
    # Evaluates the complete validation split at both checkpoints.
    settings = {
        'train__num_steps': 4,
        'checkpoint__save_interval_steps': 2,
        'eval__interval': 2,
        'eval__num_batches': 0,
        'train__global_batch_size': 16,
        'train__per_device_batch_size': 1,
        'optimizer__learning_rate': 1e-2,
        'optimizer__warmup_steps': 1,
    }
    assert train.main(arguments(dataset, workdir, **settings)) == EXIT_DONE
    return workdir


def printed(*options):
    """Returns the output of the verb, for fixtures of the module."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        assert exit_code(evaluate.main, list(options)) == EXIT_DONE
    assert err.getvalue() == ''
    return out.getvalue()


@pytest.fixture(scope='module')
def evaluation(workdir):
    """Returns the JSON output for the newest step and the complete split."""
    return json.loads(printed(f'--checkpoint={workdir}', '--json'))


@pytest.fixture(scope='module')
def lines(workdir):
    """Returns the text output for the newest step."""
    return printed(f'--checkpoint={workdir}')


@pytest.fixture(scope='module')
def compared(workdir, tmp_path_factory):
    """Returns the table of both checkpoints and the output directory."""
    folder = tmp_path_factory.mktemp('compared') / 'out'
    checkpoints = (f'--checkpoint={workdir}', f'--checkpoint={workdir}@2')
    return printed(*checkpoints, f'--output={folder}'), folder


@pytest.fixture
def run(workdir, run_command):
    """Returns a function that runs the verb on `workdir`."""
    return lambda *options, checkpoint=workdir: run_command(evaluate.main, f'--checkpoint={checkpoint}', *options)


@pytest.fixture
def measure(run):
    """Returns a function that runs the verb with `--json` and returns the parsed output."""

    def measure(*options, **given):
        code, out, err = run('--json', *options, **given)
        assert (code, err) == (EXIT_DONE, '')
        assert out.count('\n') == 1
        return json.loads(out)

    return measure


def losses_of_the_run(workdir):
    return {line['step']: line['eval/loss'] for line in read_metrics(workdir) if 'eval/loss' in line}


def test_the_loss_equals_that_of_training(evaluation, compared, workdir):
    losses = losses_of_the_run(workdir)
    assert sorted(losses) == [2, 4]
    assert evaluation['loss'] == pytest.approx(losses[4], rel=1e-5)
    _, first = json.loads((compared[1] / 'evaluation.json').read_text())['checkpoints']
    assert first['loss'] == pytest.approx(losses[2], rel=1e-5)
    # Negative control: the difference of the two steps exceeds the tolerance.
    assert losses[2] != pytest.approx(losses[4], rel=1e-3)


def test_the_number_of_devices_does_not_matter(measure, workdir, monkeypatch):
    # Other tests use all eight devices.
    monkeypatch.setattr(jax, 'device_count', lambda: 1)
    assert measure()['loss'] == pytest.approx(losses_of_the_run(workdir)[4], rel=1e-5)


def test_fields(evaluation, dataset):
    split = load_manifest(dataset).splits['validation']
    assert set(evaluation) == {'step', 'loss', 'perplexity', 'bits_per_byte', 'unigram_entropy', 'tokens'}
    assert evaluation['step'] == 4
    assert evaluation['perplexity'] == pytest.approx(math.exp(evaluation['loss']))
    assert evaluation['unigram_entropy'] == split.unigram_entropy
    # The first token of each window, document and shard is not predicted.
    assert 0.85 * split.tokens < evaluation['tokens'] < split.tokens
    # Nats per token → bits per token → bits per byte. A token is a byte or the end of a document.
    assert evaluation['bits_per_byte'] == pytest.approx(
        evaluation['loss'] / math.log(2) * (split.text_bytes + split.documents) / split.text_bytes
    )


def test_a_part_of_the_split(measure, evaluation):
    part = measure('--num-batches=1')
    assert part['tokens'] < evaluation['tokens']
    assert part['tokens'] <= 8 * 16
    assert part['loss'] != evaluation['loss']
    assert measure('--num-batches=100000') == evaluation


def test_text_output(lines, evaluation):
    loss, confidence, positions = lines.splitlines()
    assert loss.startswith(f'step 4: loss {evaluation["loss"]:.4f} nats/token')
    assert 'bits/byte' in loss
    low, high = (float(part) for part in confidence.removeprefix('  95 % confidence interval: loss ').split(' to '))
    assert low < evaluation['loss'] < high
    assert positions.startswith('  by context tokens, from: 1: ')
    assert ' 32: ' not in positions
    assert ' 16: ' in positions


def prepared(folder, text, *options):
    (folder / 'text').mkdir()
    for number in range(4):
        (folder / 'text' / f'{number}.txt').write_text(text * (number + 1))
    command = ['--input', str(folder / 'text'), '--output', str(folder / 'data'), '--workers', '1', '--quiet']
    assert prepare.main([*command, *options]) == 0
    return folder / 'data'


@pytest.fixture(scope='module')
def other_data(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp('other'), 'Everyone may do as they like. ', '--tokenizer', 'bytes')


@pytest.fixture(scope='module')
def on_other_data(other_data, workdir):
    """Returns the JSON output for the newest step on `other_data`."""
    return json.loads(printed(f'--checkpoint={workdir}', f'--data={other_data}', '--json'))


def test_other_data(other_data, on_other_data, evaluation):
    assert on_other_data['unigram_entropy'] == load_manifest(other_data).splits['validation'].unigram_entropy
    assert on_other_data['loss'] != evaluation['loss']


def test_the_same_tokenizer_written_in_another_way(measure, other_data, on_other_data, tmp_path):
    shutil.copytree(other_data, tmp_path / 'data')
    tokenizer = tmp_path / 'data' / 'tokenizer.json'
    text = json.dumps(json.loads(tokenizer.read_text()))
    assert text != tokenizer.read_text()
    tokenizer.write_text(text)
    manifest = load_manifest(other_data)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    save_manifest(dataclasses.replace(manifest, path=tmp_path / 'data', tokenizer_sha256=sha256))
    assert measure(f'--data={tmp_path / "data"}') == on_other_data


def refused(run, *options, **given):
    code, out, err = run(*options, **given)
    assert (code, out) == (EXIT_BAD_INPUT, '')
    assert_error_line(err)
    return err


def test_another_tokenizer_is_refused(run, tmp_path, workdir):
    data = prepared(tmp_path, 'Everyone may do as they like. ', '--tokenizer', 'chars')
    err = refused(run, f'--data={data}')
    assert str(data / 'tokenizer.json') in err
    assert f'--tokenizer {workdir / "tokenizer.json"}' in err


def test_missing_inputs_are_named(run, tmp_path, workdir):
    assert f'no checkpoint in {tmp_path}' in refused(run, checkpoint=tmp_path)
    assert 'steps: 2, 4' in refused(run, checkpoint=f'{workdir}@3')
    assert str(tmp_path / 'nothing') in refused(run, f'--data={tmp_path / "nothing"}')


def test_a_negative_number_of_batches_is_refused(run):
    assert '--num-batches' in refused(run, '--num-batches=-1')


def test_several_checkpoints_in_one_table(compared, evaluation):
    table, folder = compared
    values = json.loads((folder / 'evaluation.json').read_text())
    last, first = values['checkpoints']
    assert (last['name'], first['name']) == ('run@4', 'run@2')
    assert last['loss'] == evaluation['loss']
    loss, *_ = values['table']
    assert loss['name'] == 'loss'
    assert loss['checkpoints'][1]['difference'] == pytest.approx(first['loss'] - last['loss'])
    # On the same windows, the interval of the difference is smaller than that of each loss.
    (low, high), (lower, higher) = loss['checkpoints'][1]['difference_interval'], last['loss_interval']
    assert 0 < low < high
    assert high - low < higher - lower
    perplexity = values['table'][1]['checkpoints']
    assert perplexity[1]['difference'] == pytest.approx(first['perplexity'] - last['perplexity'])
    (low, high), (lower, higher) = perplexity[1]['difference_interval'], perplexity[0]['interval']
    assert 0 < low < high
    assert high - low < higher - lower
    assert (folder / 'table.txt').read_text() == table
    assert table.splitlines()[1].split()[:2] == ['loss', f'{last["loss"]:.4f}']
    assert (folder / 'positions.png').stat().st_size > 5000


def test_needle_tasks(run, measure, tmp_path, workdir, monkeypatch):
    # A context of 16 tokens is too short for the task.
    assert '--needle-lengths: 512 exceeds the context length of the model; use at most 16' in refused(
        run, '--tasks=needle', '--needle-lengths=512'
    )
    monkeypatch.setattr(
        LogprobScorer, 'max_length', property(lambda self: 300, lambda self, value: None), raising=False
    )
    monkeypatch.setattr(LogprobScorer, 'score', lambda self, spans, show: [Likelihood(-1.0, True) for _ in spans])
    values = measure('--tasks=needle', '--needle-trials=1', f'--output={tmp_path}')
    (checkpoint,) = values['checkpoints']
    # An untrained model does not find the number.
    assert checkpoint['tasks']['needle/256/choice']['value'] == 0
    assert set(checkpoint['tasks']) == {f'needle/{n}/{kind}' for n in (256, 300) for kind in ('choice', 'retrieved')}
    assert json.loads((tmp_path / 'evaluation.json').read_text()) == values
    # The loss is not computed unless requested.
    assert 'loss' not in checkpoint
    assert (tmp_path / 'run@4/needle_4.png').stat().st_size > 5000


def test_programs(run, measure, tmp_path, monkeypatch):
    prompt = 'def one():\n'
    problem = {'task_id': 'x', 'prompt': prompt, 'entry_point': 'one', 'test': 'def check(f):\n    assert f() == 1\n'}
    (tmp_path / 'p.jsonl').write_text(json.dumps(problem))
    answers = {prompt: ['    return 1', '    return 2']}
    monkeypatch.setattr(runner, 'Engine', lambda model, **_: RecitingEngine(model.tokenizer, answers))
    values = measure(f'--tasks=humaneval:{tmp_path / "p.jsonl"}', '--samples=10', f'--output={tmp_path / "out"}')
    (checkpoint,) = values['checkpoints']
    assert {name: part['value'] for name, part in checkpoint['tasks'].items()} == {
        'humaneval/pass@1': 0.5,
        'humaneval/pass@10': 1.0,
    }
    lines = (tmp_path / 'out/run@4/samples_humaneval_4.jsonl').read_text().splitlines()
    assert [json.loads(line)['passed'] for line in lines] == [True, False] * 5
    # The model was not trained on conversations.
    tasks = f'--tasks=humaneval:{tmp_path / "p.jsonl"}'
    assert 'the checkpoint has no chat template' in refused(run, tasks, '--apply-chat-template')


def test_benchmarks_and_the_loss_in_one_table(run, evaluation, dataset, tmp_path, monkeypatch):
    pytest.importorskip('lm_eval', reason="needs the extra 'eval': pip install 'maxlm[eval]'")
    tasks = write_tasks(tmp_path / 'tasks', documents(4), ['letters', 'rolling'])
    # Outside a repository, git prints an error to stderr.
    monkeypatch.chdir(tmp_path)
    code, out, err = run(f'--tasks={tasks}', f'--data={dataset}', f'--output={tmp_path / "out"}', '--json')
    assert code == EXIT_DONE, err
    assert 'git' not in err
    (checkpoint,) = json.loads(out)['checkpoints']
    assert checkpoint['loss'] == evaluation['loss']
    assert {name.partition('/')[0] for name in checkpoint['tasks']} == {'local_letters', 'local_rolling'}
    results = json.loads((tmp_path / 'out/run@4/results_4.json').read_text())
    assert results['results']['local_letters']['acc,none'] == checkpoint['tasks']['local_letters/acc']['value']


def test_texts_of_tasks_are_exported_for_decontamination(tmp_path, capfd):
    pytest.importorskip('lm_eval', reason="needs the extra 'eval': pip install 'maxlm[eval]'")
    docs = documents(4)
    tasks = write_tasks(tmp_path / 'tasks', docs, ['choice', 'rolling'])
    file = tmp_path / 'texts.jsonl'
    assert evaluate.main([f'--export-texts={file}', f'--tasks={tasks}', '--limit=3']) == EXIT_DONE
    assert capfd.readouterr().out == f'{file}: 6 documents\n'
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line['task'] for line in lines] == ['local_choice'] * 3 + ['local_rolling'] * 3
    for line, doc in zip(lines[:3], docs, strict=False):
        assert set(line['text']) == {doc['question'], *doc['choices'], doc['text'], doc['written']}
    long = max((doc['text'] for doc in docs[:3]), key=len)
    remove = decontaminate(f'decontaminate:{file}')
    # Control: the fourth document was not exported.
    assert [type(remove(Document('', '', text))) for text in (f'Read this: {long}!', docs[3]['text'])] == [
        FilterResult,
        Document,
    ]


def test_bad_exports_are_refused(tmp_path, capfd):
    for options, message in (
        ([], 'one of the arguments --checkpoint --export-texts is required'),
        ([f'--export-texts={tmp_path}/a.jsonl', '--checkpoint=runs/x'], 'not allowed with argument'),
        ([f'--export-texts={tmp_path}/a.jsonl'], 'needs --tasks and a name that ends in .jsonl'),
        ([f'--export-texts={tmp_path}/a.json', '--tasks=arc'], 'needs --tasks and a name that ends in .jsonl'),
        ([f'--export-texts={tmp_path}/a.jsonl', '--tasks=core:x'], 'directly to maxlm prepare --filter decontaminate:'),
    ):
        assert exit_code(evaluate.main, options) == EXIT_BAD_INPUT
        assert message in capfd.readouterr().err


def test_bad_task_options(run, tmp_path, monkeypatch, workdir):
    assert '--tasks=a,,b: must be comma-separated names' in refused(run, '--tasks=a,,b')
    assert 'No such file' in refused(run, f'--tasks=mbpp:{tmp_path / "none.jsonl"}')
    assert '--limit=0' in refused(run, '--limit=0')
    assert '--needle-lengths=x' in refused(run, '--tasks=needle', '--needle-lengths=x')
    assert 'given twice' in refused(run, f'--checkpoint={workdir}')
    monkeypatch.setitem(sys.modules, 'lm_eval', None)
    monkeypatch.setitem(sys.modules, 'lm_eval.tasks', None)
    assert pip_install('eval') in refused(run, '--tasks=arc_easy')
