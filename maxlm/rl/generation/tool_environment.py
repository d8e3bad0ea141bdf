"""Answers turns of the model that call tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.jinja import ChatError
from maxlm.data.chat.tool_results import encode_tool_results
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.inference.tool_calls import ToolCall, ToolCallParser
from maxlm.rl.environments.first_process import run_in_first_process
from maxlm.rl.rewards.tools import ToolResult, Tools
from maxlm.sandbox.functions import FunctionPool
from maxlm.storage.json_text import parse_json


class Reply(NamedTuple):
    """Results of the tool calls of a turn.

    Attributes:
        ids: token ids of the results and of the next generation prompt.
        num_calls: number of calls.
        num_errors: number of calls that failed.
    """

    ids: list[int]
    num_calls: int
    num_errors: int


class TurnReplies(Protocol):
    """Answers turns of the model."""

    def replies(
        self, rows: Sequence[int], turns: Sequence[Sequence[int]], max_calls: Sequence[int]
    ) -> list[Reply | None]:
        """Returns the reply to each turn; None if the response ends with the turn.

        Args:
            rows: row of the response of each turn, counted from 0 in each call of the sampler.
            turns: token ids of each turn, up to and including the token that ends it.
            max_calls: maximum number of calls of each turn. A turn with more calls has no reply.
        """


class ToolEnvironment:
    """Runs the tool calls of turns and encodes their results with the chat template.

    Attributes:
        schemas: description of each tool for the chat template.
    """

    def __init__(self, tools: Tools, encoder: ChatEncoder):
        """Raises InputError if the chat template supports no tools."""
        self.schemas = tools.schemas
        self._tools, self._encoder = tools, encoder
        question = [{'role': 'user', 'content': '?'}]
        try:
            self._encode([ToolCall('', tools.schemas[0]['function']['name'], '{}')], [ToolResult('')])
            shown = encoder.render_prompt(question, tools=tools.schemas).text
        except ChatError as error:
            raise InputError(f'grpo.tools: {error}; use a model whose chat template supports tools') from error
        if shown == encoder.render_prompt(question).text:
            raise InputError(
                'grpo.tools: the chat template of the model does not show tools; use another model, or train it on '
                'conversations with a template that does, e.g. --chat-template chatml'
            )

    def replies(
        self, rows: Sequence[int], turns: Sequence[Sequence[int]], max_calls: Sequence[int]
    ) -> list[Reply | None]:
        """See `TurnReplies`. All processes pass the same turns; the first one runs the tools for all of them."""
        del rows
        calls = [
            found if len(found) <= most else [] for found, most in zip(map(self._calls, turns), max_calls, strict=True)
        ]
        results = iter(self._run([(call.name, call.arguments) for found in calls for call in found]))
        return [self._reply(found, [next(results) for _ in found]) if found else None for found in calls]

    def _calls(self, turn: Sequence[int]) -> list[ToolCall]:
        if turn[-1] != self._encoder.end_of_turn:
            return []
        text = self._encoder.tokenizer.decode(turn[:-1])
        return [piece for piece in ToolCallParser().feed(text, is_last=True) if isinstance(piece, ToolCall)]

    def _run(self, calls: Sequence[tuple[str, str]]) -> list[ToolResult]:
        results = run_in_first_process(lambda: self._tools.run(calls)) if calls else []
        return [ToolResult(*result) for result in results]

    def _reply(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> Reply | None:
        try:
            ids = self._encode(calls, results)
        except ChatError:
            # The template cannot render the arguments of this call.
            return None
        return Reply(ids, len(calls), sum(result.is_error for result in results))

    def _encode(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[int]:
        shown = [(call.name, _arguments(call)) for call in calls]
        ids = encode_tool_results(self._encoder, shown, [result.text for result in results], self.schemas)
        return ids.tolist()


def _arguments(call: ToolCall) -> dict[str, Any]:
    arguments = parse_json(call.arguments)
    return arguments if isinstance(arguments, dict) else {}


def open_tools(
    grpo: GrpoConfig, encoder: ChatEncoder | Tokenizer, functions: FunctionPool | None
) -> ToolEnvironment | None:
    """Returns the tools of a config, which run in `functions` if given; None without tools.

    Raises:
        InputError: a tool is invalid, or the model has no chat template that supports tools.
    """
    if not grpo.tools:
        return None
    if not isinstance(encoder, ChatEncoder):
        raise InputError(
            f'grpo.tools={grpo.tools!r}: the model has no chat template; start from a model trained on conversations'
        )
    return ToolEnvironment(Tools(grpo.tools, functions), encoder)
