"""Dynamic sampling: replaces groups with equal rewards, which give no gradient (Yu et al. 2025, "DAPO").

Shapes: N responses, G responses per group (to the same prompt), P groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.rl.generation.responses import EnvironmentUse, Responses
from maxlm.rl.rewards.scorer import Scores


class ScoredRollout(NamedTuple):
    """Responses with their rewards.

    Attributes:
        prompts: index of the prompt of each response; the responses of a group are consecutive.
        responses: N responses.
        scores: their rewards.
    """

    prompts: list[int]
    responses: Responses
    scores: Scores


def differ(scores: Scores, num_generations: int) -> np.ndarray:
    """Returns True for each group whose rewards are not all equal, bool [P].

    Responses that are not used do not count.
    """
    groups_PG, used_PG = (values.reshape(-1, num_generations) for values in (scores.rewards, scores.used))
    largest = np.max(groups_PG, axis=1, where=used_PG, initial=-np.inf)
    different: np.ndarray = largest > np.min(groups_PG, axis=1, where=used_PG, initial=np.inf)
    return different


def fill_groups(
    first: ScoredRollout, draw: Callable[[int], ScoredRollout], grpo: GrpoConfig
) -> tuple[ScoredRollout, dict[str, float]]:
    """Replaces groups with equal rewards by groups of further rollouts, in their order, until none is left.

    The shapes stay those of the first rollout. After `grpo.max_num_gen_batches` rollouts, the first one included, the
    other groups with equal rewards remain, and have weight 0. With 1, there is no dynamic sampling and no metric.

    Args:
        first: the rollout.
        draw: returns the rollout of the attempt with this number, from 1. It depends only on the number, so a run that
            repeats the rollout replaces the same groups.
        grpo: section `grpo` of the config; `num_generations` is G.

    Returns:
        The rollout and the metrics of the attempts.
    """
    found, attempts, num_generations = first, 1, grpo.num_generations
    if grpo.max_num_gen_batches == 1:
        return first, {}
    while attempts < grpo.max_num_gen_batches and not (is_filled_P := differ(found.scores, num_generations)).all():
        more = draw(attempts)
        new = np.flatnonzero(differ(more.scores, num_generations))
        old = np.flatnonzero(~is_filled_P)
        num = min(len(new), len(old))
        found = _replaced(found, old[:num], more, new[:num], num_generations)
        attempts += 1
    unfilled = float((~differ(found.scores, num_generations)).mean())
    return found, {'rollout/num_gen_batches': float(attempts), 'rollout/unfilled_groups': unfilled}


def _replaced(
    rollout: ScoredRollout, old: np.ndarray, other: ScoredRollout, new: np.ndarray, num_generations: int
) -> ScoredRollout:
    """Returns the rollout with the groups `new` of another one in place of its groups `old`."""
    old_N, new_N = ((groups[:, None] * num_generations + np.arange(num_generations)).ravel() for groups in (old, new))

    def replace(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        rows = rows.copy()
        rows[old_N] = others[new_N]
        return rows

    prompts = replace(np.asarray(rollout.prompts), np.asarray(other.prompts)).tolist()
    arrays, others = ({**each.responses._asdict(), 'passes': None, 'environment': None} for each in (rollout, other))
    scores = jax.tree.map(replace, *_with_equal_names(rollout.scores, other.scores))
    environment = None
    if rollout.responses.environment is not None and other.responses.environment is not None:
        begins = list(rollout.responses.environment.prompts)
        for row, other_row in zip(old_N, new_N, strict=True):
            begins[row] = other.responses.environment.prompts[other_row]
        failed_N = replace(rollout.responses.environment.failed_B, other.responses.environment.failed_B)
        environment = EnvironmentUse(tuple(begins), failed_N, scores)
    responses = Responses(
        **{
            **jax.tree.map(replace, arrays, others),
            'passes': rollout.responses.passes + other.responses.passes,
            'environment': environment,
        }
    )
    return ScoredRollout(prompts, responses, scores)


def _with_equal_names(*scores: Scores) -> list[Scores]:
    """Returns scores with the same components, NaN where there is none; those of environments may differ."""
    names = dict.fromkeys(name for each in scores for name in each.components)
    return [
        each._replace(
            components={name: each.components.get(name, np.full_like(each.rewards, np.nan)) for name in names}
        )
        for each in scores
    ]
