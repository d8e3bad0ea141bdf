"""Saves and restores checkpoints with Orbax. Each step consists of separate items.

    WORKDIR/checkpoints/<step>/{params, ema, optimizer, source, progress, data, checksums}

Parameters are a separate item, so sampling, evaluation and download need not read the optimizer state. `ema` exists if
the run kept a moving average of the parameters, `source` if the batch source has a state. The workdir may be a bucket.
`StepDirectory` defines the layout and the commit marker. Restored items are verified against their checksums. A corrupt
step is set aside once an older step was found to be intact, and is never deleted.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from maxlm.checkpoint import checksums
from maxlm.checkpoint.async_save import SOURCE, AsyncSave, failure_reason
from maxlm.checkpoint.item_metadata import REMEDY, CorruptCheckpointError, read_json
from maxlm.checkpoint.listing import LEVEL, choose_step
from maxlm.checkpoint.params import chunked_by_layer
from maxlm.checkpoint.restore import VALIDATION_LOSS, RestoredState, is_params_only, items_of, progress_of, restore_step
from maxlm.checkpoint.retention import RetentionPolicy, RetentionRules
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.runtime.barrier import ProcessGroup
from maxlm.training.state import TrainState
from maxlm.workdir.model_directory import refuse_other_formats
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, StepDirectory, split_name, to_path

# Time after which an unfinished save probes the bucket. A bucket client silently retries writes for 15 minutes. The
# probe itself takes half a minute.
PROBE_SECONDS = 20.0
# Time that the next save waits for the previous one.
BUSY_TIMEOUT_SECONDS = 10.0
CHECKPOINT = '--checkpoint'


class Checkpoints:
    """Checkpoint manager of one workdir. Saves run in the background. Leaving the context waits for the last save.

    All processes call its methods together, except `latest_step`.
    """

    def __init__(
        self,
        workdir: Any,
        *,
        max_to_keep: int,
        keep_best: int = 0,
        keep_period: int = 0,
        max_bytes: int = 0,
        compare_replicas: bool = True,
        on_failure: Callable[[str], None] = logger.error,
    ):
        """
        Args:
            workdir: workdir of the run: a directory, gs://… or s3://….
            max_to_keep, keep_best, keep_period, max_bytes: see `RetentionRules`.
            compare_replicas: compare the replicas of all arrays before each save.
            on_failure: called from a thread with one line about each failed save. The run can continue: earlier steps
                are intact, and the next save is independent of the failed one.

        Raises:
            InputError: the bucket cannot be read.
        """
        self._folder = StepDirectory(workdir)
        self.directory = self._folder.path
        rules = RetentionRules(max_to_keep, keep_best, keep_period, max_bytes)
        self._policy = RetentionPolicy(self._folder, rules)
        self._compare_replicas, self._on_failure = compare_replicas, on_failure
        self._group = ProcessGroup()
        self._is_first_process = jax.process_index() == 0
        # Guards `_complete`, which threads also change.
        self._lock = threading.Lock()
        self._complete = set(self._folder.complete())
        # Only process 0 deletes steps.
        self._losses = saved_losses(workdir) if self._is_first_process else {}
        self._save: AsyncSave | None = None
        # Duration of the newest complete save; 0 before the first one.
        self.save_seconds = 0.0
        # True if files of a failed save or deletion remain.
        self._needs_cleaning = False
        # Deletion runs in the background, because it is slow for large steps on some file systems.
        self._cleaner = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='delete-steps')
        self._cleaning = self._clean(self._folder.clear)

    def latest_step(self) -> int | None:
        """Returns the newest step that is known to be complete."""
        with self._lock:
            return max(self._complete, default=None)

    def steps(self) -> list[int]:
        """Waits for the current save and returns the complete steps, oldest first."""
        self._wait_for_all()
        text = ''
        if self._is_first_process:
            try:
                found = self._folder.complete()
            except InputError:
                # The bucket does not respond: return the steps seen last.
                found = sorted(self._complete)
            text = json.dumps(found)
        steps = json.loads(self._group.broadcast_from_host0(text))
        with self._lock:
            self._complete = set(steps)
        return steps

    def save(
        self,
        step: int,
        state: TrainState,
        fingerprint: dict[str, Any],
        *,
        validation_loss: float | None = None,
        history: Mapping[str, Any] | None = None,
        source: Mapping[str, np.ndarray] | None = None,
        wait_for_previous: bool = True,
    ) -> bool:
        """Copies the state off the device and writes it in the background, unless the step is already saved.

        A failed write does not stop the run. It is reported to `on_failure`.

        Args:
            step: number of the step.
            state: state after that step.
            fingerprint: data fingerprint: the settings that determine the order of the data.
            validation_loss: validation loss of this state, if it was evaluated.
            history: other JSON data of the run. `restore` returns {} if it was empty.
            source: arrays of the batch source, equal in all processes.
            wait_for_previous: wait until the previous save ends. If False and the previous save does not end within
                `BUSY_TIMEOUT_SECONDS`, the step is not saved and `on_failure` is called.

        Returns:
            True if the step is saved or being saved.

        Raises:
            DeviceError: the replicas of an array differ, so the state is wrong.
        """
        if not wait_for_previous and self._is_busy():
            self._on_failure(
                f'checkpoint of step {step} skipped: the previous checkpoint is still being written; training continues'
            )
            return False
        self._wait_for_save()
        if step in self._complete:
            return True
        began = time.monotonic()
        trees = items_of(state) | ({SOURCE: dict(source)} if source else {})
        started = checksums.start_checksums(trees)
        progress = progress_of(step, state, validation_loss, history)
        occasion = f'step {step} is not saved' if self._compare_replicas else ''
        sums = checksums.finish_checksums(trees, started, occasion=occasion)
        sums |= {'progress': checksums.json_checksum(progress), 'data': checksums.json_checksum(fingerprint)}
        items = ocp.args.Composite(
            **{name: ocp.args.StandardSave(tree, save_args=chunked_by_layer(tree)) for name, tree in trees.items()},
            progress=ocp.args.JsonSave(progress),
            data=ocp.args.JsonSave(fingerprint),
            checksums=ocp.args.JsonSave({'version': checksums.VERSION, **sums}),
        )
        if problem := self._prepare_write():
            self._on_save_end(step, problem)
            return False
        loss = progress.get(VALIDATION_LOSS)
        self._save = AsyncSave(self._group.begin_save(), lambda reason: self._on_save_end(step, reason, loss, began))
        self._save.begin(self.directory / str(step), items)
        if self._is_first_process and self._folder.in_bucket:
            threading.Thread(target=self._watch_save, args=(self._save, step), daemon=True, name='look-after').start()
        return True

    def wait(self) -> int | None:
        """Waits for the current save. Returns the newest complete step, or None."""
        return max(self.steps(), default=None)

    def remove_after(self, step: int) -> None:
        """Removes all steps newer than `step`. Their numbers can be saved again.

        Raises:
            InputError: a step cannot be removed.
        """
        newer = [one for one in self.steps() if one > step]
        if self._is_first_process:
            for one in reversed(newer):
                self._folder.delete(one)
        self._group.barrier()
        with self._lock:
            self._complete -= set(newer)
        for one in newer:
            self._losses.pop(one, None)

    def is_params_only(self, step: int) -> bool:
        """Returns True if a step was saved with parameters and without optimizer state, like an imported model."""
        return is_params_only(self.directory / str(step))

    def restore_newest(self, abstract: TrainState, *, loss_scale: float = 1.0) -> RestoredState | None:
        """Restores the newest intact step. Sets aside newer corrupt steps, with a warning for each.

        Returns:
            The restored state, or None if there is no step or the newest usable one is an import (parameters only).

        Raises:
            InputError: all steps are corrupt (none is set aside), or the newest is of another model or optimizer.
        """
        failures: dict[int, str] = {}
        restored = None
        for step in reversed(self.steps()):
            imported = step == 0 and self.is_params_only(0)
            try:
                if not imported:
                    restored = self.restore(step, abstract, loss_scale=loss_scale)
            except CorruptCheckpointError as error:
                failures[step] = str(error)
                continue
            for damaged, message in failures.items():
                logger.warning(
                    f'checkpoint of step {damaged} is damaged and skipped: {message.removesuffix(f"; {REMEDY}")}; '
                    f'{self._set_aside(damaged)}; falling back to step {step}'
                )
            if failures:
                # Before this barrier, no process may list the steps again.
                self._group.barrier()
                with self._lock:
                    self._complete -= failures.keys()
            return restored
        if failures:
            others = f'; all {len(failures)} checkpoints are damaged' if len(failures) > 1 else ''
            raise InputError(failures[max(failures)] + others)
        return None

    def restore(self, step: int, abstract: TrainState, *, loss_scale: float = 1.0) -> RestoredState:
        """Waits for the current save and calls `restore_step`."""
        self._wait_for_save()
        return restore_step(self.directory / str(step), abstract, loss_scale=loss_scale)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait_for_save()
        self._cleaner.shutdown()

    def _wait_for_save(self) -> None:
        if self._save:
            self._save.finish()

    def _is_busy(self) -> bool:
        over = self._save is None or self._save.finish(BUSY_TIMEOUT_SECONDS)
        return bool(self._group.broadcast_from_host0('' if over else 'busy'))

    def _wait_for_all(self) -> None:
        self._wait_for_save()
        # The cleaner has one worker, so this task runs after all earlier ones.
        self._cleaner.submit(lambda: None).result()

    def _prepare_write(self) -> str:
        """Frees space. Returns the reason why writing fails, or '', the same in all processes."""
        # After the barrier no process writes.
        self._group.barrier()
        if self._needs_cleaning:
            self._needs_cleaning = False
            self._cleaning = self._clean(self._folder.clear)
        if self._policy.rules.max_bytes:
            self._cleaning = self._clean(partial(self._delete_old, before_save=True))
        self._cleaning.result()
        problem = ''
        if self._group.num_processes > 1 and self._is_first_process:
            try:
                self._folder.probe_write()
            except Exception as error:
                problem = failure_reason(error)
        return self._group.broadcast_from_host0(problem)

    def _on_save_end(self, step: int, reason: str, loss: float | None = None, began: float = math.inf) -> None:
        """Records the end of a save. An empty `reason` means success."""
        if reason:
            with self._lock:
                newest = max(self._complete, default=None)
            instead = 'there is no earlier checkpoint' if newest is None else f'the newest checkpoint is step {newest}'
            # Frees space immediately, because the disk may be full.
            self._cleaning = self._clean(self._folder.clear)
            # Clean again before the next save, because other processes may still be writing.
            self._needs_cleaning = True
            self._on_failure(f'checkpoint of step {step} not saved: {reason}; {instead}; training continues')
            return
        self.save_seconds = max(0.0, time.monotonic() - began)
        with self._lock:
            self._complete.add(step)
            self._losses[step] = loss
        self._clean(self._delete_old)

    def _watch_save(self, save: AsyncSave, step: int) -> None:
        if save.finish(PROBE_SECONDS):
            return
        try:
            self._folder.probe_write()
        except Exception as error:
            if not save.finish(0):
                self._on_failure(
                    f'checkpoint of step {step} not saved yet: {failure_reason(error)}; training continues'
                )

    def _clean(self, work: Callable[[], None]) -> concurrent.futures.Future[None]:
        return self._cleaner.submit(self._clean_now, work)

    def _clean_now(self, work: Callable[[], None]) -> None:
        try:
            if self._is_first_process:
                work()
        except Exception as error:
            self._needs_cleaning = True
            logger.warning(f'{self.directory}: obsolete checkpoints cannot be deleted yet: {error}')

    def _delete_old(self, *, before_save: bool = False) -> None:
        with self._lock:
            losses = {step: self._losses.get(step) for step in self._complete}
        problem = None
        for step in self._policy.steps_to_delete(losses, before_save=before_save):
            try:
                self._folder.delete(step)
            except InputError as error:
                problem = error
            else:
                with self._lock:
                    self._complete.discard(step)
        if problem:
            raise problem

    def _set_aside(self, step: int) -> str:
        return f'kept in {self._folder.set_aside(step)}' if self._is_first_process else 'set aside'


def saved_steps(workdir: Any) -> list[int]:
    """Returns the complete steps of a workdir (a directory, gs://… or s3://…), oldest first.

    Raises:
        InputError: the workdir cannot be read.
    """
    return StepDirectory(workdir).complete()


def saved_losses(workdir: Any) -> dict[int, float | None]:
    """Returns the complete steps with their validation losses, oldest first. The loss is None if it cannot be read."""
    losses: dict[int, float | None] = {}
    for step in saved_steps(workdir):
        try:
            loss = read_json(to_path(workdir) / CHECKPOINTS_DIR / str(step) / 'progress').get(VALIDATION_LOSS)
        except CorruptCheckpointError:
            loss = None
        losses[step] = loss if isinstance(loss, float) else None
    return losses


def find_step(checkpoint: str, *, key: str = CHECKPOINT) -> epath.Path:
    """Returns the directory of one step, given a workdir, `WORKDIR@STEP`, `WORKDIR@best` or the step's directory.

    `choose_step` states the rule. Each path may be a bucket URL (gs://…, s3://…).

    Raises:
        InputError: there is no such checkpoint. The message names the option `key` and lists the existing steps.
    """
    refuse_other_formats(checkpoint, key)
    workdir, step_name = split_name(checkpoint)
    directory = to_path(workdir)
    if not step_name and directory.name.isdigit() and directory.parent.name == CHECKPOINTS_DIR:
        parent = StepDirectory(directory.parent.parent)
        if parent.is_complete(directory.name):
            return directory
    # All processes read the checkpoints that config keys name, and one of them reports the step.
    level = LEVEL if key == CHECKPOINT else logging.INFO
    step = choose_step(f'{key}={checkpoint}', workdir, step_name, saved_losses(directory), level=level)
    return directory / CHECKPOINTS_DIR / str(step)
