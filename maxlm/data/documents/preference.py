r"""Preferences: a prompt with a chosen and a rejected answer, and parsers of their record formats.

    explicit    {"prompt": "…", "chosen": "…", "rejected": "…"}
    messages    {"prompt": [{"role": "user", "content": "…"}, …], "chosen": [{"role": "assistant", …}], "rejected": […]}
    implicit    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": […]}, with a common prefix
    dialogues   {"chosen": "\n\nHuman: …\n\nAssistant: …", "rejected": "…"}, with a common prefix (Anthropic's HH)

A prompt is a text or messages at `prompt`, `question`, `instruction` (with `input`) or ShareGPT's `conversations`. An
answer is a text, a message or messages. Messages have OpenAI's or ShareGPT's format. `tools` and `system` have the
same meaning as in conversations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.data.documents.conversation import Conversation, Message, make_conversation, parse_messages, system_of

# Required keys of a preference, and alternative keys of its prompt.
ANSWERS = ('chosen', 'rejected')
PROMPTS = ('prompt', 'question', 'instruction', 'conversations')
# Description of a preference in error messages.
FORMATS = '"chosen" and "rejected", each an answer to a "prompt" or a conversation with a common beginning'
_TURN = re.compile(r'\n\n(Human|Assistant):')
_SPEAKERS = {'Human': 'user', 'Assistant': 'assistant'}


@dataclasses.dataclass(frozen=True)
class Preference:
    """A prompt and two answers.

    Attributes:
        chosen: the prompt with the better answer.
        rejected: the prompt with the worse answer.
        prompt: number of messages of the prompt, which is the same in both. The loss covers only the answers.
    """

    chosen: Conversation
    rejected: Conversation
    prompt: int

    @property
    def text(self) -> str:
        """Contents of the messages, with the prompt once. See `Conversation.text`."""
        other = (message['content'] for message in self.rejected.messages[self.prompt :])
        return '\n\n'.join([self.chosen.text, *other])

    @property
    def has_answers(self) -> bool:
        """Returns True if neither answer is empty."""
        return all(
            any(
                learned and (message['content'].strip() or message.get('tool_calls') or message.get('function_call'))
                for message, learned in zip(conversation.messages, conversation.learned, strict=True)
            )
            for conversation in (self.chosen, self.rejected)
        )


def has_preference(entry: Any) -> bool:
    """Returns True if a record has the keys of a preference."""
    return isinstance(entry, dict) and all(key in entry for key in ANSWERS)


def parse_preference(entry: Any) -> Preference | None:
    """Returns the preference of a record; None if the record has no preference.

    Raises:
        ValueError: the preference is malformed. The message is one line and does not include the record.
    """
    if not has_preference(entry):
        return None
    prompt = _prompt(entry)
    answers = [_answer(entry, key) for key in ANSWERS]
    whole = [answer[0]['role'] != 'assistant' for answer in answers]
    if any(whole):
        if not all(whole):
            raise ValueError(
                "one of 'chosen' and 'rejected' begins with the prompt, and the other with an answer; "
                'put the prompt into both or neither'
            )
        common = _common(*answers)
        if prompt and not _holds(answers[0][:common], prompt[-1]):
            raise ValueError(
                "'chosen' and 'rejected' contain a prompt that differs from the prompt of the record; "
                'remove one of the prompts'
            )
        prompt, answers = answers[0][:common], [answer[common:] for answer in answers]
    if not prompt:
        raise ValueError(f"no prompt; add one of {', '.join(PROMPTS)}, or a prompt in 'chosen' and 'rejected'")
    if prompt[-1]['role'] == 'assistant':
        raise ValueError(
            'the prompt ends with an assistant message, so there is nothing to answer; remove that message'
        )
    if prompt[0]['role'] != 'system':
        prompt = [*system_of(entry), *prompt]
    chosen, rejected = (_conversation(entry, key, prompt, answer) for key, answer in zip(ANSWERS, answers, strict=True))
    return Preference(chosen, rejected, len(prompt))


def _conversation(
    entry: Mapping[str, Any], key: str, prompt: Sequence[Message], answer: Sequence[Message]
) -> Conversation:
    try:
        return make_conversation([*prompt, *answer], entry, prompt=len(prompt))
    except ValueError as error:
        raise ValueError(f'{key!r}: {error}') from error


def _prompt(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of the prompt; empty if the prompt is only contained in the answers."""
    key = next((key for key in PROMPTS if entry.get(key) is not None), None)
    if key is None:
        return []
    if not isinstance(text := entry[key], str):
        return parse_messages(entry, key)
    if key == 'instruction' and entry.get('input'):
        text = f'{text}\n\n{entry["input"]}'
    messages = _dialogue(text) or [{'role': 'user', 'content': text}]
    # An empty last turn of the assistant only prompts for the answer.
    return messages[:-1] if messages[-1] == {'role': 'assistant', 'content': ''} else messages


def _answer(entry: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns the messages of an answer, or of the conversation that ends with it; at least one."""
    answer = entry[key]
    if isinstance(answer, str):
        return _dialogue(answer) or [{'role': 'assistant', 'content': answer}]
    messages = parse_messages({key: [answer] if isinstance(answer, dict) else answer}, key)
    if not messages:
        raise ValueError(f'{key!r} contains no messages; add one')
    return messages


def _dialogue(text: str) -> list[dict[str, Any]]:
    """Returns the turns of a text in the format of HH; empty for other texts."""
    if not _TURN.match(text):
        return []
    parts = _TURN.split(text)[1:]
    return [
        {'role': _SPEAKERS[speaker], 'content': text.strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]


def _common(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Returns the length of the common prefix, after which both conversations have an answer."""
    last = min(len(chosen), len(rejected)) - 1
    common = next((place for place in range(last) if chosen[place] != rejected[place]), last)
    if any(messages[common]['role'] != 'assistant' for messages in (chosen, rejected)):
        raise ValueError(
            "'chosen' and 'rejected' differ before an assistant answer; they need a common beginning, followed by "
            'one answer each'
        )
    return common


def _holds(messages: Sequence[Message], wanted: Message) -> bool:
    return any(message['content'].strip() == wanted['content'].strip() for message in messages)
