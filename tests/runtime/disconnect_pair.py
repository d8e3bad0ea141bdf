"""Runs one of two processes, one of which may be suspended before it disconnects; started by `tests.forking`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import jax

from maxlm.runtime.heartbeat import Heartbeats, disconnect
from maxlm.runtime.initialize import initialize


def main() -> None:
    """Disconnects and exits with 3.

    The arguments are the number of the process that is suspended before it disconnects (-1: none), and a directory.
    """
    suspended, directory = int(sys.argv[1]), Path(sys.argv[2])
    initialize()
    with Heartbeats():
        # Creates the connections between the processes.
        jax.device_count()
    (directory / f'done-{jax.process_index()}').touch()
    if jax.process_index() == suspended:
        # The other process may need the coordination service of this process until it is done.
        while not (directory / f'done-{1 - suspended}').exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)
    disconnect(3)
    print('disconnected')
    sys.exit(3)
