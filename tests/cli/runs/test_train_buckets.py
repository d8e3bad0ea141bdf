"""Runs in a bucket or with a mirror in a bucket: restarts on other machines, and failing requests."""

import json
import math
import re
import shutil

import pytest

from maxlm.cli.runs import train
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_PREEMPTED, exit_code
from maxlm.telemetry.metrics import read_metrics
from maxlm.workdir.run_storage import RunStorage
from tests.cli.runs.test_train import arguments, curve, params_of, run, same
from tests.forking import forking
from tests.gcs_emulator import running
from tests.messages import assert_error_line
from tests.processes import Processes

pytestmark = pytest.mark.usefixtures('shared_steps')

SETTINGS = {
    'checkpoint__save_interval_steps': 2,
    'checkpoint__max_to_keep': 8,
    'eval__interval': 4,
    'optimizer__schedule': 'constant',
}


@pytest.fixture(scope='module')
def uninterrupted(dataset, tmp_path_factory):
    """Returns an uninterrupted run of eight steps in a directory."""
    workdir = tmp_path_factory.mktemp('uninterrupted') / 'run'
    assert run(dataset, workdir, **SETTINGS, train__num_steps=8) == EXIT_DONE
    return workdir


@pytest.mark.multiprocess
@pytest.mark.network_emulator
@pytest.mark.nightly
def test_a_run_in_a_bucket_resumes_on_another_machine(dataset, tmp_path, uninterrupted):
    """Starts a process for each attempt, because TensorStore reads its environment once."""
    url = 'gs://bucket/runs/one'
    with running('bucket') as emulator:
        environment = {**emulator.environment, 'HOME': str(tmp_path)}

        def maxlm(verb, *words):
            with forking(f'maxlm.{verb}', devices=8, environment=environment) as parent:
                process = parent.start(words, tmp_path / 'log')
                assert process.wait(100) == EXIT_DONE, process.stdout + process.stderr
                return process.stdout + process.stderr

        def run_attempt(machine, num_steps, **settings):
            settings = {**SETTINGS, 'data__cache_dir': tmp_path / machine, 'train__num_steps': num_steps, **settings}
            return maxlm('train', *arguments(dataset, url, **settings))

        run_attempt('first', 4)
        shutil.rmtree(tmp_path / 'first')
        # The upload of step 6 is refused, without other consequences.
        emulator.fault('checkpoints/6', status=403)
        assert 'resuming from step 4' in run_attempt('second', 8, alerts__file=tmp_path / 'alerts.jsonl')
        (alert,) = map(json.loads, (tmp_path / 'alerts.jsonl').read_text().splitlines())
        assert re.search(
            'checkpoint of step 6 not saved: the bucket returned status 403; .*training continues', alert['message']
        )
        emulator.clear()
        steps = {name.split('/')[4] for name in emulator.objects if name.endswith('/_CHECKPOINT_METADATA')}
        assert {'2', '4', '8'} <= steps
        assert '6' not in steps

        (local,) = (tmp_path / 'second' / 'runs').iterdir()
        assert curve(local) == curve(uninterrupted)
        assert 'step 8: loss' in maxlm('evaluate', f'--checkpoint={url}@best', f'--data={dataset}')
        # Another run resumes from it with the complete state.
        (tmp_path / 'new').mkdir()
        maxlm('train', *arguments(dataset, tmp_path / 'new', **SETTINGS, train__num_steps=8), f'--resume={url}@4')
        assert curve(tmp_path / 'new') == curve(uninterrupted)
        assert same(params_of(tmp_path / 'new', 8), params_of(uninterrupted, 8))


@pytest.mark.multiprocess
@pytest.mark.network_emulator
def test_processes_that_share_only_a_bucket(dataset, tmp_path, uninterrupted, monkeypatch):
    """Each process has a separate directory, as on the machines of a TPU pod."""
    url = 'gs://bucket/runs/two'
    with running('bucket') as emulator:
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value)

        def run_attempt(machine, num_steps):
            words = arguments(dataset, url, **SETTINGS, data__cache_dir=tmp_path / machine, train__num_steps=num_steps)
            with Processes(2, 4, words, logs=tmp_path / f'{machine}-logs') as both:
                assert both.wait(100) == [EXIT_DONE] * 2, both.output(0) + both.output(1)
                return both.output(0)

        # The first save is refused for all processes.
        emulator.fault('checkpoints/_probe', status=403, times=1)
        assert 'checkpoint of step 2 not saved' in run_attempt('first', 4)
        shutil.rmtree(tmp_path / 'first')
        assert 'resuming from step 4' in run_attempt('second', 8)
        (local,) = (tmp_path / 'second' / 'runs').iterdir()
        found, wanted = curve(local), curve(uninterrupted)
        assert sorted(found) == sorted(wanted)
        for step in wanted:
            assert math.isclose(found[step]['train/loss'], wanted[step]['train/loss'], rel_tol=1e-6)


@pytest.mark.parametrize('as_workdir', [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_run_with_a_mirror_resumes_on_another_machine(dataset, tmp_path, uninterrupted, s3, capsys, as_workdir):
    url = f's3://bucket/{as_workdir}'

    def run_attempt(machine, num_steps, **more):
        settings = SETTINGS | {'train__num_steps': num_steps} | more
        if as_workdir:
            return run(dataset, url, **settings, data__cache_dir=tmp_path / machine)
        return run(dataset, tmp_path / machine, **settings, checkpoint__remote_dir=url)

    assert run_attempt('first', 4) == EXIT_DONE
    names = {entry['Key'] for entry in s3.list_objects_v2(Bucket='bucket', Prefix=str(as_workdir))['Contents']}
    assert {f'{as_workdir}/{name}' for name in ('config.json', 'metrics.jsonl', 'checkpoints/4/mirror.json')} <= names
    shutil.rmtree(tmp_path / 'first')
    assert run_attempt('second', 8) == EXIT_DONE
    assert 'resuming from step 4' in capsys.readouterr().out
    local = next((tmp_path / 'second' / 'runs').iterdir()) if as_workdir else tmp_path / 'second'
    assert curve(local) == curve(uninterrupted)

    def complete():
        names = [
            entry['Key'].split('/') for entry in s3.list_objects_v2(Bucket='bucket', Prefix=str(as_workdir))['Contents']
        ]
        return {int(name[2]) for name in names if name[1] == 'checkpoints' and name[3:] == ['commit_success.txt']}

    assert complete() == {2, 4, 6, 8}
    # The retention rules also apply to checkpoints of attempts on other machines.
    assert run_attempt('third', 10, checkpoint__max_to_keep=1) == EXIT_DONE
    losses = {line['step']: line['eval/loss'] for line in read_metrics(local) if 'eval/loss' in line}
    assert complete() <= {10, min(losses, key=losses.get)}
    assert 10 in complete()


@pytest.mark.multiprocess
@pytest.mark.nightly
def test_processes_that_share_an_s3_bucket_and_its_cache(dataset, tmp_path, uninterrupted, s3):
    def run_attempt(machine, num_steps):
        words = arguments(
            dataset, 's3://bucket/two', **SETTINGS, data__cache_dir=tmp_path / machine, train__num_steps=num_steps
        )
        with Processes(2, 4, words, logs=tmp_path / f'{machine}-logs') as both:
            assert both.wait(100) == [EXIT_DONE] * 2, both.output(0) + both.output(1)
            return both.output(0)

    run_attempt('first', 4)
    shutil.rmtree(tmp_path / 'first')
    assert 'resuming from step 4' in run_attempt('second', 6)
    (local,) = (tmp_path / 'second' / 'runs').iterdir()
    found, wanted = curve(local), curve(uninterrupted)
    assert sorted(found) == sorted(wanted)[:6]
    for step in found:
        assert math.isclose(found[step]['train/loss'], wanted[step]['train/loss'], rel_tol=1e-6)


def test_an_unreachable_bucket_starts_no_new_run(dataset, tmp_path, s3, monkeypatch, capsys):
    monkeypatch.setitem(RunStorage.fetch.__kwdefaults__, 'timeout_seconds', 0.0)
    monkeypatch.setenv('AWS_ENDPOINT_URL', 'http://127.0.0.1:9')
    assert run(dataset, tmp_path / 'run', checkpoint__remote_dir='s3://bucket/run') == EXIT_PREEMPTED
    assert 'run the command again when the bucket responds' in capsys.readouterr().err
    assert not (tmp_path / 'run' / 'checkpoints').exists()


@pytest.mark.parametrize(
    ('workdir', 'settings', 'words'),
    [
        ('http://example.org/run', {}, '--workdir=http://example.org/run: must have the form gs://bucket/run'),
        (
            'run',
            {'checkpoint__remote_dir': 'bucket/run'},
            'checkpoint.remote_dir=bucket/run: must have the form gs://bucket/run',
        ),
        ('gs://bucket/run', {'checkpoint__remote_dir': 's3://bucket/run'}, 'is already in a bucket'),
    ],
)
def test_invalid_workdirs(dataset, tmp_path, monkeypatch, capsys, workdir, settings, words):
    monkeypatch.chdir(tmp_path)
    assert exit_code(train.main, arguments(dataset, workdir, **settings)) == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, words)
    assert not list(tmp_path.iterdir())


def test_invalid_checkpoints_to_resume_from(dataset, tmp_path, uninterrupted, capsys):
    def resumed(name, origin):
        command = arguments(dataset, tmp_path / name, **SETTINGS, train__num_steps=8)
        return exit_code(train.main, [*command, f'--resume={origin}'])

    assert resumed('a', tmp_path / 'nowhere') == EXIT_BAD_INPUT
    assert f'{tmp_path}/nowhere: no checkpoint' in capsys.readouterr().err
    assert resumed('b', f'{uninterrupted}@5') == EXIT_BAD_INPUT
    assert 'steps: ' in capsys.readouterr().err
    assert not list(tmp_path.glob('*/checkpoints/*'))
    # Checkpoints of the workdir have priority, because the same command is restarted repeatedly.
    assert resumed('c', f'{uninterrupted}@4') == EXIT_DONE
    assert resumed('c', f'{uninterrupted}@2') == EXIT_DONE
    assert 'already has checkpoints' in capsys.readouterr().out
    assert curve(tmp_path / 'c') == curve(uninterrupted)
