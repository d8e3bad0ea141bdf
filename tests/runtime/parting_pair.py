"""One of two processes of which one is suspended when all is done: `python -m tests.runtime.parting_pair WHO`."""

from __future__ import annotations

import os
import signal
import sys

import jax

from maxlm.runtime.distributed import join
from maxlm.runtime.peers import Peers, part


def main(who: int) -> None:
    """Ends with 3; process `who` is suspended before it has taken leave, -1 = nobody."""
    join()
    with Peers():
        # Opens what the processes have between them.
        jax.device_count()
    if jax.process_index() == who:
        os.kill(os.getpid(), signal.SIGSTOP)
    part(3)
    print('took leave')
    sys.exit(3)


if __name__ == '__main__':
    main(int(sys.argv[1]))
