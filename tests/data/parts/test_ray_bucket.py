"""A real Ray cluster of local nodes with separate scratch disks writes to a bucket, while nodes are killed."""

import contextlib
import os
import random
import signal
import subprocess
import sys

import psutil
import pytest

from maxlm.storage.bucket import Bucket
from tests import gcs_emulator
from tests.conftest import ROOT
from tests.data.parts.stages import OPTIONS
from tests.preparing import contents, run
from tests.waiting import until

pytestmark = [
    pytest.mark.multiprocess,
    # JAX warns when Ray forks to start its processes.
    pytest.mark.filterwarnings('ignore:os.fork\\(\\) was called:RuntimeWarning'),
]

# The driver makes the partitions.
PREPARE = """
import sys
from maxlm.cli.setup import prepare
from maxlm.data.prepare import partitions
from maxlm.errors import exit_code
partitions.GROUPS, partitions.MIN_GROUP_BYTES = 20, 1000
sys.exit(exit_code(prepare.main, sys.argv[1:]))
"""
NUM_KILLS = 2
SECONDS = 300.0


class Nodes:
    """Nodes of a cluster with one core each. Each has its own directory of temporary files."""

    def __init__(self, cluster, directory):
        self._cluster, self._directory, self._nodes = cluster, directory, {}
        self.disks = []

    def add(self):
        disk = self._directory / f'disk-{len(self.disks)}'
        disk.mkdir(parents=True)
        self._nodes[len(self.disks)] = self._cluster.add_node(num_cpus=1, env_vars={'TMPDIR': str(disk)})
        self.disks.append(disk)

    def busy(self):
        """Returns the numbers of the nodes that run a task."""
        return [number for number in self._nodes if any(self.disks[number].glob('maxlm-prepare-*'))]

    def kill(self, number):
        """Kills all processes of a node at once. Workers whose raylet dies would otherwise clean up."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get('TMPDIR') == str(self.disks[number]):
                    process.kill()
        self._cluster.remove_node(self._nodes.pop(number), allow_graceful=False)


@pytest.fixture
def bucket(monkeypatch):
    """Returns a client of an emulator that all processes of this test use."""
    with gcs_emulator.running('bucket') as emulator:
        emulator.patch_environment(monkeypatch)
        yield emulator


@pytest.fixture
def nodes(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv('RAY_USAGE_STATS_ENABLED', '0')
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    cluster_utils = pytest.importorskip('ray.cluster_utils', reason='the extra ray')
    # The head runs no tasks. It notices a killed node within two seconds.
    head = {'num_cpus': 0, 'include_dashboard': False, '_system_config': {'health_check_period_ms': 500}}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    nodes = Nodes(cluster, tmp_path / 'disks')
    nodes.address = cluster.address
    nodes.add()
    nodes.add()
    yield nodes
    cluster.shutdown()


@pytest.mark.timeout(900)
def test_killed_nodes_and_a_killed_driver_leave_the_same_bytes(nodes, bucket, inputs, tmp_path, request):
    rng = random.Random(11)
    for folder in inputs[1:]:
        for path in folder.iterdir():
            Bucket('gs://bucket').put_file(f'inputs/{folder.name}/{path.name}', path, lambda _: None)
    arguments = ['--input', *(f'gs://bucket/inputs/{folder.name}' for folder in inputs[1:]), *OPTIONS]
    assert run(*arguments, '--output', tmp_path / 'expected') == 0
    expected = contents(tmp_path / 'expected')
    # Uploads take longer than a kill, so that it meets a task.
    bucket.fault(r'(POST|PUT) .*web/.prepare/(signatures|survey)', delay=1.0)
    words = [*arguments, '--executor=ray', '--ray-address', nodes.address, '--cache', tmp_path / 'cache']
    words += ['--output', 'gs://bucket/web']
    command = [sys.executable, '-c', PREPARE, *map(str, words)]

    def start():
        started = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        request.addfinalizer(lambda: end(started))
        return started

    def end(started):
        started.kill()
        started.communicate()

    def wait_for_results(number):
        """Waits for further results of tasks and for a running task. Returns the numbers of the busy nodes."""
        before, busy = num_results(), []

        def is_ready():
            busy[:] = nodes.busy()
            return process.poll() is not None or (num_results() >= before + number and busy)

        until(is_ready, seconds=SECONDS)
        assert process.poll() is None, process.stderr.read()
        return busy

    def num_results():
        return len([name for name in bucket.objects if '/.prepare/survey-' in name or '/.prepare/group-' in name])

    process, killed = start(), []
    for _ in range(NUM_KILLS):
        killed.append(rng.choice(wait_for_results(rng.randrange(1, 4))))
        nodes.kill(killed[-1])
        nodes.add()
    # A killed node has no time to clean up.
    assert any(os.listdir(nodes.disks[number]) for number in killed)
    bucket.clear()
    bucket.fault(r'(POST|PUT) .*web/train', delay=0.3)
    wait_for_results(1)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    process = start()
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, error
    remote = Bucket('gs://bucket/web')
    assert {name: remote.read(name) for name in remote.list()} == expected
    assert os.listdir(tmp_path / 'cache' / 'preparations') == []
