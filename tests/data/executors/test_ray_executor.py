"""Tests the executor on a real Ray cluster of two local nodes, which takes half a minute to start."""

import os
import re
import sys
import types

import pytest

from maxlm.data.executors.executor import TaskResult, TaskStatus, run_tasks
from maxlm.data.executors.ray_executor import MAX_LOST_NODES, RayCluster
from maxlm.data.prepare import partitions
from maxlm.errors import InputError
from maxlm.installation import pip_install
from tests.conftest import ROOT
from tests.data.executors.tasks import ScriptedTask
from tests.messages import assert_error_line
from tests.preparing import contents, run, write_texts
from tests.user_modules import write_module

pytestmark = [
    pytest.mark.multiprocess,
    # JAX warns when Ray forks to start its processes.
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
        ray_cluster = cluster_utils.Cluster()
        ray_cluster.add_node(num_cpus=1, include_dashboard=False)
        ray_cluster.add_node(num_cpus=1)
        yield ray_cluster.address
        ray_cluster.shutdown()


def test_tasks_run_on_all_nodes_with_retries_and_stop_on_bad_input(cluster, tmp_path):
    tasks = [ScriptedTask(tmp_path, str(i)) for i in range(4)]
    tasks += [ScriptedTask(tmp_path, 'once', 'killed', num_failures=1), ScriptedTask(tmp_path, 'always', 'killed')]
    tasks += [ScriptedTask(tmp_path, 'slow to answer', 'unreachable', num_failures=1)]
    bad = [
        ScriptedTask(tmp_path, 'hangs', 'hang'),
        ScriptedTask(tmp_path, 'done'),
        ScriptedTask(tmp_path, 'bad', 'bad'),
    ]
    progress = []
    with RayCluster(cluster) as engine:
        assert engine.num_slots == 4
        failed = run_tasks(
            engine, tasks, retries=1, on_progress=lambda *new: progress.append(new), sleep=lambda _: None
        )
        # Bad input stops the remaining tasks.
        with pytest.raises(InputError, match='bad: not UTF-8'):
            run_tasks(engine, bad, retries=1, on_progress=lambda *_: None)
    assert [task.is_done() for task in bad] == [False, True, False]
    assert list(failed) == [5]
    assert 'Crashed' in failed[5] or 'died' in failed[5]
    assert [task.is_done() for task in tasks] == [True] * 5 + [False, True]
    assert [len(task.attempts) for task in tasks] == [1] * 4 + [2] * 3
    assert os.getpid() not in {pid for task in tasks for pid in task.attempts}
    # Progress reports 10 bytes for each finished task and 4 for the attempt that did not reach the storage.
    assert sum(num_bytes for num_bytes, _, _ in progress) == 6 * 10 + 4


def test_a_cluster_writes_the_same_bytes(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, 'MIN_GROUP_BYTES', 3000)
    texts = write_texts(tmp_path / 'texts')
    arguments = ['--input', texts, '--tokenizer', 'bpe:300', '--filter', 'code', '--deduplicate', 'near']
    arguments += ['--fim-rate', '0.5']
    on_ray = ['--executor', 'ray', '--ray-address', cluster]
    assert run(*arguments, '--workers', 1, '--output', tmp_path / 'local') == 0
    assert run(*arguments, *on_ray, '--output', tmp_path / 'ray') == 0
    local = contents(tmp_path / 'local')
    assert len([name for name in local if name.startswith('train-')]) > 3
    assert local == contents(tmp_path / 'ray')
    # Negative control: other settings produce other bytes.
    assert run(*arguments, '--fim-spm-rate', '0.3', '--workers', 1, '--output', tmp_path / 'other') == 0
    assert local != contents(tmp_path / 'other')


def test_a_filter_of_the_user_runs_on_a_cluster(cluster, tmp_path, monkeypatch):
    texts = write_texts(tmp_path / 'texts')
    name = write_module(tmp_path, monkeypatch, 'def keep(document):\n    return len(document.text) > 300')
    arguments = ['--input', texts, '--tokenizer', 'bytes', '--filter', f'{name}:keep']
    assert run(*arguments, '--workers', 1, '--output', tmp_path / 'local') == 0
    assert run(*arguments, '--executor', 'ray', '--ray-address', cluster, '--output', tmp_path / 'ray') == 0
    assert contents(tmp_path / 'local') == contents(tmp_path / 'ray')
    assert f'{name}:keep: removed' in (tmp_path / 'ray' / 'cleaning.json').read_text()


def test_the_error_without_ray_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, 'ray', None)
    with pytest.raises(InputError, match=re.escape(pip_install('ray'))):
        RayCluster('')


def test_an_unreachable_cluster_is_a_one_line_error(capsys, tmp_path):
    pytest.importorskip('ray', reason='the extra ray')
    (tmp_path / 'x.txt').write_text('text')
    arguments = ['--input', tmp_path / 'x.txt', '--output', tmp_path / 'data', '--executor', 'ray']
    for address in ('127.0.0.1:1', 'ray://127.0.0.1:1', '127.0.0.1:99999'):
        assert run(*arguments, '--ray-address', address) == 2
        assert_error_line(capsys.readouterr().err, f'{address}: no Ray cluster')


@pytest.mark.parametrize(('losses', 'ending'), [(MAX_LOST_NODES, 'done'), (MAX_LOST_NODES + 1, 'failed')])
def test_a_lost_machine_is_no_failed_attempt(monkeypatch, losses, ending):
    exceptions = pytest.importorskip('ray.exceptions', reason='the extra ray')
    starts = []

    def get(reference):
        if reference <= losses:
            raise exceptions.NodeDiedError('the node is dead')
        return TaskResult(7, TaskStatus.DONE), (1, 2, 3)

    def start(number, task):
        starts.append((number, task))
        return len(starts)

    # A cluster that cannot choose the time of a loss; see also tests/data/parts/test_ray_bucket.py.
    engine = object.__new__(RayCluster)
    engine._running = {}
    engine._remote = types.SimpleNamespace(remote=start)
    engine._ray = types.SimpleNamespace(
        wait=lambda all, num_returns: (all[:1], all[1:]), get=get, exceptions=exceptions
    )
    engine.start(7, 'task')
    while not (found := engine.wait(lambda *new: None)):
        pass
    assert [(result.number, result.ending.value) for result in found] == [(7, ending)]
    assert starts == [(7, 'task')] * (MAX_LOST_NODES + 1)
