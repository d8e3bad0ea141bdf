"""A run from its command line to its exit code, whatever it learns from."""

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
from maxlm.config.keys import Config
from maxlm.config.load import load, split_overrides
from maxlm.config.resolve import resolve
from maxlm.data.outage import UnreachableError
from maxlm.data.paths import ANY, Kind, PathOption
from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED, ArgumentParser, InputError, exit_code, exit_on_sigterm
from maxlm.planning.chips import capability_of
from maxlm.reporting.page import write_at_end
from maxlm.runtime.compile_cache import keep_programs
from maxlm.runtime.console import logger
from maxlm.runtime.distributed import join
from maxlm.runtime.feed import Feed
from maxlm.runtime.freed_memory import keep_freed_memory
from maxlm.runtime.home import Home, open_home
from maxlm.runtime.loop import Loop
from maxlm.runtime.peers import Peers, part
from maxlm.runtime.preemption import ignore_sigterm
from maxlm.runtime.preflight import Ready, check_size, prepare_step, sample_config
from maxlm.runtime.rendezvous import NotTogetherError
from maxlm.runtime.start import check_init_from, newest_decisions
from maxlm.runtime.timeline import Timeline, process_began
from maxlm.training.decisions import Rollback, ended
from maxlm.training.sharding import make_layout
from maxlm.training.state import abstract_state


class OpenFeed(Protocol):
    """Opens what a run learns from; what it enters into the stack is closed with the run."""

    def __call__(self, config: Config, stack: contextlib.ExitStack) -> tuple[Feed, int]:
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
        join()
    except NotTogetherError as error:
        error.leave()
    with Peers() as peers, timeline.seeing_compilers(), contextlib.ExitStack() as stack:
        return _prepare(options, overrides, open_feed, peers, timeline, stack)


def _prepare(
    options: argparse.Namespace,
    overrides: list[str],
    open_feed: OpenFeed,
    peers: Peers,
    timeline: Timeline,
    stack: contextlib.ExitStack,
) -> int:
    config = load(options.config, overrides)
    if not options.workdir:
        options.workdir = default_workdir(options.config)
        if jax.process_index() == 0:
            print(f'workdir: {options.workdir} (choose another with --workdir)', flush=True)
    keep_programs(config.train.compile_cache)
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
            open_home(options.workdir, sample, peers, timeline, resume=options.resume, at_end=write_at_end)
        )
    except UnreachableError as error:
        print(f'error: {error}', file=sys.stderr)
        if jax.process_count() > 1:
            peers.leave(EXIT_PREEMPTED, str(error))
        return EXIT_PREEMPTED
    abstract = abstract_state(sample, make_layout(sample.mesh)).params
    check_init_from(sample, abstract, home.checkpoints, tokenizer=feed.tokenizer_path)
    first_step, decisions = newest_decisions(home.checkpoints)
    ready = prepare_step(
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


def train(ready: Ready, feed: Feed, home: Home, peers: Peers) -> int:
    """Runs a config from its newest checkpoint, or from the start, to its end; returns the exit code."""
    with contextlib.ExitStack() as stack:
        run = Loop(stack, ready, feed, home, peers)
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
    keep_freed_memory()
    exit_on_sigterm(importing=False)
    code = exit_code(partial(command, began=process_began()), sys.argv[1:])
    if code in (EXIT_DONE, EXIT_PREEMPTED):
        ignore_sigterm()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    part(code)
    sys.exit(code)
