"""What the stand-ins share: each call leaves a line in calls.jsonl, and plan.json says how to behave.

They run without site-packages, beside the scripts that are tested: nothing but the standard library is imported.
"""

import fcntl
import json
import os
import sys
from pathlib import Path

FOLDER = Path(os.environ['STAND_INS'])
PREFIXES = ('MAXLM_', 'NCCL_', 'XLA_', 'JAX_', 'CUDA_')


def record(**more):
    """Appends this call. One write, so that lines of processes that run side by side do not mix."""
    call = {
        'program': Path(sys.argv[0]).name,
        'arguments': sys.argv[1:],
        'environment': {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)},
        'pid': os.getpid(),
        **more,
    }
    with (FOLDER / 'calls.jsonl').open('a') as file:
        file.write(json.dumps(call) + '\n')


class Plan:
    """plan.json, locked while it is read and written: `with Plan() as plan`."""

    def __enter__(self):
        self.lock = (FOLDER / 'lock').open('w')
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.data = json.loads((FOLDER / 'plan.json').read_text())
        return self.data

    def __exit__(self, *_):
        (FOLDER / 'plan.json').write_text(json.dumps(self.data))
        self.lock.close()


def reply(plan, line):
    """The first of plan['replies'] whose `match` is in the call and that is not used up; None if there is none."""
    for rule in plan['replies']:
        if rule['match'] in line and rule.get('times', 1):
            rule['times'] = rule.get('times', 1) - 1
            return rule
    return None
