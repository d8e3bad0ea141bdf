"""A run from its command line to its exit code, whatever it learns from."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import jax

from maxlm.config.default_workdir import default_workdir
from maxlm.config.loading import load, split_overrides
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED, ArgumentParser, InputError, exit_code, exit_on_sigterm
from maxlm.hardware.chips import capability_of
from maxlm.log import logger
from maxlm.parallel.layout import make_layout
from maxlm.reporting.page import write_at_end
from maxlm.runtime.compilation_cache import enable_compilation_cache
from maxlm.runtime.heartbeat import Heartbeats, part
from maxlm.runtime.initialize import initialize
from maxlm.runtime.preemption import ignore_sigterm
from maxlm.runtime.rendezvous import RendezvousError
from maxlm.storage.paths import ANY, Kind, PathOption
from maxlm.storage.retry import TransientStorageError
from maxlm.telemetry.timeline import Timeline, process_began
from maxlm.trainer.batch_source import BatchSource
from maxlm.trainer.initialize import check_init_from, newest_decisions
from maxlm.trainer.preflight import PreparedStep, check_size, compile_step, sample_config
from maxlm.trainer.run_context import RunContext, open_run
from maxlm.trainer.trainer import Trainer
from maxlm.training.run_control import Rollback, ended
from maxlm.training.state import abstract_state

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
# Bytes by which the heap grows at a time; pages count when they are touched, not before.
_GROWTH = 2**26
# Files of devices besides the CPU: GPUs of NVIDIA and AMD, TPUs.
_ACCELERATORS = ('dev/nvidia0', 'dev/kfd', 'dev/accel0', 'dev/vfio/0')


def disable_malloc_trim(root: Path = Path('/')) -> bool:
    """Has malloc keep what is freed. To be called before JAX starts its threads.

    What the process holds is then the most that it ever used, never less.

    Returns:
        False where nothing was changed: the machine has accelerators, whose steps use memory of their own, or malloc is
        not glibc's.
    """
    if _has_accelerator(root):
        return False
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if not os.confstr('CS_GNU_LIBC_VERSION'):
            return False
        mallopt = ctypes.CDLL(None).mallopt
        # One heap for all threads, as only that one can grow to any size; no block outside of it; never smaller.
        settings = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: _GROWTH}
        return all([mallopt(key, value) for key, value in settings.items()])
    return False


def _has_accelerator(root: Path) -> bool:
    return os.environ.get('JAX_PLATFORMS') != 'cpu' and any((root / name).exists() for name in _ACCELERATORS)


class OpenFeed(Protocol):
    """Opens what a run learns from; what it enters into the stack is closed with the run."""

    def __call__(self, config: Config, stack: contextlib.ExitStack) -> tuple[BatchSource, int]:
        """The feed and its vocabulary's size; `config` is as it was given, not resolved."""


def main(argv: list[str], open_feed: OpenFeed, *, prog: str, description: str | None, began: float | None) -> int:
    """Reads the command line, checks everything that can be checked without training, and trains.

    Args:
        argv: arguments of the command.
        open_feed: what is learned from.
        prog, description: of the command.
        began: when the process did, in seconds since 1970: what starting takes is paid for too. None = now.
    """
    timeline = Timeline(began)
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog=prog, allow_abbrev=False, description=description)
    parser.add_argument(
        '--config',
        type=PathOption(Kind.FILE),
        required=True,
        help='configs/x.py, with a variant as configs/x.py:big, or a config.json',
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
        help='where a new run goes on from, with its state, history and place in the data; a directory or a URL',
    )
    options = parser.parse_args(rest)

    try:
        initialize()
    except RendezvousError as error:
        error.leave()
    with Heartbeats() as peers, timeline.seeing_compilers(), contextlib.ExitStack() as stack:
        return _prepare(options, overrides, open_feed, peers, timeline, stack)


def _prepare(
    options: argparse.Namespace,
    overrides: list[str],
    open_feed: OpenFeed,
    peers: Heartbeats,
    timeline: Timeline,
    stack: contextlib.ExitStack,
) -> int:
    config = load(options.config, overrides)
    if not options.workdir:
        options.workdir = default_workdir(options.config)
        if jax.process_index() == 0:
            print(f'workdir: {options.workdir} (choose another with --workdir)', flush=True)
    enable_compilation_cache(config.train.compilation_cache_dir)
    feed, vocab_size = open_feed(config, stack)
    resolver: Callable[[Config], Config] = partial(
        resolve,
        platform=jax.default_backend(),
        num_devices=jax.device_count(),
        vocab_size=vocab_size,
        windows=feed.windows_per_epoch,
        capability=capability_of(jax.local_devices()[0]),
    )
    check_size(config, resolver)
    sample = sample_config(config, resolver)
    try:
        home = stack.enter_context(
            open_run(options.workdir, sample, peers, timeline, resume=options.resume, at_end=write_at_end)
        )
    except TransientStorageError as error:
        print(f'error: {error}', file=sys.stderr)
        if jax.process_count() > 1:
            peers.leave(EXIT_PREEMPTED, str(error))
        return EXIT_PREEMPTED
    abstract = abstract_state(sample, make_layout(sample.mesh)).params
    check_init_from(sample, abstract, home.checkpoints, tokenizer=feed.tokenizer_path)
    first_step, decisions = newest_decisions(home.checkpoints)
    ready = compile_step(
        config,
        resolver,
        num_sources=len(feed.names),
        first_step=first_step,
        decisions=decisions,
        compiling=partial(timeline.phase, 'compile'),
    )
    try:
        return train(ready, feed, home, peers)
    except Exception as error:
        # Of memory that is too small, of damaged data: nobody may be looking.
        kind = '' if isinstance(error, InputError) else f'{type(error).__name__}: '
        home.alerts.send('failed', f'{kind}{" ".join(str(error).split())[:300]}')
        raise


def train(ready: PreparedStep, feed: BatchSource, home: RunContext, peers: Heartbeats) -> int:
    """Runs a config from its newest checkpoint, or from the start, to its end; returns the exit code."""
    with contextlib.ExitStack() as stack:
        run = Trainer(stack, ready, feed, home, peers)
        state, decisions = run.start()
        if why := ended(ready.config, decisions, int(state.step)):
            logger.info(f'nothing to do: {why}')
            home.diary.ends('finished', f'nothing to do: {why}', EXIT_DONE)
            return EXIT_DONE
        run.tell(int(state.step), decisions)
        leg = run.leg(state, decisions)
        while isinstance(leg.verdict, Rollback):
            leg = run.leg(*run.go_back(leg.verdict, leg.decisions))
        return run.end(leg)


def start(command: Callable[..., int]) -> NoReturn:
    """Ends the process with the exit code of a command that runs a run."""
    # Of the whole process, and before JAX starts.
    disable_malloc_trim()
    exit_on_sigterm(importing=False)
    code = exit_code(partial(command, began=process_began()), sys.argv[1:])
    if code in (EXIT_DONE, EXIT_PREEMPTED):
        ignore_sigterm()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    part(code)
    sys.exit(code)
