"""Supervises one host of an elastic run: `python -m tests.elastic_host OPTIONS -- ARGUMENTS OF maxlm train`.

The training process is forked, which saves the seconds of importing JAX. It waits before each batch, so that the run
lasts as long as a test needs. The supervisor and the process form a process group, which a test can kill.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping
from unittest import mock

from maxlm.cli.runs import supervise, train
from maxlm.errors import EXIT_FAILED, exit_code
from maxlm.supervision.elastic import ElasticSupervisor
from tests.slow_batches import slow_down_batches


class ForkingSupervisor(ElasticSupervisor):
    """Forks the training process."""

    def _spawn(self, environment: Mapping[str, str]) -> int:
        pid = os.fork()
        if pid:
            return pid
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ['maxlm.train', *self._command]
        slow_down_batches()
        code = EXIT_FAILED
        try:
            train.run('train')
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            # Unlike an exception, this does not leave the contexts of the supervisor.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


if __name__ == '__main__':
    os.setpgid(0, 0)
    with mock.patch.object(supervise, 'ElasticSupervisor', ForkingSupervisor):
        sys.exit(exit_code(supervise.main, sys.argv[1:]))
