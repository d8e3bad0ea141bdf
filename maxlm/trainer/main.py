"""The main function of training commands, independent of the source of batches."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn, Protocol

import jax

from maxlm.config.default_workdir import default_workdir
from maxlm.config.loading import load, split_overrides
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED, ArgumentParser, InputError, exit_code, exit_on_sigterm
from maxlm.hardware.chips import capability_of
from maxlm.hints import print_next
from maxlm.huggingface.final_export import FinalExport, check_exportable
from maxlm.log import logger
from maxlm.parallel.layout import make_layout
from maxlm.reporting.page import write_at_end
from maxlm.runtime.compilation_cache import enable_compilation_cache
from maxlm.runtime.heartbeat import Heartbeats, disconnect
from maxlm.runtime.initialize import initialize
from maxlm.runtime.malloc import disable_malloc_trim
from maxlm.runtime.preemption import ignore_sigterm
from maxlm.runtime.rendezvous import RendezvousError
from maxlm.storage.errors import TransientStorageError
from maxlm.storage.paths import ANY, Kind, PathOption
from maxlm.telemetry.timeline import Timeline, process_start_time
from maxlm.trainer.batch_source import BatchSource
from maxlm.trainer.checkpointing import check_init_from, newest_decisions
from maxlm.trainer.preflight import PreparedStep, check_checkpoint_size, check_size, compile_step, sample_config
from maxlm.trainer.run_context import RunContext, open_run
from maxlm.trainer.trainer import Trainer
from maxlm.training.run_control import Rollback, ended
from maxlm.training.state import abstract_state
from maxlm.workdir.files import CHAT_TEMPLATE


class OpenSource(Protocol):
    """Function that opens the batch source of a run."""

    def __call__(self, config: Config, stack: contextlib.ExitStack) -> tuple[BatchSource, int]:
        """Returns the batch source and the size of its vocabulary.

        Args:
            config: config before it is resolved.
            stack: closes resources of the source at the end of the run.
        """


def main(
    argv: list[str],
    open_source: OpenSource,
    *,
    prog: str,
    description: str | None,
    example: str,
    began: float | None,
) -> int:
    """Parses the command line, checks the config, data and memory, and trains. Returns the exit code.

    Args:
        argv: arguments of the command.
        open_source: opens the batch source.
        prog: name of the command.
        description: description of the command for `--help`.
        example: arguments of an example for `--help`.
        began: start time of the process in seconds since 1970, because startup time also costs money; None means now.
    """
    timeline = Timeline(began)
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description=description,
        epilog=f'example: python -m {prog} {example}',
    )
    parser.add_argument(
        '--config',
        type=PathOption(Kind.FILE),
        required=True,
        help='config file, optionally with a variant (configs/x.py, configs/x.py:big), or a config.json',
    )
    parser.add_argument(
        '--workdir',
        type=PathOption(Kind.DIRECTORY, ANY),
        help='directory or URL of the run, created if missing; default: runs/NAME or runs/NAME-VARIANT of the config',
    )
    parser.add_argument(
        '--resume',
        type=PathOption(Kind.DIRECTORY, ANY, may_be_empty=True),
        default='',
        metavar='WORKDIR[@STEP]',
        help='checkpoint that a new run resumes from, with its state, history and data position; directory or URL',
    )
    options = parser.parse_args(rest)

    try:
        initialize()
    except RendezvousError as error:
        error.exit_process()
    with Heartbeats() as heartbeats, timeline.track_compilation(), contextlib.ExitStack() as stack:
        return _prepare(options, overrides, open_source, heartbeats, timeline, stack)


def _prepare(
    options: argparse.Namespace,
    overrides: list[str],
    open_source: OpenSource,
    heartbeats: Heartbeats,
    timeline: Timeline,
    stack: contextlib.ExitStack,
) -> int:
    config = load(options.config, overrides)
    if not options.workdir:
        options.workdir = default_workdir(options.config)
        if jax.process_index() == 0:
            print(f'workdir: {options.workdir} (choose another with --workdir)', flush=True)
    enable_compilation_cache(config.train.compilation_cache_dir)
    source, vocab_size = open_source(config, stack)
    resolver: Callable[[Config], Config] = partial(
        resolve,
        platform=jax.default_backend(),
        num_devices=jax.device_count(),
        vocab_size=vocab_size,
        windows=source.windows_per_epoch,
        capability=capability_of(jax.local_devices()[0]),
    )
    check_size(config, resolver)
    sample = sample_config(config, resolver)
    check_exportable(sample)
    check_checkpoint_size(sample)
    try:
        context = stack.enter_context(
            open_run(options.workdir, sample, heartbeats, timeline, resume=options.resume, at_end=write_at_end)
        )
    except TransientStorageError as error:
        print(f'error: {error}', file=sys.stderr)
        if jax.process_count() > 1:
            heartbeats.exit_all(EXIT_PREEMPTED, str(error))
        return EXIT_PREEMPTED
    abstract = abstract_state(sample, make_layout(sample.mesh)).params
    check_init_from(sample, abstract, context.checkpoints, tokenizer=source.tokenizer_path)
    final_export = None
    if sample.export.at_end and jax.process_index() == 0:
        final_export = FinalExport(
            sample,
            options.workdir,
            workdir=context.workdir,
            checkpoints=context.checkpoints,
            record_event=context.recorder.record_event,
        )
    first_step, decisions = newest_decisions(context.checkpoints)
    prepared = compile_step(
        config,
        resolver,
        num_sources=len(source.names),
        first_step=first_step,
        decisions=decisions,
        compiling=partial(timeline.phase, 'compile'),
    )
    try:
        code = train(prepared, source, context, heartbeats)
        if code == EXIT_DONE and sample.export.at_end:
            with timeline.phase('checkpoint'):
                if final_export:
                    final_export.export()
                heartbeats.barrier('export')
        if code == EXIT_DONE and jax.process_index() == 0:
            chat = ['--chat'] if (context.workdir / CHAT_TEMPLATE).is_file() else []
            print_next('maxlm', 'generate', f'--checkpoint={options.workdir}', *chat, '--prompt=Hello')
        return code
    except Exception as error:
        # Errors such as insufficient memory or damaged data may occur while the run is unattended.
        kind = '' if isinstance(error, InputError) else f'{type(error).__name__}: '
        context.alerts.send('failed', f'{kind}{" ".join(str(error).split())[:300]}')
        raise


def train(prepared: PreparedStep, source: BatchSource, context: RunContext, heartbeats: Heartbeats) -> int:
    """Trains from the newest checkpoint, or from the start, to the end of the run; returns the exit code."""
    with contextlib.ExitStack() as stack:
        trainer = Trainer(stack, prepared, source, context, heartbeats)
        state, decisions = trainer.restore()
        if reason := ended(prepared.config, decisions, int(state.step)):
            logger.info(f'nothing to do: {reason}')
            context.recorder.set_outcome('finished', f'nothing to do: {reason}', EXIT_DONE)
            return EXIT_DONE
        trainer.setup(int(state.step), decisions)
        segment = trainer.run_segment(state, decisions)
        while isinstance(segment.action, Rollback):
            segment = trainer.run_segment(*trainer.roll_back(segment.action, segment.decisions))
        return trainer.finish(segment)


def start(command: Callable[..., int]) -> NoReturn:
    """Runs a training command and exits the process with its exit code."""
    # It affects the entire process and must be called before JAX starts.
    disable_malloc_trim()
    exit_on_sigterm(importing=False)
    code = exit_code(partial(command, began=process_start_time()), sys.argv[1:])
    if code in (EXIT_DONE, EXIT_PREEMPTED):
        ignore_sigterm()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    disconnect(code)
    sys.exit(code)
