"""Tests the check that restarts a trial run; the last test has a real one."""

import json

import pytest

from maxlm.config.loading import load
from maxlm.diagnostics.checks.resume import check_resume, evaluate_resume, has_checkpoint, has_resumed
from maxlm.diagnostics.checks.trial_run import Trial
from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckStatus
from tests.conftest import ROOT

TINY = str(ROOT / 'configs/tiny.py')


@pytest.mark.parametrize(
    ('trial', 'status', 'words'),
    [
        (Trial('', [], {}, 5.0, [{'kind': 'resumed', 'from_step': 2}]), 'ok', 'resumed from step 2 in 5 s'),
        (Trial('', [], {}, 5.0, [{'kind': 'started'}]), 'failure', 'it did not load the checkpoint'),
        (Trial('no space', [], {}, 5.0), 'failure', 'does not continue: no space'),
    ],
)
def test_evaluation_of_facts(trial, status, words):
    found = evaluate_resume(trial)
    assert found.status == status
    assert words in found.message


def test_an_incomplete_checkpoint_does_not_count(tmp_path):
    assert not has_checkpoint(tmp_path)
    (tmp_path / 'checkpoints/2.orbax-checkpoint-tmp').mkdir(parents=True)
    assert not has_checkpoint(tmp_path)
    (tmp_path / 'checkpoints/2').mkdir()
    assert has_checkpoint(tmp_path)


def test_steps_before_the_restart_do_not_count(tmp_path):
    (tmp_path / 'events.jsonl').write_text(json.dumps({'kind': 'resumed', 'time': 10.0}) + '\n')
    (tmp_path / 'metrics.jsonl').write_text(json.dumps({'step': 3, 'time': 9.0, 'train/loss': 1.0}) + '\n')
    assert not has_resumed(tmp_path)
    with (tmp_path / 'metrics.jsonl').open('a') as file:
        file.write(json.dumps({'step': 3, 'time': 11.0, 'train/loss': 1.0}) + '\n')
    assert has_resumed(tmp_path)


def test_it_runs_only_on_request():
    assert check_resume(CheckContext(spec=TINY, config=load(TINY))).status is CheckStatus.SKIPPED


@pytest.mark.multiprocess
def test_a_run_is_killed_and_restarted(dataset, tmp_path):
    overrides = [f'data.path={dataset}', 'data.seq_len=16', 'model.num_layers=1', 'model.dim=32', 'model.ffn_dim=32']
    context = CheckContext(
        spec=TINY, overrides=overrides, config=load(TINY, overrides), workdir=str(tmp_path / 'run'), try_resume=True
    )
    found = check_resume(context)
    assert found.status is CheckStatus.OK, found
    assert 'resumed from step' in found.message
    # Nothing is left.
    assert list(tmp_path.iterdir()) == []
