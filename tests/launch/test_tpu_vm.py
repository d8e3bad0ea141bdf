"""Tests launch/tpu_vm.sh with a fake gcloud, whose two workers are directories in which bash runs their commands."""

import tarfile

import pytest

from tests.launch.programs import SECRET
from tests.launch.tpu import MACHINES, TRAIN, TYPE, arguments, made_and_deleted, tpu, verbs

pytestmark = pytest.mark.multiprocess

CAPACITY = 'There is no more capacity in the zone "us-central2-b"; you can try in another zone'
QUOTA = "RESOURCE_EXHAUSTED: Quota limit 'TPUV4PodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone"


def worker_directories(programs):
    return sorted((programs.folder / 'workers').iterdir())


@pytest.mark.parametrize(
    ('type_', 'accelerator', 'version'),
    [
        ('v3-8', 'v3-8', 'tpu-ubuntu2204-base'),
        ('v4-32', 'v4-32', 'tpu-ubuntu2204-base'),
        ('v5e-16', 'v5litepod-16', 'v2-alpha-tpuv5-lite'),
        ('v5litepod-16', 'v5litepod-16', 'v2-alpha-tpuv5-lite'),
        ('v5p-8', 'v5p-8', 'v2-alpha-tpuv5'),
        ('v6e-64', 'v6e-64', 'v2-alpha-tpuv6e'),
    ],
)
def test_accelerator_types(programs, tree, type_, accelerator, version):
    done = tpu(programs, tree, 'create', '--type', type_, '--dry-run')
    made = f'gcloud compute tpus tpu-vm create pod --zone=us-central2-b --quiet --accelerator-type={accelerator}'
    assert done.stdout.splitlines()[-1] == f'would run: {made} --version={version}'


def test_create_is_idempotent(programs, tree):
    for _ in range(2):
        done = tpu(programs, tree, 'create', *TYPE, '--spot', '--project', 'mine')
        assert done.returncode == 0, done.stderr
    assert verbs(programs) == [('tpu-vm', 'create')]
    made = arguments(programs, 'create')
    assert made[:5] == ['compute', 'tpus', 'tpu-vm', 'create', 'pod']
    machines = {'--zone=us-central2-b', '--project=mine', '--accelerator-type=v4-16', '--version=tpu-ubuntu2204-base'}
    assert set(made[5:]) == {*machines, '--spot', '--quiet'}


@pytest.mark.parametrize('state', ['PREEMPTED', 'TERMINATED', 'SUSPENDED', 'SUSPENDING'])
def test_create_refuses_preempted_machines(programs, tree, state):
    programs.plan(machines=state)
    done = tpu(programs, tree, 'create', *TYPE)
    assert done.returncode == 2
    assert 'pod was preempted' in done.stderr
    assert verbs(programs) == []


def test_create_in_the_queue(programs, tree):
    for _ in range(2):
        done = tpu(programs, tree, 'create', '--queued', '--spot', *TYPE)
        assert done.returncode == 0, done.stderr
    assert verbs(programs) == [('queued-resources', 'create')]
    assert {'--node-id=pod', '--runtime-version=tpu-ubuntu2204-base', '--spot'} <= set(arguments(programs, 'create'))
    # The command waited until the queued request became machines.
    assert (programs.folder / 'workers').is_dir()
    assert tpu(programs, tree, 'delete', '--queued').returncode == 0
    assert '--force' in arguments(programs, 'delete')


@pytest.mark.parametrize(
    ('message', 'code', 'words'),
    [
        (QUOTA, 2, 'no quota for v4-16 in us-central2-b'),
        (CAPACITY, 75, 'no free v4-16 in us-central2-b'),
        ('PERMISSION_DENIED: tpu.nodes.create', 1, 'error: (gcloud) PERMISSION_DENIED'),
    ],
)
def test_creation_failures(programs, tree, message, code, words):
    programs.plan(replies=[{'match': 'tpu-vm create', 'code': 1, 'stderr': message}])
    done = tpu(programs, tree, 'create', *TYPE)
    assert done.returncode == code
    lines = [line for line in (done.stdout + done.stderr).splitlines() if 'creating' not in line]
    assert len(lines) == 1
    assert words in lines[0]


def test_install_once(programs, tree):
    tpu(programs, tree, 'create', *TYPE)
    for _ in range(2):
        done = tpu(programs, tree, 'install')
        assert done.returncode == 0, done.stderr
    assert 'already installed' in done.stdout
    assert verbs(programs).count(('tpu-vm', 'scp')) == 1
    installs = [line for line in programs.lines('python') if 'pip install' in line]
    # Each worker installs the extras for TPUs and buckets.
    assert len(installs) == 2
    assert all(line.endswith('--editable .[tpu,gcs]') for line in installs)
    for directory in worker_directories(programs):
        with tarfile.open(directory / 'maxlm.tar.gz') as package:
            names = {name.removeprefix('./') for name in package.getnames()}
        assert names >= {'pyproject.toml', 'configs/tiny.py', 'launch/worker.sh'}
        assert not any(
            SECRET.encode() in path.read_bytes() for path in (directory / 'maxlm').rglob('*') if path.is_file()
        )

    # Changed files are copied, and removed files are deleted.
    (tree / 'configs/tiny.py').rename(tree / 'configs/small.py')
    assert tpu(programs, tree, 'install').returncode == 0
    assert verbs(programs).count(('tpu-vm', 'scp')) == 2
    for directory in worker_directories(programs):
        assert [path.name for path in (directory / 'maxlm/configs').iterdir()] == ['small.py']
    # The change installs no packages.
    assert [line for line in programs.lines('python') if 'pip install' in line] == installs
    # Another extra installs packages.
    assert tpu(programs, tree, 'install', '--extra', 'tpu').returncode == 0
    assert len([line for line in programs.lines('python') if 'pip install' in line]) == 4


def test_install_copies_files_tracked_by_git(programs, tree):
    listing = 'pyproject.toml\nlaunch/commands.sh\nlaunch/venv.sh\nlaunch/worker.sh\n.env\nremoved.py\n'
    programs.plan(
        machines='READY',
        replies=[{'match': 'git rev-parse', 'stdout': 'true\n'}, {'match': 'git ls-files', 'stdout': listing}],
    )
    for number in range(2):
        (programs.folder / 'workers' / str(number)).mkdir(parents=True)
    assert tpu(programs, tree, 'install').returncode == 0
    with tarfile.open(worker_directories(programs)[0] / 'maxlm.tar.gz') as package:
        assert sorted(package.getnames()) == sorted(listing.splitlines()[:4])


def test_install_with_an_old_python(programs, tree):
    programs.plan(python_is_new=False)
    tpu(programs, tree, 'create', *TYPE)
    # PYTHON prevents that another Python of this machine is found.
    assert tpu(programs, tree, 'install', PYTHON='python3').returncode == 0
    made = [line for line in programs.lines('python3') if 'uv venv' in line]
    assert len(made) == 2
    assert all('--python 3.12' in line for line in made)


def test_run_logs_stop(programs, tree):
    tpu(programs, tree, 'create', *TYPE)
    tpu(programs, tree, 'install')
    programs.plan(machines='READY', attempts=[{'seconds': 60}, {'seconds': 60}])
    override = "--config.data.sources=(('a b', 0.5), ('c', 0.5))"
    for _ in range(2):
        done = tpu(programs, tree, 'run', *TRAIN, override, '--config.train.num_steps=3')
        assert done.returncode == 0, done.stderr
    assert done.stdout.count('already running') == 2
    trainings = programs.wait_for(2, ready=True)
    # Arguments are passed unchanged.
    expected = ['-m', 'maxlm.train', *TRAIN, override, '--config.train.num_steps=3']
    assert [call['arguments'] for call in trainings] == [expected] * 2
    done = tpu(programs, tree, 'stop')
    assert done.stdout.count('stopped') == 2
    assert len(programs.calls('python', signal='SIGTERM')) == 2
    done = tpu(programs, tree, 'logs')
    assert done.returncode == 0
    assert done.stdout.count('training --config=configs/tiny.py') == 1
    # A stopped training can be started again.
    programs.plan(machines='READY')
    assert 'started' in tpu(programs, tree, 'run', *TRAIN).stdout
    assert len(programs.wait_for(4, ready=True)) == 4


def test_delete_twice(programs, tree):
    tpu(programs, tree, 'create', *TYPE)
    assert tpu(programs, tree, 'delete').returncode == 0
    done = tpu(programs, tree, 'delete')
    assert done.returncode == 0
    assert 'pod does not exist' in done.stdout
    assert verbs(programs) == [('tpu-vm', 'create'), ('tpu-vm', 'delete')]


CREATE, DELETE = ('tpu-vm', 'create'), ('tpu-vm', 'delete')


@pytest.mark.parametrize('codes', [(0, 0), (0, 2), (0, 74)])
def test_up_until_training_ends(programs, tree, codes):
    programs.plan(attempts=[{'code': code} for code in codes])
    done = tpu(programs, tree, 'up', *TYPE, *TRAIN)
    assert done.returncode == max(codes), done.stdout + done.stderr
    assert made_and_deleted(programs) == [CREATE]
    assert 'still exists and costs money' in done.stdout
    assert 'training --config=configs/tiny.py' in done.stdout
    # On a second call, the machines exist and the packages are installed.
    programs.forget()
    programs.plan(machines='READY')
    assert tpu(programs, tree, 'up', *TYPE, *TRAIN).returncode == 0
    assert made_and_deleted(programs) == []
    assert ('tpu-vm', 'scp') not in verbs(programs)


def test_up_after_a_preemption(programs, tree):
    # The machines disappear while the log is followed. The second attempt finishes.
    gone = {'match': 'worker.sh follow', 'code': 255, 'then': {'machines': 'PREEMPTED'}}
    programs.plan(replies=[gone])
    done = tpu(programs, tree, 'up', *TYPE, *TRAIN, '--spot')
    assert done.returncode == 0, done.stdout + done.stderr
    assert made_and_deleted(programs) == [CREATE, DELETE, CREATE]
    assert verbs(programs).count(('tpu-vm', 'scp')) == 2
    # Control: only the connection is lost. Machines are not created again, and running training is not restarted.
    programs.forget()
    programs.plan(machines='READY', replies=[{'match': 'worker.sh follow', 'code': 255, 'times': 2}])
    assert tpu(programs, tree, 'up', *TYPE, *TRAIN, '--spot').returncode == 0
    assert made_and_deleted(programs) == []


def test_up_in_the_queue_after_a_preemption(programs, tree):
    gone = {'match': 'worker.sh follow', 'code': 255, 'then': {'machines': None, 'queue': 'SUSPENDED'}}
    programs.plan(replies=[gone])
    # Deleting the request removes the fake workers of the first attempt.
    done = tpu(programs, tree, 'up', '--queued', *TYPE, *TRAIN, '--spot')
    assert done.returncode == 0, done.stdout + done.stderr
    queue = [('queued-resources', verb) for verb in ('create', 'delete', 'create')]
    assert made_and_deleted(programs) == queue


def test_up_waits_for_capacity_and_not_for_quota(programs, tree):
    full = {'match': 'tpu-vm create', 'code': 1, 'stderr': CAPACITY, 'times': 3}
    programs.plan(replies=[full])
    done = tpu(programs, tree, 'up', *TYPE, *TRAIN)
    assert done.returncode == 0, done.stderr
    assert made_and_deleted(programs) == [CREATE] * 4
    assert done.stdout.count('no free v4-16') == 3
    tpu(programs, tree, 'delete')
    programs.forget()
    programs.plan(replies=[full, {**full, 'stderr': QUOTA}])
    done = tpu(programs, tree, 'up', *TYPE, *TRAIN)
    assert done.returncode == 2
    assert made_and_deleted(programs) == [CREATE] * 4


def test_up_with_a_failed_request(programs, tree):
    refused = {'match': 'value(state)', 'code': 0, 'stdout': f'FAILED {QUOTA}', 'times': 2}
    programs.plan(queue='FAILED', replies=[refused])
    done = tpu(programs, tree, 'up', '--queued', *TYPE, *TRAIN)
    assert done.returncode == 2
    assert 'no quota' in done.stderr
    # After a failure for lack of capacity, another request is created.
    programs.plan(queue='FAILED', replies=[{**refused, 'stdout': f'FAILED {CAPACITY}'}])
    assert tpu(programs, tree, 'up', '--queued', *TYPE, *TRAIN).returncode == 0


def test_up_stops_after_permanent_failures(programs, tree):
    programs.plan(replies=[{'match': 'worker.sh install ', 'code': 1, 'times': -1}])
    done = tpu(programs, tree, 'up', *TYPE, *TRAIN)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith('failed, 5 times in a row')
    # gcloud fails permanently.
    programs.plan(replies=[{'match': 'describe', 'code': 1, 'stderr': 'invalid_grant', 'times': -1}])
    done = tpu(programs, tree, 'up', *TYPE, *TRAIN)
    assert done.returncode == 1
    assert 'invalid_grant' in done.stderr
    # Control: temporary failures are retried.
    programs.plan(machines='READY', replies=[{'match': 'describe', 'code': 1, 'times': 4}])
    assert tpu(programs, tree, 'up', *TYPE, *TRAIN).returncode == 0


def test_up_ends_after_stop(programs, tree):
    programs.plan(attempts=[{'seconds': 60}, {'seconds': 60}])
    process = programs.start(tree / 'launch/tpu_vm.sh', 'up', *MACHINES, *TYPE, *TRAIN, cwd='/')
    programs.wait_for(2, ready=True)
    assert tpu(programs, tree, 'stop').returncode == 0
    assert programs.finish(process).returncode == 75


@pytest.mark.parametrize('command', ['create', 'install', 'run', 'logs', 'stop', 'delete', 'up'])
def test_dry_run(programs, tree, command):
    options = {'create': TYPE, 'run': TRAIN, 'up': (*TYPE, *TRAIN)}.get(command, ())
    done = tpu(programs, tree, command, *options, '--dry-run')
    assert done.returncode == 0, done.stderr
    assert 'would run: gcloud compute tpus tpu-vm' in done.stdout
    assert programs.calls('gcloud') == []


def test_local_workdir_is_a_warning(programs, tree):
    assert 'goes when the machines go' in tpu(programs, tree, 'run', *TRAIN[:1], '--workdir=runs/a', '--dry-run').stderr
    assert tpu(programs, tree, 'run', *TRAIN, '--dry-run').stderr == ''


def test_no_machine_is_created_for_bad_input(programs, tree):
    programs.plan(check_code=2)
    done = tpu(programs, tree, 'up', *TYPE, *TRAIN, '--config.data.path=data/none')
    assert done.returncode == 2
    assert verbs(programs) == []
    [check] = programs.calls('python')
    assert check['arguments'] == ['-m', 'maxlm.train', '--dry-run=elsewhere', *TRAIN, '--config.data.path=data/none']


def test_inputs_are_not_checked_without_maxlm(programs, tree):
    programs.plan(machines='PREEMPTED', replies=[{'match': 'tpu-vm', 'code': 1, 'stderr': QUOTA, 'times': -1}])
    done = tpu(programs, tree, 'up', *TYPE, *TRAIN, PYTHON='/none/python')
    assert done.stderr.startswith('warning: config and data are not checked, because /none/python cannot import maxlm')
