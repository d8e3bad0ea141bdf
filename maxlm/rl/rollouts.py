"""GRPO rollouts: the model generates responses to prompts, which are scored by a reward and used for training.

In a rollout the current model generates several responses to each of some prompts. The next steps train on all of these
responses, `grpo.num_iterations` times. Prompts, random keys and order depend only on seeds and the step number, so a
resumed run repeats them exactly.

With `grpo.async_rollouts`, the main thread scores the responses of a rollout while the device works. The device ends
the last step of the previous rollout and then generates the next one, which a thread waits for. The steps of this
rollout start when both have ended, because they donate the parameters. Checkpoints contain the generated responses, so
that a resumed run trains on the same ones. Rewards run in the main thread, because rewards of the user may need signals
for time limits.

Shapes: N responses of a rollout (the responses to one prompt are consecutive), T length, R largest number of tokens of
a response.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlm.config.schema import Config
from maxlm.data.loader.windows import Batch
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.samples import Sample
from maxlm.evaluation.validation import Evaluation
from maxlm.parallel.layout import Layout
from maxlm.rl.dynamic_sampling import ScoredRollout, fill_groups
from maxlm.rl.environment_sampler import (
    Environments,
    EnvironmentSampler,
    environment_metrics,
    seeded_examples,
)
from maxlm.rl.responses import Responses
from maxlm.rl.reward_model import RewardModel
from maxlm.rl.rewards.prompts import Prompts
from maxlm.rl.rewards.rewards import MODEL_SCORE, Task, UserRewardError
from maxlm.rl.rewards.scorer import RewardScorer, Scores, accuracy, mean_pass_at_k
from maxlm.rl.rollout_batch import gather_scores, make_passes, response_rows, scored_rows, step_rows, with_advantages
from maxlm.rl.rollout_fingerprint import rollout_fingerprint
from maxlm.rl.rollout_generator import Sampler
from maxlm.rl.rollout_state import Rollout
from maxlm.rl.token_rewards import TokenRewards, token_rewards
from maxlm.rl.tool_environment import ToolEnvironment
from maxlm.rl.tool_sampler import ToolSampler, tool_metrics
from maxlm.trainer.batch_source import BatchSource, SourceUpdate
from maxlm.training.decisions.run_control import RunControl
from maxlm.training.state import Params, TrainState, evaluated_params

# Number of responses of a rollout that are logged.
SHOWN = 2


class RolloutBatches(BatchSource):
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
        tools: ToolEnvironment | None = None,
        reward_model: RewardModel | None = None,
        environments: Environments | None = None,
    ):
        """
        Args:
            config: config of the run; it need not be resolved.
            prompts: training prompts.
            eval_prompts: evaluation prompts; required if `eval.interval` is set.
            scorer: scorer for `grpo.reward`, and for `grpo.eval_reward` if it is set.
            tokenizer_path: path of the model's tokenizer.
            ends: token ids that end a response.
            tools: tools that the model may call.
            reward_model: reward model of `grpo.reward_model`.
            environments: environments of `grpo.environment`.
        """
        self._config, self._grpo = config, config.grpo
        self._prompts, self._eval_prompts = prompts, eval_prompts
        self._scorer, self._reward_model = scorer, reward_model
        self.tokenizer_path = tokenizer_path
        self.tokenizer = Tokenizer.load(tokenizer_path)
        self._ends, self._tools, self._environments = tuple(ends), tools, environments
        self.windows_per_epoch: int | None = (
            prompts.num_prompts * self._grpo.num_generations * self._grpo.num_iterations
        )
        self._batches: deque[Batch] = deque()
        self._layout: Layout | None = None
        self._sampler: Sampler | ToolSampler | EnvironmentSampler | None = None
        self._passes: Callable[[TrainState, Batch], Batch] | None = None
        # The next rollout, if its responses are already generated.
        self._next: Rollout | None = None
        self._samples: list[Sample] = []

    def fingerprint(self, config: Config) -> dict[str, Any]:
        """See `BatchSource`."""
        return rollout_fingerprint(
            config, self._config, self._prompts, reward_model=self._reward_model, environments=self._environments
        )

    def source_descriptions(self) -> list[dict[str, Any]]:
        """See `BatchSource`."""
        tokens = sum(map(len, self._prompts.ids))
        return [{'name': self._prompts.path, 'prompts': self._prompts.num_prompts, 'tokens': tokens, 'weight': 1.0}]

    def open(self, config: Config, layout: Layout) -> None:
        """See `BatchSource`."""
        self._config, self._layout = config, layout
        updates = config.steps_per_rollout
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
        if self._reward_model is not None:
            self._reward_model.open(config, layout)
        self._passes = make_passes(config, layout)
        if self._environments is not None:
            self._sampler = EnvironmentSampler(self._sampler, self._environments, config, layout, ends=self._ends)
        elif self._tools is not None:
            self._sampler = ToolSampler(self._sampler, self._tools, config, layout, ends=self._ends)

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
        return step % self._config.steps_per_rollout == 0

    def state_arrays(self) -> dict[str, np.ndarray]:
        """See `BatchSource`."""
        return {} if self._next is None else self._next.to_arrays()

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """See `BatchSource`."""
        self._next = Rollout.from_arrays(arrays) if arrays else None

    def prepare(self, step: int, state: TrainState) -> SourceUpdate:
        """See `BatchSource`."""
        config, grpo, updates = self._config, self._grpo, self._config.steps_per_rollout
        _, layout = self._made
        number, done = divmod(step - 1, updates)
        each = [index for index in self._indices(number) for _ in range(grpo.num_generations)]
        rows = len(each)
        began = time.perf_counter()
        rollout = self._next if grpo.async_rollouts else None
        if rollout is None or (rollout.number, len(rollout.responses.num_B)) != (number, rows):
            rollout = self._generate(number, step - 1, state.params)
        # A checkpoint after an error in a reward contains these responses.
        self._next = rollout if grpo.async_rollouts else None
        responses = rollout.responses
        drawn = time.perf_counter()
        ids = self._prompt_ids(self._prompts, each, responses)
        # Before the thread starts, because all processes must run the programs of the devices in the same order.
        by_tokens = self._token_rewards(ids, responses, grpo.reward)
        with ThreadPoolExecutor(1, thread_name_prefix='rollout') as executor:
            has_next = grpo.async_rollouts and (number + 1) * updates < config.train.num_steps
            following = executor.submit(self._generate_next, number + 1 if has_next else None, step - 1, state.params)
            texts, tasks = self._texts(responses), [self._prompts.tasks[index] for index in each]
            scores = self._scores(self._prompts, texts, tasks, grpo.reward, by_tokens, responses)
            scored = time.perf_counter()
            if jax.process_count() > 1:
                # The collectives of the two threads must have the same order in all processes.
                wait([following])
            scores = gather_scores(scores, rows)
        found, of_sampling = fill_groups(
            ScoredRollout(each, responses, scores),
            lambda attempt: self._draw(number, attempt, step - 1, state.params),
            grpo,
        )
        each, responses, rewards_N = found.prompts, found.responses, found.scores.rewards
        ids = self._prompt_ids(self._prompts, each, responses)
        batch = response_rows(config, ids, responses)
        if self._passes is not None:
            batch |= self._passes(state, batch)
        batch, of_advantages = with_advantages(config, batch, rewards_N, found.scores.used)
        trained, self._next = following.result()
        local = layout.local_rows(config.train.global_batch_size)
        for order in step_rows(config, number, rows)[done:]:
            self._batches.append({name: values[order[local]] for name, values in batch.items()})
        metrics = {
            **scores.metrics(grpo),
            'rollout/mean_length': float(responses.num_B.mean()),
            'rollout/clipped_ratio': 1 - float(responses.ended_B.mean()),
            'rollout/entropy': float(-responses.log_probs_BR.sum() / responses.drawn),
            'rollout/tokens_per_second': rollout.responses.drawn / (rollout.ended - rollout.began),
            'rollout/reward_seconds': scored - drawn,
            **tool_metrics(responses),
            **of_sampling,
            **of_advantages,
            **environment_metrics(responses),
            'rollout/epoch': (number + 1) * grpo.prompts_per_rollout / self._prompts.num_prompts,
        }
        if grpo.async_rollouts:
            ended = self._next.ended if self._next else trained
            metrics |= {
                'rollout/hidden_reward_seconds': max(0.0, min(scored, ended) - drawn),
                'rollout/wait_seconds': drawn - began + max(0.0, ended - max(scored, trained)),
                'rollout/staleness': float(step - 1 - rollout.step),
            }
        text = (
            f'{rows} responses to {grpo.prompts_per_rollout} prompts: reward {metrics["rollout/reward"]:.3f}, '
            f'{metrics["rollout/frac_reward_zero_std"]:.0%} of groups with equal rewards, '
            f'mean length {metrics["rollout/mean_length"]:.1f} tokens, '
            f'{metrics["rollout/tokens_per_second"]:,.0f} tokens/s'
        )
        shown = self._texts(responses._replace(tools=None))
        samples = [
            Sample(self.tokenizer.decode(ids[row].tolist()), f'{shown[row]} (reward {rewards_N[row]:.2f})')
            for row in range(SHOWN)
        ]
        return SourceUpdate(metrics, text, samples, overlap=trained - drawn)

    def evaluate(self, state: TrainState) -> Evaluation:
        """Evaluates the greedy response to each prompt, and sampled responses if the config requests them."""
        assert self._eval_prompts, 'eval.interval is refused without them'
        sampler, _ = self._made
        config, grpo, params = self._config, self._grpo, evaluated_params(state)
        prompts, num = self._eval_prompts, self._eval_prompts.num_prompts
        num = min(grpo.eval_num_prompts or num, num)
        starts, tasks = self._inputs(prompts, range(num), first=None), prompts.tasks[:num]
        reward, rows = grpo.eval_reward or grpo.reward, config.train.global_batch_size
        likeliest = sampler(params, starts, seed=config.train.seed, temperature=0.0, rows_per_run=rows)
        texts = self._texts(likeliest)
        ids = self._prompt_ids(prompts, range(num), likeliest)
        by_tokens = self._token_rewards(ids, likeliest, reward)
        scores = self._all_scores(prompts, texts, tasks, reward, by_tokens, likeliest)
        by_model = MODEL_SCORE in by_tokens
        rewards_N, has_mean = scores.rewards, by_model or self._environments is not None
        parts = {'reward': float(rewards_N[scores.used].mean())} if has_mean else {}
        # A score of a reward model does not say whether a response is correct.
        parts |= {} if by_model else {'accuracy': accuracy(rewards_N)}
        parts, tokens = {**parts, 'length': float(likeliest.num_B.mean())}, likeliest.drawn
        if samples := grpo.eval_num_generations:
            # A fixed seed, so that evaluations differ only because of the model.
            drawn = sampler(
                params, starts, seed=config.train.seed ^ 1, num_samples=samples, rows_per_run=max(rows, samples)
            )
            each = [task for task in tasks for _ in range(samples)]
            by_tokens = self._token_rewards((), drawn, reward)
            drawn_N = self._all_scores(prompts, self._texts(drawn), each, reward, by_tokens, drawn).rewards
            parts['pass_at_1'] = accuracy(drawn_N)
            parts['pass_at_k'] = mean_pass_at_k(drawn_N.reshape(-1, samples), samples)
            tokens += drawn.drawn
        if self._environments is not None:
            texts = self._texts(likeliest._replace(tools=None))
        if has_mean:
            texts = [f'{text} (reward {value:.2f})' for text, value in zip(texts, rewards_N, strict=True)]
        self._samples = [
            Sample(self.tokenizer.decode(ids[row].tolist()), texts[row])
            for row in range(min(config.eval.num_samples, num))
        ]
        loss = -parts['reward'] if has_mean else 1 - parts['accuracy']
        return Evaluation(loss, tokens, [], [], parts)

    def sample(self, params: Params) -> list[Sample]:
        """Returns the samples of the last evaluation."""
        del params
        return self._samples

    @property
    def _made(self) -> tuple[Sampler | ToolSampler | EnvironmentSampler, Layout]:
        """Returns the objects created by `open`."""
        assert self._sampler is not None
        assert self._layout is not None
        return self._sampler, self._layout

    def _indices(self, number: int, attempt: int = 0) -> list[int]:
        """Returns the indices of the prompts of a rollout. Each attempt has an order of its own."""
        return self._prompts.indices(number, self._grpo.prompts_per_rollout, self._config.data.seed ^ attempt)

    def _draw(self, number: int, attempt: int, step: int, params: Params) -> ScoredRollout:
        """Generates and scores the responses of a further attempt of dynamic sampling."""
        responses = self._generate(number, step, params, attempt).responses
        each = [index for index in self._indices(number, attempt) for _ in range(self._grpo.num_generations)]
        ids, reward = self._prompt_ids(self._prompts, each, responses), self._grpo.reward
        by_tokens, tasks = self._token_rewards(ids, responses, reward), [self._prompts.tasks[index] for index in each]
        texts = self._texts(responses)
        return ScoredRollout(
            each, responses, self._all_scores(self._prompts, texts, tasks, reward, by_tokens, responses)
        )

    def _generate(self, number: int, step: int, params: Params, attempt: int = 0) -> Rollout:
        """Generates the responses of a rollout with the parameters after `step` updates."""
        sampler, _ = self._made
        began = time.perf_counter()
        responses = sampler(
            params,
            self._inputs(
                self._prompts,
                self._indices(number, attempt),
                first=number * self._grpo.prompts_per_rollout,
                attempt=attempt,
            ),
            # The lowest bit distinguishes evaluations.
            seed=self._config.train.seed ^ (attempt << 1),
            first_row=number * self._grpo.prompts_per_rollout * self._grpo.num_generations,
            num_samples=self._grpo.num_generations,
        )
        return Rollout(number, step, responses, began, time.perf_counter())

    def _generate_next(self, number: int | None, step: int, params: Params) -> tuple[float, Rollout | None]:
        """Waits for the parameters, and generates the rollout `number`; None generates none.

        Returns:
            The time at which the parameters were ready, and the rollout.
        """
        jax.block_until_ready(params)
        trained = time.perf_counter()
        return trained, None if number is None else self._generate(number, step, params)

    def _inputs(self, prompts: Prompts, indices: Sequence[int], *, first: int | None, attempt: int = 0) -> Any:
        """Returns the inputs of the sampler; `first` is the position of the first one in training, None = eval."""
        if self._environments is None:
            return [prompts.ids[index].tolist() for index in indices]
        tasks, seed = [prompts.tasks[index] for index in indices], self._config.data.seed ^ attempt
        return seeded_examples(tasks, seed=seed, first=first or 0, is_evaluation=first is None)

    def _prompt_ids(self, prompts: Prompts, indices: Sequence[int], responses: Responses) -> Sequence[np.ndarray]:
        if responses.environment is not None:
            return responses.environment.prompts
        return [prompts.ids[index] for index in indices]

    def _texts(self, responses: Responses) -> list[str]:
        lengths = responses.num_B - responses.ended_B
        return [
            self.tokenizer.decode(row[start:length].tolist())
            for row, start, length in zip(responses.tokens_BR, responses.last_turns, lengths, strict=True)
        ]

    def _token_rewards(self, prompts: Sequence[np.ndarray], responses: Responses, reward: str) -> TokenRewards:
        return token_rewards(reward, prompts, responses, grpo=self._grpo, reward_model=self._reward_model)

    def _scores(
        self,
        prompts: Prompts,
        texts: Sequence[str],
        tasks: Sequence[Task],
        reward: str,
        by_tokens: TokenRewards,
        responses: Responses,
    ) -> Scores:
        """Scores the responses in `scored_rows`. InputError if a reward of the user fails; it names the prompt."""
        mine = scored_rows(len(texts))
        if responses.environment is not None:
            return jax.tree.map(lambda values: values[mine], responses.environment.scores)
        mine_by_tokens = {name: values[mine] for name, values in by_tokens.items()}
        try:
            return self._scorer.score(texts[mine], tasks[mine], reward=reward, by_tokens=mine_by_tokens)
        except UserRewardError as error:
            raise InputError(f'{prompts.location_of(error.task)}: {error}') from error

    def _all_scores(self, prompts: Prompts, texts: Sequence[str], *arguments: Any) -> Scores:
        """Returns the scores of all responses, see `_scores`."""
        return gather_scores(self._scores(prompts, texts, *arguments), len(texts))
