"""Executor on a real Ray cluster of two local nodes, which takes half a minute to start."""

from __future__ import annotations

import os
import sys

import pytest

from maxlm.data.executors.executor import run_tasks
from maxlm.data.executors.ray_executor import RayCluster
from maxlm.data.prepare import partitions
from maxlm.errors import InputError
from tests.conftest import ROOT
from tests.data.executors.tasks import Told
from tests.preparing import contents, run, write_texts

pytestmark = [
    pytest.mark.multiprocess,
    # JAX warns when Ray forks to start its programs.
    pytest.mark.filterwarnings('ignore:os.fork\\(\\) was called:RuntimeWarning'),
]


@pytest.fixture(scope='module')
def cluster():
    """Returns the address of a cluster of two nodes with one core each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('RAY_USAGE_STATS_ENABLED', '0')
        # Workers need the same import path as the tests.
        patch.setenv('PYTHONPATH', str(ROOT))
        cluster_utils = pytest.importorskip('ray.cluster_utils', reason='the extra ray')
        made = cluster_utils.Cluster()
        made.add_node(num_cpus=1, include_dashboard=False)
        made.add_node(num_cpus=1)
        yield made.address
        made.shutdown()


def test_tasks_run_on_all_machines_are_tried_again_and_end_on_bad_input(cluster, tmp_path):
    tasks = [Told(tmp_path, str(i)) for i in range(4)]
    tasks += [Told(tmp_path, 'once', 'killed', times=1), Told(tmp_path, 'always', 'killed')]
    tasks += [Told(tmp_path, 'slow to answer', 'unreachable', times=1)]
    bad = [Told(tmp_path, 'hangs', 'hang'), Told(tmp_path, 'done'), Told(tmp_path, 'bad', 'bad')]
    done = []
    with RayCluster(cluster) as engine:
        assert engine.num_slots == 4
        failed = run_tasks(engine, tasks, retries=1, on_progress=lambda *new: done.append(new), sleep=lambda _: None)
        # Bad input stops the remaining tasks.
        with pytest.raises(InputError, match='bad: not UTF-8'):
            run_tasks(engine, bad, retries=1, on_progress=lambda *_: None)
    assert [task.is_done() for task in bad] == [False, True, False]
    assert list(failed) == [5]
    assert 'Crashed' in failed[5] or 'died' in failed[5]
    assert [task.is_done() for task in tasks] == [True] * 5 + [False, True]
    assert [len(task.tries) for task in tasks] == [1] * 4 + [2] * 3
    assert os.getpid() not in {pid for task in tasks for pid in task.tries}
    # Progress reports 10 bytes for each finished task and 4 for the attempt that did not reach the storage.
    assert sum(num_bytes for num_bytes, _, _ in done) == 6 * 10 + 4


def test_a_cluster_writes_the_same_bytes(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, 'MIN_GROUP_BYTES', 3000)
    texts = write_texts(tmp_path / 'texts')
    arguments = ['--input', texts, '--tokenizer', 'bpe:300', '--filter', 'code', '--deduplicate', 'near']
    arguments += ['--fim-rate', '0.5']
    on_ray = ['--executor', 'ray', '--ray-address', cluster]
    assert run(*arguments, '--workers', 1, '--output', tmp_path / 'here') == 0
    assert run(*arguments, *on_ray, '--output', tmp_path / 'there') == 0
    here = contents(tmp_path / 'here')
    assert len([name for name in here if name.startswith('train-')]) > 3
    assert here == contents(tmp_path / 'there')
    # Negative control: other settings produce other bytes.
    assert run(*arguments, '--fim-spm-rate', '0.3', '--workers', 1, '--output', tmp_path / 'other') == 0
    assert here != contents(tmp_path / 'other')


def test_without_ray_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'ray', None)
    with pytest.raises(InputError, match=r"needs ray: pip install 'maxlm\[ray\]'"):
        RayCluster('')


def test_a_cluster_that_is_not_there(capsys, tmp_path):
    pytest.importorskip('ray', reason='the extra ray')
    (tmp_path / 'x.txt').write_text('text')
    arguments = ['--input', tmp_path / 'x.txt', '--output', tmp_path / 'data', '--executor', 'ray']
    for address in ('127.0.0.1:1', 'ray://127.0.0.1:1', '127.0.0.1:99999'):
        assert run(*arguments, '--ray-address', address) == 2
        error = capsys.readouterr().err
        assert error.count('\n') == 1
        assert f'{address}: no Ray cluster' in error
