"""Where a run lives: its directory, held by this run alone, its copy in a bucket, and whoever hears of trouble."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from maxlm.config.keys import CheckpointConfig, Config
from maxlm.data.storage import is_url
from maxlm.errors import EXIT_FAILED, InputError
from maxlm.runtime.alerts import Alerts
from maxlm.runtime.checkpoint import saved_steps
from maxlm.runtime.console import Console, logger
from maxlm.runtime.fetching import THREADS, fetch_step
from maxlm.runtime.inventory import inventory
from maxlm.runtime.lock import WorkdirLock
from maxlm.runtime.peers import Peers
from maxlm.runtime.storage.run import MIRRORED, open_run_storage
from maxlm.runtime.workdir import check_same_model, open_workdir
from maxlm.training.retention import SavedStep, reasons_to_keep


class Home(NamedTuple):
    """What is open as long as a run runs.

    Attributes:
        workdir: the local directory: config, metrics, log.
        checkpoints: what `Checkpoints` takes as workdir: the same, or a bucket's.
        alerts: for people.
    """

    workdir: Path
    checkpoints: Any
    alerts: Alerts


@contextlib.contextmanager
def open_home(given: str, config: Config, peers: Peers, *, resume: str = '') -> Iterator[Home]:
    """Opens the workdir of a run; all processes together, of which the first does what is to be done once.

    Args:
        given: the workdir as the command has it: a directory or a URL.
        config: resolved.
        peers: the other processes.
        resume: checkpoint to go on from where the workdir has none; '' = none.

    Raises:
        InputError: the workdir cannot be used, is in use, or holds a run of another model; `resume` cannot be had.
        UnreachableError: the bucket does not answer.
    """
    process = jax.process_index()
    if given.startswith(f'{MIRRORED}://') and jax.process_count() > 1:
        raise InputError(
            f'--workdir={given}: several processes need a place that all can write to; give gs://…, or a directory '
            f'that all machines reach with --config.checkpoint.mirror={given}'
        )

    def warn(line: str) -> None:
        alerts.send('storage', line)

    with contextlib.ExitStack() as stack:
        storage = open_run_storage(
            given,
            mirror=config.checkpoint.mirror,
            cache=config.data.cache,
            process=process,
            warn=warn,
            surplus=partial(_surplus, given if is_url(given) else config.checkpoint.mirror, config.checkpoint),
        )
        alerts: Alerts = Alerts(config.alerts, storage.workdir, process=process)
        if process == 0:
            open_workdir(storage.workdir)
            # Who has lost it must not write any more.
            lock = WorkdirLock(storage.workdir, on_lost=lambda reason: peers.leave(EXIT_FAILED, reason))
            stack.enter_context(lock)
        stack.enter_context(Console(storage.workdir, process=process))
        home = Home(storage.workdir, storage.checkpoint_directory.parent, alerts)
        if process == 0:
            storage.fetch()
            if resume:
                _resume(resume, home)
            check_same_model(storage.workdir, config)
        peers.meet('home')
        stack.enter_context(alerts)
        stack.enter_context(storage)
        yield home


def _surplus(url: str, config: CheckpointConfig, steps: list[int]) -> list[int]:
    """Which steps of a copy no rule keeps: those that lives on other machines have left there."""
    saved = [SavedStep(one.step, one.validation_loss) for one in inventory(url)]
    kept = reasons_to_keep(
        saved, keep_last=config.keep_last, keep_best=config.keep_best, permanent_every=config.permanent_every
    )
    # What cannot be judged stays.
    return [step for step in steps if kept.get(step) == ()]


def _resume(name: str, home: Home) -> None:
    if saved_steps(home.checkpoints):
        logger.info(f'--resume={name}: the workdir has checkpoints of its own, from which it goes on')
        return
    if is_url(str(home.checkpoints)):
        raise InputError(
            f'--resume={name}: only into a directory; give one as --workdir, and the bucket as checkpoint.mirror'
        )
    found = fetch_step(name, home.workdir, weights_only=False, threads=THREADS, show=True)
    if found.damages:
        raise InputError(f'--resume={name}: {found.damages[0]}')
    logger.info(f'fetched {name}: {found.num_checksums} checksums compared')
