"""Trains with reinforcement learning: `python -m maxlm.grpo --config=FILE[:variant] [--config.section.key=value …]`.

Samples responses to grpo.prompts from the model of train.init_from, scores them with grpo.reward, and reinforces the
responses that score above others to the same prompt (GRPO). Workdir, resuming and exit codes are those of maxlm.train.
"""

from __future__ import annotations

from maxlm.errors import exit_on_sigterm

if __name__ == '__main__':
    # Must precede the other imports, which take seconds.
    exit_on_sigterm(importing=True)

from maxlm.train import start, train
from maxlm.trainer.rollouts import open_rollouts


def main(argv: list[str], *, began: float | None = None) -> int:
    """Trains with GRPO; `began` as in `train`."""
    return train(
        argv,
        open_rollouts,
        prog='maxlm grpo',
        description=__doc__,
        example='--config=configs/arithmetic.py:rl',
        began=began,
    )


def run() -> None:
    """Entry point of `python -m maxlm.grpo` and `maxlm grpo`."""
    start(main)


if __name__ == '__main__':
    run()
