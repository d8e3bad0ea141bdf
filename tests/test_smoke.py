"""Smoke test in the fast tier: train, resume and generate with a tiny model."""

import contextlib
import io
import re

import numpy as np
import pytest

from maxlm.checkpoint.streaming import ParamsReader
from maxlm.cli.models import generate
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.telemetry.events import read_events
from maxlm.telemetry.goodput import read_goodput
from maxlm.telemetry.metrics import read_metrics
from maxlm.workdir.files import read_config
from tests.cli.runs.test_train import curve, ends, params_of, run, same

pytestmark = pytest.mark.usefixtures('shared_steps')

SETTINGS = {
    'optimizer__schedule': 'constant',
    'checkpoint__save_interval_steps': 2,
    'eval__interval': 2,
}


@pytest.fixture(scope='module')
def smoke(dataset, tmp_path_factory):
    """Runs two steps and two more after a restart, four steps without a restart, and generates text.

    All tests share this fixture to save time.
    """
    directory = tmp_path_factory.mktemp('smoke')
    resumed, uninterrupted = directory / 'resumed', directory / 'uninterrupted'
    assert run(dataset, resumed, **SETTINGS, train__num_steps=2) == EXIT_DONE
    assert run(dataset, resumed, **SETTINGS, train__num_steps=4) == EXIT_DONE
    assert run(dataset, uninterrupted, **SETTINGS, train__num_steps=4) == EXIT_DONE
    command = [f'--checkpoint={resumed}', '--prompt=Lic', '--max-tokens=6', '--temperature=0', '--num-samples=2']
    with contextlib.redirect_stdout(io.StringIO()) as written:
        assert exit_code(generate.main, command) == EXIT_DONE
    return resumed, uninterrupted, written.getvalue()


@pytest.fixture
def resumed(smoke):
    return smoke[0]


@pytest.fixture
def uninterrupted(smoke):
    return smoke[1]


def test_resumed_losses_are_exact(resumed, uninterrupted):
    assert curve(resumed) == curve(uninterrupted)


def test_resumed_parameters_are_exact(resumed, uninterrupted):
    assert same(params_of(resumed, 4), params_of(uninterrupted, 4))


def test_parameters_change(resumed):
    """Negative control: training changes the parameters."""
    assert not same(params_of(resumed, 2), params_of(resumed, 4))


def test_each_step_and_evaluation_has_a_line(resumed):
    lines = read_metrics(resumed)
    assert [line['step'] for line in lines if 'train/loss' in line] == [1, 2, 3, 4]
    assert [line['step'] for line in lines if 'eval/loss' in line] == [2, 4]


def test_losses_start_at_chance_level(resumed):
    losses = [line['train/loss'] for line in read_metrics(resumed) if 'train/loss' in line]
    assert losses == pytest.approx([np.log(257)] * 4, rel=0.03)
    assert len(set(losses)) == 4


def test_tokens_are_counted_across_attempts(resumed):
    tokens = [line['train/tokens'] for line in read_metrics(resumed) if 'train/loss' in line]
    assert tokens == [128, 256, 384, 512]


def test_the_learning_rate_warms_up(resumed):
    rates = [line['train/learning_rate'] for line in read_metrics(resumed) if 'train/loss' in line]
    # The warm-up to 2e-3 takes five steps.
    assert rates == pytest.approx([4e-4, 8e-4, 12e-4, 16e-4], abs=1e-9)


def test_the_config_is_resolved_and_written(resumed):
    config = read_config(resumed)
    assert (config.train.num_steps, config.train.per_device_batch_size, config.mesh.fsdp) == (4, 1, 8)
    assert (config.model.vocab_size, config.model.head_dim, config.model.max_positions) == (257, 8, 16)


def test_both_attempts_finish(resumed):
    assert ends(resumed) == [(1, 'finished', EXIT_DONE), (2, 'finished', EXIT_DONE)]
    assert [event['from_step'] for event in read_events(resumed).lines if event['kind'] == 'resumed'] == [2]


def test_saves_are_events(resumed):
    assert [event['step'] for event in read_events(resumed).lines if event['kind'] == 'saved'] == [2, 4]


def test_the_ledger_has_both_attempts(resumed):
    ledger = read_goodput(resumed)
    assert [(attempt.number, attempt.start_step, attempt.step, attempt.is_closed) for attempt in ledger.attempts] == [
        *((1, 0, 2, True), (2, 2, 4, True)),
    ]
    assert ledger.totals['lost'] == 0
    assert ledger.totals['step'] > 0


def test_the_log_has_both_attempts(resumed):
    log = (resumed / 'run.log').read_text()
    assert log.count('done: ') == 2
    assert 'resuming from step 2' in log
    assert len(re.findall(r'step +\d  loss 5\.\d', log)) == 4
    assert 'nats/token; unigram entropy' in log


@pytest.mark.parametrize(
    'words',
    ['parameters on 8 × cpu', 'memory      fits: ', 'step       2  loss', 'validation loss', 'MFU', 'unigram'],
)
def test_the_log_contains(resumed, words):
    assert words in (resumed / 'run.log').read_text()


def test_files_of_a_workdir(resumed):
    names = {entry.name for entry in resumed.iterdir()}
    small = {'config.json', 'events.jsonl', 'goodput.jsonl', 'metrics.jsonl', 'run.log', 'tokenizer.json'}
    assert names == {'checkpoints', 'report.html', *small}
    assert {entry.name for entry in (resumed / 'checkpoints').iterdir() if entry.name.isdigit()} == {'2', '4'}


def test_events_of_evaluations(resumed):
    events = [event for event in read_events(resumed).lines if event['kind'] == 'evaluated']
    losses = {line['step']: line['eval/loss'] for line in read_metrics(resumed) if 'eval/loss' in line}
    assert {event['step']: event['loss'] for event in events} == losses


def test_parameters_are_finite(resumed):
    reader = ParamsReader(resumed / 'checkpoints' / '4')
    # The vocabulary has all bytes and the end-of-document token.
    assert reader.shapes['embedding'] == (257, 16)
    assert all(np.all(np.isfinite(reader.read(name))) for name in reader.shapes)


def test_metrics_of_a_step(resumed):
    last = [line for line in read_metrics(resumed) if 'train/loss' in line][-1]
    assert last['train/perplexity'] == pytest.approx(np.exp(last['train/loss']), rel=1e-5)
    assert last['train/best_loss'] == min(line['train/loss'] for line in read_metrics(resumed) if 'train/loss' in line)
    assert 0 < last['perf/mfu'] < last['perf/mfu_full']
    assert last['train/skipped_steps'] == 0


def test_the_report_is_written(resumed):
    page = (resumed / 'report.html').read_text()
    assert page.startswith('<!')
    assert 'finished' in page


def test_a_checkpoint_generates(smoke):
    _, _, text = smoke
    _, first, second = re.split(r'--- \d of 2\n', text)
    assert first.startswith('Lic')
    assert len(first.strip()) > len('Lic')
    # At temperature 0, both samples are equal.
    assert first.strip() == second.strip()
