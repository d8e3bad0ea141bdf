"""Fake Docker: refuses unknown commands and options of `docker build`, `push`, `run` and `docker compose`.

The options are those that the documentation uses, with their meaning in Docker's command line reference.
"""

import argparse

from record import record


def options(parser, *, values=(), lists=(), flags=()):
    for name in values:
        parser.add_argument(f'--{name}')
    for name in lists:
        parser.add_argument(f'--{name}', action='append', default=[])
    for name in flags:
        parser.add_argument(f'--{name}', action='store_true')


parser = argparse.ArgumentParser(prog='docker', allow_abbrev=False)
commands = parser.add_subparsers(dest='command', required=True)

build = commands.add_parser('build', allow_abbrev=False)
options(build, values=['target', 'tag', 'file'], lists=['build-arg'], flags=['pull', 'push', 'no-cache'])
build.add_argument('context')

push = commands.add_parser('push', allow_abbrev=False)
push.add_argument('image')

run = commands.add_parser('run', allow_abbrev=False)
options(
    run,
    values=['gpus', 'shm-size', 'entrypoint', 'user', 'network', 'workdir', 'name'],
    lists=['volume', 'publish', 'env'],
    flags=['rm', 'init', 'privileged', 'detach'],
)
run.add_argument('image')
run.add_argument('words', nargs=argparse.REMAINDER)

compose = commands.add_parser('compose', allow_abbrev=False)
options(compose, values=['project-name'], lists=['file', 'profile'])
verbs = compose.add_subparsers(dest='verb', required=True)
options(verbs.add_parser('up', allow_abbrev=False), flags=['build', 'detach', 'wait'])
options(verbs.add_parser('down', allow_abbrev=False), flags=['volumes'])
compose_run = verbs.add_parser('run', allow_abbrev=False)
options(compose_run, flags=['rm', 'build'])
compose_run.add_argument('service')
compose_run.add_argument('words', nargs=argparse.REMAINDER)

record(options=vars(parser.parse_args()))
