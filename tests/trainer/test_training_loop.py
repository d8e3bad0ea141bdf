"""Tests the training loop with a fake step: batches, metrics, checkpoints, resume, rollback and exit.

The fake computes a loss from the step number and the tokens. `tests/cli/runs/test_train.py` tests real steps.
"""

import os
import shutil
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from maxlm.checkpoint.manager import saved_steps
from maxlm.cli.runs import train
from maxlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from maxlm.evaluation.validation import Evaluation
from maxlm.formatting import format_si
from maxlm.planning.forecast import estimate
from maxlm.telemetry.events import ENDS, read_events
from maxlm.telemetry.metrics import read_metrics
from maxlm.trainer import batch_source, checkpointing, preflight, step_runner
from maxlm.training.batch import HOLD
from maxlm.training.compile import CompiledStep
from maxlm.workdir.files import read_config
from tests.checkpoint.test_manager import zero_state
from tests.cli.runs.test_train import arguments, curve

STEPS = 8
SETTINGS = {
    'train__num_steps': STEPS,
    'train__compilation_cache_dir': '',
    'eval__interval': 4,
    'checkpoint__save_interval_steps': 4,
    'checkpoint__max_to_keep': 1,
    'optimizer__warmup_steps': 2,
}


class Step:
    """Fake of a compiled step. Steps in `bad` are skipped, and step `stops_at` sends SIGTERM to the process.

    `batches` are those of the executed steps, without steps that were held and without replays.
    """

    def __init__(self, *, bad=(), stops_at=0):
        self.bad, self.stops_at = bad, stops_at
        self.batches = []
        self.replayed, self.held, self.newest = [], [], 0

    def __call__(self, state, batch):
        step, tokens = int(jax.device_get(state.step)) + 1, jax.device_get(batch['tokens'])
        if jax.device_get(batch[HOLD]):
            self.held.append(step)
            return state, {'loss': jax.device_put(np.float32(0))}
        if step == self.newest and np.array_equal(tokens, self.batches[-1]):
            self.replayed.append(step)
        else:
            self.batches.append(tokens)
        self.newest = step
        if step == self.stops_at:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = 5 / step + tokens.mean() / 1000
        skipped = step in self.bad
        if skipped and len(self.batches) > step:
            # After a rollback, the step reads another batch, which is not bad.
            skipped = False

        def put(like, value):
            return jax.device_put(np.full(like.shape, value, like.dtype), like.sharding)

        params = {**state.params, 'embedding': put(state.params['embedding'], loss)}
        metrics = {'loss': loss, 'skipped': skipped, 'bad': skipped, 'learning_rate': 1e-3}
        metrics |= {'grad_norm': 2.0, 'param_norm': 3.0, 'window_steps': 0}
        metrics = {name: jax.device_put(np.float32(value)) for name, value in metrics.items()}
        return state._replace(step=put(state.step, step), params=params), metrics


class Validation:
    """Fake of the evaluation; returns the loss of the last step, which is stored in the parameters."""

    def __init__(self, *_):
        pass

    def __len__(self):
        return 1

    def __call__(self, state):
        loss = float(np.asarray(state.params['embedding']).flat[0])
        return Evaluation(loss, 64, [], [], {})


@pytest.fixture(scope='module')
def run_attempt(dataset):
    """Returns a function that runs one attempt with a fake step and returns its exit code."""

    def run_attempt(workdir, step, **overrides):
        compiled = CompiledStep(step, 0.1)

        def compile_for(config, machine, *_, **options):
            return estimate(config, machine)._replace(compiled=compiled)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(preflight, 'compile_for', compile_for)
            patch.setattr(step_runner, 'compile_train_step', lambda *_, **options: compiled)
            patch.setattr(checkpointing, 'init_state', zero_state)
            patch.setattr(batch_source, 'Validation', Validation)
            return train.main(arguments(dataset, workdir, **SETTINGS, **overrides))

    return run_attempt


@pytest.fixture(scope='module')
def runs(run_attempt, tmp_path_factory):
    """Returns three runs: uninterrupted, stopped at step 3 and resumed, and with the bad steps 5 and 6."""
    folder = tmp_path_factory.mktemp('loop')

    def run(name, *steps, **overrides):
        codes = [run_attempt(folder / name, step, **overrides) for step in steps]
        batches = [batch for step in steps for batch in step.batches]
        replayed, held = ([each for step in steps for each in getattr(step, name)] for name in ('replayed', 'held'))
        return SimpleNamespace(workdir=folder / name, batches=batches, codes=codes, replayed=replayed, held=held)

    return SimpleNamespace(
        uninterrupted=run('uninterrupted', Step()),
        resumed=run('resumed', Step(stops_at=3), Step()),
        rolled_back=run('rolled_back', Step(bad=(5, 6)), guard__max_consecutive_skips=2),
    )


@pytest.fixture
def uninterrupted(runs):
    return runs.uninterrupted


def events(workdir, kind):
    return [event for event in read_events(workdir).lines if event['kind'] == kind]


def losses(workdir):
    return {line['step']: line['train/loss'] for line in read_metrics(workdir) if 'train/loss' in line}


def test_each_step_has_a_batch_and_a_metric_line(uninterrupted):
    assert uninterrupted.codes == [EXIT_DONE]
    assert len(uninterrupted.batches) == STEPS
    # Negative control: no batch occurs twice.
    assert len({batch.tobytes() for batch in uninterrupted.batches}) == STEPS
    expected = {n: 5 / n + batch.mean() / 1000 for n, batch in enumerate(uninterrupted.batches, 1)}
    assert losses(uninterrupted.workdir) == pytest.approx(expected)


def test_metric_lines(uninterrupted):
    lines = [line for line in read_metrics(uninterrupted.workdir) if 'train/loss' in line]
    rows, seq_len = uninterrupted.batches[0].shape
    for line in lines:
        assert line['train/tokens'] == line['step'] * rows * seq_len
        assert line['train/best_loss'] == min(losses(uninterrupted.workdir)[n] for n in range(1, line['step'] + 1))
        assert (line['train/skipped_steps'], line['train/grad_norm'], line['data/seq_len']) == (0, 2.0, seq_len)
        assert line['train/perplexity'] == pytest.approx(np.exp(line['train/loss']))
        assert line['perf/tokens_per_second'] == pytest.approx(rows * seq_len / line['perf/step_time_seconds'])


def test_evaluation_and_save_intervals(uninterrupted):
    evaluated = {line['step']: line['eval/loss'] for line in read_metrics(uninterrupted.workdir) if 'eval/loss' in line}
    assert evaluated == pytest.approx({step: losses(uninterrupted.workdir)[step] for step in (4, STEPS)})
    assert [event['step'] for event in events(uninterrupted.workdir, 'evaluated')] == [4, STEPS]
    assert [event['step'] for event in events(uninterrupted.workdir, 'saved')] == [4, STEPS]
    assert saved_steps(uninterrupted.workdir) == [STEPS]


def test_events_of_an_attempt(uninterrupted):
    (started,) = events(uninterrupted.workdir, 'started')
    config = read_config(uninterrupted.workdir)
    assert started['tokens_per_step'] == config.train.global_batch_size * config.data.seq_len
    assert (started['num_steps'], started['pid'], started['peak_tflops']) == (STEPS, os.getpid(), 1)
    assert f'× cpu (fsdp={jax.device_count()})' in started['message']
    assert started['dataset']['sources'][0]['weight'] == 1
    assert started['bytes_per_token']['English'].keys() == {'tokenizer', 'GPT-2', 'cl100k_base'}
    ends = [event for event in read_events(uninterrupted.workdir).lines if event['kind'] in ENDS]
    assert [(end['kind'], end['code']) for end in ends] == [('finished', EXIT_DONE)]


def test_last_lines_of_the_log(uninterrupted):
    *_, over, done, line, loss, speed = [
        line.partition(' INFO ')[2]
        for line in (uninterrupted.workdir / 'run.log').read_text().splitlines()
        if ' INFO ' in line
    ]
    assert over == f'run finished: step {STEPS} of {STEPS} is done'
    assert done.startswith(f'done: {STEPS} steps in ')
    config = read_config(uninterrupted.workdir)
    tokens = STEPS * config.train.global_batch_size * config.data.seq_len
    (source,) = events(uninterrupted.workdir, 'started')[0]['dataset']['sources']
    epochs = next(line['train/epoch'] for line in read_metrics(uninterrupted.workdir)[::-1] if 'train/epoch' in line)
    data = f'{epochs:.3g} epochs; the training data have {format_si(source["tokens"])} tokens'
    assert f', {format_si(tokens)} tokens ({data}), ' in done
    assert line.startswith('all attempts of the run: ')
    last = losses(uninterrupted.workdir)[STEPS]
    assert loss.startswith(f'training loss {last:.3f}; validation loss {last:.3f} nats/token; unigram entropy of ')
    assert ' tokens/s, ' in speed
    assert ' per device' in speed


def test_finished_run_does_nothing(uninterrupted, run_attempt, tmp_path):
    workdir = shutil.copytree(uninterrupted.workdir, tmp_path / 'run')
    step = Step()
    assert run_attempt(workdir, step) == EXIT_DONE
    assert step.batches == []


def test_resumed_run_equals_uninterrupted_run(uninterrupted, runs):
    resumed = runs.resumed
    assert resumed.codes == [EXIT_PREEMPTED, EXIT_DONE]
    assert [event['step'] for event in events(resumed.workdir, 'resumed')] == [3]
    for batch, expected in zip(resumed.batches, uninterrupted.batches, strict=True):
        np.testing.assert_array_equal(batch, expected)
    assert curve(resumed.workdir) == curve(uninterrupted.workdir)


def test_stopped_run_saves(runs):
    assert [event['step'] for event in events(runs.resumed.workdir, 'saved')] == [3, 4, STEPS]
    (end,) = events(runs.resumed.workdir, 'preempted')
    assert end['message'] == f'SIGTERM: saved step 3 of {STEPS}; start again to resume'


def test_batches_of_bad_steps_are_skipped_after_a_rollback(uninterrupted, runs):
    run = runs.rolled_back
    assert run.codes == [EXIT_DONE]
    # Step 6 was dispatched before the metrics of step 5 were read. Of the two bad steps only the first is replayed.
    assert (run.held, run.replayed) == ([6], [5])
    assert (uninterrupted.held, uninterrupted.replayed) == ([], [])
    # The bad steps are detected during step 7. The run returns to the start and skips the batches of steps 1 to 6.
    before, after = run.batches[:7], run.batches[7:]
    for batch, expected in zip([*before, after[1]], uninterrupted.batches, strict=True):
        np.testing.assert_array_equal(batch, expected)
    np.testing.assert_array_equal(before[6], after[0])
    assert len({batch.tobytes() for batch in run.batches}) == 6 + STEPS
    assert [event['step'] for event in events(run.workdir, 'skipped')] == [5, 6]
    (rollback,) = events(run.workdir, 'rollback')
    assert 'rolling back to step 0 and skipping the batches of steps 1 to 6 (rollback 1 of ' in rollback['message']
    assert sorted(losses(run.workdir)) == list(range(1, STEPS + 1))


def test_run_without_rollbacks_stops(run_attempt, tmp_path):
    assert (
        run_attempt(tmp_path / 'run', Step(bad=(1, 2)), guard__max_consecutive_skips=2, guard__max_rollbacks=0)
        == EXIT_FAILED
    )
    (end,) = events(tmp_path / 'run', 'diverged')
    assert end['message'].startswith('stopped at step 3: steps 1 to 2: 2 consecutive steps had a loss ')
