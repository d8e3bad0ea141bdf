"""Lists, verifies, prunes, fetches and merges checkpoints."""

from __future__ import annotations

import argparse
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
    losses_of,
    resolve_checkpoints,
)
from maxlm.checkpoint.restore import is_params_only
from maxlm.checkpoint.retention import RetentionRules, steps_to_resume
from maxlm.cli.hints import print_generate, print_next
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError
from maxlm.formatting import format_bytes
from maxlm.log import Console
from maxlm.storage.filesystem import display_path
from maxlm.storage.json_text import finite_json, parse_json
from maxlm.storage.regular_files import read_text
from maxlm.workdir.files import read_config
from maxlm.workdir.lock import LOCK, STALE_SECONDS, Owner, WorkdirLock, is_alive
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, StepDirectory, split_name, to_path

RULES = ('max_to_keep', 'keep_best', 'keep_period')


def execute(options: argparse.Namespace) -> int:
    """Runs the subcommand."""
    commands = {'list': _list, 'verify': _verify, 'prune': _prune, 'fetch': _fetch, 'merge': _merge}
    with Console(stderr=True):
        return commands[options.command](options)


def _list(options: argparse.Namespace) -> int:
    rows = []
    for reference in options.workdirs:
        workdir, steps = resolve_checkpoints(reference)
        # The retention rules apply to all steps, even if only one is listed.
        reasons = _reasons(workdir, list_checkpoints(workdir), options, need_config=False)
        for one in steps:
            kept = ', '.join(reasons[one.step]) or 'nothing'
            rows.append((f'{display_path(workdir)}@{one.step}', one, kept))
    if options.json:
        for name, one, kept in rows:
            print(finite_json({'name': name, **one._asdict(), 'kept': kept}))
        return EXIT_DONE
    width = max(len(name) for name, *_ in rows)
    print(f'{"checkpoint":<{width}}  {"size":>9}  {"optimizer":>9}  {"validation loss":>15}  kept by')
    for name, one, kept in rows:
        loss = '-' if one.validation_loss is None else f'{one.validation_loss:.4f}'
        optimizer = format_bytes(one.optimizer_bytes) if one.optimizer_bytes else '-'
        print(f'{name:<{width}}  {format_bytes(one.bytes):>9}  {optimizer:>9}  {loss:>15}  {kept}')
    for workdir in dict.fromkeys(split_name(reference)[0] for reference in options.workdirs):
        if names := damaged_steps(workdir):
            print(f'{display_path(workdir)}: damaged and set aside: {", ".join(names)}')
    print_generate(rows[-1][0])
    return EXIT_DONE


def _verify(options: argparse.Namespace) -> int:
    num_damaged = 0
    for reference in options.workdirs:
        name, steps = resolve_checkpoints(reference)
        workdir = Path(name)
        for one in steps:
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
    print_generate(options.workdirs[0])
    return EXIT_DONE


def _prune(options: argparse.Namespace) -> int:
    for reference in options.workdirs:
        name, steps = resolve_checkpoints(reference)
        workdir, everything = Path(name), list_checkpoints(name)
        reasons = _reasons(name, everything, options, need_config=True)
        going = [one for one in steps if not reasons[one.step]]
        kept = [one for one in everything if one not in going]
        reduced = _reducible(workdir, kept, options) if options.drop_optimizer else []
        reduced = [one for one in reduced if one in steps]
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
        if options.drop_optimizer:
            _print_complete(workdir, [one for one in kept if one not in reduced and one.optimizer_bytes])
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


def _print_complete(workdir: Path, steps: list[CheckpointInfo]) -> None:
    if steps:
        numbers = ', '.join(str(one.step) for one in steps)
        size = format_bytes(sum(one.optimizer_bytes for one in steps))
        print(f'{workdir}: optimizer state kept to resume and roll back: steps {numbers}, {size}')


def _fetch(options: argparse.Namespace) -> int:
    found = fetch_checkpoint(
        options.workdir, Path(options.output), weights_only=options.weights_only, threads=options.threads, show=True
    )
    for line in found.errors:
        print(f'damaged   {line}')
    if found.errors:
        return EXIT_FAILED
    print(f'{found.directory}: {format_bytes(found.bytes)}, {found.num_checksums} checksums verified')
    # The directory may contain other steps.
    print_generate(f'{options.output}@{found.directory.name}')
    return EXIT_DONE


def _merge(options: argparse.Namespace) -> int:
    merged = merge_checkpoint(options.checkpoint, options.output, show=True)
    print(f'{merged.workdir}@0: {merged.parameters:,} parameters, with adapters merged')
    print_generate(merged.workdir)
    return EXIT_DONE


def _reasons(
    workdir: str, steps: list[CheckpointInfo], options: argparse.Namespace, *, need_config: bool
) -> dict[int, tuple[str, ...]]:
    rules = {rule: getattr(options, rule) for rule in RULES if getattr(options, rule) is not None}
    config = _config(workdir, options, need_config=need_config).checkpoint
    return RetentionRules.of(config)._replace(**rules).reasons(losses_of(steps))


def _config(workdir: str, options: argparse.Namespace, *, need_config: bool) -> Config:
    """Returns the config of the run, or the default if it is missing and not needed."""
    try:
        return read_config(workdir)
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
    # The clock of the file server may be ahead. `WorkdirLock` then watches for a heartbeat.
    if alive or (alive is None and 0 <= age <= STALE_SECONDS):
        whose = holder or 'an unknown run'
        raise InputError(
            f'{workdir}: in use by {whose}, which prunes its own checkpoints; prune it after the run has ended'
        )
