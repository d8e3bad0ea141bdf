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
import json
import sys
import time
from pathlib import Path

from maxlm.checkpoint.checksums import corrupt_arrays
from maxlm.checkpoint.conversion.merge_lora import merge_checkpoint
from maxlm.checkpoint.drop_optimizer import drop_optimizer
from maxlm.checkpoint.fetch import fetch_checkpoint
from maxlm.checkpoint.listing import (
    CheckpointInfo,
    damaged_steps,
    list_checkpoints,
    resolve_checkpoint,
    run_config,
)
from maxlm.checkpoint.restore import is_params_only
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, EXIT_FAILED, ArgumentParser, InputError, exit_code, flag
from maxlm.formatting import format_bytes
from maxlm.hints import print_next
from maxlm.log import Console
from maxlm.storage.filesystem import display_path
from maxlm.storage.json_text import parse_json
from maxlm.storage.paths import ANY, Kind, PathOption
from maxlm.storage.regular_files import read_text
from maxlm.training.retention import SavedStep, retention_reasons, steps_to_resume
from maxlm.workdir.lock import LOCK, STALE_SECONDS, Owner, WorkdirLock, is_alive
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, StepDirectory, to_path

WORKDIR = PathOption(Kind.DIRECTORY, ANY)
LOCAL_WORKDIR = PathOption(
    Kind.DIRECTORY,
    advice='only local directories can be verified or pruned; fetch it first with `maxlm checkpoints fetch`',
)
NEW_WORKDIR = PathOption(Kind.DIRECTORY)
RULES = ('max_to_keep', 'keep_best', 'keep_period')


def main(argv: list[str]) -> int:
    """Runs the subcommand."""
    options = _parse(argv)
    commands = {'list': _list, 'verify': _verify, 'prune': _prune, 'fetch': _fetch, 'merge': _merge}
    with Console():
        return commands[options.command](options)


def run() -> None:
    """Entry point of `python -m maxlm.checkpoints` and `maxlm checkpoints`."""
    sys.exit(exit_code(main, sys.argv[1:]))


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


def _list(options: argparse.Namespace) -> int:
    rows = []
    for given in options.workdirs:
        chosen = resolve_checkpoint(given)
        # The retention rules apply to all steps, even if only one is listed.
        reasons = _reasons(chosen.workdir, list_checkpoints(chosen.workdir), options, need_config=False)
        for one in chosen.steps:
            kept = ', '.join(reasons[one.step]) or 'nothing'
            rows.append((f'{display_path(chosen.workdir)}@{one.step}', one, kept))
    if options.json:
        for name, one, kept in rows:
            print(json.dumps({'name': name, **one._asdict(), 'kept': kept}))
        return EXIT_DONE
    width = max(len(name) for name, *_ in rows)
    print(f'{"checkpoint":<{width}}  {"size":>9}  {"optimizer":>9}  {"validation loss":>15}  kept by')
    for name, one, kept in rows:
        loss = '-' if one.validation_loss is None else f'{one.validation_loss:.4f}'
        optimizer = format_bytes(one.optimizer_bytes) if one.optimizer_bytes else '-'
        print(f'{name:<{width}}  {format_bytes(one.bytes):>9}  {optimizer:>9}  {loss:>15}  {kept}')
    for workdir in dict.fromkeys(resolve_checkpoint(given).workdir for given in options.workdirs):
        if names := damaged_steps(workdir):
            print(f'{display_path(workdir)}: damaged and set aside: {", ".join(names)}')
    print_next('maxlm', 'generate', f'--checkpoint={rows[-1][0]}', '--prompt=Hello')
    return EXIT_DONE


def _verify(options: argparse.Namespace) -> int:
    num_damaged = 0
    for given in options.workdirs:
        chosen = resolve_checkpoint(given)
        workdir = Path(chosen.workdir)
        for one in chosen.steps:
            found, num_sums = corrupt_arrays(to_path(workdir) / CHECKPOINTS_DIR / str(one.step))
            num_damaged += bool(found)
            for line in found:
                print(f'damaged   {line}')
            if not found:
                status = (
                    f'intact    {{}}: {num_sums} checksums' if num_sums else 'unknown   {}: saved without checksums'
                )
                print(status.format(f'{workdir}@{one.step}'))
    if num_damaged:
        return EXIT_FAILED
    print_next('maxlm', 'generate', f'--checkpoint={options.workdirs[0]}', '--prompt=Hello')
    return EXIT_DONE


def _prune(options: argparse.Namespace) -> int:
    for given in options.workdirs:
        chosen = resolve_checkpoint(given)
        workdir, everything = Path(chosen.workdir), list_checkpoints(chosen.workdir)
        reasons = _reasons(chosen.workdir, everything, options, need_config=True)
        going = [one for one in chosen.steps if not reasons[one.step]]
        kept = [one for one in everything if one not in going]
        reduced = _reducible(workdir, kept, options) if options.drop_optimizer else []
        reduced = [one for one in reduced if one in chosen.steps]
        if (going or reduced) and not options.dry_run:
            _check_free(workdir)
            # While the lock is held, a new run cannot start.
            with WorkdirLock(workdir):
                for one in going:
                    StepDirectory(workdir).delete(one.step)
                for one in reduced:
                    drop_optimizer(workdir, one.step)
        status = 'would be deleted' if options.dry_run else 'deleted'
        for one in going:
            print(f'{workdir}@{one.step}: {status}, {format_bytes(one.bytes)}')
        for one in reduced:
            print(f'{workdir}@{one.step}: optimizer state {status}, {format_bytes(one.optimizer_bytes)}')
        size = format_bytes(sum(one.bytes for one in going) + sum(one.optimizer_bytes for one in reduced))
        print(f'{workdir}: {len(kept)} of {len(everything)} steps kept; {size} freed')
    print_next('maxlm', 'checkpoints', 'list', *map(str, options.workdirs))
    return EXIT_DONE


def _reducible(workdir: Path, steps: list[CheckpointInfo], options: argparse.Namespace) -> list[CheckpointInfo]:
    """Returns the steps whose optimizer state is not needed to resume the run."""
    folder = to_path(workdir) / CHECKPOINTS_DIR
    guard = _config(str(workdir), options, need_config=True).guard
    needed = steps_to_resume(
        [one.step for one in steps if not is_params_only(folder / str(one.step))],
        max_rollbacks=guard.max_rollbacks,
        rollback_skip_steps=guard.rollback_skip_steps,
    )
    # An interrupted deletion may have left files.
    return [one for one in steps if one.optimizer_bytes and one.step not in needed]


def _fetch(options: argparse.Namespace) -> int:
    found = fetch_checkpoint(
        options.workdir, Path(options.output), weights_only=options.weights_only, threads=options.threads, show=True
    )
    for line in found.errors:
        print(f'damaged   {line}')
    if found.errors:
        return EXIT_FAILED
    print(f'{found.directory}: {format_bytes(found.bytes)}, {found.num_checksums} checksums verified')
    print_next('maxlm', 'generate', f'--checkpoint={options.output}', '--prompt=Hello')
    return EXIT_DONE


def _merge(options: argparse.Namespace) -> int:
    merged = merge_checkpoint(options.checkpoint, options.output, show=True)
    print(f'{merged.workdir}@0: {merged.parameters:,} parameters, with adapters merged')
    print_next('maxlm', 'generate', f'--checkpoint={merged.workdir}', '--prompt=Hello')
    return EXIT_DONE


def _reasons(
    workdir: str, steps: list[CheckpointInfo], options: argparse.Namespace, *, need_config: bool
) -> dict[int, tuple[str, ...]]:
    given = {rule: getattr(options, rule) for rule in RULES if getattr(options, rule) is not None}
    config = _config(workdir, options, need_config=need_config).checkpoint
    rules = {rule: given.get(rule, getattr(config, rule)) for rule in RULES}
    return retention_reasons([SavedStep(one.step, one.validation_loss) for one in steps], **rules)


def _config(workdir: str, options: argparse.Namespace, *, need_config: bool) -> Config:
    """Returns the config of the run, or the default if it is missing and not needed."""
    try:
        return run_config(workdir)
    except InputError:
        if need_config and any(getattr(options, rule) is None for rule in RULES):
            raise
        return Config()


def _check_free(workdir: Path) -> None:
    """Rejects a workdir in use by a run. A remote run counts as alive for STALE_SECONDS after its last heartbeat."""
    path = workdir / LOCK
    holder = None
    try:
        age = time.time() - path.stat().st_mtime
        holder = Owner(**parse_json(read_text(path)))
    except FileNotFoundError:
        return
    except (ValueError, TypeError):
        # An unreadable lock file belongs to an unknown run.
        pass
    alive = is_alive(holder) if holder else None
    if alive or (alive is None and age <= STALE_SECONDS):
        whose = holder or 'an unknown run'
        raise InputError(
            f'{workdir}: in use by {whose}, which prunes its own checkpoints; prune it after the run has ended'
        )


if __name__ == '__main__':
    run()
