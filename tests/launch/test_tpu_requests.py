"""Tests the options of launch/tpu_vm.sh that determine the machines: their kind, network and number of slices."""

import pytest

from tests.launch.tpu import TRAIN, TYPE, made_and_deleted, tpu
from tests.messages import assert_error_line

pytestmark = pytest.mark.multiprocess

NETWORK = ('--network=private', '--subnetwork', 'tpus', '--service-account=trainer@mine.iam.gserviceaccount.com')


@pytest.mark.parametrize(
    ('options', 'command', 'flags'),
    [
        (('--reserved',), 'tpu-vm', ('--reserved',)),
        (
            ('--reserved', '--queued', *NETWORK),
            'queued-resources',
            ('--node-id=pod', '--reserved', '--network=private'),
        ),
        (NETWORK, 'tpu-vm', ('--network=private', '--subnetwork=tpus', NETWORK[-1])),
        (('--internal-ips',), 'tpu-vm', ('--internal-ips',)),
        (('--node-count', '3', '--spot'), 'queued-resources', ('--node-count=3', '--node-prefix=pod', '--spot')),
        (
            ('--flex-start', '--max-run-duration', '12h'),
            'alpha queued-resources',
            ('--node-id=pod', '--provisioning-model=flex-start', '--max-run-duration=12h'),
        ),
    ],
)
def test_requests(programs, tree, options, command, flags):
    # The fake gcloud fails for flags that the command does not have.
    done = tpu(programs, tree, 'create', *TYPE, *options)
    assert done.returncode == 0, done.stderr
    [made] = [line for line in programs.lines('gcloud') if ' create ' in line]
    *track, kind = command.split()
    assert made.startswith(' '.join(['gcloud', *track, 'compute tpus', kind, 'create pod ']))
    assert set(flags) <= set(made.split())
    # Control: without the options, the request has none of these flags.
    plain = tpu(programs, tree, 'create', *TYPE, '--dry-run').stdout
    assert not set(flags) & set(plain.split())


def test_fake_gcloud_refuses_unknown_and_conflicting_flags(programs):
    create = ('gcloud', 'compute', 'tpus', 'queued-resources', 'create', 'pod', '--zone=z', '--node-id=pod')
    assert programs.run(*create).returncode == 0
    programs.plan()
    for flags in (['--max-run-duration=12h'], ['--spot', '--reserved'], ['--node-count=2'], ['--nodes=2']):
        done = programs.run(*create, *flags)
        assert done.returncode == 2, flags


def test_several_slices(programs, tree):
    options = ('--node-count=2', '--internal-ips', *TYPE, *TRAIN)
    done = tpu(programs, tree, 'up', *options)
    assert done.returncode == 0, done.stdout + done.stderr
    # Both workers of both slices install and train.
    assert len(programs.calls('python', ready=True)) == 4
    assert len([line for line in programs.lines('python') if 'pip install' in line]) == 4
    assert made_and_deleted(programs) == [('queued-resources', 'create')]
    connections = [line for line in programs.lines('gcloud') if ' ssh ' in line or ' scp ' in line]
    assert all(line.startswith('gcloud alpha compute tpus queued-resources ') for line in connections)
    assert all(' --tunnel-through-iap' in line for line in connections)
    assert {word for line in connections for word in line.split() if '--node=' in word} == {'--node=all', '--node=0'}
    # A lost slice ends the request, because the slices can only train together.
    programs.forget()
    lost = {'match': 'tpu-vm describe pod-1', 'code': 0, 'stdout': 'PREEMPTED\n', 'times': 2}
    programs.plan(machines='READY', queue='ACTIVE', replies=[lost])
    assert tpu(programs, tree, 'up', *options).returncode == 0
    assert made_and_deleted(programs) == [('queued-resources', 'delete'), ('queued-resources', 'create')]


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (['fetch'], 'unknown command fetch'),
        ([], 'unknown command (none)'),
        (['create', '--zone=z', '--type=v4-8'], '--name is missing'),
        (['create', '--name=n', '--type=v4-8'], '--zone is missing'),
        (['create', '--name=n', '--zone=z'], '--type is missing'),
        (['create', '--name=n', '--zone=z', '--type=v9-8'], '--type=v9-8'),
        (
            ['create', '--name=n', '--zone=z', '--type=v7x-8'],
            'has no TPU7x; use launch/tpu_compute.sh',
        ),
        (['create', '--name=n', '--zone=z', '--type=v4-8', '--spot', '--reserved'], 'choose one of'),
        (['create', '--name=n', '--zone=z', '--type=v4-8', '--flex-start'], '--max-run-duration is missing'),
        (['create', '--name=n', '--zone=z', '--type=v4-8', '--max-run-duration=1h'], 'only for --flex-start'),
        (['create', '--name=n', '--zone=z', '--type=v3-8', '--node-count=2'], 'need v4 or later'),
        (['create', '--name=n', '--zone=z', '--type=v4-8', '--node-count=0'], '--node-count=0'),
        (['run', '--name=n', '--zone=z', '--workdir=gs://b/r'], '--config is missing'),
        (['run', '--name=n', '--zone=z', '--config=c'], '--workdir is missing'),
        (['run', '--name=n', '--zone=z', '--cofnig=c'], 'unknown option --cofnig'),
        (['create', '--name'], '--name requires a value'),
    ],
)
def test_bad_options(programs, options, words):
    done = programs.run('launch/tpu_vm.sh', *options)
    assert done.returncode == 2
    assert_error_line(done.stderr, words)
    assert programs.calls() == []
