"""Opens and locks a run's workdir, its remote mirror, its recorder and its alert channels."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

from maxlm.checkpoint.fetch import THREADS, fetch_checkpoint
from maxlm.checkpoint.listing import list_checkpoints, resolve_checkpoint
from maxlm.checkpoint.manager import saved_steps
from maxlm.config.loading import from_json
from maxlm.config.schema import CheckpointConfig, Config
from maxlm.errors import EXIT_FAILED, InputError
from maxlm.log import Console, logger
from maxlm.runtime.barrier import ProcessGroup, is_shared
from maxlm.runtime.heartbeat import Heartbeats
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import display_path, is_url, read_bytes
from maxlm.storage.regular_files import MAX_TEXT_BYTES
from maxlm.telemetry.alerts import Alerts
from maxlm.telemetry.cost import price_of
from maxlm.telemetry.metrics import MetricWriter, Tracker, lowest_loss
from maxlm.telemetry.run_recorder import RunRecorder
from maxlm.telemetry.timeline import Timeline
from maxlm.training.retention import SavedStep, retention_reasons
from maxlm.training.run_control import RunControl
from maxlm.workdir.files import CONFIG, check_same_model, model_difference, open_workdir, write_run_files
from maxlm.workdir.lock import WorkdirLock
from maxlm.workdir.run_storage import MIRRORED, RunStorage, open_run_storage


class RunContext(NamedTuple):
    """The open workdir of a run and its channels to people.

    Attributes:
        workdir: the local directory: config, metrics, log.
        checkpoints: workdir of the checkpoints: the same, or that of a bucket.
        alerts: sends alerts.
        recorder: writes events and the goodput log.
    """

    workdir: Path
    checkpoints: Any
    alerts: Alerts
    recorder: RunRecorder

    def describe(self, config: Config, decisions: RunControl, tokenizer: Path) -> None:
        """Writes config.json with the number of steps decided so far, but with the configured learning rates."""
        if jax.process_index():
            return
        if decisions.num_steps:
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, num_steps=decisions.num_steps))
        write_run_files(self.workdir, config, tokenizer)

    def open_metrics(self, start: int, trackers: Sequence[Tracker]) -> tuple[MetricWriter | None, float]:
        """Truncates the metrics after step `start`, and opens their writer in the first process.

        Returns:
            The writer, or None, and the lowest training loss until `start`; infinity if unknown.
        """
        if jax.process_index():
            return None, math.inf
        best_loss = lowest_loss(self.workdir, up_to=start)
        return MetricWriter(self.workdir, after_step=start, trackers=list(trackers)), best_loss


@contextlib.contextmanager
def open_run(
    given: str,
    config: Config,
    heartbeats: Heartbeats,
    timeline: Timeline,
    *,
    resume: str = '',
    at_end: Callable[[Path], None] = lambda workdir: None,
) -> Iterator[RunContext]:
    """Opens the workdir of a run; all processes together, of which the first does what is to be done once.

    Args:
        given: the workdir as the command has it: a directory or a URL.
        config: resolved.
        heartbeats: the other processes.
        timeline: of this process.
        resume: checkpoint to go on from where the workdir has none; '' = none.
        at_end: is given the local directory when a run that has begun has written all that it writes. It must not
            raise.

    Raises:
        InputError: the workdir cannot be used, is in use, or holds a run of another model; `resume` cannot be had.
        TransientStorageError: the bucket does not answer.
    """
    process = jax.process_index()
    recorder: RunRecorder | None = None

    def warn(line: str) -> None:
        alerts.send('storage', line)

    def record(kind: str, message: str) -> None:
        if recorder:
            recorder.record_alert(kind, message)

    def lost(reason: str) -> NoReturn:
        # Who has lost the workdir must not write there any more.
        heartbeats.on_exit = lambda code, reason: None
        heartbeats.exit_all(EXIT_FAILED, reason)

    if resume and process == 0 and not (is_url(given) or config.checkpoint.remote_dir or saved_steps(Path(given))):
        # Before the workdir exists: a refused start leaves nothing.
        check_resume(resume, config)
    with contextlib.ExitStack() as stack:
        storage = open_run_storage(
            given,
            mirror=config.checkpoint.remote_dir,
            cache=config.data.cache_dir,
            process=process,
            warn=warn,
            surplus=partial(_surplus, given if is_url(given) else config.checkpoint.remote_dir, config.checkpoint),
        )
        alerts: Alerts = Alerts(config.alerts, storage.workdir, process=process, on_alert=record)
        if process == 0:
            open_workdir(storage.workdir)
        if given.startswith(f'{MIRRORED}://'):
            _check_shared(given, storage.workdir)
        if process == 0:
            stack.enter_context(WorkdirLock(storage.workdir, on_lost=lost))
        stack.enter_context(Console(storage.workdir, process=process))
        checkpoints = storage.checkpoint_directory.parent
        if process == 0:
            with timeline.phase('restore'):
                storage.fetch()
                if resume:
                    _resume(resume, checkpoints, storage.workdir, config)
            check_same_model(storage.workdir, config)
        heartbeats.barrier('home')
        recorder = _open_recorder(storage.workdir, config, timeline)
        # The recorder's last lines, and what is made of them, come after all else that is uploaded.
        stack.callback(_finish, storage, recorder, at_end if process == 0 else None)
        stack.enter_context(recorder)
        heartbeats.on_exit = recorder.record_exit
        stack.enter_context(alerts)
        storage.start()
        stack.callback(_close, storage, timeline)
        yield RunContext(storage.workdir, checkpoints, alerts, recorder)


def _check_shared(given: str, workdir: Path) -> None:
    """Several processes write one checkpoint together into the directory that is uploaded."""
    together = ProcessGroup()
    # Nobody looks before it is made.
    together.barrier()
    if not is_shared(workdir):
        raise InputError(
            f'--workdir={given}: {workdir} is not the same directory for all processes; set data.cache_dir to a '
            'directory '
            f'that all machines share, or give --workdir=gs://…'
        )


def _open_recorder(workdir: Path, config: Config, timeline: Timeline) -> RunRecorder:
    process, together = jax.process_index(), ProcessGroup()
    if process:
        # In the cache of another machine nobody has made it. What cannot be written is said later.
        with contextlib.suppress(OSError):
            workdir.mkdir(parents=True, exist_ok=True)
    return RunRecorder(
        workdir,
        timeline,
        interval_seconds=config.metrics.goodput_interval_seconds,
        num_devices=jax.device_count(),
        price=price_of(config, jax.local_devices()[0].device_kind),
        process=process,
        is_only_process=together.num_processes == 1,
        agree=lambda life: int(together.broadcast_from_host0(str(life))),
    )


def _finish(storage: RunStorage, recorder: RunRecorder, at_end: Callable[[Path], None] | None) -> None:
    if at_end and recorder.has_begun:
        at_end(storage.workdir)
    storage.upload_last_files()


def _close(storage: RunStorage, timeline: Timeline) -> None:
    with timeline.phase('checkpoint'):
        storage.close()


def _surplus(url: str, config: CheckpointConfig, steps: list[int]) -> list[int]:
    """Which steps of a copy no rule keeps: those that lives on other machines have left there."""
    saved = [SavedStep(one.step, one.validation_loss) for one in list_checkpoints(url)]
    kept = retention_reasons(
        saved, max_to_keep=config.max_to_keep, keep_best=config.keep_best, keep_period=config.keep_period
    )
    # What cannot be judged stays.
    return [step for step in steps if kept.get(step) == ()]


def check_resume(name: str, config: Config) -> None:
    """Compares the model of the checkpoint that a new run continues from with that of its config.

    Raises:
        InputError: the checkpoint does not exist, or is of another model.
    """
    source = resolve_checkpoint(name).workdir
    try:
        old = from_json(read_bytes(f'{source}/{CONFIG}', limit=MAX_TEXT_BYTES).decode())
    except (StorageError, ValueError):
        # Imports have none. Then the shapes of the parameters are compared.
        return
    if found := model_difference(old, config):
        key, before, now = found
        raise InputError(
            f'--resume={display_path(name)} has {key}={before}, the config has {now}; set {key}={before}, or resume '
            f'from a run of the same model'
        )


def _resume(name: str, checkpoints: Any, workdir: Path, config: Config) -> None:
    if saved_steps(checkpoints):
        logger.info(f'--resume={name}: the workdir has checkpoints of its own, from which it goes on')
        return
    if is_url(str(checkpoints)):
        raise InputError(
            f'--resume={name}: only into a directory; give one as --workdir, and the bucket as checkpoint.remote_dir'
        )
    check_resume(name, config)
    found = fetch_checkpoint(name, workdir, weights_only=False, threads=THREADS, show=True)
    if found.errors:
        raise InputError(f'--resume={name}: {found.errors[0]}')
    logger.info(f'fetched {name}: {found.num_checksums} checksums compared')
