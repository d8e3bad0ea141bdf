"""Tests launch/k8s/apply.sh: its manifests follow the published schemas and contain the given options."""

import copy

import kubernetes_validate
import pytest
import yaml
from jax._src.clusters import cloud_tpu_cluster
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from tests.launch.programs import SECRET
from tests.messages import assert_error_line

pytestmark = pytest.mark.multiprocess

APPLY = 'launch/k8s/apply.sh'
GPU = ('gpu', '--name', 'run', '--image', 'registry.example/maxlm:1', '--nodes=4')
TPU = ('tpu', '--name', 'run', '--image', 'registry.example/maxlm:1', '--accelerator=tpu-v6e-slice')
TRAIN = ('--', '--config=configs/1b.py', '--workdir=gs://bucket/run')
ALL_OPTIONS = ('--claim', 'runs:/mnt/runs', '--secret', 'tokens', '--service-account', 'trainer')


def render(programs, *command, training=TRAIN):
    done = programs.run(APPLY, *command, '--render', *training)
    assert done.returncode == 0, done.stderr
    # No placeholder is left.
    assert training != TRAIN or '{{' not in done.stdout.split('apiVersion', 1)[1]
    return list(yaml.safe_load_all(done.stdout))


def validate(document):
    # 1.31 is the oldest version in which all features are stable. In strict mode unknown keys are errors.
    kubernetes_validate.validate(document, '1.31', strict=True)


def validate_jobset(document):
    # The classes are generated from the schema of JobSet v1alpha2 and drop unknown keys.
    assert JobsetV1alpha2JobSet.from_dict(copy.deepcopy(document)).to_dict() == document
    for replicated in document['spec']['replicatedJobs']:
        job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'x'}, **replicated['template']}
        validate(job)


def rules(job_spec):
    """Returns the action for each exit code and each pod condition."""
    found = {}
    for rule in job_spec['podFailurePolicy']['rules']:
        for value in rule.get('onExitCodes', {}).get('values', []):
            found[value] = rule['action']
        for condition in rule.get('onPodConditions', []):
            found[condition['type']] = rule['action']
    return found


@pytest.mark.parametrize('options', [(), ALL_OPTIONS])
def test_gpu_job(programs, options):
    service, job = render(programs, *GPU, *options)
    validate(service)
    validate(job)
    spec, pod = job['spec'], job['spec']['template']['spec']
    [container] = pod['containers']
    assert (spec['completions'], spec['parallelism'], spec['completionMode']) == (4, 4, 'Indexed')
    assert rules(spec) == {2: 'FailJob', 75: 'Ignore', 'DisruptionTarget': 'Ignore'}
    # A pod failure policy requires it.
    assert pod['restartPolicy'] == 'Never'
    assert container['resources']['limits'] == {'nvidia.com/gpu': '8'}
    # The coordinator is pod 0, under the name that the Service gives it.
    assert service['spec']['clusterIP'] == 'None'
    assert pod['subdomain'] == service['metadata']['name'] == job['metadata']['name'] == 'run'
    assert service['spec']['selector'].items() <= spec['template']['metadata']['labels'].items()
    environment = {entry['name']: entry.get('value') or entry['valueFrom'] for entry in container['env']}
    index = {'fieldRef': {'fieldPath': "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    assert environment == {
        'MAXLM_COORDINATOR': 'run-0.run:8476',
        'MAXLM_NUM_PROCESSES': '4',
        'MAXLM_PROCESS_ID': index,
    }
    assert container['command'] + container['args'] == ['bash', 'launch/gpu_node.sh', *TRAIN]


@pytest.mark.parametrize('options', [(), ALL_OPTIONS])
@pytest.mark.parametrize(
    ('topology', 'machines', 'chips'),
    [('2x2', 1, '4'), ('1x1', 1, '1'), ('2x4', 2, '4'), ('4x4', 4, '4'), ('2x2x4', 4, '4')],
)
def test_tpu_jobset(programs, options, topology, machines, chips):
    [jobset] = render(programs, *TPU, '--topology', topology, *options)
    validate_jobset(jobset)
    [replicated] = jobset['spec']['replicatedJobs']
    spec = replicated['template']['spec']
    pod = spec['template']['spec']
    assert (spec['completions'], spec['parallelism']) == (machines, machines)
    assert pod['containers'][0]['resources']['limits'] == {'google.com/tpu': chips}
    assert pod['nodeSelector'] == {
        'cloud.google.com/gke-tpu-accelerator': 'tpu-v6e-slice',
        'cloud.google.com/gke-tpu-topology': topology,
    }
    assert rules(spec) == {2: 'FailJob', 75: 'Ignore', 'DisruptionTarget': 'Ignore'}
    [rule] = jobset['spec']['failurePolicy']['rules']
    assert (rule['action'], rule['onJobFailureReasons']) == ('FailJobSet', ['PodFailurePolicy'])
    container = pod['containers'][0]
    assert container['command'] == ['python', '-m', 'maxlm.supervise', '--', 'python', '-m', 'maxlm.train']
    assert container['args'] == list(TRAIN[1:])


def pod_of(document):
    spec = document['spec']
    spec = spec['replicatedJobs'][0]['template']['spec'] if 'replicatedJobs' in spec else spec
    return spec['template']['spec']


def test_several_slices(programs):
    command = (*TPU[:5], '--accelerator=tpu7x', '--topology=2x2x4')
    [jobset] = render(programs, *command, '--slices', '3')
    validate_jobset(jobset)
    [replicated] = jobset['spec']['replicatedJobs']
    assert replicated['replicas'] == 3
    # All slices are equal: GKE sets the slice of each pod, and JAX numbers the processes.
    assert replicated['template']['spec']['completions'] == 4
    assert pod_of(jobset)['nodeSelector']['cloud.google.com/gke-tpu-accelerator'] == 'tpu7x'
    # Each slice has a node pool of its own.
    assert 'alpha.jobset.sigs.k8s.io/exclusive-topology' in jobset['metadata']['annotations']
    [jobset] = render(programs, *command)
    assert jobset['spec']['replicatedJobs'][0]['replicas'] == 1


@pytest.mark.parametrize(('slice_', 'numbers'), [('0', (1, 4)), ('1', (3, 4)), (None, (1, 2))])
def test_jax_numbers_the_processes_of_all_slices(monkeypatch, slice_, numbers):
    # GKE sets these variables in the pods of a JobSet.
    variables = {'TPU_WORKER_HOSTNAMES': 'localhost,other', 'TPU_WORKER_ID': '1'}
    if slice_ is not None:
        variables |= {'MEGASCALE_NUM_SLICES': '2', 'MEGASCALE_SLICE_ID': slice_}
        variables['MEGASCALE_COORDINATOR_ADDRESS'] = 'localhost:8080'
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cloud_tpu_cluster, 'get_tpu_env_value_from_metadata', lambda name: None)
    cluster = cloud_tpu_cluster.GkeTpuCluster
    assert (cluster.get_process_id(), cluster.get_process_count()) == numbers
    assert cluster.get_coordinator_address(1, None) == 'localhost:8482'


@pytest.mark.parametrize('kind', [GPU, (*TPU, '--topology=4x4')])
def test_spot_machines_and_queues(programs, kind):
    *_, document = render(programs, *kind, '--spot', '--queue', 'team-a', *ALL_OPTIONS)
    (validate_jobset if document['kind'] == 'JobSet' else validate)(document)
    pod = pod_of(document)
    assert pod['nodeSelector']['cloud.google.com/gke-spot'] == 'true'
    assert {entry['key'] for entry in pod['tolerations']} >= {'cloud.google.com/gke-spot'}
    assert document['metadata']['labels']['kueue.x-k8s.io/queue-name'] == 'team-a'
    # A second `kubectl apply` would suspend a running job.
    assert 'suspend' not in document['spec']
    # Control: without the options, neither is in the manifest.
    *_, plain = render(programs, *kind, *ALL_OPTIONS)
    assert 'gke-spot' not in str(plain)
    assert 'kueue' not in str(plain)


def test_schemas_reject_unknown_keys(programs):
    _, job = render(programs, *GPU)
    job['spec']['podFailurePolcy'] = job['spec'].pop('podFailurePolicy')
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)
    [jobset] = render(programs, *TPU, '--topology=4x4')
    misspelled = copy.deepcopy(jobset)
    misspelled['spec']['failurePolicy']['maxRestart'] = 3
    with pytest.raises(AssertionError):
        validate_jobset(misspelled)
    jobset['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']['restart'] = 'Never'
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        validate_jobset(jobset)


@pytest.mark.parametrize('kind', [GPU, (*TPU, '--topology=4x4')])
def test_secrets_and_accounts_are_references(programs, kind):
    *_, document = render(programs, *kind, *ALL_OPTIONS)
    pod = pod_of(document)
    [container] = pod['containers']
    assert container['envFrom'] == [{'secretRef': {'name': 'tokens'}}]
    assert pod['serviceAccountName'] == 'trainer'
    assert {'name': 'runs', 'mountPath': '/mnt/runs'} in container['volumeMounts']
    assert {'name': 'runs', 'persistentVolumeClaim': {'claimName': 'runs'}} in pod['volumes']
    # Control: without the options, these fields are absent.
    *_, document = render(programs, *kind)
    assert not {'envFrom', 'serviceAccountName', 'claimName'} & set(str(document).replace("'", ' ').split())


def test_arguments_are_passed_unchanged(programs):
    words = ['--config=x', '--workdir=gs://b/r', '{{nodes}}', 'a "b" \'c\' & \\d', 'two\nlines', '# $HOME', '$(HOME)']
    *_, job = render(programs, *GPU, training=['--', *words])
    validate(job)
    # Kubernetes converts the last argument to one dollar sign.
    assert job['spec']['template']['spec']['containers'][0]['args'] == [*words[:-1], '$$(HOME)']


def test_applied_manifest(programs):
    for _ in range(2):
        done = programs.run(APPLY, *GPU, '--namespace=team', *TRAIN)
        assert done.returncode == 0, done.stderr
    first, second = programs.calls('kubectl')
    assert first['arguments'] == ['apply', '--namespace=team', '-f', '-']
    # Applying the same manifest again changes nothing.
    assert first['stdin'] == second['stdin']
    assert list(yaml.safe_load_all(first['stdin'])) == render(programs, *GPU)
    assert SECRET not in first['stdin']


@pytest.mark.parametrize(
    ('answer', 'code', 'words'),
    [
        ('The Job "run" is invalid: spec.template: field is immutable', 2, 'kubectl delete job run'),
        ('forbidden: exceeded quota: gpus, requested: 32, limited: 8', 2, 'no quota in the namespace: forbidden'),
        ('no matches for kind "JobSet" in version', 2, 'does not know JobSet'),
        ('Unable to connect to the server', 1, 'Unable to connect'),
    ],
)
def test_faults(programs, answer, code, words):
    programs.plan(replies=[{'match': 'kubectl', 'code': 1, 'stderr': f'warning\n{answer}\n'}])
    done = programs.run(APPLY, *GPU, *TRAIN)
    assert done.returncode == code
    assert_error_line(done.stderr, words)


def test_dry_run(programs):
    done = programs.run(APPLY, *GPU, '--dry-run', *TRAIN)
    assert done.returncode == 0
    assert done.stdout.endswith('would run: kubectl apply -f -\n')
    assert programs.calls() == []


@pytest.mark.parametrize(
    ('command', 'words'),
    [
        (('cpu',), 'unknown kind cpu'),
        (('gpu', *GPU[3:]), '--name is missing'),
        ((*GPU[:3], '--nodes=2'), '--image is missing'),
        (GPU[:5], '--nodes is missing'),
        ((*GPU, '--name=Run'), '--name=Run'),
        ((*GPU, '--name=a: b'), '--name=a: b'),
        ((*GPU, '--image=a"b'), '--image=a"b'),
        ((*GPU, '--nodes=0'), '--nodes=0'),
        ((*GPU, '--topology=4x4'), 'are for tpu'),
        ((*GPU, '--claim=runs'), '--claim=runs'),
        ((*TPU, '--topology=16'), '--topology=16'),
        ((*TPU, '--topology=4x4', '--nodes=3'), '16 chips'),
        ((*TPU, '--topology=4x4', '--accelerator=tpu-v9'), '--accelerator=tpu-v9'),
        ((*TPU, '--topology=2x2', '--slices=2'), 'the slice 2x2 is one machine'),
        ((*TPU, '--topology=4x4', '--slices=0'), '--slices=0'),
        ((*GPU, '--slices=2'), 'are for tpu'),
        ((*GPU, '--queue=Team A'), '--queue=Team A'),
    ],
)
def test_bad_options(programs, command, words):
    done = programs.run(APPLY, *command, *TRAIN)
    assert done.returncode == 2
    assert_error_line(done.stderr, words)
    assert programs.calls() == []


def test_workdir_inside_a_pod_is_rejected(programs):
    done = programs.run(APPLY, *GPU, '--', '--config=configs/1b.py', '--workdir=runs/1b')
    assert done.returncode == 2
    assert '--claim' in done.stderr
    assert programs.run(APPLY, *GPU, '--', '--config=configs/1b.py').returncode == 2


def test_nothing_is_sent_for_bad_input(programs):
    programs.plan(check_code=2)
    assert programs.run(APPLY, *GPU, *TRAIN).returncode == 2
    assert programs.calls('kubectl') == []
