"""Config keys of post-training: preference optimization (DPO), reward models, and reinforcement learning (GRPO)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from maxlm.config.sections.declaration import CheckpointPath, Renamed
from maxlm.config.sections.ranges import Fraction, FractionBelow1, Range, Steps, Weight
from maxlm.storage.paths import ANY, Kind, PathOption


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    # Strength of the KL regularization toward the reference, i.e. the initial model. Higher values keep it closer. With
    # orpo, the weight of the odds ratio beside the cross-entropy (lambda in the paper).
    beta: Annotated[float, Range(0, 1000, above=True)] = 0.1
    # Loss. sigmoid: Rafailov et al. 2023, "Direct Preference Optimization"; ipo: Azar et al. 2023, "A General
    # Theoretical Paradigm to Understand Learning from Human Preferences"; orpo: Hong et al. 2024, "ORPO: Monolithic
    # Preference Optimization without Reference Model"; kto: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect
    # Theoretic Optimization"; apo_zero_unpaired: D'Oosterlinck et al. 2024, "Anchored Preference Optimization and
    # Contrastive Revisions". The last two take single answers with labels, and also pairs.
    loss_type: Annotated[Literal['sigmoid', 'ipo', 'orpo', 'kto', 'apo_zero_unpaired'], Renamed('loss')] = 'sigmoid'
    # sigmoid: fraction of the pairs that are assumed to be mislabeled (Mitchell 2023, "conservative DPO").
    label_smoothing: FractionBelow1 = 0.0
    # Weight of the mean cross-entropy of the preferred answers (Pang et al. 2024, "Iterative Reasoning Preference
    # Optimization"); 0 = none.
    rpo_alpha: Annotated[Weight, Renamed('next_token_weight')] = 0.0
    # kto, apo_zero_unpaired: weights of the losses of desirable (chosen) and undesirable (rejected) answers. With
    # unequal numbers of answers, raise the weight of the rarer kind.
    desirable_weight: Weight = 1.0
    undesirable_weight: Weight = 1.0

    @property
    def takes_labels(self) -> bool:
        """Returns True if the loss is that of single answers with labels instead of pairs."""
        return self.loss_type in ('kto', 'apo_zero_unpaired')


@dataclasses.dataclass(frozen=True)
class RewardModelConfig:
    # Weight of the squared sum of both scores of a pair, which keeps the scores near 0 (Eisenstein et al. 2023,
    # "Helping or Herding?"); 0 = none, 0.01 is usual.
    center_rewards_coefficient: Weight = 0.0


@dataclasses.dataclass(frozen=True)
class GrpoConfig:
    # JSONL file of prompts, each with a `prompt` or `messages` and the fields that its reward needs.
    prompts: Annotated[str, PathOption(Kind.FILE, ANY, may_be_empty=True)] = ''
    # JSONL file of evaluation prompts, evaluated at eval.interval; '' = none.
    eval_prompts: Annotated[str, PathOption(Kind.FILE, ANY, may_be_empty=True)] = ''
    # Reward of a response (maxlm/rl/rewards/rewards.py), a function of the user ('package.module:function', see
    # docs/posttraining.md), or a weighted sum of them: 'numeric + 0.1*format'.
    reward: str = 'exact'
    # Checkpoint of a reward model (train.objective=reward), whose score is the reward reward_model of grpo.reward; '' =
    # none.
    reward_model: CheckpointPath = ''
    # Reward for evaluations; a response counts as correct if its reward is 1. '' = grpo.reward.
    eval_reward: str = ''
    # Functions of the user that the model may call ('package.module:function', see docs/posttraining.md); () = none.
    tools: tuple = ()
    # Maximum number of tool calls of a response.
    max_tool_calls: Annotated[int, Range(1, 10**5)] = 8
    # Environment of the user ('package.module:Class', see docs/posttraining.md), or one of the package verifiers
    # ('verifiers:NAME'), which opens conversations, answers the turns of the model and scores the result; '' = none.
    environment: str = ''
    # Arguments of the constructor of grpo.environment as a JSON object, e.g. '{"high": 100}'; '' = none.
    environment_args: str = ''
    # Time limit of each call of a method of grpo.environment, in seconds. A conversation that exceeds it has failed.
    environment_timeout: Annotated[float, Range(0, 10**5, above=True)] = 60.0
    # Maximum number of turns of the model in a conversation with grpo.environment.
    max_turns: Annotated[int, Range(1, 10**5)] = 8
    # Run the functions of the user in grpo.reward, grpo.eval_reward and grpo.tools in the sandbox, without network,
    # environment variables or other files, and with limits on time and memory. A reward that fails during training is
    # 0.
    sandbox_functions: bool = False
    # Number of processes that compute the rewards of the user in grpo.reward and grpo.eval_reward at the same time; 0 =
    # one with max_staleness above 0, otherwise the training process.
    reward_processes: Annotated[int, Range(0, 1000)] = 0
    # Number of responses sampled per prompt from the unmodified model distribution (a group; G in the paper). Only
    # advantage_estimator=gae works with 1.
    num_generations: Annotated[int, Range(1, 10**5), Renamed('samples')] = 16
    # Number of prompts per rollout. num_generations · prompts_per_rollout must be a multiple of
    # train.global_batch_size, the number of responses in one optimizer step. 0 = the fewest prompts for which it is.
    prompts_per_rollout: Annotated[int, Range(0, 10**6)] = 0
    # Dynamic sampling (Yu et al. 2025, "DAPO"): largest number of times that a rollout generates responses to
    # prompts_per_rollout prompts, until this many groups have different rewards. 1 = no dynamic sampling; 10 is usual.
    max_num_gen_batches: Annotated[int, Range(1, 1000)] = 1
    # Maximum number of tokens per response; the remaining tokens of data.seq_len are for the prompt.
    max_completion_length: Annotated[int, Range(0, 2**24), Renamed('max_tokens')] = 0
    # Gather sharded parameters once per rollout instead of once per token. This is faster, but each device then holds
    # all parameters in the compute dtype.
    gather_params_for_generation: Annotated[bool, Renamed('gather_once')] = False
    # Number of rollouts that are generated ahead, so that their rewards are computed while the devices generate and
    # train. Rollout n, counted from 0, is generated with the parameters after rollout n - 1 - max_staleness, and the
    # first ones with the initial parameters. Importance weights correct the loss for the difference. 0 = each rollout
    # is generated with the newest parameters.
    max_staleness: Annotated[int, Range(0, 1000), Renamed('async_rollouts', was_bool=True)] = 0
    # With max_staleness above 0: upper bound of the importance weights (Yao et al. 2025, "Your Efficient RL Framework
    # Secretly Brings You Off-Policy RL Training": 2).
    importance_sampling_cap: Annotated[float, Range(1, 1000)] = 2.0
    # Number of optimization passes over the same responses.
    num_iterations: Annotated[int, Range(1, 10**5), Renamed('epochs')] = 1
    # Estimator of the advantages, named as in verl. grpo: relative to the mean reward of the group; rloo: relative to
    # the mean reward of the other responses of the group (Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE
    # Style Optimization"); gae: PPO with a value head on the policy, an advantage for each token (Schulman et al. 2015,
    # "High-Dimensional Continuous Control Using Generalized Advantage Estimation").
    advantage_estimator: Literal['grpo', 'rloo', 'gae'] = 'grpo'
    # gae: discount of the rewards of later tokens, and decay of the errors of later values (lambda in the paper).
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    # gae: weight of the loss of the value head, and largest change of a value that lowers this loss.
    vf_coef: Weight = 0.1
    cliprange_value: Weight = 0.2
    # Clipping range of the probability ratio, 1 - epsilon to 1 + epsilon_high (Yu et al. 2025, "DAPO": 0.2 and 0.28).
    # The ratio compares a token's probability with that at sampling time, or with max_staleness above 0 before the
    # first update by the responses. With loss_type=cispo, epsilon_high is the largest ratio itself, and epsilon is not
    # used.
    epsilon: Annotated[Fraction, Renamed('clip_low')] = 0.2
    epsilon_high: Annotated[Weight, Renamed('clip_high')] = 0.2
    # Weight of the KL divergence from the initial model; 0 = none, and no copy of the initial model.
    kl_coef: Annotated[Weight, Renamed('kl_weight')] = 0.0
    # Estimator of this KL divergence (Schulman 2020, "Approximating KL Divergence"). k1: log(p/q), without bias; k2:
    # log²(p/q) / 2, with low variance; k3: without bias and never negative.
    kl_estimator: Literal['k1', 'k2', 'k3'] = 'k3'
    # Subtract kl_coef · KL from the rewards instead of adding it to the loss, as in PPO and RLOO: of each token with
    # gae, otherwise the sum over the response.
    kl_in_reward: bool = False
    # Weight of the entropy of the softmax, which the loss rewards; 0 = none.
    entropy_coef: Weight = 0.0
    # advantage_estimator=grpo: divide advantages by the standard deviation of their group. Liu et al. 2025,
    # "Understanding R1-Zero-Like Training", recommend False.
    scale_rewards: Annotated[bool, Renamed('divide_by_deviation')] = True
    # Averaging of token losses, named as in TRL. grpo: per response, then over responses (Shao et al. 2024,
    # "DeepSeekMath"); dapo: over all tokens; dr_grpo: sum divided by max_completion_length (Liu et al.); gspo: one
    # probability ratio per response, the geometric mean over its tokens, averaged over responses (Zheng et al. 2025,
    # "Group Sequence Policy Optimization", with epsilon=3e-4 and epsilon_high=4e-4); cispo: over all tokens, the
    # log-probability weighted by a ratio of at most epsilon_high (MiniMax 2025, "MiniMax-M1", with epsilon_high=5).
    loss_type: Annotated[
        Literal['grpo', 'dapo', 'dr_grpo', 'gspo', 'cispo'],
        Renamed('loss_mean', values={'sequence': 'grpo', 'token': 'dapo', 'budget': 'dr_grpo'}),
    ] = 'dapo'
    # Number of tokens before max_completion_length over which the reward soft_overlong_punishment falls from 0 to -1
    # (DAPO: a fifth of max_completion_length).
    soft_punish_cache: Annotated[int, Range(0, 2**24)] = 0
    # Number of evaluation prompts, from the beginning of the file; 0 = all.
    eval_num_prompts: Steps = 0
    # Number of responses per evaluation prompt at temperature 1, for pass@k, in addition to a greedy one. 0 = greedy
    # only.
    eval_num_generations: Annotated[int, Range(0, 10**5), Renamed('eval_samples')] = 0

    @property
    def has_kl_loss(self) -> bool:
        """Returns True if the loss contains the KL divergence from the reference."""
        return self.kl_coef > 0 and not self.kl_in_reward
