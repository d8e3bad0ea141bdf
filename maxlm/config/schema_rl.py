"""Keys of what comes after pretraining: preferences (DPO) and reinforcement by rewards (GRPO)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    # Strength of the tie to the reference, which is the model that the run starts from: the more, the closer it stays.
    beta: float = 0.1
    # sigmoid (Rafailov et al. 2023, "Direct Preference Optimization") | ipo (Azar et al. 2023, "A General Theoretical
    # Paradigm to Understand Learning from Human Preferences").
    loss_type: str = 'sigmoid'
    # sigmoid: share of the pairs that are taken to be the wrong way round (Mitchell 2023, "conservative DPO").
    label_smoothing: float = 0.0
    # Weight of the mean cross-entropy of the answers that are preferred (Pang et al. 2024, "Iterative Reasoning
    # Preference Optimization"); 0 = none.
    rpo_alpha: float = 0.0


@dataclasses.dataclass(frozen=True)
class GrpoConfig:
    # JSONL file of prompts: each a `prompt` or `messages`, and what its reward needs.
    prompts: str = ''
    # JSONL file of prompts to evaluate on at eval.interval; '' = none.
    eval_prompts: str = ''
    # Reward of a response (maxlm/rewards/rewards.py), or a weighted sum of rewards: 'numeric + 0.1*format'.
    reward: str = 'exact'
    # Reward that must be 1 for a response to count as correct in evaluations; '' = grpo.reward.
    eval_reward: str = ''
    # Responses to each prompt, drawn from the model as it is (a group; G in the paper).
    num_generations: int = 16
    # Prompts that are answered before the model learns from the answers. num_generations times it is a multiple of
    # train.global_batch_size, the responses in one optimizer step.
    prompts_per_rollout: int = 0
    # Tokens of a response, at most; of data.seq_len the rest is for the prompt.
    max_completion_length: int = 0
    # Parameters that are split to save memory are brought together once for a rollout, and not for every token: faster,
    # and each device then holds all of them in the type of the computation.
    gather_params_for_generation: bool = False
    # Times that the model learns from the same responses.
    num_iterations: int = 1
    # How far a token's probability may go down, and up, from that with which it was drawn, as a share of it (Yu et al.
    # 2025, "DAPO": 0.2 and 0.28).
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    # Weight of the divergence from the model that the run starts from; 0 = none, and no copy of it.
    kl_coef: float = 0.0
    # Whether advantages are divided by the standard deviation of their group. Liu et al. 2025, "Understanding R1-Zero-
    # Like Training": better not.
    scale_rewards: bool = True
    # Average of the token losses, named as in TRL: grpo (over each response, then over responses: Shao et al. 2024,
    # "DeepSeekMath") | dapo (over all tokens) | dr_grpo (their sum divided by max_completion_length: Liu et al.).
    loss_type: str = 'dapo'
    # Prompts of an evaluation, from the first; 0 = all.
    eval_num_prompts: int = 0
    # Responses to each of them at temperature 1, for pass@k; besides these there is the likeliest one. 0 = only that.
    eval_num_generations: int = 0
