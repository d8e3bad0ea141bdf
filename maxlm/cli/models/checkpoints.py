"""List, verify, prune, fetch and merge the checkpoints of runs.

    python -m maxlm.checkpoints list WORKDIR… [--json]
    python -m maxlm.checkpoints verify WORKDIR…
    python -m maxlm.checkpoints prune WORKDIR… [--max-to-keep=N] [--keep-best=K] [--keep-period=M] [--drop-optimizer]
                                      [--dry-run]
    python -m maxlm.checkpoints fetch WORKDIR --output=DIR [--weights-only]
    python -m maxlm.checkpoints merge --checkpoint=CKPT --output=DIR

WORKDIR@STEP selects one step, and WORKDIR@best the step with the lowest validation loss. The default is all steps, or
the newest step for fetch and merge. list, fetch and merge also accept URLs (gs://…, s3://…). merge creates a workdir
with the LoRA adapters (model.lora_rank) merged into the model. Exit codes: 0 done; 1 a checkpoint is corrupt; 2 bad
input.
"""

from __future__ import annotations

import argparse
import sys

from maxlm.errors import ArgumentParser, InputError, flag, run_command
from maxlm.storage.paths import ANY, Kind, PathOption

WORKDIR = PathOption(Kind.DIRECTORY, ANY)
LOCAL_WORKDIR = PathOption(
    Kind.DIRECTORY,
    advice='only local directories can be verified or pruned; fetch it first with `maxlm checkpoints fetch`',
)
NEW_WORKDIR = PathOption(Kind.DIRECTORY)


def main(argv: list[str]) -> int:
    """Runs the subcommand."""
    options = _parse(argv)

    from maxlm.commands.checkpoints import execute

    return execute(options)


def run() -> None:
    """Entry point of `python -m maxlm.checkpoints` and `maxlm checkpoints`."""
    sys.exit(run_command(main))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog='maxlm checkpoints',
        allow_abbrev=False,
        description=__doc__,
        epilog='example: python -m maxlm.checkpoints verify runs/first@best',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest='command', required=True, metavar='list|verify|prune|fetch|merge')
    helps = {
        'list': 'list steps with sizes, validation losses and retention reasons',
        'verify': 'read all steps and compare them with their checksums (read-only)',
        'prune': 'delete steps that no retention rule keeps',
    }
    made = {name: commands.add_parser(name, allow_abbrev=False, help=text) for name, text in helps.items()}
    for name, one in made.items():
        runs = WORKDIR if name == 'list' else LOCAL_WORKDIR
        one.add_argument('workdirs', nargs='+', type=runs, metavar='WORKDIR', help='workdir of a run, or WORKDIR@STEP')
    made['list'].add_argument('--json', action='store_true', help='print one JSON object per step')
    for name in ('list', 'prune'):
        add = made[name].add_argument
        add(
            '--max-to-keep',
            type=int,
            metavar='N',
            help="number of newest steps to keep (default: from the run's config)",
        )
        add('--keep-best', type=int, metavar='K', help='number of steps with the lowest validation loss to keep')
        add('--keep-period', type=int, metavar='M', help='keep steps that are multiples of M; 0 = none')
    made['prune'].add_argument(
        '--drop-optimizer',
        action='store_true',
        help='also delete the optimizer state of all steps except the newest and those that a rollback may restore',
    )
    made['prune'].add_argument('--dry-run', action='store_true', help='print what would be deleted, without deleting')
    fetcher = commands.add_parser('fetch', allow_abbrev=False, help='download one step with its config and tokenizer')
    fetcher.add_argument('workdir', type=WORKDIR, metavar='WORKDIR', help='workdir or URL of a run, or WORKDIR@STEP')
    fetcher.add_argument('--output', required=True, type=NEW_WORKDIR, metavar='DIR', help='workdir to create')
    fetcher.add_argument(
        '--weights-only', action='store_true', help='download the parameters without the optimizer state'
    )
    fetcher.add_argument(
        '--threads', type=int, default=8, metavar='N', help='number of concurrent downloads (default %(default)s)'
    )
    merger = commands.add_parser(
        'merge', allow_abbrev=False, help='create a workdir with the adapters merged into the model'
    )
    merger.add_argument(
        '--checkpoint',
        required=True,
        type=WORKDIR,
        metavar='CKPT',
        help='workdir, WORKDIR@STEP, or the directory of a step',
    )
    merger.add_argument('--output', required=True, type=NEW_WORKDIR, metavar='DIR', help='workdir to create')
    options = parser.parse_args(argv)
    for name, smallest in {'max_to_keep': 1, 'keep_best': 0, 'keep_period': 0, 'threads': 1}.items():
        value = getattr(options, name, None)
        if value is not None and value < smallest:
            raise InputError(f'{flag(name)}={value}: must be at least {smallest}')
    return options


if __name__ == '__main__':
    run()
