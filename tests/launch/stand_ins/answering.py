"""Stands in for kubectl, srun, scontrol, git, nvidia-smi: answers as plan.json says, else with nothing and 0."""

import sys
from pathlib import Path

from record import Plan, record, reply

takes_input = sys.argv[-2:] == ['-f', '-']
record(**({'stdin': sys.stdin.read()} if takes_input else {}))
with Plan() as plan:
    rule = reply(plan, ' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])) or {}
if 'step' in rule:
    (Path(rule['workdir']) / 'checkpoints' / str(rule['step'])).mkdir(parents=True)
sys.stdout.write(rule.get('stdout', ''))
sys.stderr.write(rule.get('stderr', ''))
sys.exit(rule.get('code', 0))
