"""Runs of several nodes that share only an S3 bucket: each process has its own home directory and cache."""

import contextlib
import math
import re
import shutil

import pytest

from maxlm.errors import EXIT_DONE
from tests.cli.runs.test_train import arguments, curve, run
from tests.forking import forking, free_port
from tests.waiting import until

URL = 's3://bucket/runs/two'
SETTINGS = {
    'checkpoint__save_interval_steps': 2,
    'checkpoint__max_to_keep': 8,
    'eval__interval': 0,
    'optimizer__schedule': 'constant',
}


@contextlib.contextmanager
def nodes(dataset, homes, num_steps):
    """Yields the two processes of a run, 4 devices each."""
    run_id = {'MAXLM_COORDINATOR': f'127.0.0.1:{free_port()}', 'MAXLM_NUM_PROCESSES': '2'}
    words = arguments(dataset, URL, **SETTINGS, train__num_steps=num_steps)
    with forking('maxlm.train', devices=4) as parent:
        processes = []
        for number in range(2):
            (homes / str(number)).mkdir(parents=True)
            environment = {**run_id, 'MAXLM_PROCESS_ID': str(number), 'HOME': str(homes / str(number))}
            processes.append(parent.start(words, homes / f'log-{number}', environment))
        yield processes


def finish(processes):
    codes = [process.wait(200) for process in processes]
    assert codes == [EXIT_DONE] * 2, ''.join(process.stdout + process.stderr for process in processes)
    return processes[0].stdout


def steps_in(client):
    """Returns the object names of each step in the bucket."""
    steps = {}
    for page in client.get_paginator('list_objects_v2').paginate(Bucket='bucket', Prefix='runs/two/checkpoints/'):
        for entry in page.get('Contents', ()):
            step, _, name = entry['Key'].removeprefix('runs/two/checkpoints/').partition('/')
            steps.setdefault(step, set()).add(name)
    return steps


def complete(client):
    return {int(step) for step, names in steps_in(client).items() if 'commit_success.txt' in names}


@pytest.mark.multiprocess
@pytest.mark.network_emulator
@pytest.mark.timeout(600)
def test_nodes_that_share_only_an_s3_bucket(dataset, tmp_path, s3, capsys):
    assert run(dataset, tmp_path / 'uninterrupted', **SETTINGS, train__num_steps=10) == EXIT_DONE
    with nodes(dataset, tmp_path / 'first', 4) as processes:
        finish(processes)
    assert complete(s3) == {2, 4}
    # Each process has written its own shards.
    for number in range(2):
        assert any(name.startswith(f'params/ocdbt.process_{number}/d/') for name in steps_in(s3)['4'])
    shutil.rmtree(tmp_path / 'first')

    # One node is lost during a save. The run goes on with the newest complete step, on new nodes.
    with nodes(dataset, tmp_path / 'second', 8) as processes:
        until(lambda: '6' in steps_in(s3) or processes[1].poll() is not None, 200)
        processes[1].kill()
        assert processes[0].wait(100) != EXIT_DONE
        assert 'resuming from step 4' in processes[0].stdout
    shutil.rmtree(tmp_path / 'second')
    newest = max(complete(s3))
    with nodes(dataset, tmp_path / 'third', 8) as processes:
        assert re.search(rf'resuming from step {newest}\b', finish(processes))
    assert complete(s3) == {2, 4, 6, 8}
    shutil.rmtree(tmp_path / 'third')

    # One process downloads the step that Orbax wrote into the bucket.
    capsys.readouterr()
    assert run(dataset, URL, **SETTINGS, train__num_steps=10, data__cache_dir=tmp_path / 'one') == EXIT_DONE
    assert 'resuming from step 8' in capsys.readouterr().out
    (local,) = (tmp_path / 'one' / 'runs').iterdir()
    found, wanted = curve(local), curve(tmp_path / 'uninterrupted')
    assert sorted(found) == sorted(wanted)
    for step in wanted:
        assert math.isclose(found[step]['train/loss'], wanted[step]['train/loss'], rel_tol=1e-6)
