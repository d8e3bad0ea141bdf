"""One of two processes of which one is suspended when all is done; started by `tests.forking`."""

from __future__ import annotations

import os
import signal
import sys

import jax

from maxlm.runtime.distributed import join
from maxlm.runtime.peers import Peers, part


def main() -> None:
    """Ends with 3; the process whose number is the argument is suspended before it has taken leave, -1 = none."""
    suspended = int(sys.argv[1])
    join()
    with Peers():
        # Opens what the processes have between them.
        jax.device_count()
    if jax.process_index() == suspended:
        os.kill(os.getpid(), signal.SIGSTOP)
    part(3)
    print('took leave')
    sys.exit(3)
