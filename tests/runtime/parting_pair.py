"""One of two processes of which one is suspended when all is done; started by `tests.forking`."""

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
    """Exits with 3. Arguments: number of the process that is suspended before it parts (-1: none), and a directory."""
    suspended, directory = int(sys.argv[1]), Path(sys.argv[2])
    initialize()
    with Heartbeats():
        # Opens what the processes have between them.
        jax.device_count()
    (directory / f'done-{jax.process_index()}').touch()
    if jax.process_index() == suspended:
        # Until then the other one may need an answer of this process' coordination service.
        while not (directory / f'done-{1 - suspended}').exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)
    disconnect(3)
    print('took leave')
    sys.exit(3)
