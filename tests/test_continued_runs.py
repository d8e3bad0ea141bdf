"""Runs that continue with another config, or with a config of an earlier version."""

import json

import pytest

from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE
from maxlm.telemetry.events import read_events
from maxlm.workdir.files import CONFIG, read_config
from tests.cli.runs.test_train import CONSTANT, curve, run

pytestmark = pytest.mark.usefixtures('shared_steps')

EVERY_STEP = {**CONSTANT, 'eval__interval': 2, 'checkpoint__save_interval_steps': 1, 'checkpoint__max_to_keep': 9}


def messages(workdir, kind):
    return [event['message'] for event in read_events(workdir).lines if event['kind'] == kind]


def without_key(workdir):
    """Rewrites config.json as a version without `data.train_first_token` did."""
    config = json.loads((workdir / CONFIG).read_text())
    del config['data']['train_first_token']
    (workdir / CONFIG).write_text(json.dumps(config))


def test_an_earlier_run_continues_without_first_tokens(dataset, tmp_path, capsys):
    before, new, run_of = {'data__train_first_token': 'false'}, tmp_path / 'new', tmp_path / 'old'
    assert run(dataset, tmp_path / 'whole', train__num_steps=4, **EVERY_STEP, **before) == EXIT_DONE
    assert run(dataset, run_of, train__num_steps=2, **EVERY_STEP, **before) == EXIT_DONE
    without_key(run_of)
    capsys.readouterr()
    assert run(dataset, run_of, train__num_steps=3, **EVERY_STEP) == EXIT_DONE
    assert 'data.train_first_token=False: the run continues as it began' in capsys.readouterr().out
    assert not read_config(run_of).data.train_first_token
    assert run(dataset, run_of, train__num_steps=4, **EVERY_STEP) == EXIT_DONE
    whole, continued = curve(tmp_path / 'whole'), curve(run_of)
    for step in (1, 2, 4):
        assert continued[step] == whole[step]
    # A new run trains them, also if it starts from the parameters of an earlier one, and keeps that too.
    assert run(dataset, new, train__num_steps=3, train__init_from=f'{run_of}@2', **EVERY_STEP) == EXIT_DONE
    assert run(dataset, new, train__num_steps=4, **EVERY_STEP, **before) == EXIT_DONE
    assert 'data.train_first_token=True: the run continues as it began' in capsys.readouterr().out
    assert read_config(new).data.train_first_token
    assert curve(new)[2]['train/loss'] != whole[2]['train/loss']


def test_another_batch_size_continues_with_the_next_sequence(dataset, tmp_path, capsys):
    changed, again = tmp_path / 'changed', tmp_path / 'again'
    for workdir in (changed, again):
        assert run(dataset, workdir, train__num_steps=3, train__global_batch_size=8, **EVERY_STEP) == EXIT_DONE
    assert 'train.global_batch_size was' not in capsys.readouterr().out
    larger = {'train__global_batch_size': 16, **EVERY_STEP}
    assert run(dataset, changed, train__num_steps=6, **larger) == EXIT_DONE
    text = 'train.global_batch_size was 8 and is 16: step 4 continues with sequence 25 of the data'
    assert text in capsys.readouterr().out
    assert text in messages(changed, 'batch')[0]
    lines = curve(changed)
    tokens = [lines[step]['train/tokens'] for step in range(1, 7)]
    assert tokens == [16 * sequences for sequences in (8, 16, 24, 40, 56, 72)]
    assert lines[6]['train/epoch'] / lines[3]['train/epoch'] == pytest.approx(3)
    # Interrupted after the change, the run has the same batches.
    assert run(dataset, again, train__num_steps=4, **larger) == EXIT_DONE
    assert run(dataset, again, train__num_steps=6, **larger) == EXIT_DONE
    assert len(messages(again, 'batch')) == 1
    assert curve(again)[6] == lines[6]
    # The rest of a length in tokens takes fewer steps: 24 sequences of 8 and 3 batches of 16.
    assert run(dataset, tmp_path / 'tokens', train__num_steps=3, train__global_batch_size=8, **EVERY_STEP) == EXIT_DONE
    length = {'train__num_steps': 0, 'train__num_tokens': 16 * 72}
    assert run(dataset, tmp_path / 'tokens', **length, **larger) == EXIT_DONE
    assert curve(tmp_path / 'tokens')[6] == lines[6]
    # Other changes of the data are still refused.
    assert run(dataset, again, train__num_steps=7, data__seed=5, **larger) == EXIT_BAD_INPUT
    assert 'seed was 0 and is 5' in capsys.readouterr().err


def test_a_changed_schedule_is_reported(dataset, tmp_path, capsys):
    settings = {'eval__interval': 0, 'optimizer__warmup_steps': 1, 'optimizer__schedule': 'cosine'}
    assert run(dataset, tmp_path, train__num_steps=4, **settings) == EXIT_DONE
    assert run(dataset, tmp_path, train__num_steps=4, **settings) == EXIT_DONE
    assert 'the learning rate of step' not in capsys.readouterr().out
    assert run(dataset, tmp_path, train__num_steps=8, **settings) == EXIT_DONE
    (event,) = [event for event in read_events(tmp_path).lines if event['kind'] == 'schedule']
    assert 'train.num_steps was 4 and is 8: the learning rate of step 5 was 0.0002 and is 0.0' in event['message']
    assert event['message'] in capsys.readouterr().out
    assert event['learning_rate'] == pytest.approx(curve(tmp_path)[5]['train/learning_rate'], rel=1e-4)
    assert event['learning_rate'] > 3 * event['old_learning_rate']
