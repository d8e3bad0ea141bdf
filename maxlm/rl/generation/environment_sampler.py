"""Generates conversations with environments of `grpo.environment`.

The first process runs the environments and sends their messages to the others. All processes encode them, with the chat
template of the model, after the generated tokens, which are never encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from maxlm.config.schema import Config
from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.rl.environments.calls import allow_open_files
from maxlm.rl.environments.conversations import Conversations, SeededExample
from maxlm.rl.environments.first_process import run_in_first_process
from maxlm.rl.environments.loading import load_environment
from maxlm.rl.environments.protocol import Environment
from maxlm.rl.generation.conversation_rollout import ConversationRollout
from maxlm.rl.generation.responses import Responses
from maxlm.rl.generation.timed_environment import Stopwatch
from maxlm.rl.generation.turns import TurnSampler
from maxlm.rl.rewards.scorer import Scores
from maxlm.storage.json_text import parse_json
from maxlm.training.state import Params


class EnvironmentSampler:
    """A sampler whose prompts and replies come from environments, and whose responses have their scores."""

    def __init__(self, sampler: TurnSampler, environments: Environments, config: Config, *, stopwatch: Stopwatch):
        """
        Args:
            sampler: sampler of turns.
            environments: creates the environments and encodes their messages.
            config: resolved config of the run.
            stopwatch: receives the seconds for which `__call__` waits for environments.
        """
        self._sampler, self._environments = sampler, environments
        self._grpo, self._stopwatch = config.grpo, stopwatch
        self._max_prompt = config.data.seq_len - config.grpo.max_completion_length

    def __call__(self, params: Params, starts: Sequence[SeededExample], **sampling: Any) -> Responses:
        """Generates `num_samples` conversations for each start, see `Sampler` for its arguments.

        The environment ends a conversation, or one of these limits: `grpo.max_turns` turns of the model, a turn without
        end token, or messages of the environment that leave no token for the next turn.

        Raises:
            InputError: all conversations failed.
        """
        rollout = self.begin(starts, **sampling)
        try:
            while not rollout.is_generated:
                rollout.advance(self._timed(rollout.job), params)
            scores = rollout.scores(self._timed(rollout.job))
        except BaseException:
            # Ctrl-C, too.
            rollout.end()
            raise
        responses = rollout.responses
        assert responses.environment is not None
        return responses._replace(environment=responses.environment._replace(scores=scores))

    def begin(
        self,
        starts: Sequence[SeededExample],
        *,
        recorded: Responses | None = None,
        is_complete: bool = False,
        **sampling: Any,
    ) -> ConversationRollout:
        """Returns the conversations of `__call__` before the first call of an environment.

        Args:
            starts: example and seed of each group.
            recorded: conversations of a checkpoint, which are continued.
            is_complete: True if only their scores are missing.
            sampling: arguments of `Sampler` except the parameters and prompts.
        """
        num_samples = sampling.get('num_samples', 1)
        return ConversationRollout(
            Conversations(
                self._environments.create,
                [start for start in starts for _ in range(num_samples)],
                seconds=self._grpo.environment_timeout,
                max_turns=self._grpo.max_turns,
            ),
            partial(self._sampler.begin, recorded=recorded, **sampling),
            self._environments.encoder,
            self._grpo,
            num_samples=num_samples,
            max_prompt=self._max_prompt,
            recorded=recorded,
            is_complete=is_complete,
        )

    def _timed(self, function: Callable[[], Any]) -> Any:
        with self._stopwatch.running():
            return run_in_first_process(function)


class Environments:
    """Creates the environments of a config.

    Attributes:
        create: creates an environment.
        encoder: encoder of the messages.
    """

    def __init__(self, create: Callable[[], Environment], encoder: ChatEncoder):
        self.create, self.encoder = create, encoder

    @staticmethod
    def settings(grpo: GrpoConfig) -> list[Any]:
        """Returns the values of config keys that a resumed run must not change."""
        return [grpo.environment, parse_json(grpo.environment_args or '{}'), grpo.max_turns]


def open_environments(grpo: GrpoConfig, encoder: ChatEncoder | Tokenizer) -> Environments | None:
    """Returns the environments of a config; None without `grpo.environment`.

    Raises:
        InputError: the environment cannot be loaded, or the model has no chat template.
    """
    if not grpo.environment:
        return None
    if not isinstance(encoder, ChatEncoder):
        raise InputError(
            f'grpo.environment={grpo.environment}: the model has no chat template; start from a model trained on '
            'conversations'
        )
    allow_open_files()
    return Environments(load_environment(grpo), encoder)


def environment_metrics(responses: Responses, scores: Scores) -> dict[str, float]:
    """Returns metrics of conversations with environments and their scores; empty without them."""
    if responses.environment is None:
        return {}
    begins_BR = np.diff(responses.generated.astype(np.int8), axis=1, prepend=0) > 0
    return {
        'rollout/turns': float(begins_BR.sum(axis=1).mean()),
        'rollout/environment_failures': float((~scores.used).sum()),
    }


def seeded_examples(
    examples: Sequence[Mapping[str, Any]], *, seed: int, first: int = 0, is_evaluation: bool = False
) -> list[SeededExample]:
    """Returns examples with seeds that depend on `seed`, their position from `first` on, and their purpose."""
    return [
        SeededExample(example, int(np.random.SeedSequence([seed, first + index, is_evaluation]).generate_state(1)[0]))
        for index, example in enumerate(examples)
    ]
