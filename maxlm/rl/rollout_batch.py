"""Converts scored responses to a batch of GRPO or PPO.

Shapes: B rows of a program, N responses of a rollout (the responses to one prompt are consecutive), T length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from maxlm.config.schema import Config
from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.data.loader.windows import Batch
from maxlm.parallel.determinism import deterministic_options
from maxlm.parallel.layout import Layout
from maxlm.rl.generation.responses import Responses
from maxlm.rl.rewards.scorer import Scores
from maxlm.training.batch import OLD_VALUES, PROXIMAL, RETURNS
from maxlm.training.forward import make_log_probs
from maxlm.training.losses.advantages import advantages, generalized_advantages, whitened
from maxlm.training.losses.grpo import kl_divergence, token_weights
from maxlm.training.reference import reference_params
from maxlm.training.state import Params, TrainState
from maxlm.training.update import working_params

# Array of the KL divergence of each token from the reference, which only `with_advantages` uses.
KL = 'kl'


def response_rows(config: Config, prompts: Sequence[np.ndarray], responses: Responses) -> Batch:
    """Returns training rows, each a prompt followed by a response.

    Args:
        config: config of the run; `data.seq_len` is T.
        prompts: token ids of the prompt of each response.
        responses: N responses.

    Returns:
        Arrays [N, T] of BATCH_TYPES and GRPO_TYPES without `advantages` and `weights`, which `with_advantages` adds.
    """
    generated_NR = responses.generated
    T, N = config.data.seq_len, len(prompts)
    batch: Batch = {name: np.zeros((N, T), np.int32) for name in ('tokens', 'targets', 'segments', 'positions')}
    batch |= {name: np.zeros((N, T), np.float32) for name in ('predicted', 'old_log_probs')}
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
    return batch


def with_advantages(
    config: Config, rows: Batch, rewards_N: np.ndarray, used_N: np.ndarray | None = None
) -> tuple[Batch, dict[str, float]]:
    """Returns the batch of training rows, and the metrics of their advantages.

    Without a value head, the responses of groups with equal rewards have weight 0.

    Args:
        config: config of the run.
        rows: result of `response_rows` with the arrays of `make_passes`.
        rewards_N: reward of each response.
        used_N: False for responses with weight 0 that have no part in any statistic; None = all are used.
    """
    grpo, rows = config.grpo, dict(rows)
    used_N = np.ones(len(rewards_N), bool) if used_N is None else used_N
    metrics: dict[str, float] = {}
    predicted_NT, kl_NT = rows['predicted'], np.zeros_like(rows['predicted'])
    used_NT = predicted_NT * used_N[:, None]
    if KL in rows:
        kl_NT = rows.pop(KL)
        metrics['rollout/kl'] = float((kl_NT * used_N[:, None]).sum() / used_NT.sum())
    if grpo.advantage_estimator == 'gae':
        values_NT, active_N = rows[OLD_VALUES], used_N
        rewards_NT = -grpo.kl_coef * kl_NT
        # The reward of the response is that of its last token.
        last_N = predicted_NT.shape[1] - 1 - np.argmax(predicted_NT[:, ::-1] > 0, axis=1)
        rewards_NT[np.arange(len(rewards_N)), last_N] += rewards_N
        found = generalized_advantages(rewards_NT, values_NT, used_NT, grpo)
        rows['advantages'], rows[RETURNS] = whitened(found.advantages, used_NT), found.returns
        returns, errors = (x_NT[used_NT > 0] for x_NT in (found.returns, found.returns - values_NT))
        if returns.var() > 0:
            metrics['rollout/explained_variance'] = float(1 - errors.var() / returns.var())
    else:
        advantages_N, active_N = _advantages(rewards_N - grpo.kl_coef * kl_NT.sum(axis=1), used_N, grpo)
        rows['advantages'] = predicted_NT * advantages_N[:, None]
    rows['weights'] = token_weights(predicted_NT, active_N, grpo)
    return rows, metrics


def _advantages(rewards_N: np.ndarray, used_N: np.ndarray, grpo: GrpoConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the advantage of each response, float32 [N], and True for those in the loss, bool [N]."""
    if used_N.all():
        spread = np.ptp(rewards_N.reshape(-1, grpo.num_generations), axis=1)
        return advantages(rewards_N, grpo), np.repeat(spread > 0, grpo.num_generations)
    advantages_N, active_N = np.zeros(len(rewards_N), np.float32), np.zeros(len(rewards_N), bool)
    for rows in np.arange(len(rewards_N)).reshape(-1, grpo.num_generations):
        used = rows[used_N[rows]]
        # A single response has no other to be compared with.
        if len(used) > 1:
            group = dataclasses.replace(grpo, num_generations=len(used))
            advantages_N[used], active_N[used] = _advantages(rewards_N[used], np.ones(len(used), bool), group)
    return advantages_N, active_N


def step_rows(config: Config, number: int, rows: int) -> list[np.ndarray]:
    """Returns the row indices of each step that trains on the rollout `number` of `rows` responses."""
    orders = []
    for epoch in range(config.grpo.num_iterations):
        shuffled = np.random.default_rng([config.data.seed, number, epoch]).permutation(rows)
        orders += list(shuffled.reshape(-1, config.train.global_batch_size))
    return orders


def make_passes(config: Config, layout: Layout) -> Callable[[TrainState, Batch], Batch] | None:
    """Returns a function (state, rows [N, T]) → arrays of the model before the first update, float32 [N, T].

    The arrays are PROXIMAL if `Config.has_proximal`, OLD_VALUES of a model with a value head, and KL with
    `grpo.kl_in_reward`. Returns None if a run needs none of them.

    The program processes as many rows at a time as a micro-batch of the training step has. All processes call the
    function together with the same rows and receive all results.
    """
    grpo, rows = config.grpo, config.train.per_device_batch_size * config.batch_shards
    has_reference = grpo.kl_coef > 0 and grpo.kl_in_reward
    if not (config.has_proximal or config.model.value_head or has_reference):
        return None
    log_probs = make_log_probs(config, layout)

    def run(params: Params, stored: Params | None, batch_BT: dict[str, jax.Array]) -> dict[str, jax.Array]:
        used = working_params(config, layout, params)
        found: dict[str, jax.Array] = {}
        if config.has_proximal or config.model.value_head:
            of_policy = log_probs(used, None, batch_BT, None)
            found |= {PROXIMAL: of_policy.log_probs_BT} if config.has_proximal else {}
            found |= {} if of_policy.values_BT is None else {OLD_VALUES: of_policy.values_BT}
        if has_reference:
            reference = reference_params(config, used, stored)
            of_reference_BT = log_probs(reference, None, batch_BT, None).log_probs_BT
            # Selected first: positions without a target may contain non-finite values.
            log_ratio_BT = jnp.where(batch_BT['predicted'] > 0, batch_BT['old_log_probs'] - of_reference_BT, 0)
            found[KL] = kl_divergence(log_ratio_BT, grpo.kl_estimator)
        return found

    options = deterministic_options(config, layout.platform)
    program = jax.jit(run, out_shardings=layout.named(), compiler_options=options)

    def passes(state: TrainState, batch: Batch) -> Batch:
        local = layout.local_rows(rows)
        parts = []
        for start in range(0, len(batch['tokens']), rows):
            part = {name: values[start : start + rows][local] for name, values in batch.items()}
            parts.append(program(state.params, state.reference, layout.put_batch(part, rows)))
        return jax.tree.map(lambda *x: np.concatenate(x), *jax.device_get(parts))

    return passes


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
