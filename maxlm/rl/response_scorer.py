"""Scores the responses of rollouts and evaluations by their texts, tokens and environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.rl.generation.responses import Responses
from maxlm.rl.pending_rollouts import ScoringJob
from maxlm.rl.reward_model import RewardModel
from maxlm.rl.rewards.prompts import Prompts
from maxlm.rl.rewards.rewards import UserRewardError
from maxlm.rl.rewards.scorer import RewardScorer, Scores
from maxlm.rl.rollout_batch import gather_scores, scored_rows
from maxlm.rl.token_rewards import TokenRewards, token_rewards


class ResponseScorer:
    """Scores responses to prompts."""

    def __init__(self, scorer: RewardScorer, tokenizer: Tokenizer, grpo: GrpoConfig, reward_model: RewardModel | None):
        """
        Args:
            scorer: scorer of texts.
            tokenizer: tokenizer of the model.
            grpo: section `grpo` of the config.
            reward_model: reward model of `grpo.reward_model`.
        """
        self._scorer, self._tokenizer, self._grpo, self._reward_model = scorer, tokenizer, grpo, reward_model

    @staticmethod
    def prompt_ids(prompts: Prompts, indices: Sequence[int], responses: Responses) -> Sequence[np.ndarray]:
        """Returns the token ids of the prompt of each response; `indices` are those of the prompts."""
        if responses.environment is not None:
            return responses.environment.prompts
        return [prompts.ids[index] for index in indices]

    def texts(self, responses: Responses) -> list[str]:
        """Returns the text of the last turn of each response."""
        lengths = responses.num_B - responses.ended_B
        return [
            self._tokenizer.decode(row[start:length].tolist())
            for row, start, length in zip(responses.tokens_BR, responses.last_turns, lengths, strict=True)
        ]

    def token_rewards(self, prompts: Sequence[np.ndarray], responses: Responses, reward: str) -> TokenRewards:
        """Returns the rewards of the sum `reward` that depend on tokens."""
        return token_rewards(reward, prompts, responses, grpo=self._grpo, reward_model=self._reward_model)

    def job(self, prompts: Prompts, indices: Sequence[int], responses: Responses) -> ScoringJob:
        """Returns a job that scores responses with `grpo.reward`. Its rewards by tokens are computed before."""
        # In the main thread, because all processes must run the programs of the devices in the same order.
        by_tokens = self.token_rewards(self.prompt_ids(prompts, indices, responses), responses, self._grpo.reward)
        return self._job(prompts, indices, responses, self._grpo.reward, by_tokens)

    def scores(
        self,
        prompts: Prompts,
        indices: Sequence[int],
        responses: Responses,
        reward: str,
        by_tokens: TokenRewards,
    ) -> Scores:
        """Returns the scores of all responses.

        Raises:
            InputError: a reward of the user fails; the message names the prompt.
        """
        job = self._job(prompts, indices, responses, reward, by_tokens)
        return job.collect(job.run)

    def _job(
        self, prompts: Prompts, indices: Sequence[int], responses: Responses, reward: str, by_tokens: TokenRewards
    ) -> ScoringJob:
        mine = scored_rows(len(responses.num_B))
        texts, tasks = self.texts(responses)[mine], [prompts.tasks[index] for index in indices][mine]
        mine_by_tokens = {name: values[mine] for name, values in by_tokens.items()}

        def run() -> Scores:
            if responses.environment is not None:
                assert responses.environment.scores is not None
                return jax.tree.map(lambda values: values[mine], responses.environment.scores)
            try:
                return self._scorer.score(texts, tasks, reward=reward, by_tokens=mine_by_tokens)
            except UserRewardError as error:
                raise InputError(f'{prompts.location_of(error.task)}: {error}') from error

        def collect(wait: Callable[[], Scores]) -> Scores:
            return gather_scores(wait(), len(responses.num_B))

        return ScoringJob(run, collect)
