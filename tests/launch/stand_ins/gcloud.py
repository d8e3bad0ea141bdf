"""Fake gcloud with a slice of two TPU workers, whose home directories are local. `ssh --command` runs bash in them.

plan['machines'] and plan['queue'] are the states that `describe` reports, or None if the resource does not exist.
"""

import os
import sys

from record import FOLDER, Plan, record, reply

WORKERS = [f'{FOLDER}/workers/{number}' for number in range(2)]
NEXT = {'WAITING_FOR_RESOURCES': 'PROVISIONING', 'PROVISIONING': 'ACTIVE'}
words = sys.argv[1:]
line = ' '.join(words)
options = dict(word[2:].split('=', 1) for word in words if word.startswith('--') and '=' in word)


def fail(message, code=1):
    print(f'ERROR: (gcloud) {message}', file=sys.stderr)
    sys.exit(code)


def make_machines(plan):
    plan['machines'] = 'READY'
    for directory in WORKERS:
        os.makedirs(directory)


def remove_machines(plan):
    import shutil

    plan['machines'] = None
    shutil.rmtree(f'{FOLDER}/workers', ignore_errors=True)


record()
with Plan() as plan:
    rule = reply(plan, line) or {}
    plan.update(rule.get('then', {}))
    kind, verb = words[2:4] if words[:2] == ['compute', 'tpus'] else ('', '')
    key = 'queue' if kind == 'queued-resources' else 'machines'
    if 'code' in rule:
        sys.stdout.write(rule.get('stdout', ''))
        if rule['code']:
            fail(rule.get('stderr', ''), rule['code'])
        sys.exit(0)
    if verb == 'describe':
        if plan[key] is None:
            fail(f'NOT_FOUND: Resource {words[4]!r} was not found')
        if key == 'queue' and plan['queue'] in NEXT:
            plan['queue'] = NEXT[plan['queue']]
            if plan['queue'] == 'ACTIVE':
                make_machines(plan)
        print(plan[key])
    elif verb == 'create':
        if plan[key] is not None:
            fail('ALREADY_EXISTS: Resource already exists')
        if key == 'queue':
            plan['queue'] = 'WAITING_FOR_RESOURCES'
        else:
            make_machines(plan)
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

    chosen = WORKERS if options['worker'] == 'all' else [WORKERS[int(options['worker'])]]
    for directory in chosen:
        if verb == 'scp':
            shutil.copy(words[4], f'{directory}/{words[5].split(":")[1]}')
            continue
        environment = {**os.environ, 'HOME': directory}
        done = subprocess.run(['bash', '-c', options['command']], cwd=directory, env=environment)
        if done.returncode:
            sys.exit(done.returncode)
