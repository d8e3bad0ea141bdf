"""Restarts a command until it succeeds: `maxlm supervise [--max-failures=K] -- maxlm train …`.

Exit code 0 of the command ends the loop. Exit code 2 (bad input) also ends it, because a restart would fail in the same
way. So does 74, because a device of this host computes wrong results. After 75 (preempted) the command restarts
immediately; after any other code it restarts after a pause. The loop gives up after K failures in a row without a new
checkpoint in the command's --workdir. It then returns the exit code of the command, or 1 instead of 75. SIGTERM, Ctrl-C
and the loss of the terminal are forwarded once, as SIGTERM; the loop then waits for the command and returns its exit
code.

With --detach, the run continues without the terminal: its output goes to WORKDIR/logs, and --stop=WORKDIR stops it.

With --min-hosts, the run is elastic: start the same command on each of --hosts hosts, with a --workdir that all of them
reach. After the loss of a host, the others resume without it if at least N remain, and it can rejoin at any time. A
host whose command exits with 74 is excluded from the run until WORKDIR/elastic/quarantined-HOST is deleted.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from maxlm.cli.parser import ArgumentParser, command_parser, number
from maxlm.cli.process import run
from maxlm.config.schema import DataConfig
from maxlm.errors import EXIT_DONE, InputError, flag
from maxlm.storage.filesystem import is_url
from maxlm.storage.paths import ANY, Kind, PathOption
from maxlm.supervision.detached import start_detached, stop_detached
from maxlm.supervision.elastic import ElasticSettings, ElasticSupervisor
from maxlm.supervision.host_counts import host_counts, load_config
from maxlm.supervision.restarts import Policy, find_option, find_workdir
from maxlm.supervision.supervisor import Supervisor


def main(argv: list[str]) -> int:
    """Parses the options and supervises the command after `--`."""
    mark = argv.index('--') if '--' in argv else len(argv)
    options = make_parser().parse_args(argv[:mark])
    command = argv[mark + 1 :]
    if options.stop:
        if command:
            raise InputError('--stop takes no command; give only --stop=WORKDIR')
        return stop_detached(options.stop)
    if not command:
        raise InputError('no command given; usage: maxlm supervise [OPTIONS] -- COMMAND …')
    policy = Policy(options.max_failures, options.backoff, find_workdir(command))
    supervisor: Supervisor
    if options.min_hosts is None:
        if elastic := [flag(name) for name in ('hosts', 'devices_per_host', 'address') if getattr(options, name)]:
            raise InputError(f'{", ".join(elastic)}: only for elastic runs; give --min-hosts too')
        supervisor = Supervisor(command, policy)
    else:
        supervisor = ElasticSupervisor(command, policy, _elastic_settings(options, command, policy.workdir))
    if options.dry_run:
        print(f'would run: {shlex.join(command)}')
        return EXIT_DONE
    if not options.detach:
        return supervisor.run()
    cache = find_option(command, '--config.data.cache_dir') or DataConfig().cache_dir
    return start_detached(policy.workdir, supervisor.run, cache=cache)


def make_parser() -> ArgumentParser:
    parser = command_parser('supervise', __doc__, '-- maxlm train --config=configs/tiny.py')
    parser.usage = '%(prog)s [OPTIONS] -- COMMAND …'
    parser.add_shared('--max-failures')
    parser.add_argument(
        '--backoff',
        type=number(0, kind=float),
        default=10,
        help='pause before the first restart in seconds, doubled after each failure (default 10)',
    )
    elastic = parser.add_argument_group('elastic runs')
    elastic.add_argument(
        '--min-hosts', type=number(1), metavar='N', help='minimum number of hosts (default: the run is not elastic)'
    )
    elastic.add_argument(
        '--hosts', type=number(1), metavar='N', help='maximum number of hosts; required with --min-hosts'
    )
    elastic.add_argument(
        '--devices-per-host', type=number(1), metavar='N', help='devices of each host; required with --min-hosts'
    )
    elastic.add_argument(
        '--address',
        default='',
        help='name or address of this host that other hosts can reach (default: address of the default route)',
    )
    elastic.add_argument(
        '--host-timeout',
        type=float,
        default=30,
        help='seconds without a heartbeat after which a host is lost (default 30)',
    )
    detached = parser.add_argument_group('runs without a terminal')
    detached.add_argument(
        '--detach',
        action='store_true',
        help='start the run in its own session, with its output in WORKDIR/logs, and return when training has started',
    )
    detached.add_argument(
        '--stop',
        type=PathOption(Kind.DIRECTORY, ANY),
        metavar='WORKDIR',
        help='stop the detached run of this workdir on this host, and wait until it has saved',
    )
    parser.add_shared('--dry-run', help='print the command without running it')
    return parser


def _elastic_settings(options: argparse.Namespace, command: Sequence[str], workdir: str) -> ElasticSettings:
    """Checks the options of elastic runs.

    Raises:
        InputError: an option is missing or invalid, or the config cannot train on these numbers of hosts.
    """
    for name in ('hosts', 'devices_per_host'):
        if getattr(options, name) is None:
            raise InputError(f'{flag(name)} is missing; give it together with --min-hosts')
    if options.min_hosts > options.hosts:
        raise InputError(f'--min-hosts={options.min_hosts}: must be at most --hosts={options.hosts}')
    if not options.host_timeout > 0:
        raise InputError(f'--host-timeout={options.host_timeout:g}: must be above 0')
    if not workdir or is_url(workdir):
        raise InputError(
            f'--min-hosts with --workdir={workdir}: the hosts exchange files in the workdir; set it to a directory on '
            'a shared disk, and checkpoint.remote_dir for a copy in a bucket'
        )
    counts = host_counts(
        load_config(command),
        min_hosts=options.min_hosts,
        max_hosts=options.hosts,
        devices_per_host=options.devices_per_host,
    )
    return ElasticSettings(counts, options.address, options.host_timeout)


if __name__ == '__main__':
    run('supervise')
