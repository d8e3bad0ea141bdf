"""Opens and locks a run's workdir, its remote mirror, its recorder and its alert channels."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

from maxlm.checkpoint.fetch import THREADS, fetch_checkpoint
from maxlm.checkpoint.item_metadata import CorruptCheckpointError, read_json
from maxlm.checkpoint.listing import list_checkpoints, losses_of, resolve_checkpoint
from maxlm.checkpoint.manager import find_step, saved_steps
from maxlm.checkpoint.retention import RetentionRules
from maxlm.config.schema import CheckpointConfig, Config
from maxlm.config.serialization import from_json
from maxlm.errors import EXIT_FAILED, InputError
from maxlm.log import Console, logger
from maxlm.runtime.barrier import ProcessGroup, is_shared
from maxlm.runtime.heartbeat import Heartbeats
from maxlm.storage.atomic import replace_file
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import display_path, is_url, read_bytes
from maxlm.storage.regular_files import MAX_TEXT_BYTES
from maxlm.telemetry.alerts import Alerts
from maxlm.telemetry.cost import price_of
from maxlm.telemetry.metrics import MetricWriter, Tracker, lowest_loss
from maxlm.telemetry.run_recorder import RunRecorder
from maxlm.telemetry.timeline import Timeline
from maxlm.trainer.callbacks import Callback
from maxlm.training.decisions.run_control import RunControl
from maxlm.training.decisions.run_control import from_json as decisions_from_json
from maxlm.workdir.files import (
    CONFIG,
    GENERATION,
    HF_CONFIG,
    SPECIAL_TOKENS,
    TEXT_BOUNDARIES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    check_same_model,
    model_difference,
    open_workdir,
    write_run_files,
)
from maxlm.workdir.lock import WorkdirLock
from maxlm.workdir.run_storage import MIRRORED, RunStorage, cache_directory, open_run_storage
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR


class RunContext(NamedTuple):
    """The open workdir of a run, its alerts and its recorder.

    Attributes:
        workdir: local directory of config, metrics and log.
        checkpoint_workdir: workdir of the checkpoints, either `workdir` or a path in a bucket.
        alerts: sends alerts.
        recorder: writes events and the goodput log.
        callbacks: functions of the user; see `Callback`.
    """

    workdir: Path
    checkpoint_workdir: Any
    alerts: Alerts
    recorder: RunRecorder
    callbacks: tuple[Callback, ...] = ()

    def describe(self, config: Config, decisions: RunControl, tokenizer: Path) -> None:
        """Writes config.json with the number of steps decided so far, but with the configured learning rates."""
        if jax.process_index():
            return
        if decisions.num_steps:
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, num_steps=decisions.num_steps))
        write_run_files(self.workdir, config, tokenizer)
        if config.train.init_from and not (self.workdir / HF_CONFIG).exists():
            self._keep_original(config.train.init_from)

    def _keep_original(self, init_from: str) -> None:
        """Copies the files that the author of an imported model wrote, so that an export of the run keeps them.

        Files that describe the tokenizer are copied if the run has the same tokenizer.
        """

        def read(path: Any) -> bytes:
            # A resumed run does not need the checkpoint, and a model that is not imported has no such files.
            with contextlib.suppress(OSError, StorageError):
                return read_bytes(str(path), limit=MAX_TEXT_BYTES)
            return b''

        with contextlib.suppress(InputError):
            origin = find_step(init_from, key='train.init_from').parent.parent
            is_same = all(read(origin / name) == read(self.workdir / name) for name in (TOKENIZER, TEXT_BOUNDARIES))
            # The config is last, because it shows that the copies are complete.
            for name in (*((TOKENIZER_CONFIG, SPECIAL_TOKENS, GENERATION) if is_same else ()), HF_CONFIG):
                if (content := read(origin / name)) and read(origin / TEXT_BOUNDARIES):
                    replace_file(self.workdir / name, content.decode())

    def open_metrics(
        self, start: int, trackers: Sequence[Tracker], on_write: Callable[[int, Mapping[str, float]], None]
    ) -> tuple[MetricWriter | None, float]:
        """Truncates the metrics after step `start` and opens their writer in process 0; see `MetricWriter`.

        Returns:
            The writer, or None in all other processes, and the lowest training loss until `start`, or infinity if it is
            unknown.
        """
        if jax.process_index():
            return None, math.inf
        best_loss = lowest_loss(self.workdir, up_to=start)
        return MetricWriter(self.workdir, after_step=start, trackers=list(trackers), on_write=on_write), best_loss


@contextlib.contextmanager
def open_run(
    location: str,
    config: Config,
    heartbeats: Heartbeats,
    timeline: Timeline,
    *,
    resume: str = '',
    at_end: Callable[[Path], None] = lambda workdir: None,
    callbacks: tuple[Callback, ...] = (),
) -> Iterator[RunContext]:
    """Opens the workdir of a run as a context manager. All processes must call it.

    Args:
        location: value of `--workdir`, a directory or a URL.
        config: resolved config.
        heartbeats: heartbeats of the run's processes.
        timeline: timeline of this process.
        resume: checkpoint from which a run without checkpoints continues; '' means none.
        at_end: called in process 0 with the local directory after the last write of a run that has begun. It must not
            raise.
        callbacks: see `Callback`.

    Raises:
        InputError: the workdir is unusable, in use, or contains a run of another model, or `resume` cannot be loaded.
        TransientStorageError: the bucket is temporarily unavailable.
    """
    process = jax.process_index()
    recorder: RunRecorder | None = None

    def warn(line: str) -> None:
        alerts.send('storage', line)

    def record(kind: str, message: str) -> None:
        if recorder:
            recorder.record_alert(kind, message)

    def lost(reason: str) -> NoReturn:
        # A process that has lost the lock must not write to the workdir.
        heartbeats.on_exit = lambda code, reason: None
        heartbeats.exit_all(EXIT_FAILED, reason)

    remote = location if is_url(location) else config.checkpoint.remote_dir
    if resume and process == 0 and not (remote or saved_steps(Path(location))):
        # Check this before the workdir is created, so that an invalid start leaves no files.
        check_resume(resume, config)
    with contextlib.ExitStack() as stack:
        storage = open_run_storage(
            location,
            mirror=config.checkpoint.remote_dir,
            cache=config.data.cache_dir,
            process=process,
            is_shared=_shares_cache(location, config.data.cache_dir),
            warn=warn,
            surplus=partial(_surplus, remote, config.checkpoint),
        )
        alerts: Alerts = Alerts(config.alerts, storage.workdir, process=process, on_alert=record)
        if process == 0:
            open_workdir(storage.workdir)
            stack.enter_context(WorkdirLock(storage.workdir, on_lost=lost))
        stack.enter_context(Console(storage.workdir, process=process))
        checkpoint_workdir = storage.checkpoint_directory.parent
        if process == 0:
            with timeline.phase('restore'):
                storage.fetch()
                if resume:
                    _resume(resume, checkpoint_workdir, storage.workdir, config)
            check_same_model(storage.workdir, config)
        heartbeats.barrier('workdir')
        recorder = _open_recorder(storage.workdir, config, timeline)
        # The recorder's last lines and the files generated from them are uploaded last.
        stack.callback(_finish, storage, recorder, at_end if process == 0 else None)
        stack.enter_context(recorder)
        heartbeats.on_exit = recorder.record_exit
        stack.enter_context(alerts)
        storage.start()
        stack.callback(_close, storage, timeline)
        yield RunContext(storage.workdir, checkpoint_workdir, alerts, recorder, callbacks)


def _shares_cache(location: str, cache: str) -> bool:
    """Returns True if all processes see the same cache, in which a checkpoint waits for its upload to S3."""
    together = ProcessGroup()
    if together.num_processes == 1 or not location.startswith(f'{MIRRORED}://'):
        return True
    workdir = cache_directory(location, cache)
    if together.process_index == 0:
        open_workdir(workdir)
    # The directory must exist before other processes check it.
    together.barrier()
    return is_shared(workdir)


def _open_recorder(workdir: Path, config: Config, timeline: Timeline) -> RunRecorder:
    process, together = jax.process_index(), ProcessGroup()
    if process:
        # Process 0 creates the directory only on its own machine. Write errors are reported later.
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
        agree=lambda attempt: int(together.broadcast_from_host0(str(attempt))),
    )


def _finish(storage: RunStorage, recorder: RunRecorder, at_end: Callable[[Path], None] | None) -> None:
    if at_end and recorder.has_begun:
        at_end(storage.workdir)
    storage.upload_last_files()


def _close(storage: RunStorage, timeline: Timeline) -> None:
    with timeline.phase('checkpoint'):
        storage.close()


def _surplus(url: str, config: CheckpointConfig, steps: list[int]) -> list[int]:
    """Returns the steps in a bucket that no retention rule keeps, such as leftovers of attempts on other machines."""
    listed = list_checkpoints(url)
    sizes = {one.step: one.bytes for one in listed}
    surplus = RetentionRules.of(config).steps_to_delete(losses_of(listed), sizes)
    # Steps that are not listed as complete checkpoints are kept.
    return [step for step in steps if step in surplus]


class SavedProgress(NamedTuple):
    """Progress of a run at its newest checkpoint.

    Attributes:
        step: its step; 0 for a new run.
        decisions: decisions of the run until then.
        data: data fingerprint of the checkpoint; {} for a new run.
    """

    step: int = 0
    decisions: RunControl = RunControl()
    data: Mapping[str, Any] = {}


def newest_progress(workdir: Any) -> SavedProgress:
    """Returns the progress from which a run will resume, without reading the state."""
    steps = saved_steps(workdir)
    if not steps:
        return SavedProgress()

    def read(step: int, item: str) -> dict[str, Any]:
        try:
            return dict(read_json(workdir / CHECKPOINTS_DIR / str(step) / item))
        except CorruptCheckpointError:
            # Either an older checkpoint will be used, or the checkpoint is an import, which has no history.
            return {}

    # All checkpoints of a run have the same data.
    data = next((found for step in reversed(steps) if (found := read(step, 'data'))), {})
    history = read(steps[-1], 'progress').get('history', {})
    return SavedProgress(steps[-1], decisions_from_json(history.get('decisions')), data)


def check_resume(name: str, config: Config) -> None:
    """Checks that the checkpoint from which a new run continues has optimizer state and the model of its config.

    Raises:
        InputError: the checkpoint does not exist, has only parameters or is of another model.
    """
    source, chosen = resolve_checkpoint(name)
    # Step 0 of an import is the start of a run.
    if chosen.step and not chosen.optimizer_bytes:
        raise InputError(
            f'--resume={display_path(name)}: step {chosen.step} has no optimizer state (--weights-only or '
            '--drop-optimizer); choose a step with optimizer state, or start from its parameters with train.init_from'
        )
    try:
        old = from_json(read_bytes(f'{source}/{CONFIG}', limit=MAX_TEXT_BYTES).decode())
    except (StorageError, ValueError):
        # Imported checkpoints have no config. The shapes of their parameters are compared later.
        return
    if found := model_difference(old, config):
        key, before, now = found
        raise InputError(
            f'--resume={display_path(name)} has {key}={before}, but the config has {key}={now}; set {key}={before}, or '
            'resume from a run of the same model'
        )


def _resume(name: str, checkpoint_workdir: Any, workdir: Path, config: Config) -> None:
    if saved_steps(checkpoint_workdir):
        logger.info(f'--resume={name} is ignored: the workdir already has checkpoints, and the run resumes from them')
        return
    if is_url(str(checkpoint_workdir)):
        raise InputError(
            f'--resume={name} requires a local --workdir; give a directory as --workdir and '
            'the bucket as checkpoint.remote_dir'
        )
    check_resume(name, config)
    found = fetch_checkpoint(name, workdir, weights_only=False, threads=THREADS, show=True)
    if found.errors:
        raise InputError(f'--resume={name}: {found.errors[0]}; choose another step')
    logger.info(f'fetched {name}: {found.num_checksums} checksums compared')
