"""Calls of launch/tpu_vm.sh in tests, and the calls of gcloud that they made."""

MACHINES = ('--name', 'pod', '--zone=us-central2-b', '--poll', '0', '--backoff', '0')
TYPE = ('--type', 'v4-16')
TRAIN = ('--config=configs/tiny.py', '--workdir=/mnt/runs/run')


def tpu(programs, tree, command, *options, **environment):
    return programs.run(tree / 'launch/tpu_vm.sh', command, *MACHINES, *options, cwd='/', **environment)


def verbs(programs):
    """Returns the calls of gcloud about TPUs as (kind, verb), without `describe`."""
    words = [[word for word in call['arguments'] if word != 'alpha'] for call in programs.calls('gcloud')]
    pairs = [tuple(line[2:4]) for line in words if line[:2] == ['compute', 'tpus']]
    return [pair for pair in pairs if pair[1] != 'describe']


def arguments(programs, verb):
    return next(call['arguments'] for call in programs.calls('gcloud') if call['arguments'][3] == verb)


def made_and_deleted(programs):
    return [pair for pair in verbs(programs) if pair[1] in ('create', 'delete')]
