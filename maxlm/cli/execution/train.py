"""Runs a training command."""

from __future__ import annotations

import argparse
import gc
import sys

import jax

from maxlm.cli.execution.credentials import use_credentials
from maxlm.cli.execution.dry_run import check_elsewhere, check_here
from maxlm.cli.hints import print_generate
from maxlm.config.config_files import default_workdir
from maxlm.config.loading import load
from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED
from maxlm.runtime.heartbeat import Heartbeats
from maxlm.runtime.initialize import initialize
from maxlm.runtime.rendezvous import RendezvousError
from maxlm.telemetry.timeline import Timeline
from maxlm.trainer.run import OpenSource, WorkdirUnavailableError
from maxlm.trainer.run import run as run_training


def execute(
    options: argparse.Namespace, overrides: list[str], open_source: OpenSource, *, began: float | None = None
) -> int:
    """Trains a run and returns the exit code.

    Args:
        options: parsed arguments.
        overrides: overrides of the config.
        open_source: opens the batch source.
        began: start time of the process in seconds since 1970, because startup time also costs money, if this is the
            main function of a process. None means now.
    """
    if options.gcs_credentials:
        use_credentials(options.gcs_credentials)
    if options.dry_run:
        config = load(options.config, overrides)
        notes = check_elsewhere(config) if options.dry_run == 'elsewhere' else check_here(config, open_source)
        for note in notes:
            print(f'not checked: {note}')
        print('the config and its inputs are accepted; nothing was started')
        return EXIT_DONE
    if began is not None:
        # Later collections skip the imported objects, which accelerates tracing.
        gc.freeze()
        gc.enable()
    timeline = Timeline(began)
    try:
        initialize()
    except RendezvousError as error:
        error.exit_process()
    with Heartbeats() as heartbeats, timeline.track_compilation():
        config = load(options.config, overrides)
        if not options.workdir:
            options.workdir = default_workdir(options.config)
            if jax.process_index() == 0:
                print(f'workdir: {options.workdir} (choose another with --workdir)', flush=True)
        try:
            code = run_training(
                config,
                open_source,
                workdir=options.workdir,
                resume=options.resume,
                heartbeats=heartbeats,
                timeline=timeline,
            )
        except WorkdirUnavailableError as error:
            print(f'error: {error}', file=sys.stderr)
            if jax.process_count() > 1:
                heartbeats.exit_all(EXIT_PREEMPTED, str(error))
            return EXIT_PREEMPTED
        if code == EXIT_DONE and jax.process_index() == 0:
            print_generate(options.workdir)
        return code
