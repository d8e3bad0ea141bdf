"""Tests the trial run of two steps with programs in place of training; `test_doctor` has a real one."""

import os
import sys
import textwrap

import pytest

from maxlm.config.loading import load
from maxlm.diagnostics.checks.trial_run import (
    QUIET,
    STEPS,
    Trial,
    check_trial,
    evaluate_trial,
    reached,
    trial_command,
    try_run,
)
from maxlm.diagnostics.result import CheckStatus
from tests.conftest import ROOT
from tests.diagnostics.machines import CPU, GIB, case_on
from tests.small import small_config

TINY = str(ROOT / 'configs/tiny.py')
STEP = {'step': 2, 'train/loss': 5.0, 'perf/step_time_seconds': 0.5, 'perf/data_loading_seconds': 0.01}
PLAN = {'step_seconds': 0.45, 'memory_bytes': 60 * GIB}


def lines(**changes):
    return [{**STEP, 'step': 1}, {**STEP, **{name.replace('__', '/'): value for name, value in changes.items()}}]


@pytest.mark.parametrize(
    ('trial', 'status', 'words'),
    [
        (Trial('', lines(), {}, 21.0), 'ok', 'a step takes 0.5 s; startup took 20 s'),
        (Trial('', lines(), PLAN, 21.0), 'ok', 'a step takes 0.5 s (planned 0.45), planned memory 60.0 GiB'),
        (Trial('', lines(perf__step_time_seconds=0.9), PLAN, 21.0), 'warning', '2.0 times the plan'),
        (Trial('', lines(perf__data_loading_seconds=0.4), PLAN, 21.0), 'warning', '80% of the step waits for data'),
        (Trial('', lines(memory__peak_gib=61.0), PLAN, 21.0), 'ok', '61.0 GiB per device (planned 60.0 GiB)'),
        (Trial('', lines(memory__peak_gib=70.0), PLAN, 21.0), 'warning', '70.0 GiB per device'),
        (Trial('', lines(train__loss=None), {}, 21.0), 'failure', 'the loss is not finite'),
        (Trial('ValueError: no', [], {}, 3.0), 'failure', 'training does not reach step 2: ValueError: no'),
    ],
)
def test_evaluation_of_facts(trial, status, words):
    found = evaluate_trial(trial)
    assert found.status == status, found
    assert words in found.message


def test_a_slow_run_fails_if_a_throughput_is_required():
    trial = Trial('', lines(perf__tokens_per_second=900.0), {}, 21.0)
    assert evaluate_trial(trial, min_tokens_per_second=900).status is CheckStatus.OK
    found = evaluate_trial(trial, min_tokens_per_second=1000)
    assert found.status is CheckStatus.FAILURE
    assert '900 tokens/s, below --min-tokens-per-second=1000' in found.message


@pytest.fixture
def fake_run(tmp_path):
    """Runs a program in place of training. Its workdir is in the variable `workdir`."""
    workdir = tmp_path / 'run'

    def run(program, seconds=20.0):
        start = 'import json, pathlib, sys, time\nworkdir = pathlib.Path(sys.argv[1]); workdir.mkdir()\n'
        command = [sys.executable, '-S', '-c', start + textwrap.dedent(program), str(workdir)]
        return try_run(command, os.environ, workdir, is_done=reached(STEPS), seconds=seconds)

    return run


WRITE = f"""
(workdir / 'events.jsonl').write_text(json.dumps({{'kind': 'started', 'plan': {PLAN}}}) + '\\n')
with (workdir / 'metrics.jsonl').open('a') as file:
    for line in {lines()}:
        file.write(json.dumps(line) + '\\n')
"""


def test_a_trial_stops_after_its_second_step_and_saves_nothing(fake_run, tmp_path):
    trial = fake_run(f'{WRITE}\ntime.sleep(60)\n(workdir / "saved").touch()')
    assert (trial.trouble, trial.lines, trial.plan) == ('', lines(), PLAN)
    assert evaluate_trial(trial).status is CheckStatus.OK
    assert not (tmp_path / 'run/saved').exists()


def test_a_run_that_exits_is_reported_with_its_reason(fake_run):
    trial = fake_run('print("error: mesh.data=3 is wrong", file=sys.stderr); sys.exit(2)')
    assert trial.trouble == 'mesh.data=3 is wrong'


def test_a_run_of_one_step_is_accepted(fake_run):
    trial = fake_run(WRITE.replace(repr(lines()), repr(lines()[:1])))
    assert trial.trouble == ''
    assert evaluate_trial(trial).status is CheckStatus.OK


def test_a_run_that_does_not_reach_its_second_step_is_stopped(fake_run):
    trial = fake_run('time.sleep(60)', seconds=0.3)
    assert trial.trouble == 'not done after 0.3 s'


def test_a_trial_is_quiet_and_keeps_user_settings(tmp_path):
    overrides = ['train.num_steps=7', 'checkpoint.remote_dir=gs://bucket/run']
    command = trial_command(case_on(CPU, spec=TINY, overrides=overrides), tmp_path / 'run')
    words = [word.removeprefix('--config.') for word in command if word.startswith('--config.')]
    config = load(TINY, words)
    assert config.train.num_steps == 7
    assert (config.checkpoint.remote_dir, config.checkpoint.save_interval_steps, config.train.log_every) == ('', 0, 1)
    assert not config.metrics.tensorboard
    # Control: without the quiet settings, the user's value remains.
    assert load(TINY, overrides).checkpoint.remote_dir
    # The command sets every key of QUIET.
    assert {word.partition('=')[0] for word in words} >= set(QUIET)


def test_runs_that_cannot_be_tried():
    assert check_trial(case_on(CPU)).status is CheckStatus.SKIPPED
    several = {'MAXLM_COORDINATOR': 'a:1', 'MAXLM_NUM_PROCESSES': '2', 'MAXLM_PROCESS_ID': '0'}
    assert check_trial(case_on(CPU, config=small_config(), environment=several)).status is CheckStatus.SKIPPED
