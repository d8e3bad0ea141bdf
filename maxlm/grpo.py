"""Trains with reinforcement learning: `python -m maxlm.grpo --config=FILE[:variant] [--config.section.key=value …]`.

Samples responses to grpo.prompts from the model of train.init_from, scores them with grpo.reward, and reinforces the
responses that score above others to the same prompt (GRPO). Workdir, resuming and exit codes are those of maxlm.train.
"""

from __future__ import annotations

from maxlm.train import parse, start


def main(argv: list[str], *, began: float | None = None) -> int:
    """Trains with GRPO; `began` as in `execute`."""
    options, overrides = parse(
        argv, prog='maxlm grpo', description=__doc__, example='--config=configs/arithmetic.py:rl'
    )

    from maxlm.commands.train import execute
    from maxlm.rl.rollouts import open_rollouts

    return execute(options, overrides, open_rollouts, began=began)


def run() -> None:
    """Entry point of `python -m maxlm.grpo` and `maxlm grpo`."""
    start(main)


if __name__ == '__main__':
    run()
