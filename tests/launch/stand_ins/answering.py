"""Fake kubectl, sbatch, srun, scontrol, enroot, git and nvidia-smi.

They reply as plan.json specifies, or exit with 0 and no output.
"""

import os
import sys

from record import PROGRAM, Plan, record, reply

takes_input = sys.argv[-2:] == ['-f', '-']
record(**({'stdin': sys.stdin.read()} if takes_input else {}))
with Plan() as plan:
    rule = reply(plan, ' '.join([PROGRAM, *sys.argv[1:]])) or {}
if 'step' in rule:
    os.makedirs(f'{rule["workdir"]}/checkpoints/{rule["step"]}')
sys.stdout.write(rule.get('stdout', ''))
sys.stderr.write(rule.get('stderr', ''))
sys.exit(rule.get('code', 0))
