"""Runs `maxlm grpo`, kills it after a step, or completes it: `python -m tests.rl.killed_rollouts STEP ARGUMENTS…`.

A random model calls no tools, so each complete turn counts as a call if the run has tools.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

from maxlm.checkpoint.manager import saved_steps
from maxlm.cli.runs import grpo
from maxlm.errors import exit_code
from maxlm.inference.tool_calls import ToolCall
from maxlm.rl.generation.tool_environment import ToolEnvironment
from maxlm.trainer.metric_logger import MetricLogger


def calls_in_each_turn(environment: Any, turn: Sequence[int]) -> list[ToolCall]:
    """Returns a call for a turn that has ended."""
    is_complete = turn[-1] == environment._encoder.end_of_turn
    return [ToolCall('', 'calculate', f'{{"expression": "{len(turn)} * 7"}}')] if is_complete else []


def main() -> None:
    """Runs the command. The process dies by SIGKILL after STEP, once the checkpoint before it is complete."""
    step, *words = sys.argv[1:]
    (workdir,) = (word.partition('=')[2] for word in words if word.startswith('--workdir='))
    submit = MetricLogger.submit

    def submit_and_die(self: MetricLogger, number: int, *rest: Any) -> None:
        submit(self, number, *rest)
        if number == int(step):
            while not saved_steps(workdir):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    with (
        mock.patch.object(MetricLogger, 'submit', submit_and_die),
        mock.patch.object(ToolEnvironment, '_calls', calls_in_each_turn),
    ):
        sys.exit(exit_code(grpo.main, words))


if __name__ == '__main__':
    main()
