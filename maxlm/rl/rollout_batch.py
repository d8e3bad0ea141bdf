"""Converts scored responses to a batch of GRPO.

Shapes: B rows of a program, N responses of a rollout (the responses to one prompt are consecutive), T length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxlm.config.schema import Config
from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.data.loader.windows import Batch
from maxlm.parallel.determinism import deterministic_options
from maxlm.parallel.layout import Layout
from maxlm.rl.responses import Responses
from maxlm.rl.rewards.scorer import Scores
from maxlm.training.batch import BATCH_TYPES
from maxlm.training.forward import make_log_probs
from maxlm.training.losses.grpo import advantages, token_weights
from maxlm.training.state import Params
from maxlm.training.update import working_params


def response_batch(
    config: Config,
    prompts: Sequence[np.ndarray],
    responses: Responses,
    rewards_N: np.ndarray,
    used_N: np.ndarray | None = None,
) -> Batch:
    """Returns a batch of training rows, each a prompt followed by a response.

    Args:
        config: config of the run; `data.seq_len` is T.
        prompts: token ids of the prompt of each response.
        responses: N responses.
        rewards_N: reward of each response. Groups with equal rewards have weight 0.
        used_N: False for responses with weight 0 that have no part in the statistics of their group; None = all are
            used.

    Returns:
        Arrays [N, T] of BATCH_TYPES and GRPO_TYPES.
    """
    advantages_N, active_N = _advantages(rewards_N, used_N, config.grpo)
    generated_NR = responses.generated
    T, N = config.data.seq_len, len(prompts)
    batch: Batch = {name: np.zeros((N, T), np.int32) for name in ('tokens', 'targets', 'segments', 'positions')}
    batch |= {name: np.zeros((N, T), np.float32) for name in ('predicted', 'old_log_probs', 'advantages')}
    for row, prompt in enumerate(prompts):
        num, start = int(responses.num_B[row]), len(prompt)
        ids = np.concatenate([prompt.astype(np.int32), responses.tokens_BR[row, :num]])
        length = len(ids) - 1
        batch['tokens'][row, :length], batch['targets'][row, :length] = ids[:-1], ids[1:]
        batch['segments'][row, :length] = 1
        batch['positions'][row, :length] = np.arange(length)
        # The last token of the prompt predicts the first token of the response.
        predicts = slice(start - 1, start - 1 + num)
        batch['predicted'][row, predicts] = generated_NR[row, :num]
        batch['old_log_probs'][row, predicts] = responses.log_probs_BR[row, :num]
        batch['advantages'][row, predicts] = advantages_N[row]
    batch['weights'] = token_weights(batch['predicted'], active_N, config.grpo)
    return batch


def _advantages(rewards_N: np.ndarray, used_N: np.ndarray | None, grpo: GrpoConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the advantage of each response, float32 [N], and True for those in the loss, bool [N]."""
    if used_N is None or used_N.all():
        spread = np.ptp(rewards_N.reshape(-1, grpo.num_generations), axis=1)
        return advantages(rewards_N, grpo), np.repeat(spread > 0, grpo.num_generations)
    advantages_N, active_N = np.zeros(len(rewards_N), np.float32), np.zeros(len(rewards_N), bool)
    for rows in np.arange(len(rewards_N)).reshape(-1, grpo.num_generations):
        used = rows[used_N[rows]]
        # A single response has no other to be compared with.
        if len(used) > 1:
            group = dataclasses.replace(grpo, num_generations=len(used))
            advantages_N[used], active_N[used] = _advantages(rewards_N[used], None, group)
    return advantages_N, active_N


def step_rows(config: Config, number: int, rows: int) -> list[np.ndarray]:
    """Returns the row indices of each step that trains on the rollout `number` of `rows` responses."""
    orders = []
    for epoch in range(config.grpo.num_iterations):
        shuffled = np.random.default_rng([config.data.seed, number, epoch]).permutation(rows)
        orders += list(shuffled.reshape(-1, config.train.global_batch_size))
    return orders


def make_proximal(config: Config, layout: Layout) -> Callable[[Params, Batch], np.ndarray]:
    """Returns a function (parameters, batch [N, T]) → log-probabilities of its targets, float32 [N, T].

    The program processes as many rows at a time as a micro-batch of the training step has. All processes call the
    function together with the same batch and receive all results.
    """
    rows = config.train.per_device_batch_size * config.batch_shards
    log_probs = make_log_probs(config, layout)

    def run(params: Params, batch_BT: dict[str, jax.Array]) -> jax.Array:
        return log_probs(working_params(config, layout, params), None, batch_BT, None).log_probs_BT

    options = deterministic_options(config, layout.platform)
    program = jax.jit(run, out_shardings=layout.named(), compiler_options=options)

    def proximal(params: Params, batch: Batch) -> np.ndarray:
        local = layout.local_rows(rows)
        parts = []
        for start in range(0, len(batch['tokens']), rows):
            part = {name: batch[name][start : start + rows][local] for name in BATCH_TYPES}
            parts.append(program(params, layout.put_batch(part, rows)))
        return np.concatenate(jax.device_get(parts))

    return proximal


def gather_scores(scores: Scores, count: int) -> Scores:
    """Returns the scores of all responses, equal on all processes.

    Args:
        scores: scores of the responses in `scored_rows` of this process.
        count: N.
    """
    if jax.process_count() == 1:
        return scores
    per_process = -(-count // jax.process_count())
    padded = jax.tree.map(lambda values: np.pad(values, (0, per_process - len(values))), scores)
    gathered = multihost_utils.process_allgather(padded, tiled=True)
    return jax.tree.map(lambda values: np.asarray(values)[:count], gathered)


def scored_rows(count: int) -> slice:
    """Returns the range of `count` responses that this process scores.

    Each response is scored by one process, because a second execution of a slow program can have another result.
    """
    per_process = -(-count // jax.process_count())
    return slice(jax.process_index() * per_process, (jax.process_index() + 1) * per_process)
