"""Trains with reinforcement learning: `maxlm grpo --config=FILE[:variant] [--config.section.key=value …]`.

Samples responses to grpo.prompts from the model of train.init_from, scores them with grpo.reward, and reinforces the
responses that score above others to the same prompt (GRPO). Workdir, resuming and exit codes are those of maxlm train.
"""

from __future__ import annotations

from maxlm.cli.parser import ArgumentParser, command_parser
from maxlm.cli.process import run
from maxlm.cli.runs.train import add_arguments
from maxlm.config.config_files import split_overrides


def main(argv: list[str], *, began: float | None = None) -> int:
    """Trains with GRPO; `began` as in `execute`."""
    overrides, rest = split_overrides(argv)
    options = make_parser().parse_args(rest)

    from maxlm.cli.execution.train import execute
    from maxlm.rl.opening import open_rollouts

    return execute(options, overrides, open_rollouts, began=began)


def make_parser() -> ArgumentParser:
    parser = command_parser('grpo', __doc__, '--config=configs/arithmetic.py:rl')
    add_arguments(parser)
    return parser


if __name__ == '__main__':
    run('grpo')
