"""Generates conversations with environments of `grpo.environment`.

The first process runs the environments and sends their messages to the others. All processes encode them, with the chat
template of the model, after the generated tokens, which are never encoded again. A conversation whose environment
misbehaves has failed; see `maxlm.rl.environments.conversations`.

Shapes: B rows, R maximum response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from maxlm.config.schema import Config
from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.jinja import ChatError
from maxlm.data.chat.tool_results import CALL_ID, encode_replies
from maxlm.data.documents.messages import Message
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError, one_line
from maxlm.inference.tool_calls import ToolCall, ToolCallParser
from maxlm.log import logger
from maxlm.parallel.layout import Layout
from maxlm.rl.environments.conversations import Conversations, SeededExample
from maxlm.rl.environments.first_process import run_in_first_process
from maxlm.rl.environments.loading import load_environment
from maxlm.rl.environments.protocol import Environment
from maxlm.rl.generation.responses import EnvironmentUse, Responses
from maxlm.rl.generation.rollout_generator import Sampler
from maxlm.rl.generation.timed_environment import Stopwatch
from maxlm.rl.generation.tool_environment import Reply
from maxlm.rl.generation.tool_sampler import ToolSampler
from maxlm.rl.rewards.scorer import Scores
from maxlm.storage.json_text import parse_json
from maxlm.training.state import Params

# Number of failures of a rollout that are logged.
SHOWN_FAILURES = 3


class EnvironmentSampler:
    """A sampler whose prompts and replies come from environments, and whose responses have their scores."""

    def __init__(
        self,
        sampler: Sampler,
        environments: Environments,
        config: Config,
        layout: Layout,
        *,
        ends: Sequence[int],
        stopwatch: Stopwatch,
    ):
        """Initializes the sampler.

        Args:
            sampler: sampler of the first turns.
            environments: creates the environments and encodes their messages.
            config: resolved config of the run.
            layout: layout of the parameters.
            ends: token ids that end a turn.
            stopwatch: receives the seconds of the environments.
        """
        self._environments, self._grpo, self._stopwatch = environments, config.grpo, stopwatch
        self._max_prompt = config.data.seq_len - config.grpo.max_completion_length
        self._turns = ToolSampler(sampler, self, config, layout, ends=ends)
        # The conversations of the last call, one per row.
        self._conversations: Conversations | None = None
        self._failures: dict[int, str] = {}
        self._tools: dict[int, list[Any]] = {}
        self._num_calls: dict[int, int] = {}

    def __call__(
        self,
        params: Params,
        starts: Sequence[SeededExample],
        *,
        seed: int,
        first_row: int = 0,
        num_samples: int = 1,
        temperature: float = 1.0,
        rows_per_run: int = 0,
    ) -> Responses:
        """Generates `num_samples` conversations for each start, see `Sampler`.

        The environment ends a conversation, or one of these limits: `grpo.max_turns` turns of the model, a turn without
        end token, or messages of the environment that leave no token for the next turn.

        Raises:
            InputError: all conversations failed.
        """
        rows = [start for start in starts for _ in range(num_samples)]
        # Only the first process uses it.
        self._conversations = conversations = Conversations(
            self._environments.create,
            rows,
            seconds=self._grpo.environment_timeout,
            max_turns=self._grpo.max_turns,
        )
        self._failures, self._tools, self._num_calls = {}, {}, {}
        prompts = self._prompts(self._timed(conversations.open), num_samples)
        responses = self._turns(
            params,
            prompts,
            seed=seed,
            first_row=first_row,
            num_samples=num_samples,
            temperature=temperature,
            rows_per_run=rows_per_run,
        )
        scores = self._scores(responses)
        ids = tuple(np.asarray(prompt, np.uint32) for prompt in prompts for _ in range(num_samples))
        return responses._replace(environment=EnvironmentUse(ids, scores))

    def replies(
        self, rows: Sequence[int], turns: Sequence[Sequence[int]], max_calls: Sequence[int]
    ) -> list[Reply | None]:
        """See `maxlm.rl.generation.tool_environment.TurnReplies`. `grpo.max_turns` is the only limit on replies."""
        del max_calls
        messages = {
            row: self._message(row, turn) for row, turn in zip(rows, turns, strict=True) if row not in self._failures
        }
        conversations = self._conversations
        assert conversations is not None, 'replies are part of a call'
        # JSON has no integers as names.
        found = self._timed(lambda: list(conversations.step(messages).items()))
        answers = {row: answer for row, answer in found if answer is not None}
        return [
            self._reply(row, messages[row], turn, answers[row]) if row in answers else None
            for row, turn in zip(rows, turns, strict=True)
        ]

    def _timed(self, function: Callable[[], Any]) -> Any:
        with self._stopwatch.running():
            return run_in_first_process(function)

    def _prompts(self, opened: Sequence[Mapping[str, Any]], num_samples: int) -> list[list[int]]:
        """Returns the prompt of each group; other prompts of the same group are failures."""
        prompts = []
        for first in range(0, len(opened), num_samples):
            prompt: list[int] | None = None
            for row in range(first, first + num_samples):
                one = opened[row]
                ids = None if 'failure' in one else self._prompt(row, one)
                if ids is None:
                    self._fail(row, one.get('failure', ''))
                elif prompt is None:
                    prompt = ids
                elif ids != prompt:
                    self._fail(row, 'reset returned other messages than for the same example and seed before')
            # Failed conversations generate a response that is not used.
            prompts.append(prompt or [self._environments.encoder.end_of_turn])
        return prompts

    def _prompt(self, row: int, opened: Mapping[str, Any]) -> list[int] | None:
        self._tools[row] = opened['tools']
        try:
            ids = self._environments.encoder.encode_prompt(opened['messages'], tools=opened['tools']).tolist()
        except (ChatError, InputError) as error:
            self._fail(row, f'reset returned messages that cannot be encoded: {error}')
            return None
        if len(ids) > self._max_prompt:
            self._fail(
                row,
                f'reset returned {len(ids)} tokens; at most data.seq_len - grpo.max_completion_length = '
                f'{self._max_prompt} are allowed',
            )
            return None
        return ids

    def _message(self, row: int, turn: Sequence[int], *, is_ended: bool = True) -> Message:
        """Returns a turn of the model as a message, with calls of tools as in OpenAI's API."""
        text = self._environments.encoder.tokenizer.decode(list(turn[:-1] if is_ended else turn))
        if not self._tools.get(row) or not is_ended:
            return {'role': 'assistant', 'content': text}
        pieces = ToolCallParser().feed(text, is_last=True)
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        if not calls:
            return {'role': 'assistant', 'content': text}
        first = self._num_calls.get(row, 0)
        self._num_calls[row] = first + len(calls)
        numbered = [call._replace(id=CALL_ID.format(index)).fields for index, call in enumerate(calls, start=first)]
        content = ''.join(piece for piece in pieces if isinstance(piece, str))
        return {'role': 'assistant', 'content': content, 'tool_calls': numbered}

    def _reply(self, row: int, message: Message, turn: Sequence[int], answer: Sequence[Message]) -> Reply | None:
        encoder = self._environments.encoder
        if turn[-1] != encoder.end_of_turn:
            # The template cannot continue a conversation after another token.
            return None
        calls = message.get('tool_calls', ())
        # The content of the turn is not encoded again, so it needs no exact text.
        shown: Message = {'role': 'assistant', 'content': '' if calls else '?'}
        if calls:
            shown = {**shown, 'tool_calls': [_with_object(call) for call in calls]}
        try:
            return Reply(encode_replies(encoder, shown, answer, self._tools[row]).tolist(), 1, 0)
        except (ChatError, InputError) as error:
            self._fail(row, f'step returned messages that cannot be encoded: {error}')
            return None

    def _fail(self, row: int, reason: str) -> None:
        if row not in self._failures:
            self._failures[row] = one_line(reason)
            assert self._conversations is not None
            self._conversations.fail(row, reason)

    def _scores(self, responses: Responses) -> Scores:
        conversations = self._conversations
        assert conversations is not None
        starts_B, num_B = responses.last_turns, responses.num_B
        cut = {
            row: self._message(row, responses.tokens_BR[row, starts_B[row] : num_B[row]].tolist(), is_ended=False)
            for row in np.flatnonzero(~responses.ended_B).tolist()
            if row not in self._failures
        }
        closed = self._timed(lambda: conversations.close(cut))
        for row, one in enumerate(closed):
            if 'failure' in one:
                self._failures[row] = one_line(one['failure'])
        self._report(len(closed))
        names = dict.fromkeys(name for one in closed for name in one.get('scores', ()))
        return Scores(
            np.array([one.get('reward', 0.0) for one in closed], np.float32),
            {name: np.array([one.get('scores', {}).get(name, np.nan) for one in closed], np.float32) for name in names},
            np.zeros(len(closed), np.float32),
            np.array(['failure' in one for one in closed], np.float32),
        )

    def _report(self, count: int) -> None:
        reasons = list(self._failures.values())
        if len(reasons) == count:
            raise InputError(
                f'grpo.environment={self._grpo.environment}: all {count} conversations failed; fix the environment. '
                f'The first: {reasons[0]}'
            )
        for reason in reasons[:SHOWN_FAILURES]:
            logger.warning(f'a conversation failed and is not used for training: {reason}')
        if len(reasons) > SHOWN_FAILURES:
            logger.warning(f'{len(reasons)} of {count} conversations failed')


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
    return Environments(load_environment(grpo), encoder)


def environment_metrics(responses: Responses) -> dict[str, float]:
    """Returns metrics of conversations with environments; empty without them."""
    if responses.environment is None:
        return {}
    begins_BR = np.diff(responses.generated.astype(np.int8), axis=1, prepend=0) > 0
    return {
        'rollout/turns': float(begins_BR.sum(axis=1).mean()),
        'rollout/environment_failures': float((~responses.environment.scores.used).sum()),
    }


def seeded_examples(
    examples: Sequence[Mapping[str, Any]], *, seed: int, first: int = 0, is_evaluation: bool = False
) -> list[SeededExample]:
    """Returns examples with seeds that depend on `seed`, their position from `first` on, and their purpose."""
    return [
        SeededExample(example, int(np.random.SeedSequence([seed, first + index, is_evaluation]).generate_state(1)[0]))
        for index, example in enumerate(examples)
    ]


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call with its arguments as an object, as templates need them."""
    arguments = parse_json(call['function']['arguments'])
    function = {**call['function'], 'arguments': arguments if isinstance(arguments, dict) else {}}
    return {**call, 'function': function}
