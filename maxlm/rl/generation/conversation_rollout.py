"""Conversations of a rollout with environments, while they are generated.

The calls of the environments and the turns of the model alternate. `ConversationRollout.job` makes the next calls, and
does not touch the devices, so it may run in another thread. `advance` takes their result and generates the next turn of
all conversations. A conversation whose environment misbehaves has failed; see `maxlm.rl.environments.conversations`.

Environments cannot be saved. Conversations that continue after a checkpoint repeat the recorded turns of the model, to
which the environments must give the same answers as before.

Shapes: B rows, R maximum response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.jinja import ChatError
from maxlm.data.chat.tool_results import CALL_ID, encode_replies
from maxlm.data.documents.messages import Message
from maxlm.errors import InputError, one_line
from maxlm.inference.tool_calls import ToolCall, ToolCallParser
from maxlm.log import logger
from maxlm.rl.environments.conversations import Conversations
from maxlm.rl.generation.responses import EnvironmentUse, Responses
from maxlm.rl.generation.tool_environment import Reply
from maxlm.rl.generation.turns import Turns
from maxlm.rl.rewards.scorer import Scores
from maxlm.storage.json_text import parse_json
from maxlm.training.state import Params

# Number of failures of a rollout that are logged.
SHOWN_FAILURES = 3


class ConversationRollout:
    """Conversations of a rollout. All processes advance them together."""

    def __init__(
        self,
        conversations: Conversations,
        begin: Callable[[Sequence[Sequence[int]]], Turns],
        encoder: ChatEncoder,
        grpo: GrpoConfig,
        *,
        num_samples: int,
        max_prompt: int,
        recorded: Responses | None = None,
        is_complete: bool = False,
    ):
        """
        Args:
            conversations: the conversations, `num_samples` consecutive ones for each prompt. Only the first process
                uses them.
            begin: returns the responses to prompts, which repeat `recorded`.
            encoder: encoder of the messages.
            grpo: section `grpo` of the config.
            num_samples: number of conversations of a group.
            max_prompt: maximum number of tokens of the first messages.
            recorded: conversations of a checkpoint.
            is_complete: True if no recorded conversation continues.
        """
        self._conversations, self._begin, self._encoder, self._grpo = conversations, begin, encoder, grpo
        self._num_samples, self._max_prompt = num_samples, max_prompt
        self._recorded, self._is_complete = recorded, is_complete
        self._prompts: list[list[int]] = []
        self._turns: Turns | None = None
        self._messages: dict[int, Message] = {}
        self._failures: dict[int, str] = {}
        self._tools: dict[int, list[Any]] = {}
        self._num_calls: dict[int, int] = {}
        if recorded is not None and recorded.environment is not None:
            for row in np.flatnonzero(recorded.environment.failed_B).tolist():
                self._fail(row, 'it had failed before the run was resumed')

    @property
    def is_generated(self) -> bool:
        """Returns True if only the scores are missing."""
        return self._turns is not None and not self._turns.going

    @property
    def is_repeating(self) -> bool:
        """Returns True while the conversations continue to those of the checkpoint."""
        return self._recorded is not None

    @property
    def job(self) -> Callable[[], Any]:
        """Function that makes the next calls of the environments, whose result JSON can express.

        `advance` takes the result until `is_generated`, and then `scores`.
        """
        conversations, turns = self._conversations, self._turns
        if turns is None:
            return conversations.open
        if turns.going:
            messages = self._messages
            # JSON has no integers as names.
            return lambda: list(conversations.step(messages).items())
        responses = turns.responses
        starts_B, num_B = responses.last_turns, responses.num_B
        cut = {
            row: self._message(row, responses.tokens_BR[row, starts_B[row] : num_B[row]].tolist(), is_ended=False)
            for row in np.flatnonzero(~responses.ended_B).tolist()
            if row not in self._failures
        }
        return lambda: conversations.close(cut)

    def advance(self, result: Any, params: Params) -> None:
        """Continues with the result of `job`: generates the next turn of the conversations, or repeats it."""
        if self._turns is None:
            self._prompts = self._encode_prompts(result)
            self._turns = self._begin(self._prompts)
        else:
            answers = dict(result)
            replies = [
                self._reply(row, turn, answers.get(row))
                for row, turn in zip(self._turns.going, self._turns.last_turns, strict=True)
            ]
            self._turns.add(replies)
            if self._is_complete and self._recorded is None:
                self._fail_changed(self._turns.going)
                self._turns.going = []
        self._turns.generate(params)
        if self._recorded is not None and not (self._turns.is_repeating and self._turns.going):
            self._fail_changed(self._turns.end_recorded())
            self._recorded = None
        self._messages = {
            row: self._message(row, turn)
            for row, turn in zip(self._turns.going, self._turns.last_turns, strict=True)
            if row not in self._failures
        }

    @property
    def responses(self) -> Responses:
        """The conversations so far, without scores."""
        assert self._turns is not None
        responses = self._turns.responses
        ids = tuple(np.asarray(prompt, np.uint32) for prompt in self._prompts for _ in range(self._num_samples))
        failed_B = np.isin(np.arange(len(ids)), list(self._failures))
        return responses._replace(environment=EnvironmentUse(ids, failed_B))

    def scores(self, closed: Sequence[Mapping[str, Any]]) -> Scores:
        """Returns the scores of all conversations, given the result of `job`, and logs their failures.

        Raises:
            InputError: all conversations failed.
        """
        for row, one in enumerate(closed):
            if 'failure' in one:
                self._failures[row] = one_line(one['failure'])
        self._report(len(closed))
        self._report_unused([one['unused_weights'] for one in closed if 'unused_weights' in one])
        names = dict.fromkeys(name for one in closed for name in one.get('scores', ()))
        return Scores(
            np.array([one.get('reward', 0.0) for one in closed], np.float32),
            {name: np.array([one.get('scores', {}).get(name, np.nan) for one in closed], np.float32) for name in names},
            np.zeros(len(closed), np.float32),
            np.array(['failure' in one for one in closed], np.float32),
        )

    def end(self) -> None:
        """Closes the environments of conversations that do not continue."""
        self._conversations.end()

    def _encode_prompts(self, opened: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Returns the prompt of each group; other prompts of the same group are failures."""
        prompts = []
        known = self._recorded.environment.prompts if self._recorded and self._recorded.environment else ()
        for first in range(0, len(opened), self._num_samples):
            prompt: list[int] | None = known[first].tolist() if known else None
            for row in range(first, first + self._num_samples):
                one = opened[row]
                ids = None if 'failure' in one else self._prompt(row, one)
                if ids is None:
                    self._fail(row, one.get('failure', ''))
                elif prompt is None:
                    prompt = ids
                elif ids != prompt:
                    self._fail(row, 'reset returned other messages than for the same example and seed before')
            # Failed conversations generate a response that is not used.
            prompts.append(prompt or [self._encoder.end_of_turn])
        return prompts

    def _prompt(self, row: int, opened: Mapping[str, Any]) -> list[int] | None:
        self._tools[row] = opened['tools']
        try:
            ids = self._encoder.encode_prompt(opened['messages'], tools=opened['tools']).tolist()
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
        text = self._encoder.tokenizer.decode(list(turn[:-1] if is_ended else turn))
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

    def _reply(self, row: int, turn: Sequence[int], answer: Sequence[Message] | str | None) -> Reply | None:
        """Returns the reply to a turn, given the answer of `Conversations.step`."""
        if isinstance(answer, str):
            self._fail(row, answer)
        # The template cannot continue a conversation after another token.
        if answer is None or isinstance(answer, str) or turn[-1] != self._encoder.end_of_turn:
            return None
        calls = self._messages[row].get('tool_calls', ())
        # The content of the turn is not encoded again, so it needs no exact text.
        shown: Message = {'role': 'assistant', 'content': '' if calls else '?'}
        if calls:
            shown = {**shown, 'tool_calls': [_with_object(call) for call in calls]}
        try:
            return Reply(encode_replies(self._encoder, shown, answer, self._tools[row]).tolist(), 1, 0)
        except (ChatError, InputError) as error:
            self._fail(row, f'step returned messages that cannot be encoded: {error}')
            return None

    def _fail(self, row: int, reason: str) -> None:
        if row not in self._failures:
            self._failures[row] = one_line(reason)
            self._conversations.fail(row, reason)

    def _fail_changed(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._fail(row, 'its environment gave other answers than before the run was resumed')

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

    def _report_unused(self, names: Sequence[Sequence[str]]) -> None:
        """Warns of weights for whose names no conversation has a score, such as misspelled ones."""
        unused = set.intersection(*map(set, names)) if names else set()
        if unused:
            logger.warning(
                f'grpo.environment={self._grpo.environment}: weights has {", ".join(sorted(unused))}, but score '
                'returned no such name for any conversation of the rollout; check the names'
            )


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call with its arguments as an object, as templates need them."""
    arguments = parse_json(call['function']['arguments'])
    function = {**call['function'], 'arguments': arguments if isinstance(arguments, dict) else {}}
    return {**call, 'function': function}
