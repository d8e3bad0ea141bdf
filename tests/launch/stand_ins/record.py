"""Shared code of the fake programs: each call appends a line to calls.jsonl, and plan.json gives the behavior.

The fake programs start hundreds of times, so they run without site-packages and import as little as possible.
"""

import fcntl
import json
import os
import sys

FOLDER = os.environ['STAND_INS']
PROGRAM = os.path.basename(sys.argv[0])
PREFIXES = ('MAXLM_', 'NCCL_', 'XLA_', 'JAX_', 'CUDA_')


def record(**more):
    """Appends this call in one write, so that lines of concurrent processes do not mix."""
    call = {
        'program': PROGRAM,
        'arguments': sys.argv[1:],
        'environment': {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)},
        'pid': os.getpid(),
        **more,
    }
    with open(f'{FOLDER}/calls.jsonl', 'a') as file:
        file.write(json.dumps(call) + '\n')


def count_ready():
    """Returns the number of training processes that reported readiness."""
    with open(f'{FOLDER}/calls.jsonl') as file:
        return file.read().count('"ready"')


class Plan:
    """plan.json, locked while it is read and written: `with Plan() as plan`."""

    def __enter__(self):
        self.lock = open(f'{FOLDER}/lock', 'w')
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        with open(f'{FOLDER}/plan.json') as file:
            self.data = json.load(file)
        return self.data

    def __exit__(self, *_):
        with open(f'{FOLDER}/plan.json', 'w') as file:
            json.dump(self.data, file)
        self.lock.close()


def reply(plan, line):
    """Returns the first unused entry of plan['replies'] whose `match` is in the call, or None."""
    for rule in plan['replies']:
        if rule['match'] in line and rule.get('times', 1):
            rule['times'] = rule.get('times', 1) - 1
            return rule
    return None
