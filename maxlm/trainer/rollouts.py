"""GRPO rollouts: the model generates responses to prompts, which are scored by a reward and used for training.

In a rollout the current model generates several responses to each of some prompts. The next steps train on all of these
responses, `grpo.num_iterations` times. Prompts, random keys and order depend only on seeds and the step number, so a
resumed run repeats them exactly.

Shapes: N responses of a rollout (the responses to one prompt are consecutive), T length, R largest number of tokens of
a response.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxlm.checkpoint.manager import find_step
from maxlm.config.schema import Config
from maxlm.config.validation_rl import check_grpo
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.loader.shuffle import VERSION
from maxlm.data.loader.windows import Batch
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.validation import Evaluation
from maxlm.inference.rollout_generator import Responses, Sampler
from maxlm.parallel.layout import Layout
from maxlm.rewards.prompts import Prompts, load_encoder, read_prompts
from maxlm.rewards.rewards import Task, UserRewardError
from maxlm.rewards.scorer import RewardScorer, accuracy, check_tasks, mean_pass_at_k
from maxlm.trainer.batch_source import SourceUpdate
from maxlm.trainer.checkpointing import INIT_FROM
from maxlm.trainer.samples import Sample
from maxlm.trainer.source_metrics import NullSourceMetrics, SourceMetrics
from maxlm.training.losses.grpo import advantages, token_weights
from maxlm.training.run_control import RunControl
from maxlm.training.state import Params, TrainState, evaluated_params
from maxlm.workdir.files import TOKENIZER

# Number of responses of a rollout that are logged.
SHOWN = 2


class RolloutBatches:
    """Batches of GRPO rollouts; see `maxlm.trainer.batch_source.BatchSource`."""

    names: tuple[str, ...] = ()

    def __init__(
        self,
        config: Config,
        *,
        prompts: Prompts,
        eval_prompts: Prompts | None,
        scorer: RewardScorer,
        tokenizer_path: Path,
        ends: Sequence[int],
    ):
        """
        Args:
            config: config of the run; it need not be resolved.
            prompts: training prompts.
            eval_prompts: evaluation prompts; required if `eval.interval` is set.
            scorer: scorer for `grpo.reward`, and for `grpo.eval_reward` if it is set.
            tokenizer_path: path of the model's tokenizer.
            ends: token ids that end a response.
        """
        self._config, self._grpo = config, config.grpo
        self._prompts, self._eval_prompts = prompts, eval_prompts
        self._scorer = scorer
        self.tokenizer_path = tokenizer_path
        self._tokenizer = Tokenizer.load(tokenizer_path)
        self._ends = tuple(ends)
        self.windows_per_epoch: int | None = (
            prompts.num_prompts * self._grpo.num_generations * self._grpo.num_iterations
        )
        self._batches: deque[Batch] = deque()
        self._layout: Layout | None = None
        self._sampler: Sampler | None = None
        self._samples: list[Sample] = []

    def fingerprint(self, config: Config) -> dict[str, Any]:
        """See `BatchSource`."""
        # The keys are part of the checkpoint format, which is older than the current config keys.
        return {
            'prompts': self._prompts.fingerprint,
            'grpo.samples': self._grpo.num_generations,
            'grpo.prompts_per_rollout': self._grpo.prompts_per_rollout,
            'grpo.max_tokens': self._grpo.max_completion_length,
            'grpo.epochs': self._grpo.num_iterations,
            'grpo.reward': self._grpo.reward,
            'window': self._config.data.seq_len,
            'seed': self._config.data.seed,
            'global_batch': config.train.global_batch_size,
            'order': VERSION,
        }

    def facts(self, config: Config) -> dict[str, Any]:
        """See `BatchSource`."""
        tokens = sum(map(len, self._prompts.ids))
        source = {'name': self._prompts.path, 'prompts': self._prompts.num_prompts, 'tokens': tokens, 'weight': 1.0}
        return {**self.fingerprint(config), 'sources': [source]}

    def open(self, config: Config, layout: Layout) -> None:
        """See `BatchSource`."""
        self._config, self._layout = config, layout
        updates = self.updates
        if config.eval.interval % updates:
            raise InputError(
                f'eval.interval={config.eval.interval} is not a multiple of {updates}, the number of steps '
                f'per rollout; set it to a multiple of {updates}'
            )
        self._sampler = Sampler(
            config,
            layout,
            ends=self._ends,
            max_prompt=config.data.seq_len - self._grpo.max_completion_length,
            max_tokens=self._grpo.max_completion_length,
            gather_once=self._grpo.gather_params_for_generation,
        )

    @property
    def updates(self) -> int:
        """Returns the number of steps that train on the same rollout; the config must be resolved."""
        rows = self._grpo.prompts_per_rollout * self._grpo.num_generations
        return self._grpo.num_iterations * (rows // self._config.train.global_batch_size)

    @contextlib.contextmanager
    def batches(
        self,
        start: int,
        config: Config,
        decisions: RunControl,
        *,
        layout: Layout,
        alarm: Callable[[str], None],
        on_wait: Callable[[bool], None],
    ) -> Iterator[Iterator[Batch]]:
        """See `BatchSource`."""
        del start, config, decisions, layout, alarm, on_wait
        self._batches.clear()

        def take() -> Iterator[Batch]:
            while True:
                yield self._batches.popleft()

        yield take()

    def has_work_before(self, step: int) -> bool:
        """See `BatchSource`."""
        del step
        return not self._batches

    def can_checkpoint_after(self, step: int) -> bool:
        """See `BatchSource`."""
        return step % self.updates == 0

    def prepare(self, step: int, state: TrainState) -> SourceUpdate:
        """See `BatchSource`."""
        config, grpo = self._config, self._grpo
        sampler, layout = self._made
        number, done = divmod(step - 1, self.updates)
        indices = self._prompts.indices(number, grpo.prompts_per_rollout, config.data.seed)
        rows = len(indices) * grpo.num_generations
        began = time.perf_counter()
        responses = sampler(
            state.params,
            [self._prompts.ids[index].tolist() for index in indices],
            seed=config.train.seed,
            first_row=number * rows,
            num_samples=grpo.num_generations,
        )
        drawn = time.perf_counter()
        each = [index for index in indices for _ in range(grpo.num_generations)]
        texts = self._texts(responses)
        scores = self._scores(self._prompts, texts, [self._prompts.tasks[index] for index in each], grpo.reward)
        scored = time.perf_counter()
        rewards_N = scores['']
        batch = response_batch(config, [self._prompts.ids[index] for index in each], responses, rewards_N)
        local = layout.local_rows(config.train.global_batch_size)
        for order in self._orders(number, rows)[done:]:
            self._batches.append({name: values[order[local]] for name, values in batch.items()})
        groups = rewards_N.reshape(-1, grpo.num_generations)
        metrics = {
            'rollout/reward': float(rewards_N.mean()),
            'rollout/reward_std': float(groups.std(axis=1).mean()),
            **{f'rollout/reward/{name}': float(part.mean()) for name, part in scores.items() if name},
            'rollout/frac_reward_zero_std': float((np.ptp(groups, axis=1) == 0).mean()),
            'rollout/mean_length': float(responses.num_B.mean()),
            'rollout/clipped_ratio': 1 - float(responses.ended_B.mean()),
            'rollout/entropy': float(-responses.log_probs_BR.sum() / responses.drawn),
            'rollout/tokens_per_second': responses.drawn / (drawn - began),
            'rollout/reward_seconds': scored - drawn,
            'rollout/epoch': (number + 1) * len(indices) / self._prompts.num_prompts,
        }
        text = (
            f'{rows} responses to {len(indices)} prompts: reward {metrics["rollout/reward"]:.3f}, '
            f'{metrics["rollout/frac_reward_zero_std"]:.0%} of groups with equal rewards, '
            f'mean length {metrics["rollout/mean_length"]:.1f} tokens, '
            f'{metrics["rollout/tokens_per_second"]:,.0f} tokens/s'
        )
        samples = [
            Sample(self._asked(self._prompts, each[row]), f'{texts[row]} (reward {rewards_N[row]:.2f})')
            for row in range(SHOWN)
        ]
        return SourceUpdate(metrics, text, samples)

    def sources(self, config: Config) -> SourceMetrics:
        """See `BatchSource`."""
        del config
        return NullSourceMetrics()

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """See `BatchSource`."""
        del batch
        return {}

    @property
    def evaluation_share(self) -> float:
        """Returns 0. It is needed only for run lengths by budget, which GRPO does not support."""
        return 0.0

    def evaluate(self, state: TrainState) -> Evaluation:
        """Evaluates the greedy response to each prompt, and sampled responses if the config requests them."""
        assert self._eval_prompts, 'eval.interval is refused without them'
        sampler, _ = self._made
        config, grpo, params = self._config, self._grpo, evaluated_params(state)
        prompts, num = self._eval_prompts, self._eval_prompts.num_prompts
        num = min(grpo.eval_num_prompts or num, num)
        ids, tasks = [row.tolist() for row in prompts.ids[:num]], prompts.tasks[:num]
        reward, rows = grpo.eval_reward or grpo.reward, config.train.global_batch_size
        likeliest = sampler(params, ids, seed=config.train.seed, temperature=0.0, rows_per_run=rows)
        texts = self._texts(likeliest)
        rewards_N = self._scores(prompts, texts, tasks, reward)['']
        parts = {'accuracy': accuracy(rewards_N), 'length': float(likeliest.num_B.mean())}
        tokens = likeliest.drawn
        if samples := grpo.eval_num_generations:
            # A fixed seed, so that evaluations differ only because of the model.
            drawn = sampler(
                params, ids, seed=config.train.seed ^ 1, num_samples=samples, rows_per_run=max(rows, samples)
            )
            each = [task for task in tasks for _ in range(samples)]
            rewards_N = self._scores(prompts, self._texts(drawn), each, reward)['']
            parts['pass_at_1'] = accuracy(rewards_N)
            parts['pass_at_k'] = mean_pass_at_k(rewards_N.reshape(-1, samples), samples)
            tokens += drawn.drawn
        self._samples = [
            Sample(self._asked(prompts, row), texts[row]) for row in range(min(config.eval.num_samples, num))
        ]
        return Evaluation(1 - parts['accuracy'], tokens, [], [], parts)

    def sample(self, params: Params) -> list[Sample]:
        """Returns the samples of the last evaluation."""
        del params
        return self._samples

    def at_end(self) -> str:
        """Returns ''."""
        return ''

    @property
    def _made(self) -> tuple[Sampler, Layout]:
        """Returns the objects created by `open`."""
        assert self._sampler is not None
        assert self._layout is not None
        return self._sampler, self._layout

    def _asked(self, prompts: Prompts, index: int) -> str:
        return self._tokenizer.decode(prompts.ids[index].tolist())

    def _texts(self, responses: Responses) -> list[str]:
        lengths = responses.num_B - responses.ended_B
        return [
            self._tokenizer.decode(row[:length].tolist())
            for row, length in zip(responses.tokens_BR, lengths, strict=True)
        ]

    def _scores(
        self, prompts: Prompts, texts: Sequence[str], tasks: Sequence[Task], reward: str
    ) -> dict[str, np.ndarray]:
        """Returns `gather_scores`. Raises InputError if a reward of the user fails; the message names the prompt."""
        try:
            return gather_scores(self._scorer, texts, tasks, reward)
        except UserRewardError as error:
            raise InputError(f'{prompts.location_of(error.task)}: {error}') from error

    def _orders(self, number: int, rows: int) -> list[np.ndarray]:
        """Returns the row indices of each step that trains on a rollout."""
        orders = []
        for epoch in range(self._grpo.num_iterations):
            shuffled = np.random.default_rng([self._config.data.seed, number, epoch]).permutation(rows)
            orders += list(shuffled.reshape(-1, self._config.train.global_batch_size))
        return orders


def response_batch(
    config: Config,
    prompts: Sequence[np.ndarray],
    responses: Responses,
    rewards_N: np.ndarray,
) -> Batch:
    """Returns a batch of training rows, each a prompt followed by a response.

    Args:
        config: config of the run; `data.seq_len` is T.
        prompts: token ids of the prompt of each response.
        responses: N responses.
        rewards_N: reward of each response. Groups with equal rewards have weight 0.

    Returns:
        Arrays [N, T] of BATCH_TYPES and GRPO_TYPES.
    """
    advantages_N = advantages(rewards_N, config.grpo)
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
        batch['predicted'][row, predicts] = 1
        batch['old_log_probs'][row, predicts] = responses.log_probs_BR[row, :num]
        batch['advantages'][row, predicts] = advantages_N[row]
    groups = rewards_N.reshape(-1, config.grpo.num_generations)
    active_N = np.repeat(np.ptp(groups, axis=1) > 0, config.grpo.num_generations)
    batch['weights'] = token_weights(batch['predicted'], active_N, config.grpo)
    return batch


def gather_scores(
    scorer: RewardScorer, texts: Sequence[str], tasks: Sequence[Task], reward: str
) -> dict[str, np.ndarray]:
    """Returns rewards float32 [N] by key: '' for the total, and the name of each component. Equal on all processes.

    Each response is scored by one process, because a second execution of a slow program can have another result.
    """
    processes, process = jax.process_count(), jax.process_index()
    share = -(-len(texts) // processes)
    mine = slice(process * share, (process + 1) * share)
    scores = scorer.score(texts[mine], tasks[mine], reward=reward)
    found = {'': scores.rewards, **scores.components}
    if processes == 1:
        return found
    padded = {name: np.pad(values, (0, share - len(values))) for name, values in found.items()}
    gathered = multihost_utils.process_allgather(padded, tiled=True)
    return {name: np.asarray(values)[: len(texts)] for name, values in gathered.items()}


def open_rollouts(config: Config, stack: contextlib.ExitStack) -> tuple[RolloutBatches, int]:
    """Opens the rollouts of a config; see `maxlm.trainer.run.OpenSource`."""
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
