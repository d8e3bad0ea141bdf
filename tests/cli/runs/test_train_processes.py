"""Runs of several processes: results equal those of one process, and all processes exit if one fails."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from maxlm.cli.runs.train import main
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_PREEMPTED, exit_code
from maxlm.storage.jsonl import read_lines
from maxlm.telemetry.events import read_events
from maxlm.telemetry.goodput import read_goodput
from maxlm.telemetry.metrics import read_metrics
from maxlm.workdir.files import SAMPLES_FILE
from tests.cli.runs.test_train import arguments, curve, params_of, run, same
from tests.conftest import ROOT
from tests.cpu import CHEAP_COMPILER
from tests.evaluation.harness_tasks import documents, write_tasks
from tests.faults import measured
from tests.forking import free_port
from tests.messages import assert_error_line
from tests.processes import Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures('shared_steps')]

# With a constant rate, runs of different lengths share the same step.
SETTINGS = {
    'optimizer__schedule': 'constant',
    'checkpoint__save_interval_steps': 3,
    'checkpoint__max_to_keep': 100,
    'eval__interval': 3,
    'train__hang_timeout_seconds': 60,
}
ENDLESS = {**SETTINGS, 'train__num_steps': 1_000_000, 'checkpoint__save_interval_steps': 0, 'eval__interval': 0}
# Seven steps with a sample at each evaluation.
WANTED = {**SETTINGS, 'train__num_steps': 7, 'eval__num_samples': 1, 'eval__sample_max_tokens': 8}
# The learning rate is negligible, so step 7 saves the restored parameters unchanged.
NO_UPDATE = {
    **SETTINGS,
    'optimizer__learning_rate': 1e-30,
    'optimizer__min_learning_rate': 0,
    'optimizer__weight_decay': 0,
    'train__num_steps': 7,
    'eval__interval': 0,
}
# Seconds within which other processes must exit. Linger time, heartbeat and polling take about 10.
END_SECONDS = 15


@pytest.fixture
def start(dataset, tmp_path):
    """Returns a function that starts `count` processes with `devices` each on the workdir `name` in tmp_path."""

    def start(count, devices, name, settings=SETTINGS, **more):
        words = arguments(dataset, tmp_path / name, **{**settings, **{k: v for k, v in more.items() if '__' in k}})
        options = {k: v for k, v in more.items() if '__' not in k}
        if 'fault' in options:
            words, options = [options['fault'], *words], {'module': 'tests.processes'}
        return Processes(count, devices, words, logs=tmp_path / f'logs_{name}', **options)

    return start


def train_together(start, count, devices, name, **more):
    with start(count, devices, name, **more) as processes:
        codes = processes.wait()
        assert codes == [EXIT_DONE] * count, processes.output(0) + processes.output(count - 1)
        return processes


def wait_for_lines(processes, workdir, number):
    deadline = time.monotonic() + 120
    while not (workdir / 'metrics.jsonl').exists() or len(read_metrics(workdir)) < number:
        assert time.monotonic() < deadline, processes.output(0) + processes.output(1)
        assert all(process.poll() is None for process in processes.all), processes.output(0) + processes.output(1)
        time.sleep(0.05)


def steps_of(workdir):
    return sorted(int(entry.name) for entry in (workdir / 'checkpoints').iterdir() if entry.name.isdigit())


def losses(workdir):
    return {step: line['train/loss'] for step, line in curve(workdir).items()}


def samples(workdir):
    return [(line['step'], line['prompt'], line['text']) for line in read_lines(workdir / SAMPLES_FILE).lines]


@pytest.fixture(scope='module')
def two_processes(dataset, tmp_path_factory):
    """Returns a run of seven steps with two processes of four devices each, and its processes."""
    directory = tmp_path_factory.mktemp('two_processes')
    words = arguments(dataset, directory / 'run', **WANTED)
    with Processes(2, 4, words, logs=directory / 'logs') as processes:
        codes = processes.wait()
        assert codes == [EXIT_DONE] * 2, processes.output(0) + processes.output(1)
        return directory / 'run', processes


@pytest.fixture(scope='module')
def alone(dataset, tmp_path_factory):
    """Returns the same run with one process, and a run with another initialization as negative control."""
    one, other = (tmp_path_factory.mktemp('alone') / name for name in ('one', 'other'))
    assert run(dataset, one, **WANTED) == EXIT_DONE
    assert run(dataset, other, **WANTED, train__seed=1, model__init_std=0.5) == EXIT_DONE
    return one, other


def test_two_processes_equal_one(two_processes, alone):
    (workdir, _), (one, other) = two_processes, alone
    expected = losses(one)
    assert sorted(expected) == [1, 2, 3, 4, 5, 6, 7]
    assert losses(workdir) == pytest.approx(expected, rel=1e-6)
    assert losses(other) != pytest.approx(expected, rel=1e-6)
    # Evaluations sum over all processes.
    for step in (3, 6, 7):
        assert curve(workdir)[step]['eval/loss'] == pytest.approx(curve(one)[step]['eval/loss'], rel=1e-6)
    # All processes take part in sampling.
    assert samples(workdir) == samples(one)
    assert samples(workdir) != samples(other)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_processes_evaluate_benchmarks_like_one(dataset, tmp_path):
    pytest.importorskip('lm_eval', reason='needs the extra eval: pip install maxlm[eval]')
    tasks = write_tasks(tmp_path / 'tasks', documents(4), ['rolling'])
    settings = {**SETTINGS, 'train__num_steps': 1, 'eval__interval': 0}
    settings |= {'eval__tasks': f"('{tasks}',)", 'eval__tasks_interval': 1, 'eval__tasks_limit': 3}
    words = arguments(dataset, tmp_path / 'two', **settings)
    with Processes(2, 4, words, logs=tmp_path / 'logs') as processes:
        assert processes.wait(300) == [EXIT_DONE] * 2, processes.output(0) + processes.output(1)
    assert run(dataset, tmp_path / 'one', **settings) == EXIT_DONE
    assert run(dataset, tmp_path / 'other', **settings, train__seed=1, model__init_std=0.5) == EXIT_DONE
    name = 'eval/tasks/local_rolling/bits_per_byte'
    found, one, other = (curve(tmp_path / workdir)[1][name] for workdir in ('two', 'one', 'other'))
    assert found == pytest.approx(one, rel=1e-6)
    assert found != pytest.approx(other, rel=1e-6)


def test_only_the_first_process_writes_shared_files(two_processes):
    workdir, processes = two_processes
    assert [line['step'] for line in read_metrics(workdir)] == [1, 2, 3, 3, 4, 5, 6, 6, 7, 7]
    names = {entry.name for entry in workdir.iterdir()}
    small = {'config.json', 'events.jsonl', 'goodput.jsonl', 'metrics.jsonl', 'run.log', SAMPLES_FILE, 'tokenizer.json'}
    # Each process has a separate ledger.
    assert names == {'checkpoints', 'goodput-1.jsonl', 'report.html', *small}
    assert (workdir / 'run.log').read_text().count('done: 7 steps') == 1
    assert 'done: 7 steps' in processes.output(0)
    for words in ('done', 'step ', 'parameters on'):
        assert words not in processes.output(1)


def test_each_process_writes_a_ledger(two_processes):
    workdir, _ = two_processes
    ledgers = [read_goodput(workdir, process) for process in (0, 1)]
    for ledger in ledgers:
        assert [(each.number, each.start_step, each.step, each.is_closed) for each in ledger.attempts] == [
            (1, 0, 7, True)
        ]
        assert min(ledger.totals[name] for name in ('start', 'compile', 'step', 'evaluation', 'checkpoint')) > 0
    # Each process measures separately.
    assert ledgers[0].totals != ledgers[1].totals
    assert {event['life'] for event in read_events(workdir).lines} == {1}


@pytest.mark.parametrize(('count', 'devices'), [pytest.param(1, 1, marks=pytest.mark.nightly), (2, 2)])
def test_a_checkpoint_of_two_processes_is_restored_with_other_counts(
    start, two_processes, tmp_path, record_property, count, devices
):
    workdir, _ = two_processes
    shutil.copytree(workdir, tmp_path / 'run')
    shutil.rmtree(tmp_path / 'run/checkpoints/7')
    train_together(start, count, devices, 'run', settings=NO_UPDATE)
    assert same(params_of(tmp_path / 'run', 7), params_of(workdir, 6))
    assert not same(params_of(workdir, 7), params_of(workdir, 6))
    assert losses(tmp_path / 'run')[7] == pytest.approx(losses(workdir)[7], rel=1e-6)
    assert losses(tmp_path / 'run')[7] != pytest.approx(losses(workdir)[6], rel=1e-6)
    difference = abs(losses(tmp_path / 'run')[7] / losses(workdir)[7] - 1)
    measured(record_property, 'other-mesh', f'2 × 4 → {count} × {devices}: loss {difference:.0e}')


@pytest.mark.nightly
def test_a_checkpoint_of_one_process_is_restored_in_two(dataset, start, two_processes, tmp_path, record_property):
    assert run(dataset, tmp_path / 'run', **SETTINGS, train__num_steps=6) == EXIT_DONE
    before = params_of(tmp_path / 'run', 6)
    train_together(start, 2, 4, 'run', settings=NO_UPDATE)
    assert same(params_of(tmp_path / 'run', 7), before)
    assert losses(tmp_path / 'run')[7] == pytest.approx(losses(two_processes[0])[7], rel=1e-6)
    difference = abs(losses(tmp_path / 'run')[7] / losses(two_processes[0])[7] - 1)
    measured(record_property, 'other-mesh', f'1 × 8 → 2 × 4: loss {difference:.0e}')


@pytest.mark.nightly
def test_processes_that_read_the_same_rows(start, tmp_path):
    # Each sequence is split over both processes, so both read all rows.
    mesh = {'mesh__fsdp': 1, 'mesh__context': 2, 'train__num_steps': 3}
    train_together(start, 2, 1, 'run', **mesh)
    train_together(start, 1, 2, 'one', **mesh)
    found, expected = losses(tmp_path / 'run'), losses(tmp_path / 'one')
    assert found == pytest.approx(expected, rel=1e-6)
    # Negative control: the difference of two steps exceeds the tolerance.
    assert found[2] != pytest.approx(expected[3], rel=1e-6)


@pytest.mark.parametrize('victim', [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_other_process_exits_after_a_kill(start, tmp_path, victim):
    with start(2, 4, 'run', ENDLESS) as processes:
        wait_for_lines(processes, tmp_path / 'run', 3)
        processes.all[victim].kill()
        killed = time.monotonic()
        survivor = 1 - victim
        assert processes.all[survivor].wait(END_SECONDS) == EXIT_PREEMPTED, processes.output(survivor)
        assert time.monotonic() - killed < END_SECONDS
        assert f'lost contact with process {victim}; restart the run' in processes.output(survivor)


def test_a_stuck_process_logs_its_stacks_and_all_exit(start, tmp_path, record_property):
    with start(2, 4, 'run', ENDLESS, fault='hang', train__hang_timeout_seconds=5) as processes:
        wait_for_lines(processes, tmp_path / 'run', 1)
        while 'hangs' not in processes.output(1):
            time.sleep(0.05)
        stuck = time.monotonic()
        assert processes.all[1].wait(5 + END_SECONDS) == EXIT_PREEMPTED
        stuck_seconds = time.monotonic() - stuck
        assert processes.wait(END_SECONDS) == [EXIT_PREEMPTED] * 2
        all_seconds = time.monotonic() - stuck
        assert all_seconds < 5 + END_SECONDS
        stuck_output, other_output = processes.output(1), processes.output(0)
    assert 'stuck: no step for 5 s (train.hang_timeout_seconds)' in stuck_output
    assert 'in faulty' in stuck_output
    # The waiting process is not reported as stuck.
    assert 'exiting with the other processes: process 1: stuck' in other_output
    assert 'Current thread' not in other_output
    # A process that exits immediately still records its last event and its time.
    last = read_events(tmp_path / 'run').lines[-1]
    assert (last['kind'], last['code']) == ('preempted', EXIT_PREEMPTED)
    assert 'process 1: stuck' in last['message']
    assert all(read_goodput(tmp_path / 'run', process).attempts[0].is_closed for process in (0, 1))
    times = f'it exited after {stuck_seconds:.1f} s, the other after {all_seconds:.1f} s'
    measured(record_property, 'stuck', f'a loader that hangs, with a deadline of 5 s: {times}')


def test_bad_input_of_one_process_stops_all(start, tmp_path):
    with start(2, 4, 'run', ENDLESS, fault='bad_input') as processes:
        assert processes.wait() == [EXIT_BAD_INPUT] * 2
        assert 'error: train-00000: damaged' in processes.output(1)
        assert 'exiting with the other processes: process 1: train-00000: damaged' in processes.output(0)


@pytest.mark.parametrize(
    ('variables', 'words'),
    [
        ({'COORDINATOR': 'localhost:1234'}, 'without MAXLM_NUM_PROCESSES, MAXLM_PROCESS_ID'),
        ({'COORDINATOR': 'localhost:1234', 'NUM_PROCESSES': '2', 'PROCESS_ID': '2'}, 'MAXLM_PROCESS_ID=2'),
        ({'COORDINATOR': 'localhost:1234', 'NUM_PROCESSES': 'two', 'PROCESS_ID': '0'}, 'MAXLM_NUM_PROCESSES=two'),
    ],
)
def test_invalid_variables(dataset, tmp_path, monkeypatch, capsys, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(f'MAXLM_{name}', value)
    assert exit_code(main, arguments(dataset, tmp_path / 'run')) == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, words)
    assert not (tmp_path / 'run').exists()


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_launcher_of_a_node_starts_processes(dataset, two_processes, tmp_path):
    words = arguments(dataset, tmp_path / 'run', **SETTINGS, train__num_steps=7)
    environment = {
        **os.environ,
        # The launcher adds the number of devices.
        'XLA_FLAGS': CHEAP_COMPILER,
        'PYTHON': sys.executable,
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    options = ['--once', '--platform', 'cpu', '--devices', '4', '--per-gpu', '--gpus', '2']
    done = subprocess.run(
        ['bash', 'launch/gpu_node.sh', *options, '--coordinator', f'127.0.0.1:{free_port()}', '--', *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == EXIT_DONE, done.stdout + done.stderr
    workdir, _ = two_processes
    assert losses(tmp_path / 'run') == losses(workdir)
    assert (tmp_path / 'run' / 'logs' / 'process-1.log').exists()


def test_replays_of_two_processes_change_nothing(start, two_processes, tmp_path):
    expected, _ = two_processes
    train_together(start, 2, 4, 'replayed', settings=WANTED, guard__replay_fraction=1.0)
    assert curve(tmp_path / 'replayed') == curve(expected)
    last = [line for line in read_metrics(tmp_path / 'replayed') if 'replay/steps' in line][-1]
    assert (last['step'], last['replay/steps'], last['replay/differences']) == (7, 7, 0)
