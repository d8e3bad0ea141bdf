"""Description of the batches of a GRPO run, which a resumed run must share."""

from __future__ import annotations

from typing import Any

from maxlm.config.schema import Config
from maxlm.data.loader.shuffle import VERSION
from maxlm.rl.generation.environment_sampler import Environments
from maxlm.rl.reward_model import RewardModel
from maxlm.rl.rewards.prompts import Prompts


def rollout_fingerprint(
    config: Config,
    of_rollouts: Config,
    prompts: Prompts,
    *,
    reward_model: RewardModel | None,
    environments: Environments | None,
) -> dict[str, Any]:
    """Returns the settings that determine the batches of a run; see `BatchSource.fingerprint`.

    Args:
        config: config of the run, with the batch size.
        of_rollouts: config of the rollouts.
        prompts: training prompts.
        reward_model: reward model of `grpo.reward_model`.
        environments: environments of `grpo.environment`.
    """
    grpo, data = of_rollouts.grpo, of_rollouts.data
    # The keys are part of the checkpoint format, which is older than the current config keys.
    return {
        'prompts': prompts.fingerprint,
        'grpo.samples': grpo.num_generations,
        'grpo.prompts_per_rollout': grpo.prompts_per_rollout,
        'grpo.max_tokens': grpo.max_completion_length,
        'grpo.epochs': grpo.num_iterations,
        'grpo.reward': grpo.reward,
        'window': data.seq_len,
        'seed': data.seed,
        'global_batch': config.train.global_batch_size,
        'order': VERSION,
        **({'grpo.tools': list(grpo.tools)} if grpo.tools else {}),
        **({'grpo.reward_model': reward_model.checksum} if reward_model else {}),
        **({'grpo.environment': environments.settings(grpo)} if environments else {}),
        **({'grpo.max_num_gen_batches': grpo.max_num_gen_batches} if grpo.max_num_gen_batches > 1 else {}),
    }
