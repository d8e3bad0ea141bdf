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

from maxlm.checkpoint.manager import find_step
from maxlm.config.schema import Config
from maxlm.config.validation_rl import check_grpo
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.loader.shuffle import VERSION
from maxlm.data.loader.windows import Batch
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.samples import Sample
from maxlm.evaluation.validation import Evaluation
from maxlm.parallel.layout import Layout
from maxlm.rl.pending_rollouts import PendingRollouts
from maxlm.rl.reward_model import RewardModel, open_reward_model
from maxlm.rl.rewards.open_functions import open_functions, open_reward_process
from maxlm.rl.rewards.prompts import Prompts, load_encoder, read_prompts
from maxlm.rl.rewards.rewards import Task, UserRewardError, parse_reward
from maxlm.rl.rewards.scorer import RewardScorer, Scores, accuracy, check_tasks, mean_pass_at_k
from maxlm.rl.rollout_batch import gather_scores, make_proximal, response_batch, scored_rows, step_rows
from maxlm.rl.rollout_generator import Responses, Sampler
from maxlm.rl.rollout_metrics import Seconds, rollout_metrics, rollout_text
from maxlm.rl.rollout_state import Rollout
from maxlm.rl.timed_environment import Stopwatch, TimedEnvironment
from maxlm.rl.tool_environment import ToolEnvironment, open_tools
from maxlm.rl.tool_sampler import ToolSampler
from maxlm.trainer.batch_source import BatchSource, SourceUpdate
from maxlm.trainer.checkpointing import INIT_FROM
from maxlm.training.batch import PROXIMAL
from maxlm.training.decisions.run_control import RunControl
from maxlm.training.state import Params, TrainState, evaluated_params
from maxlm.workdir.files import TOKENIZER

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
        """
        self._config, self._grpo = config, config.grpo
        self._prompts, self._eval_prompts = prompts, eval_prompts
        self._scorer, self._reward_model = scorer, reward_model
        self.tokenizer_path = tokenizer_path
        self.tokenizer = Tokenizer.load(tokenizer_path)
        self._ends, self._tools = tuple(ends), tools
        self.windows_per_epoch: int | None = (
            prompts.num_prompts * self._grpo.num_generations * self._grpo.num_iterations
        )
        self._batches: deque[Batch] = deque()
        self._layout: Layout | None = None
        self._sampler: Sampler | ToolSampler | None = None
        self._proximal: Callable[[Params, Batch], np.ndarray] | None = None
        self._pending = PendingRollouts(in_background=self._grpo.max_staleness > 0)
        self._waits = Stopwatch()
        self._samples: list[Sample] = []

    def close(self) -> None:
        """Computes no more rewards, and does not wait for those of the current rollout."""
        self._pending.close()

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
            **({'grpo.tools': list(self._grpo.tools)} if self._grpo.tools else {}),
            **({'grpo.reward_model': self._reward_model.checksum} if self._reward_model else {}),
        }

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
        if config.has_proximal:
            self._proximal = make_proximal(config, layout)
        if self._tools is not None:
            self._sampler = ToolSampler(
                self._sampler, TimedEnvironment(self._tools, self._waits), config, layout, ends=self._ends
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
        tool_seconds = self._generate_ahead(number, step - 1, state.params)
        waited = time.perf_counter()
        rollout, scores, reward_seconds = self._pending.first()
        waited = time.perf_counter() - waited
        each, responses, rewards_N = self._rows(number), rollout.responses, scores.rewards
        rows = len(each)
        batch = response_batch(config, [self._prompts.ids[index] for index in each], responses, rewards_N)
        if self._proximal is not None:
            batch[PROXIMAL] = self._proximal(state.params, batch)
        self._pending.remove_first()
        local = layout.local_rows(config.train.global_batch_size)
        for order in step_rows(config, number, rows)[done:]:
            self._batches.append({name: values[order[local]] for name, values in batch.items()})
        seconds = Seconds(reward_seconds, waited, tool_seconds)
        metrics = {
            **rollout_metrics(rollout, scores, grpo, seconds, step=step),
            'rollout/epoch': (number + 1) * grpo.prompts_per_rollout / self._prompts.num_prompts,
        }
        shown = self._texts(responses._replace(tools=None))
        samples = [
            Sample(self._prompt_text(self._prompts, each[row]), f'{shown[row]} (reward {rewards_N[row]:.2f})')
            for row in range(SHOWN)
        ]
        return SourceUpdate(metrics, rollout_text(metrics, rows, grpo), samples, waited=waited + tool_seconds)

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
        model_scores = self._model_scores(prompts.ids[:num], likeliest, reward)
        rewards_N = self._rewards(prompts, texts, tasks, reward, model_scores)
        # A score of a reward model does not say whether a response is correct.
        parts = {'reward': float(rewards_N.mean())} if len(model_scores) else {'accuracy': accuracy(rewards_N)}
        parts, tokens = {**parts, 'length': float(likeliest.num_B.mean())}, likeliest.drawn
        if samples := grpo.eval_num_generations:
            # A fixed seed, so that evaluations differ only because of the model.
            drawn = sampler(
                params, ids, seed=config.train.seed ^ 1, num_samples=samples, rows_per_run=max(rows, samples)
            )
            each = [task for task in tasks for _ in range(samples)]
            rewards_N = self._rewards(prompts, self._texts(drawn), each, reward, ())
            parts['pass_at_1'] = accuracy(rewards_N)
            parts['pass_at_k'] = mean_pass_at_k(rewards_N.reshape(-1, samples), samples)
            tokens += drawn.drawn
        if len(model_scores):
            texts = [f'{text} (reward {value:.2f})' for text, value in zip(texts, rewards_N, strict=True)]
        self._samples = [
            Sample(self._prompt_text(prompts, row), texts[row]) for row in range(min(config.eval.num_samples, num))
        ]
        loss = -parts['reward'] if len(model_scores) else 1 - parts['accuracy']
        return Evaluation(loss, tokens, [], [], parts)

    def sample(self, params: Params) -> list[Sample]:
        """Returns the samples of the last evaluation."""
        del params
        return self._samples

    @property
    def _made(self) -> tuple[Sampler | ToolSampler, Layout]:
        """Returns the objects created by `open`."""
        assert self._sampler is not None
        assert self._layout is not None
        return self._sampler, self._layout

    def _indices(self, number: int) -> list[int]:
        """Returns the indices of the prompts of a rollout."""
        return self._prompts.indices(number, self._grpo.prompts_per_rollout, self._config.data.seed)

    def _rows(self, number: int) -> list[int]:
        """Returns the index of the prompt of each response of a rollout."""
        return [index for index in self._indices(number) for _ in range(self._grpo.num_generations)]

    def _generate_ahead(self, number: int, step: int, params: Params) -> float:
        """Generates the rollouts up to `number` + max_staleness that are missing, and lets all pending ones be scored.

        Returns:
            Seconds of waits for tools.
        """
        updates, ahead = self._config.steps_per_rollout, self._grpo.max_staleness
        # The last rollout that is trained on; a longer run generates the later ones when it continues.
        last = min(number + ahead, (self._config.train.num_steps - 1) // updates)
        numbers = range(number, last + 1)
        # The checkpoint may be that of a run with a higher limit, or of one that ended within a rollout.
        self._pending.keep(numbers, lambda rollout: rollout.number * updates - rollout.step <= ahead * updates)
        for restored in self._pending.unscored:
            self._start_scoring(restored)
        tool_seconds = self._waits.seconds
        for missing in sorted({*numbers} - {*self._pending.numbers}):
            rollout = self._generate(missing, step, params)
            self._pending.add(rollout)
            self._start_scoring(rollout)
        return self._waits.seconds - tool_seconds

    def _generate(self, number: int, step: int, params: Params) -> Rollout:
        """Generates the responses of a rollout with the parameters after `step` updates."""
        sampler, _ = self._made
        began, waited = time.perf_counter(), self._waits.seconds
        responses = sampler(
            params,
            [self._prompts.ids[index].tolist() for index in self._indices(number)],
            seed=self._config.train.seed,
            first_row=number * self._grpo.prompts_per_rollout * self._grpo.num_generations,
            num_samples=self._grpo.num_generations,
        )
        return Rollout(number, step, responses, time.perf_counter() - began - (self._waits.seconds - waited))

    def _start_scoring(self, rollout: Rollout) -> None:
        """Computes the scores of the reward model, and lets the other rewards be computed."""
        each, responses, reward = self._rows(rollout.number), rollout.responses, self._grpo.reward
        texts, tasks = self._texts(responses), [self._prompts.tasks[index] for index in each]
        # In the main thread, because all processes must run the programs of the devices in the same order.
        model_scores = self._model_scores([self._prompts.ids[index] for index in each], responses, reward)
        self._pending.score(rollout.number, lambda: self._scores(self._prompts, texts, tasks, reward, model_scores))

    def _prompt_text(self, prompts: Prompts, index: int) -> str:
        return self.tokenizer.decode(prompts.ids[index].tolist())

    def _texts(self, responses: Responses) -> list[str]:
        lengths = responses.num_B - responses.ended_B
        return [
            self.tokenizer.decode(row[start:length].tolist())
            for row, start, length in zip(responses.tokens_BR, responses.last_turns, lengths, strict=True)
        ]

    def _model_scores(self, prompts: Sequence[np.ndarray], responses: Responses, reward: str) -> Sequence[float]:
        """Returns the score of each response by the reward model; () if the sum `reward` does not contain it."""
        if self._reward_model is None or not parse_reward(reward, is_imported=False).uses_model:
            return ()
        return self._reward_model(prompts, responses).tolist()

    def _scores(
        self, prompts: Prompts, texts: Sequence[str], tasks: Sequence[Task], reward: str, by_model: Sequence[float]
    ) -> Scores:
        """Scores the responses in `scored_rows`. InputError if a reward of the user fails; it names the prompt."""
        mine = scored_rows(len(texts))
        try:
            return self._scorer.score(texts[mine], tasks[mine], reward=reward, model_scores=by_model[mine])
        except UserRewardError as error:
            raise InputError(f'{prompts.location_of(error.task)}: {error}') from error

    def _rewards(
        self, prompts: Prompts, texts: Sequence[str], tasks: Sequence[Task], reward: str, by_model: Sequence[float]
    ) -> np.ndarray:
        """Returns the rewards of all responses, float32 [N]."""
        return gather_scores(self._scores(prompts, texts, tasks, reward, by_model), len(texts)).rewards


def open_rollouts(config: Config, stack: contextlib.ExitStack) -> tuple[RolloutBatches, int]:
    """Opens the rollouts of a config; see `maxlm.trainer.run.OpenSource`."""
    check_grpo(config)
    origin = Path(find_step(config.train.init_from, key=INIT_FROM)).parent.parent
    encoder = load_encoder(origin)
    tokenizer = encoder.tokenizer if isinstance(encoder, ChatEncoder) else encoder
    ends = {*tokenizer.boundaries.stops, *([encoder.end_of_turn] if isinstance(encoder, ChatEncoder) else [])}
    grpo = config.grpo
    eval_reward, reward_model = grpo.eval_reward or grpo.reward, open_reward_model(grpo, encoder)
    functions = open_functions(grpo, stack)
    reward_functions = open_reward_process(grpo, stack) or functions
    tools = open_tools(grpo, encoder, functions)

    def read(path: str, reward: str) -> Prompts:
        room = config.data.seq_len - grpo.max_completion_length
        prompts = read_prompts(path, encoder, room, tools=tools.schemas if tools else ())
        check_tasks(prompts, reward, reward_functions)
        return prompts

    prompts = read(grpo.prompts, grpo.reward)
    eval_prompts = read(grpo.eval_prompts, eval_reward) if config.eval.interval else None
    if grpo.prompts_per_rollout > prompts.num_prompts:
        raise InputError(
            f'grpo.prompts_per_rollout={grpo.prompts_per_rollout}: {grpo.prompts} has only '
            f'{prompts.num_prompts} prompts; use at most {prompts.num_prompts}'
        )
    scorer = stack.enter_context(RewardScorer(grpo.reward, eval_reward, functions=reward_functions))
    source = RolloutBatches(
        config,
        prompts=prompts,
        eval_prompts=eval_prompts,
        scorer=scorer,
        tokenizer_path=origin / TOKENIZER,
        ends=sorted(ends),
        tools=tools,
        reward_model=reward_model,
    )
    # Before the end of the sandbox and of the reward process, which ends the current job.
    stack.callback(source.close)
    return source, tokenizer.vocab_size
