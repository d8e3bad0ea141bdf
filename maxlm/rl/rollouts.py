"""GRPO rollouts: the model generates responses to prompts, which are scored by a reward and used for training.

In a rollout the current model generates several responses to each of some prompts. The next steps train on all of these
responses, `grpo.num_iterations` times. Prompts, random keys and order depend only on seeds and the step number, so a
resumed run repeats them exactly.

With `grpo.max_staleness` = k, rollout n + k is generated before the training on rollout n, and rollouts 1 to k before
that on rollout 0. The parameters that generate rollout n are therefore those after rollout n - k - 1, or the initial
ones, however long the rewards take. A thread scores the pending responses while the devices generate and train, see
`maxlm.rl.pending_rollouts`. Checkpoints contain these responses, so that a resumed run trains on the same ones. Rewards
of the user may need the main thread of a process for signals: with k = 0 they run in that of this process, and above
0 in that of a process of their own.

Shapes: N responses of a rollout (the responses to one prompt are consecutive), T length, R largest number of tokens of
a response.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.config.schema import Config
from maxlm.data.loader.windows import Batch
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.samples import Sample
from maxlm.evaluation.validation import Evaluation
from maxlm.parallel.layout import Layout
from maxlm.rl.dynamic_sampling import ScoredRollout, fill_groups
from maxlm.rl.generation.conversation_rollout import ConversationRollout
from maxlm.rl.generation.environment_sampler import Environments, EnvironmentSampler, seeded_examples
from maxlm.rl.generation.rollout_generator import Sampler
from maxlm.rl.generation.timed_environment import Stopwatch, TimedEnvironment
from maxlm.rl.generation.tool_environment import ToolEnvironment
from maxlm.rl.generation.tool_sampler import ToolSampler
from maxlm.rl.generation.turns import TurnSampler
from maxlm.rl.ongoing_conversations import OngoingConversations
from maxlm.rl.pending_rollouts import PendingRollouts
from maxlm.rl.response_scorer import ResponseScorer
from maxlm.rl.reward_model import RewardModel
from maxlm.rl.rewards.prompts import Prompts
from maxlm.rl.rewards.rewards import MODEL_SCORE, parse_reward
from maxlm.rl.rewards.scorer import RewardScorer, accuracy, mean_pass_at_k
from maxlm.rl.rollout_batch import make_passes, response_rows, step_rows, with_advantages
from maxlm.rl.rollout_fingerprint import rollout_fingerprint
from maxlm.rl.rollout_metrics import Seconds, rollout_metrics, rollout_text
from maxlm.rl.rollout_state import Rollout
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
        self._reward_model = reward_model
        self.tokenizer_path = tokenizer_path
        self.tokenizer = Tokenizer.load(tokenizer_path)
        self._scorer = ResponseScorer(scorer, self.tokenizer, self._grpo, reward_model)
        self._ends, self._tools, self._environments = tuple(ends), tools, environments
        self.windows_per_epoch: int | None = (
            prompts.num_prompts * self._grpo.num_generations * self._grpo.num_iterations
        )
        self._batches: deque[Batch] = deque()
        self._layout: Layout | None = None
        self._sampler: Sampler | ToolSampler | EnvironmentSampler | None = None
        self._passes: Callable[[TrainState, Batch], Batch] | None = None
        self._pending = PendingRollouts(in_background=self._grpo.max_staleness > 0)
        self._waits, self._environment_work = Stopwatch(), Stopwatch()
        self._ongoing: OngoingConversations | None = None
        self._samples: list[Sample] = []

    def close(self) -> None:
        """Computes no more rewards, and does not wait for those of the current rollout."""
        self._pending.close()
        if self._ongoing is not None:
            self._ongoing.close()

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
        if self._environments is None and self._tools is None:
            return
        turns = TurnSampler(self._sampler, config, layout, ends=self._ends)
        if self._tools is not None:
            self._sampler = ToolSampler(turns, TimedEnvironment(self._tools, self._waits))
        if self._environments is None:
            return
        self._sampler = EnvironmentSampler(turns, self._environments, config, stopwatch=self._waits)
        if ahead := self._grpo.max_staleness:
            self._ongoing = OngoingConversations(
                self._pending, self._begin, ahead=ahead, waits=self._waits, work=self._environment_work
            )

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
        return self._pending.to_arrays()

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """See `BatchSource`."""
        self._pending.load_arrays(arrays, list(parse_reward(self._grpo.reward, is_imported=False).weights))

    def prepare(self, step: int, state: TrainState) -> SourceUpdate:
        """See `BatchSource`."""
        config, grpo, updates = self._config, self._grpo, self._config.steps_per_rollout
        _, layout = self._made
        number, done = divmod(step - 1, updates)
        tool_seconds, work_seconds = self._waits.seconds, self._environment_work.seconds
        self._generate_ahead(number, step - 1, state.params)
        waited = time.perf_counter()
        rollout, scores, reward_seconds = self._pending.first()
        waited = time.perf_counter() - waited
        each = self._rows(number)
        more_generation, more_scoring = Stopwatch(), Stopwatch()
        found, of_sampling = fill_groups(
            ScoredRollout(each, rollout.responses, scores),
            lambda attempt: self._draw(number, attempt, step - 1, state.params, more_generation, more_scoring),
            grpo,
        )
        each, responses, rewards_N = found.prompts, found.responses, found.scores.rewards
        ids = self._scorer.prompt_ids(self._prompts, each, responses)
        batch = response_rows(config, ids, responses)
        if self._passes is not None:
            batch |= self._passes(state, batch)
        batch, of_advantages = with_advantages(config, batch, rewards_N, found.scores.used)
        self._pending.remove_first()
        local = layout.local_rows(config.train.global_batch_size)
        for order in step_rows(config, number, len(each))[done:]:
            self._batches.append({name: values[order[local]] for name, values in batch.items()})
        tool_seconds, waited = self._waits.seconds - tool_seconds, waited + more_scoring.seconds
        seconds = Seconds(
            generating=rollout.seconds + more_generation.seconds,
            scoring=reward_seconds + more_scoring.seconds,
            waiting_for_rewards=waited,
            waiting_for_tools=tool_seconds,
            environments=self._environment_work.seconds - work_seconds,
        )
        metrics = {
            **rollout_metrics(rollout, scores, grpo, seconds, step=step, trained=found),
            **of_sampling,
            **of_advantages,
            'rollout/epoch': (number + 1) * grpo.prompts_per_rollout / self._prompts.num_prompts,
        }
        shown = self._scorer.texts(responses._replace(tools=None))
        samples = [
            Sample(self.tokenizer.decode(ids[row].tolist()), f'{shown[row]} (reward {rewards_N[row]:.2f})')
            for row in range(min(SHOWN, len(each)))
        ]
        waits = {'reward_wait': waited, 'tool_wait': tool_seconds}
        return SourceUpdate(metrics, rollout_text(metrics, len(each), grpo), samples, waits)

    def evaluate(self, state: TrainState) -> Evaluation:
        """Evaluates the greedy response to each prompt, and sampled responses if the config requests them."""
        assert self._eval_prompts, 'eval.interval is refused without them'
        sampler, _ = self._made
        config, grpo, params = self._config, self._grpo, evaluated_params(state)
        prompts, num = self._eval_prompts, self._eval_prompts.num_prompts
        num = min(grpo.eval_num_prompts or num, num)
        starts = self._inputs(prompts, range(num), first=None)
        reward, rows = grpo.eval_reward or grpo.reward, config.train.global_batch_size
        likeliest = sampler(params, starts, seed=config.train.seed, temperature=0.0, rows_per_run=rows)
        texts = self._scorer.texts(likeliest)
        ids = self._scorer.prompt_ids(prompts, range(num), likeliest)
        by_tokens = self._scorer.token_rewards(ids, likeliest, reward)
        scores = self._scorer.scores(prompts, range(num), likeliest, reward, by_tokens)
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
            each = [index for index in range(num) for _ in range(samples)]
            by_tokens = self._scorer.token_rewards((), drawn, reward)
            drawn_N = self._scorer.scores(prompts, each, drawn, reward, by_tokens).rewards
            parts['pass_at_1'] = accuracy(drawn_N)
            parts['pass_at_k'] = mean_pass_at_k(drawn_N.reshape(-1, samples), samples)
            tokens += drawn.drawn
        if self._environments is not None:
            texts = self._scorer.texts(likeliest._replace(tools=None))
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

    def _rows(self, number: int, attempt: int = 0) -> list[int]:
        """Returns the index of the prompt of each response of a rollout."""
        return [index for index in self._indices(number, attempt) for _ in range(self._grpo.num_generations)]

    def _draw(
        self, number: int, attempt: int, step: int, params: Params, generation: Stopwatch, scoring: Stopwatch
    ) -> ScoredRollout:
        """Generates and scores the responses of a further attempt of dynamic sampling."""
        rollout = self._generate(number, step, params, attempt)
        generation.seconds += rollout.seconds
        each = self._rows(number, attempt)
        job = self._scorer.job(self._prompts, each, rollout.responses)
        with scoring.running():
            scores = job.run()
        return ScoredRollout(each, rollout.responses, job.collect(lambda: scores))

    def _generate_ahead(self, number: int, step: int, params: Params) -> None:
        """Generates the missing rollouts up to `number` + max_staleness, and lets all pending ones be scored."""
        updates, ahead = self._config.steps_per_rollout, self._grpo.max_staleness
        # The last rollout that is trained on; a longer run generates the later ones when it continues.
        last = (self._config.train.num_steps - 1) // updates
        numbers = range(number, min(number + ahead, last) + 1)
        # Without `max_staleness`, no conversations continue.
        lost = [one.number for one in self._pending.unscored if one.responses.environment is not None and not ahead]
        # The checkpoint may be that of a run with a higher limit, or of one that ended within a rollout.
        self._pending.keep(
            {*numbers}.difference(lost), lambda rollout: rollout.number * updates - rollout.step <= ahead * updates
        )
        if self._ongoing is not None:
            self._ongoing.generate(number, last, step, params)
            return
        for restored in self._pending.unscored:
            self._start_scoring(restored)
        for missing in sorted({*numbers} - {*self._pending.numbers}):
            rollout = self._generate(missing, step, params)
            self._pending.add(rollout)
            self._start_scoring(rollout)

    def _generate(self, number: int, step: int, params: Params, attempt: int = 0) -> Rollout:
        """Generates the responses of a rollout with the parameters after `step` updates."""
        sampler, _ = self._made
        began, waited = time.perf_counter(), self._waits.seconds
        responses = sampler(params, self._starts(number, attempt), **self._sampling(number, attempt))
        return Rollout(number, step, responses, time.perf_counter() - began - (self._waits.seconds - waited))

    def _begin(self, number: int, restored: Rollout | None) -> ConversationRollout:
        """Begins or continues the conversations of a rollout."""
        sampler, _ = self._made
        assert isinstance(sampler, EnvironmentSampler)
        return sampler.begin(
            self._starts(number),
            recorded=restored.responses if restored else None,
            is_complete=restored is not None and restored.is_complete,
            **self._sampling(number),
        )

    def _starts(self, number: int, attempt: int = 0) -> Any:
        first = number * self._grpo.prompts_per_rollout
        return self._inputs(self._prompts, self._indices(number, attempt), first=first, attempt=attempt)

    def _sampling(self, number: int, attempt: int = 0) -> dict[str, Any]:
        """Returns the arguments of the sampler for a rollout."""
        return {
            # The lowest bit distinguishes evaluations.
            'seed': self._config.train.seed ^ (attempt << 1),
            'first_row': number * self._grpo.prompts_per_rollout * self._grpo.num_generations,
            'num_samples': self._grpo.num_generations,
        }

    def _start_scoring(self, rollout: Rollout) -> None:
        """Lets the rewards be computed."""
        job = self._scorer.job(self._prompts, self._rows(rollout.number), rollout.responses)
        self._pending.score(rollout.number, job)

    def _inputs(self, prompts: Prompts, indices: Sequence[int], *, first: int | None, attempt: int = 0) -> Any:
        """Returns the inputs of the sampler; `first` is the position of the first one in training, None = eval."""
        if self._environments is None:
            return [prompts.ids[index].tolist() for index in indices]
        tasks, seed = [prompts.tasks[index] for index in indices], self._config.data.seed ^ attempt
        return seeded_examples(tasks, seed=seed, first=first or 0, is_evaluation=first is None)
