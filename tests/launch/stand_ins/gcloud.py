"""Fake gcloud with slices of two TPU workers, whose home directories are local. `ssh --command` runs bash in them.

Instances of Compute Engine have one worker; the state READY of the plan is their status RUNNING.

plan['machines'] and plan['queue'] are the states that `describe` reports, or None if the resource does not exist.
Arguments that gcloud's reference does not list for a command are errors.
"""

import os
import sys

from record import FOLDER, Plan, record, reply

NEXT = {'WAITING_FOR_RESOURCES': 'PROVISIONING', 'PROVISIONING': 'ACTIVE'}
# From https://cloud.google.com/sdk/gcloud/reference/compute/tpus and …/alpha/compute/tpus.
GENERAL = 'zone project quiet format verbosity account impersonate-service-account'
CONNECT = 'worker dry-run force-key-file-overwrite plain ssh-key-file strict-host-key-checking internal-ip'
CREATE = (
    'accelerator-type topology type async boot-disk data-disk description labels metadata metadata-from-file network '
    'subnetwork internal-ips range reserved scopes service-account shielded-secure-boot spot tags'
)
QUEUE = (
    f'{CREATE} runtime-version node-id node-count node-prefix guaranteed valid-after-duration valid-after-time '
    'valid-until-duration valid-until-time'
)
FLAGS = {
    'tpu-vm create': f'{CREATE} version preemptible queue-count',
    'tpu-vm delete': 'async',
    'tpu-vm describe': '',
    'tpu-vm start': 'async',
    'tpu-vm ssh': f'{CONNECT} command output-directory ssh-flag',
    'tpu-vm scp': f'{CONNECT} compress recurse scp-flag',
    'alpha tpu-vm ssh': f'{CONNECT} command output-directory ssh-flag batch-size tunnel-through-iap',
    'alpha tpu-vm scp': f'{CONNECT} compress recurse scp-flag batch-size tunnel-through-iap',
    'queued-resources create': QUEUE,
    'alpha queued-resources create': f'{QUEUE} best-effort provisioning-model max-run-duration workload-type',
    'queued-resources delete': 'async force',
    'queued-resources describe': '',
    'queued-resources ssh': f'{CONNECT} command output-directory ssh-flag node batch-size tunnel-through-iap',
    'queued-resources scp': f'{CONNECT} compress recurse scp-flag node batch-size tunnel-through-iap',
}
# From https://cloud.google.com/sdk/gcloud/reference/compute.
FLAGS |= {
    'instances create': 'machine-type image-family image-project maintenance-policy boot-disk-size scopes '
    'service-account network subnet no-address provisioning-model instance-termination-action '
    'request-valid-for-duration max-run-duration reservation reservation-affinity',
    'instances delete': 'delete-disks keep-disks',
    'instances describe': '',
    'instances start': 'async',
    'compute ssh': 'command tunnel-through-iap internal-ip ssh-flag',
    'compute scp': 'compress recurse tunnel-through-iap internal-ip scp-flag',
}
FLAGS |= {f'alpha {name}': FLAGS[name] for name in ('queued-resources ssh', 'queued-resources scp')}
# Sets of which at most one flag may be given, and of which one must be given.
EXCLUSIVE = [{'spot', 'reserved', 'provisioning-model'}, {'internal-ip', 'tunnel-through-iap'}]
ONE_OF = {'queued-resources create': {'node-id', 'node-count'}}

words = sys.argv[1:]
line = ' '.join(words)
track = 'alpha ' if words[:1] == ['alpha'] else ''
words = words[bool(track) :]
options = {name[2:]: value for name, _, value in (word.partition('=') for word in words if word.startswith('--'))}


def fail(message, code=1):
    print(f'ERROR: (gcloud) {message}', file=sys.stderr)
    sys.exit(code)


def check_flags(command):
    if f'{track}{command}' not in FLAGS:
        fail(f'Invalid choice: {track}{command!r}', 2)
    unknown = options.keys() - {*f'{GENERAL} {FLAGS[f"{track}{command}"]}'.split()}
    if unknown:
        fail(f'unrecognized arguments: {sorted(unknown)}', 2)
    if any(len(flags & options.keys()) > 1 for flags in EXCLUSIVE):
        fail(f'At most one of these arguments can be specified: {sorted(options)}', 2)
    if command in ONE_OF and len(ONE_OF[command] & options.keys()) != 1:
        fail(f'Exactly one of these arguments must be specified: {sorted(ONE_OF[command])}', 2)


def worker_directories():
    """Returns the directories of the selected workers. With several slices, their names have two numbers."""
    workers = []
    for name in sorted(os.listdir(f'{FOLDER}/workers')):
        node, _, worker = name.rpartition('-')
        if options.get('worker', 'all') in ('all', worker) and options.get('node', 'all') in ('all', node):
            workers.append(f'{FOLDER}/workers/{name}')
    return workers


def make_machines(plan, workers=2):
    # Preempted machines of Compute Engine disappear without a call.
    remove_machines(plan)
    plan['machines'] = 'READY'
    slices = plan.get('slices', 1)
    for number in range(workers * slices):
        os.makedirs(f'{FOLDER}/workers/' + (f'{number // 2}-{number % 2}' if slices > 1 else str(number)))


def remove_machines(plan):
    import shutil

    plan['machines'] = None
    shutil.rmtree(f'{FOLDER}/workers', ignore_errors=True)


record()
with Plan() as plan:
    kind, verb, *names = words[2:] if words[:2] == ['compute', 'tpus'] else ('', '')
    if words[:2] == ['compute', 'instances']:
        kind, verb, *names = words[1:]
    elif words[:2] in (['compute', 'ssh'], ['compute', 'scp']):
        kind, verb, *names = words
    check_flags(f'{kind} {verb}')
    rule = reply(plan, line) or {}
    plan.update(rule.get('then', {}))
    key = 'queue' if kind == 'queued-resources' else 'machines'
    if 'code' in rule:
        sys.stdout.write(rule.get('stdout', ''))
        if rule['code']:
            fail(rule.get('stderr', ''), rule['code'])
        sys.exit(0)
    if verb == 'describe':
        if plan[key] is None:
            fail(f'NOT_FOUND: Resource {names[0]!r} was not found')
        if key == 'queue' and plan['queue'] in NEXT:
            plan['queue'] = NEXT[plan['queue']]
            if plan['queue'] == 'ACTIVE':
                make_machines(plan)
        print('RUNNING' if (kind, plan[key]) == ('instances', 'READY') else plan[key])
    elif verb == 'create':
        if plan[key] is not None:
            fail('ALREADY_EXISTS: Resource already exists')
        plan['slices'] = int(options.get('node-count', 1))
        if key == 'queue':
            plan['queue'] = 'WAITING_FOR_RESOURCES'
        else:
            make_machines(plan, 1 if kind == 'instances' else 2)
    elif verb == 'delete':
        if plan[key] is None:
            fail('NOT_FOUND: Resource was not found')
        plan['queue'] = None
        remove_machines(plan)
    elif verb in ('ssh', 'scp') and plan['machines'] != 'READY':
        fail('Could not SSH into the machine', 255)

if verb in ('ssh', 'scp'):
    import shutil
    import subprocess

    for directory in worker_directories():
        if verb == 'scp':
            shutil.copy(names[0], f'{directory}/{names[1].split(":")[1]}')
            continue
        environment = {**os.environ, 'HOME': directory}
        done = subprocess.run(['bash', '-c', options['command']], cwd=directory, env=environment)
        if done.returncode:
            sys.exit(done.returncode)
