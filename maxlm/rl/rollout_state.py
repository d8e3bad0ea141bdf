"""Responses of rollouts that are not yet used for training, and their form in a checkpoint.

Shapes: Q rollouts, N responses of a rollout, R largest number of tokens of a response, P of a prompt, C rewards of the
sum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxlm.rl.generation.responses import EnvironmentUse, Responses, ToolUse
from maxlm.rl.rewards.scorer import Scores
from maxlm.storage.json_text import parse_json

# Values of a row of the array `numbers`. Former versions wrote one rollout, as one row of the first three.
NUMBERS = ('number', 'step', 'passes', 'is_scored')


class Rollout(NamedTuple):
    """Responses to the prompts of a rollout.

    Attributes:
        number: number of the rollout, counted from 0.
        step: number of updates of the parameters that generated the responses.
        responses: the responses.
        seconds: time of the generation, without that of tools.
        is_complete: False for conversations with environments whose next turns are not yet generated.
    """

    number: int
    step: int
    responses: Responses
    seconds: float
    is_complete: bool = True


def to_arrays(rollouts: Sequence[tuple[Rollout, Scores | None]]) -> dict[str, np.ndarray]:
    """Returns rollouts and the scores of all responses, if they are known, as arrays; {} without rollouts."""
    if not rollouts:
        return {}
    R = max(int(rollout.responses.num_B.max()) for rollout, _ in rollouts)

    def stack(name: str) -> np.ndarray:
        return np.stack([_columns(getattr(rollout.responses, name), R) for rollout, _ in rollouts])

    arrays = {
        'numbers': np.array(
            [
                [rollout.number, rollout.step, rollout.responses.passes, scores is not None]
                for rollout, scores in rollouts
            ],
            np.int32,
        ),
        'seconds': np.array([rollout.seconds for rollout, _ in rollouts], np.float32),
        'tokens': stack('tokens_BR'),
        'log_probs': stack('log_probs_BR'),
        'lengths': stack('num_B'),
        'ended': stack('ended_B'),
    }
    tools = [rollout.responses.tools for rollout, _ in rollouts if rollout.responses.tools is not None]
    if tools:
        arrays |= {
            'generated': np.stack([_columns(use.generated_BR, R) for use in tools]),
            'calls': np.stack([[use.num_calls_B, use.num_errors_B] for use in tools]),
        }
    uses = [rollout.responses.environment for rollout, _ in rollouts if rollout.responses.environment is not None]
    if uses:
        P = max(len(prompt) for use in uses for prompt in use.prompts)
        arrays |= {
            'complete': np.array([rollout.is_complete for rollout, _ in rollouts]),
            'failed': np.stack([use.failed_B for use in uses]),
            'prompts': np.stack([[np.pad(prompt, (0, P - len(prompt))) for prompt in use.prompts] for use in uses]),
            'prompt_lengths': np.array([[len(prompt) for prompt in use.prompts] for use in uses], np.int32),
        }
    known = [scores for _, scores in rollouts if scores is not None]
    if known:
        # Those of conversations may differ.
        names = list(dict.fromkeys(name for scores in known for name in scores.components))
        empty = np.zeros((len(names) + 2, len(known[0].rewards)), np.float32)
        arrays['scores'] = np.stack([empty if scores is None else _score_rows(scores, names) for _, scores in rollouts])
        if uses:
            arrays['excluded'] = np.stack(
                [empty[0] if scores is None else (~scores.used).astype(np.float32) for _, scores in rollouts]
            )
            arrays['score_names'] = np.frombuffer(json.dumps(names).encode(), np.uint8)
    return arrays


def from_arrays(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> list[tuple[Rollout, Scores | None]]:
    """Returns the rollouts and scores of `to_arrays`.

    Args:
        arrays: arrays of a checkpoint; {} = no rollouts.
        names: names of the rewards of the sum, which are the components of the scores without environments.
    """
    if not arrays:
        return []
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    if arrays['numbers'].ndim == 1:
        arrays = {name: array if name == 'seconds' else array[None] for name, array in arrays.items()}
        arrays['numbers'] = np.append(arrays['numbers'], [[0]], axis=1)
    if 'score_names' in arrays:
        names = parse_json(arrays['score_names'].astype(np.uint8).tobytes())
    found = []
    for row, (number, step, passes, is_scored) in enumerate(arrays['numbers'].tolist()):
        tools = environment = scores = None
        if 'generated' in arrays:
            tools = ToolUse(arrays['generated'][row], *arrays['calls'][row])
        if is_scored:
            rewards_N, failed_N, *components = arrays['scores'][row]
            excluded_N = arrays['excluded'][row] if 'excluded' in arrays else None
            scores = Scores(rewards_N, dict(zip(names, components, strict=True)), failed_N, excluded_N)
        if 'prompts' in arrays:
            pairs = zip(arrays['prompts'][row], arrays['prompt_lengths'][row], strict=True)
            environment = EnvironmentUse(tuple(ids[:length] for ids, length in pairs), arrays['failed'][row])
        tokens_BR, log_probs_BR, num_B, ended_B = (
            arrays[name][row] for name in ('tokens', 'log_probs', 'lengths', 'ended')
        )
        responses = Responses(tokens_BR, log_probs_BR, num_B, ended_B, passes, tools, environment)
        is_complete = bool(arrays['complete'][row]) if 'complete' in arrays else True
        found.append((Rollout(number, step, responses, float(arrays['seconds'][row]), is_complete), scores))
    return found


def _columns(values: np.ndarray, R: int) -> np.ndarray:
    """Returns an array [N, …] whose rows have R columns; the others are empty in all rows. [N] stays unchanged."""
    if values.ndim == 1:
        return values
    return np.pad(values[:, :R], ((0, 0), (0, max(0, R - values.shape[1]))))


def _score_rows(scores: Scores, names: Sequence[str]) -> np.ndarray:
    """Returns float32 [C + 2, N]; NaN for components that the scores lack."""
    lacking = np.full_like(scores.rewards, np.nan)
    return np.stack([scores.rewards, scores.failed, *(scores.components.get(name, lacking) for name in names)])
