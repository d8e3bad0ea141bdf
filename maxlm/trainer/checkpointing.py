"""Restores, initializes, saves and rolls back the state of a run."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from maxlm.checkpoint.conversion.quantized_init import open_initial
from maxlm.checkpoint.frozen_models import TEACHER, frozen_checksum, read_teacher
from maxlm.checkpoint.init_from import InitCheckpoint, context_change_text, load_tokenizer
from maxlm.checkpoint.manager import Checkpoints, find_step, saved_steps
from maxlm.checkpoint.params import copy_params
from maxlm.config.schema import Config
from maxlm.data.loader.batch_rows import BatchRows
from maxlm.data.loader.batches import check_same_data, fingerprint_changes
from maxlm.data.loader.position import Position
from maxlm.data.loader.skipped_batches import data_index, skip_steps
from maxlm.data.loader.teacher_outputs import read_manifest
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError, name_errors
from maxlm.log import logger
from maxlm.model.mtp import MTP
from maxlm.model.parameters import SCORE, VALUE_HEAD
from maxlm.parallel.layout import Layout
from maxlm.trainer.batch_source import BatchSource
from maxlm.trainer.preflight import PreparedStep
from maxlm.trainer.run_context import RunContext
from maxlm.training.compile import device_options
from maxlm.training.decisions.run_control import Rollback, RunControl, from_json, rolled_back, to_json
from maxlm.training.decisions.run_length import at_start
from maxlm.training.decisions.schedule_change import schedule_change
from maxlm.training.optimizers.trainable import is_trained
from maxlm.training.reference import reference_of
from maxlm.training.state import Params, TrainState, init_opt_state, init_state
from maxlm.workdir.files import CONFIG, TOKENIZER, read_config

INIT_FROM = 'train.init_from'
# Entry of the data fingerprint.
GLOBAL_BATCH = 'global_batch'


class RunCheckpoints:
    """The checkpoints of a run, with the decisions of the run and the fingerprint of its data.

    Attributes:
        best_loss: lowest training loss of the restored run; infinity for a new one.
    """

    def __init__(self, manager: Checkpoints, prepared: PreparedStep, source: BatchSource, context: RunContext):
        self._manager, self._source, self._recorder = manager, source, context.recorder
        self._workdir = context.workdir
        self._config, self._layout, self._abstract = prepared.config, prepared.layout, prepared.abstract
        self._fingerprint = source.fingerprint(self._config) | reference_metadata(self._config)
        self.best_loss = math.inf

    def restore(self) -> tuple[TrainState, RunControl]:
        """Returns the state of the newest checkpoint, or the initial state, and the decisions of the run so far."""
        reads = self._manager.latest_step() is not None or self._config.train.init_from
        with self._recorder.timeline.phase('restore') if reads else contextlib.nullcontext():
            state, history, source, data = restore_or_initialize(
                self._config,
                tokenizer=self._source.tokenizer_path,
                layout=self._layout,
                abstract=self._abstract,
                manager=self._manager,
                fingerprint=self._fingerprint,
                follows=(GLOBAL_BATCH,) if self._source.follows_batch_size else (),
            )
        # After a permitted change of the data, the arrays belong to the former data.
        self._source.load_state_arrays({} if fingerprint_changes(data, self._fingerprint) else source)
        # Used for workdirs without metrics.
        self.best_loss = float(history.get('best_loss', math.inf))
        return state, self._continued(from_json(history.get('decisions')), state, data)

    def _continued(self, before: RunControl, state: TrainState, data: Mapping[str, Any]) -> RunControl:
        """Returns the restored decisions adapted to the config, and reports what it changes."""
        step, now = int(state.step), self._config.train.global_batch_size
        decisions = at_start(before, self._config, step)
        if step and self._source.follows_batch_size and (size := data.get(GLOBAL_BATCH, now)) != now:
            decisions = with_batch_size(decisions, step, before=size, now=now)
            row = BatchRows.of(now, decisions.batch_sizes).first_row(data_index(step, decisions.skips))
            text = (
                f'train.global_batch_size was {size} and is {now}: step {step + 1} continues with sequence {row + 1:,} '
                'of the data, the first that was not read'
            )
            self._report('batch', text, step)
        if step and jax.process_index() == 0 and (self._workdir / CONFIG).is_file():
            old, skipped = read_config(self._workdir), int(state.skipped)
            change = schedule_change(old, self._config, before=before, now=decisions, step=step, skipped=skipped)
            if change:
                text, old_rate, rate = change
                self._report('schedule', text, step, old_learning_rate=old_rate, learning_rate=rate)
        return decisions

    def _report(self, kind: str, text: str, step: int, **extra: float | None) -> None:
        logger.info(text)
        self._recorder.record_event(kind, text, step=step, **extra)

    def save(
        self,
        step: int,
        state: TrainState,
        decisions: RunControl,
        *,
        best_loss: float,
        validation_loss: float | None = None,
        required: bool = True,
    ) -> None:
        """Starts an asynchronous save.

        Args:
            step: number of the last completed step.
            state: state after that step.
            decisions: decisions of the run so far.
            best_loss: lowest training loss so far.
            validation_loss: validation loss after that step; None if it was not evaluated.
            required: if True, wait for a save in progress instead of skipping this save.
        """
        # JSON has no infinity.
        history = {'decisions': to_json(decisions), **({'best_loss': best_loss} if math.isfinite(best_loss) else {})}
        began = time.monotonic()
        with self._recorder.timeline.phase('checkpoint'):
            started = self._manager.save(
                step,
                state,
                self._fingerprint,
                validation_loss=validation_loss,
                history=history,
                source=self._source.state_arrays(),
                wait_for_previous=required,
            )
        if started:
            loss = {} if validation_loss is None else {'loss': validation_loss}
            seconds = round(time.monotonic() - began, 3)
            self._recorder.record_event(
                'saved', f'blocked training for {seconds:.2f} s', step=step, seconds=seconds, **loss
            )
            self._recorder.record_save()

    def roll_back(self, rollback: Rollback, decisions: RunControl) -> tuple[TrainState, RunControl]:
        """Removes the checkpoints after `rollback.step`, restores the newest and skips the batches of the bad steps."""
        skips = skip_steps(decisions.skips, rollback.skip_from, rollback.skip_to)
        with self._recorder.timeline.phase('restore'):
            self._manager.remove_after(rollback.step)
            state, restored = self.restore()
        self._recorder.record_rollback(rollback.step)
        return state, rolled_back(decisions, restored, skips, self._config.guard)

    def rollback_steps(self) -> list[int]:
        """Returns the steps to which the run can roll back. Step 0 is a restart from the initial state.

        Steps whose optimizer state was dropped are excluded, and then also step 0, because a rollback deletes all newer
        steps.
        """
        steps = self._manager.steps()
        complete = [step for step in steps if step and not self._manager.is_params_only(step)]
        return complete if len(complete) < len({*steps} - {0}) else [0, *complete]

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def wait(self) -> int | None:
        """Waits for pending saves and returns the step of the newest complete checkpoint."""
        return self._manager.wait()


def with_batch_size(decisions: RunControl, step: int, *, before: int, now: int) -> RunControl:
    """Returns the decisions of a run that resumes with another global batch size; see `Position.after_change`."""
    if before == now:
        return decisions
    sizes, skips = Position(decisions.batch_sizes, decisions.skips).after_change(step, before=before, now=now)
    return decisions._replace(batch_sizes=sizes, skips=skips)


def check_init_from(config: Config, abstract: Params, workdir: Path, *, tokenizer: Path | None = None) -> None:
    """Checks the checkpoint `train.init_from` of a new run before files are written.

    Args:
        config: resolved config.
        abstract: shapes and dtypes of the config's parameters.
        workdir: workdir of the run. If it contains checkpoints, the run resumes and nothing is checked.
        tokenizer: `tokenizer.json` of the run's data; None selects the checkpoint's tokenizer.

    Raises:
        InputError: the checkpoint does not exist, or its parameters cannot be converted to the config's model.
    """
    if config.train.init_from and not saved_steps(workdir):
        origin = find_step(config.train.init_from, key=INIT_FROM)
        with name_errors(f'{INIT_FROM}={config.train.init_from}'):
            open_initial(origin, config, abstract, tokenizer=tokenizer)


def restore_or_initialize(
    config: Config,
    *,
    tokenizer: Path,
    layout: Layout,
    abstract: TrainState,
    manager: Checkpoints,
    fingerprint: dict[str, Any],
    follows: Collection[str] = (),
) -> tuple[TrainState, Mapping[str, Any], Mapping[str, np.ndarray], Mapping[str, Any]]:
    """Returns the state before the next step, and the history, state arrays and fingerprint saved with it.

    Args:
        config: resolved config.
        tokenizer: `tokenizer.json` of the run's data.
        layout: layout of the state.
        abstract: the result of `abstract_state`.
        manager: checkpoints of the run's workdir. The newest complete one is restored.
        fingerprint: `BatchSource.fingerprint` and `reference_metadata`, which must equal those of the checkpoint.
        follows: keys of the fingerprint that may differ.

    Raises:
        InputError: the checkpoint cannot be read, or has another model, optimizer, data order or tokenizer.
    """
    restored = manager.restore_newest(abstract, loss_scale=config.train.initial_loss_scale)
    if restored is None:
        return (
            initialize_state(config, tokenizer=tokenizer, layout=layout, abstract=abstract, manager=manager),
            {},
            {},
            {},
        )
    both = restored.fingerprint, fingerprint
    stored, present = ({key: value for key, value in each.items() if key not in follows} for each in both)
    check_same_data(stored, present, allow_dataset_change=config.data.allow_dataset_change)
    logger.info(f'resuming from step {int(restored.state.step)}')
    state = restored.state
    if config.teacher is not None:
        state = state._replace(reference=read_teacher(config, abstract))
    elif abstract.reference is not None:
        origin = open_initial(_origin_of(config), config, abstract.params, tokenizer=tokenizer)
        # The names are enough to know whether random parameters are needed.
        has_new_params = bool(origin.missing(abstract.params))
        missing = origin.missing(_random_state(config, layout).params) if has_new_params else {}
        params = origin.read(abstract.params, missing)
        state = state._replace(reference=reference_of(config, params, abstract.reference))
    return state, restored.history, restored.source, restored.fingerprint


def initialize_state(
    config: Config, *, tokenizer: Path, layout: Layout, abstract: TrainState, manager: Checkpoints
) -> TrainState:
    """Returns the state before the first step.

    Args:
        config, tokenizer, layout, abstract: see `restore_or_initialize`.
        manager: checkpoints of the run's workdir. If step 0 contains only parameters, as written by an import, the
            run starts with them.

    Raises:
        InputError: the initial checkpoint cannot be read, or has another model or tokenizer.
    """
    imported = manager.is_params_only(0)
    state = _random_state(config, layout)
    if not (imported or config.train.init_from):
        return state if config.teacher is None else state._replace(reference=read_teacher(config, abstract))
    step = manager.directory / '0' if imported else _origin_of(config)
    if imported:
        _check_same_tokenizer(step, tokenizer)
    origin = open_initial(step, config, abstract.params, tokenizer=tokenizer)
    if origin.tokenizer_mismatch:
        logger.warning(origin.tokenizer_mismatch)
    # Random parameters are freed before the checkpoint is read, except parameters that are missing from it.
    initial = origin.missing(state.params)
    state = state._replace(params=None, ema=None, reference=None)
    params = origin.read(abstract.params, initial)
    logger.info(f'starting with the parameters of {origin.path} and a fresh optimizer')
    if remedy := _untrained_rows_text(config, origin):
        logger.warning(remedy)
    for line in (
        origin.vocab_resize,
        *(text for module, text in _NEW_MODULES.items() if any(name.partition('.')[0] == module for name in initial)),
        _upcycled_text(origin),
        context_change_text(step, config),
    ):
        if line:
            logger.info(str(line))
    ema = None if abstract.ema is None else copy_params(params)
    reference = read_teacher(config, abstract)
    if config.teacher is None:
        reference = reference_of(config, params, abstract.reference)
    state = state._replace(params=params, ema=ema, reference=reference)
    if config.optimizer.is_function:
        # Its state may contain the initial parameters.
        state = state._replace(opt_state=init_opt_state(config, layout, abstract, params))
    return state


def _random_state(config: Config, layout: Layout) -> TrainState:
    # On CPUs, the program would take three times as long to compile by default, and its values are the same.
    options = device_options(layout.mesh.devices.flat[0]) if layout.platform == 'cpu' else None
    return init_state(config, layout, compiler_options=options)


def _untrained_rows_text(config: Config, origin: InitCheckpoint) -> str:
    """Returns a warning if the rows of new tokens, such as the end of a turn, keep their initial mean; otherwise ''."""
    resize = origin.vocab_resize
    if resize is None or resize.num_new_tokens == resize.num_old_tokens:
        return ''
    tables = ('embedding',) if config.model.tie_embeddings else ('embedding', 'head')
    if all(is_trained(config, name if name == 'embedding' else f'{name}.kernel') for name in tables):
        return ''
    return (
        f'the rows of {resize.num_new_tokens - resize.num_old_tokens} new tokens are not trained, so the model will '
        f'hardly generate these tokens; set --config.optimizer.trainable_params="{tables}"'
    )


def _upcycled_text(origin: InitCheckpoint) -> str:
    if origin.upcycled is None:
        return ''
    model = origin.upcycled.model
    return f'each of the {model.num_experts} experts starts as a copy of the feed-forward of its layer, with noise'


# Log line by the first name of the parameters that the initial checkpoint lacks.
_NEW_MODULES = {
    MTP: 'the modules of multi-token prediction are initialized, because the checkpoint has none',
    SCORE: 'the head of the reward model is initialized',
    VALUE_HEAD: 'the value head is initialized, because the checkpoint has none',
}


def reference_metadata(config: Config) -> dict[str, str]:
    """Returns a hash that identifies the reference of a run, for its checkpoints; empty without a reference."""
    if config.distill.logits_dir:
        stored = repr(read_manifest(Path(config.distill.logits_dir)))
        return {'reference': hashlib.sha256(stored.encode()).hexdigest()}
    if config.teacher is not None:
        found = frozen_checksum(config.distill.teacher, key=TEACHER)
    elif config.has_reference and config.train.init_from:
        found = frozen_checksum(config.train.init_from, key=INIT_FROM)
    else:
        return {}
    return {'reference': found} if found else {}


def _origin_of(config: Config) -> epath.Path:
    return find_step(config.train.init_from, key=INIT_FROM)


def _check_same_tokenizer(step: epath.Path, tokenizer: Path) -> None:
    """Checks that the data set has the tokenizer of the imported model, if the import contains one."""
    path = step.parent.parent / TOKENIZER
    if path.is_file() and load_tokenizer(path).ids_sha256 != Tokenizer.load(tokenizer).ids_sha256:
        # Continuing would overwrite the model's tokenizer with the tokenizer of the data set.
        raise InputError(
            f'{tokenizer} is not the tokenizer of the initial model, {path}; prepare the data with --tokenizer {path}. '
            f'If the new tokenizer only adds tokens, start a new run with another --workdir and '
            f'--config.{INIT_FROM}={path.parent}'
        )
