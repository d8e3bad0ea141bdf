"""Runs a training: checks the config, opens the workdir, compiles the step and trains to the end of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import jax

from maxlm.checkpoint.frozen_models import check_teacher, with_frozen_models
from maxlm.checkpoint.listing import choose_step
from maxlm.checkpoint.manager import saved_losses
from maxlm.config.schema import Config
from maxlm.data.loader.batch_rows import trained_before
from maxlm.errors import EXIT_DONE, DeviceError, InputError
from maxlm.hardware.chips import capability_of
from maxlm.huggingface.final_export import FinalExport, check_exportable
from maxlm.log import logger
from maxlm.model.attention.cudnn import lists_documents
from maxlm.parallel.determinism import exclude_switch_sums
from maxlm.parallel.layout import make_layout
from maxlm.planning.machine import local_resolver, sized_config
from maxlm.reporting.page import write_at_end
from maxlm.runtime.compilation_cache import enable_compilation_cache
from maxlm.runtime.heartbeat import Heartbeats
from maxlm.runtime.malloc import trim_malloc
from maxlm.storage.errors import TransientStorageError
from maxlm.storage.filesystem import display_path
from maxlm.telemetry.timeline import Timeline
from maxlm.trainer.batch_source import BatchSource
from maxlm.trainer.callbacks import Callback
from maxlm.trainer.checkpointing import GLOBAL_BATCH, check_init_from, with_batch_size
from maxlm.trainer.preflight import PreparedStep, check_checkpoint_size, check_size, compile_step
from maxlm.trainer.run_context import RunContext, newest_progress, open_run
from maxlm.trainer.training_loop import TrainingLoop
from maxlm.training.decisions.run_control import Rollback, ended
from maxlm.training.known_answers.check import check_kernels, warn_of_known_faults
from maxlm.training.known_answers.fastest_attention import FASTEST, with_fastest_attention
from maxlm.training.known_answers.kernels import training_answers, training_settings
from maxlm.training.state import abstract_state


class WorkdirUnavailableError(TransientStorageError):
    """The bucket of a workdir does not respond, so a later start may succeed."""


class OpenSource(Protocol):
    """Function that opens the batch source of a run."""

    def __call__(self, config: Config, stack: contextlib.ExitStack) -> tuple[BatchSource, int]:
        """Returns the batch source and the size of its vocabulary.

        Args:
            config: config before it is resolved.
            stack: closes resources of the source at the end of the run.
        """


def run(
    config: Config,
    open_source: OpenSource,
    *,
    workdir: str,
    heartbeats: Heartbeats,
    timeline: Timeline,
    resume: str = '',
    callbacks: Sequence[Callback] = (),
) -> int:
    """Trains a run from its newest checkpoint, or from the start, to its end. All processes must call it.

    Args:
        config: config before it is resolved.
        open_source: opens the batch source.
        workdir: directory or URL of the run.
        heartbeats: heartbeats of the run's processes.
        timeline: timeline of this process.
        resume: see `open_run`.
        callbacks: see `Callback`.

    Returns:
        The exit code of the command.

    Raises:
        InputError: the config, the data or the workdir is not usable, or the step does not fit the devices.
        WorkdirUnavailableError: the bucket of the workdir does not respond.
        DeviceError: a device computes wrong results.
    """
    config = with_frozen_models(config)
    exclude_switch_sums(config)
    with contextlib.ExitStack() as stack:
        cache = enable_compilation_cache(config.train.compilation_cache_dir)
        source, vocab_size = open_source(config, stack)
        resolver = local_resolver(vocab_size=vocab_size, windows=source.windows_per_epoch)
        check_size(config, resolver)
        sized = sized_config(config, resolver)
        check_exportable(sized)
        check_checkpoint_size(sized)
        warn_of_known_faults(has_document_lists=lists_documents(sized, capability_of(jax.local_devices()[0])))
        layout = make_layout(sized.mesh)
        if sized.train.check_kernels:
            check_kernels(partial(training_answers, sized), training_settings(sized), layout.mesh, cache=cache)
        # Optimizers and patterns of parameters are checked before files are written.
        abstract = abstract_state(sized, layout)
        opened = open_run(
            workdir, sized, heartbeats, timeline, resume=resume, at_end=write_at_end, callbacks=tuple(callbacks)
        )
        try:
            context = stack.enter_context(opened)
        except TransientStorageError as error:
            raise WorkdirUnavailableError(str(error)) from error
        if config.model.attention == FASTEST:
            config = with_fastest_attention(config, sized, context.workdir)
            sized = sized_config(config, resolver)
            if sized.train.check_kernels:
                check_kernels(partial(training_answers, sized), training_settings(sized), layout.mesh, cache=cache)
        check_init_from(sized, abstract.params, context.checkpoint_workdir, tokenizer=source.tokenizer_path)
        check_teacher(sized, abstract, tokenizer=source.tokenizer_path)
        final_export = None
        if sized.export.at_end and jax.process_index() == 0:
            final_export = FinalExport(
                sized,
                workdir,
                workdir=context.workdir,
                checkpoint_workdir=context.checkpoint_workdir,
                record_event=context.recorder.record_event,
            )
        first_step, decisions, data = newest_progress(context.checkpoint_workdir)
        config = source.continued(config, data)
        if source.follows_batch_size and data:
            now = sized.train.global_batch_size
            decisions = with_batch_size(decisions, first_step, before=data.get(GLOBAL_BATCH, now), now=now)
            # The rest of a length in tokens or epochs.
            resolver = partial(resolver, trained=trained_before(decisions.batch_sizes))
        prepared = compile_step(
            config,
            resolver,
            num_sources=len(source.names),
            first_step=first_step,
            decisions=decisions,
            compiling=partial(timeline.phase, 'compile'),
            cache=cache,
        )
        try:
            code = _train(prepared, source, context, heartbeats)
            if code == EXIT_DONE and jax.process_index() == 0 and (losses := saved_losses(context.checkpoint_workdir)):
                name = display_path(workdir)
                choose_step(name, name, '', losses, verb='commands use')
            if code == EXIT_DONE and sized.export.at_end:
                with timeline.phase('checkpoint'):
                    if final_export:
                        final_export.export()
                    heartbeats.barrier('export')
            return code
        except Exception as error:
            # Errors such as insufficient memory or damaged data may occur while the run is unattended.
            if isinstance(error, DeviceError):
                context.alerts.send('device', str(error))
                raise
            kind = '' if isinstance(error, InputError) else f'{type(error).__name__}: '
            context.alerts.send('failed', f'{kind}{" ".join(str(error).split())[:300]}')
            raise


def _train(prepared: PreparedStep, source: BatchSource, context: RunContext, heartbeats: Heartbeats) -> int:
    with contextlib.ExitStack() as stack:
        loop = TrainingLoop(stack, prepared, source, context, heartbeats)
        # Each phase frees fragments that later arrays do not fit into.
        trim_malloc()
        state, decisions = loop.restore()
        trim_malloc()
        if reason := ended(prepared.config, decisions, int(state.step)):
            logger.info(f'nothing to do: {reason}')
            context.recorder.set_outcome('finished', f'nothing to do: {reason}', EXIT_DONE)
            return EXIT_DONE
        loop.setup(int(state.step), decisions)
        segment = loop.run_segment(state, decisions)
        while isinstance(segment.action, Rollback):
            segment = loop.run_segment(*loop.roll_back(segment.action, segment.decisions))
        return loop.finish(segment)
