"""Tests launch/tpu_compute.sh with a fake gcloud, whose machine is a directory in which bash runs its commands."""

import pytest

pytestmark = pytest.mark.multiprocess

MACHINE = ('--name', 'pod', '--zone=us-east5-b', '--poll', '0', '--backoff', '0')
TYPE = ('--type', 'v6e-8')
TRAIN = ('--config=configs/tiny.py', '--workdir=/mnt/runs/run')
CAPACITY = 'ZONE_RESOURCE_POOL_EXHAUSTED: The zone does not have enough resources available'
QUOTA = 'Quota TPUS_PER_TPU_FAMILY exceeded. Limit: 0.0 in region us-east5.'


@pytest.fixture
def compute(programs, tree):
    """Returns a function (command, options) → the finished script."""
    return lambda command, *options: programs.run(tree / 'launch/tpu_compute.sh', command, *MACHINE, *options, cwd='/')


def verbs(programs):
    """Returns the commands of gcloud, such as `instances create` or `ssh`, without `describe`."""
    lines = [call['arguments'] for call in programs.calls('gcloud')]
    names = [' '.join(words[1:3]) if words[1] == 'instances' else words[1] for words in lines]
    return [name for name in names if name != 'instances describe']


@pytest.mark.parametrize(
    ('options', 'machine', 'family', 'more'),
    [
        (('v6e-1',), 'ct6e-standard-1t', 'ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e', ''),
        (('v5p-8', '--internal-ips'), 'ct5p-hightpu-4t', 'ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e', ' --no-address'),
        (('tpu7x-standard-4t',), 'tpu7x-standard-4t', 'ubuntu-accel-2404-amd64-tpu-tpu7x', ''),
        (
            ('v6e-4', '--spot'),
            'ct6e-standard-4t',
            'ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e',
            ' --provisioning-model=SPOT --instance-termination-action=DELETE',
        ),
        (
            ('v6e-8', '--flex-start', '--max-run-duration', '12h', '--subnetwork=tpus'),
            'ct6e-standard-8t',
            'ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e',
            ' --subnet=tpus --provisioning-model=FLEX_START --request-valid-for-duration=2h --max-run-duration=12h '
            '--instance-termination-action=DELETE',
        ),
        (
            ('v6e-8', '--reserved', 'mine'),
            'ct6e-standard-8t',
            'ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e',
            ' --provisioning-model=RESERVATION_BOUND --reservation-affinity=specific --reservation=mine',
        ),
    ],
)
def test_machine_types_and_kinds_of_capacity(compute, options, machine, family, more):
    done = compute('create', '--type', *options, '--dry-run')
    assert done.stdout.splitlines()[-1] == (
        f'would run: gcloud compute instances create pod --zone=us-east5-b --quiet --machine-type={machine} '
        f'--image-family={family} --image-project=ubuntu-os-accelerator-images --maintenance-policy=TERMINATE '
        f'--boot-disk-size=200GB --scopes=cloud-platform{more}'
    )


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (('--type=v6e-64',), '--type=v6e-64: has several machines; use launch/tpu_vm.sh'),
        (('--type=v5e-8',), '--type=v5e-8: not on Compute Engine; use launch/tpu_vm.sh'),
        (('--type=n2-standard-8',), 'not a type that has a default --image-family'),
        ((), '--type is missing'),
        ((*TYPE, '--spot', '--flex-start'), '--spot --flex-start: choose one of'),
        ((*TYPE, '--flex-start'), '--max-run-duration is missing'),
        ((*TYPE, '--queued'), 'unknown option --queued; see the head of launch/tpu_compute.sh'),
    ],
)
def test_requests_that_cannot_work(compute, programs, options, words):
    done = compute('create', *options)
    assert (done.returncode, done.stderr.count('\n')) == (2, 1)
    assert words in done.stderr
    assert programs.calls('gcloud') == []


@pytest.mark.parametrize(
    ('message', 'code', 'words'),
    [
        (QUOTA, 2, 'no quota for v6e-8 in us-east5-b'),
        (CAPACITY, 75, 'no free v6e-8 in us-east5-b'),
        ('Required compute.instances.create permission', 1, 'error: (gcloud) Required compute.instances.create'),
    ],
)
def test_creation_failures(compute, programs, message, code, words):
    programs.plan(replies=[{'match': 'instances create', 'code': 1, 'stderr': message}])
    done = compute('create', *TYPE)
    assert done.returncode == code
    assert words in done.stdout + done.stderr


def test_training_from_creation_to_deletion(compute, programs):
    programs.plan(attempts=[{'code': 0}])
    done = compute('up', *TYPE, '--spot', *TRAIN, '--config.train.num_steps=5')
    assert done.returncode == 0, done.stderr
    assert 'tpu_compute: training has ended with exit code 0' in done.stdout
    assert 'delete it with launch/tpu_compute.sh delete' in done.stdout
    assert verbs(programs)[:4] == ['instances create', 'ssh', 'scp', 'ssh']
    (train,) = [line for line in programs.lines('python') if 'maxlm.train --config' in line]
    assert train.endswith('--config=configs/tiny.py --workdir=/mnt/runs/run --config.train.num_steps=5')
    assert compute('delete').returncode == 0
    assert verbs(programs)[-1] == 'instances delete'
    assert 'pod does not exist' in compute('delete').stdout


def test_config_and_data_are_checked_before_a_machine_is_created(compute, programs):
    programs.plan(check_code=2)
    assert compute('up', *TYPE, *TRAIN).returncode == 2
    assert programs.calls('gcloud') == []
    (check,) = [line for line in programs.lines('python') if 'maxlm.train' in line]
    assert '--dry-run=elsewhere --config=configs/tiny.py' in check


def test_a_preempted_machine_is_created_again(compute, programs):
    # The first attempt is preempted: Compute Engine deletes the machine.
    programs.plan(
        attempts=[{'code': 0}],
        replies=[{'match': 'worker.sh follow', 'code': 255, 'then': {'machines': None}}],
    )
    done = compute('up', *TYPE, '--spot', *TRAIN)
    assert done.returncode == 0, done.stderr + done.stdout
    assert verbs(programs).count('instances create') == 2
