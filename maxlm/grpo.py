"""Trains with reinforcement learning: `python -m maxlm.grpo --config=FILE[:variant] [--config.section.key=value …]`.

Samples responses to grpo.prompts from the model of train.init_from, scores them with grpo.reward, and reinforces the
responses that score above others to the same prompt (GRPO). Workdir, resuming and exit codes are those of maxlm.train.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from maxlm.errors import InputError, exit_on_sigterm

if __name__ == '__main__':
    # Must precede the other imports, which take seconds.
    exit_on_sigterm(importing=True)

from maxlm.checkpoint.manager import find_step
from maxlm.config.schema import Config
from maxlm.config.validation_rl import check_grpo
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.rewards.prompts import Prompts, load_encoder, read_prompts
from maxlm.rewards.scorer import RewardScorer, check_tasks
from maxlm.trainer import main as runs
from maxlm.trainer.checkpointing import INIT_FROM
from maxlm.trainer.rollouts import RolloutBatches
from maxlm.workdir.files import TOKENIZER


def main(argv: list[str], *, began: float | None = None) -> int:
    """Trains with GRPO; `began` as in `runs.main`."""
    return runs.main(
        argv,
        open_feed,
        prog='maxlm grpo',
        description=__doc__,
        example='--config=configs/arithmetic.py:rl',
        began=began,
    )


def open_feed(config: Config, stack: contextlib.ExitStack) -> tuple[RolloutBatches, int]:
    """Opens the rollouts of a config; see `runs.OpenSource`."""
    check_grpo(config)
    origin = Path(find_step(config.train.init_from, key=INIT_FROM)).parent.parent
    encoder = load_encoder(origin)
    tokenizer = encoder.tokenizer if isinstance(encoder, ChatEncoder) else encoder
    ends = {tokenizer.end_of_document, *([encoder.end_of_turn] if isinstance(encoder, ChatEncoder) else [])}
    grpo = config.grpo
    eval_reward = grpo.eval_reward or grpo.reward

    def read(path: str, reward: str) -> Prompts:
        prompts = read_prompts(path, encoder, config.data.seq_len - grpo.max_completion_length)
        check_tasks(prompts, reward)
        return prompts

    prompts = read(grpo.prompts, grpo.reward)
    eval_prompts = read(grpo.eval_prompts, eval_reward) if config.eval.interval else None
    if grpo.prompts_per_rollout > prompts.num_prompts:
        raise InputError(
            f'grpo.prompts_per_rollout={grpo.prompts_per_rollout}: {grpo.prompts} has only '
            f'{prompts.num_prompts} prompts; use at most {prompts.num_prompts}'
        )
    scorer = stack.enter_context(RewardScorer(grpo.reward, eval_reward))
    source = RolloutBatches(
        config,
        prompts=prompts,
        eval_prompts=eval_prompts,
        scorer=scorer,
        tokenizer_path=origin / TOKENIZER,
        ends=sorted(ends),
    )
    return source, tokenizer.vocab_size


def run() -> None:
    """Entry point of `python -m maxlm.grpo` and `maxlm grpo`."""
    runs.start(main)


if __name__ == '__main__':
    run()
