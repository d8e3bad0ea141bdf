"""List, verify, prune, fetch and merge the checkpoints of runs.

    maxlm checkpoints list WORKDIR… [--json]
    maxlm checkpoints verify WORKDIR…
    maxlm checkpoints prune WORKDIR… [--max-to-keep=N] [--keep-best=K] [--keep-period=M] [--drop-optimizer]
                                      [--dry-run]
    maxlm checkpoints fetch WORKDIR --output=DIR [--weights-only]
    maxlm checkpoints merge --checkpoint=CKPT --output=DIR

WORKDIR@STEP selects one step, and WORKDIR@best the step with the lowest validation loss. The default is all steps, or
the newest step for fetch and merge. list, fetch and merge also accept URLs (gs://…, s3://…). merge creates a workdir
with the LoRA adapters (model.lora_rank) merged into the model. Exit codes: 0 done; 1 a checkpoint is corrupt; 2 bad
input.
"""

from __future__ import annotations

from maxlm.cli.parser import ArgumentParser, command_parser, number
from maxlm.cli.process import run
from maxlm.storage.paths import ANY, Kind, PathOption

LOCAL_WORKDIR = PathOption(
    Kind.DIRECTORY,
    advice='only local directories can be verified or pruned; fetch it first with `maxlm checkpoints fetch`',
)
NEW_WORKDIR = PathOption(Kind.DIRECTORY)


def main(argv: list[str]) -> int:
    """Runs the subcommand."""
    options = make_parser().parse_args(argv)

    from maxlm.cli.execution.checkpoints import execute

    return execute(options)


def make_parser() -> ArgumentParser:
    parser = command_parser('checkpoints', __doc__, 'verify runs/first@best')
    commands = parser.add_subparsers(dest='command', required=True, metavar='list|verify|prune|fetch|merge')
    helps = {
        'list': 'list steps with sizes, validation losses and retention reasons',
        'verify': 'read all steps and compare them with their checksums (read-only)',
        'prune': 'delete steps that no retention rule keeps',
    }
    made = {name: commands.add_parser(name, help=text) for name, text in helps.items()}
    for name, one in made.items():
        local = {} if name == 'list' else {'type': LOCAL_WORKDIR}
        one.add_shared('workdirs', help='workdir of a run, or WORKDIR@STEP', **local)
    made['list'].add_shared('--json', help='print one JSON object per step')
    for name in ('list', 'prune'):
        add = made[name].add_argument
        add(
            '--max-to-keep',
            type=number(1),
            metavar='N',
            help="number of newest steps to keep (default: from the run's config)",
        )
        add('--keep-best', type=number(0), metavar='K', help='number of steps with the lowest validation loss to keep')
        add('--keep-period', type=number(0), metavar='M', help='keep steps that are multiples of M; 0 = none')
    made['prune'].add_argument(
        '--drop-optimizer',
        action='store_true',
        help='also delete the optimizer state of all steps except the newest and those that a rollback may restore',
    )
    made['prune'].add_shared('--dry-run', help='print what would be deleted, without deleting')
    fetcher = commands.add_parser('fetch', help='download one step with its config and tokenizer')
    fetcher.add_argument(
        'workdir',
        type=PathOption(Kind.DIRECTORY, ANY),
        metavar='WORKDIR',
        help='workdir or URL of a run, or WORKDIR@STEP',
    )
    fetcher.add_argument('--output', required=True, type=NEW_WORKDIR, metavar='DIR', help='workdir to create')
    fetcher.add_argument(
        '--weights-only', action='store_true', help='download the parameters without the optimizer state'
    )
    fetcher.add_shared('--threads')
    merger = commands.add_parser('merge', help='create a workdir with the adapters merged into the model')
    merger.add_shared('--checkpoint')
    merger.add_argument('--output', required=True, type=NEW_WORKDIR, metavar='DIR', help='workdir to create')
    return parser


if __name__ == '__main__':
    run('checkpoints')
