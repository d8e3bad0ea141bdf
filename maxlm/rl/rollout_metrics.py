"""Metrics of a rollout, and its line in the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.rl.dynamic_sampling import ScoredRollout
from maxlm.rl.generation.environment_sampler import environment_metrics
from maxlm.rl.generation.tool_sampler import tool_metrics
from maxlm.rl.rewards.scorer import Scores
from maxlm.rl.rollout_state import Rollout


class Seconds(NamedTuple):
    """Times of a rollout in seconds.

    Attributes:
        generating: generation of the responses, without the waits for tools.
        scoring: computation of their rewards.
        waiting_for_rewards: time before its first step for which the devices waited for these.
        waiting_for_tools: time since the previous rollout for which the devices waited for tools or environments.
        environments: time of the calls of environments in the background that ended in the same time.
    """

    generating: float
    scoring: float
    waiting_for_rewards: float
    waiting_for_tools: float
    environments: float = 0.0


def rollout_metrics(
    rollout: Rollout, scores: Scores, config: GrpoConfig, seconds: Seconds, *, step: int, trained: ScoredRollout
) -> dict[str, float]:
    """Returns the metrics of a rollout before its first step, `step`.

    Dynamic sampling replaces some of its responses; `trained` has those of the batch. Rewards and tokens per second are
    those of the rollout, and the other metrics those of `trained`.
    """
    responses = trained.responses
    metrics = {
        **scores.metrics(config),
        'rollout/mean_length': float(responses.num_B.mean()),
        'rollout/clipped_ratio': 1 - float(responses.ended_B.mean()),
        # The number of columns of a restored array may differ, and with it the order of a sum over all elements.
        'rollout/entropy': float(-responses.log_probs_BR[responses.generated].sum() / responses.drawn),
        'rollout/tokens_per_second': rollout.responses.drawn / rollout.seconds,
        'rollout/generate_seconds': seconds.generating,
        'rollout/reward_seconds': seconds.scoring,
        'rollout/reward_wait_seconds': seconds.waiting_for_rewards,
    }
    if responses.tools is not None:
        metrics |= {**tool_metrics(responses), 'rollout/tool_wait_seconds': seconds.waiting_for_tools}
    metrics |= environment_metrics(responses, trained.scores)
    if config.max_staleness:
        metrics |= {
            'rollout/hidden_reward_seconds': max(0.0, seconds.scoring - seconds.waiting_for_rewards),
            'rollout/staleness': float(step - 1 - rollout.step),
        }
        if responses.environment is not None:
            hidden = max(0.0, seconds.environments - seconds.waiting_for_tools)
            metrics['rollout/hidden_tool_seconds'] = hidden
    return metrics


def rollout_text(metrics: Mapping[str, float], rows: int, config: GrpoConfig) -> str:
    """Returns the line of a rollout of `rows` responses for the log."""
    return (
        f'{rows} responses to {config.prompts_per_rollout} prompts: reward {metrics["rollout/reward"]:.3f}, '
        f'{metrics["rollout/frac_reward_zero_std"]:.0%} of groups with equal rewards, '
        f'mean length {metrics["rollout/mean_length"]:.1f} tokens, '
        f'{metrics["rollout/tokens_per_second"]:,.0f} tokens/s'
    )
