r"""Preferences: a prompt with a chosen and a rejected answer, or one answer with a label, and parsers of their formats.

    explicit    {"prompt": "…", "chosen": "…", "rejected": "…"}
    messages    {"prompt": [{"role": "user", "content": "…"}, …], "chosen": [{"role": "assistant", …}], "rejected": […]}
    implicit    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": […]}, with a common prefix
    dialogues   {"chosen": "\n\nHuman: …\n\nAssistant: …", "rejected": "…"}, with a common prefix (Anthropic's HH),
                with or without the blank lines at its beginning
    labeled     {"prompt": "…", "completion": "…", "label": true}, or messages; false marks a rejected answer
    labeled     {"messages": [{"role": "user", …}, {"role": "assistant", …}], "label": true}, as in LLaMA-Factory

A prompt is a text, a message or messages at `prompt`, `question`, `instruction` (with `input`) or ShareGPT's
`conversations`. An answer is a text, a message or messages. Messages have OpenAI's or ShareGPT's format. `tools` and
`system` have the same meaning as in conversations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.data.documents.conversation import (
    Conversation,
    has_format,
    history_of,
    make_conversation,
    record_messages,
    system_of,
)
from maxlm.data.documents.label import LABEL, parse_label
from maxlm.data.documents.messages import Message, message_text, parse_messages, text_or_messages

# Required keys of a pair and of an answer without messages, and alternative keys of a pair's prompt.
ANSWERS = ('chosen', 'rejected')
COMPLETION = ('prompt', 'completion')
PROMPTS = ('prompt', 'question', 'instruction', 'conversations')
# Description of a preference in error messages.
FORMATS = (
    '"chosen" and "rejected", each an answer to a "prompt" or a conversation with a common beginning; or "prompt", '
    '"completion" and a "label" that is true or false'
)
_TURN = re.compile(r'(?:\A|\r?\n\r?\n)(Human|Assistant):')
_SPEAKERS = {'Human': 'user', 'Assistant': 'assistant'}


@dataclasses.dataclass(frozen=True)
class Preference:
    """A prompt and two answers, or one answer with a label.

    Attributes:
        chosen: the prompt with the better answer or with an answer labeled as desirable; None = no such answer.
        rejected: the prompt with the worse answer or with an answer labeled as undesirable; None = no such answer.
        prompt: number of messages of the prompt, which is the same in both. The loss covers only the answers.
    """

    chosen: Conversation | None
    rejected: Conversation | None
    prompt: int

    @property
    def conversations(self) -> list[Conversation]:
        """The prompt with each answer: one or two conversations."""
        return [answer for answer in (self.chosen, self.rejected) if answer is not None]

    @property
    def text(self) -> str:
        """Contents and tool calls of the messages, with the prompt once. See `Conversation.text`."""
        first, *rest = self.conversations
        others = (message_text(message) for other in rest for message in other.messages[self.prompt :])
        return '\n\n'.join([first.text, *others])

    @property
    def has_answers(self) -> bool:
        """Returns True if no answer is empty."""
        return all(
            any(
                learned and message_text(message).strip()
                for message, learned in zip(conversation.messages, conversation.learned, strict=True)
            )
            for conversation in self.conversations
        )


def has_preference(entry: Any) -> bool:
    """Returns True if a record has the keys of a pair of answers, or of an answer with a label."""
    return isinstance(entry, dict) and (_is_pair(entry) or _has_label(entry))


def _is_pair(entry: Mapping[str, Any]) -> bool:
    return all(key in entry for key in ANSWERS)


def _has_label(entry: Mapping[str, Any]) -> bool:
    try:
        return has_format(entry) and parse_label(entry) is not None
    except ValueError:
        return False


def parse_preference(entry: Any) -> Preference | None:
    """Returns the preference of a record; None if the record has no preference.

    Raises:
        ValueError: the preference is malformed. The message is one line and does not include the record.
    """
    if not isinstance(entry, dict):
        return None
    # A pair with a label is a pair.
    if not _is_pair(entry):
        label = parse_label(entry) if has_format(entry) else None
        return None if label is None else _parse_labeled(entry, is_good=label)
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
    prompt = _with_system(entry, prompt)
    chosen, rejected = (_conversation(entry, key, prompt, answer) for key, answer in zip(ANSWERS, answers, strict=True))
    return Preference(chosen, rejected, len(prompt))


def _parse_labeled(entry: Mapping[str, Any], *, is_good: bool) -> Preference:
    if all(key in entry for key in COMPLETION):
        prompt, answer = _prompt(entry), _answer(entry, 'completion')
        if answer[0]['role'] != 'assistant':
            raise ValueError("'completion' must begin with a message of the assistant")
        if not prompt:
            raise ValueError("'prompt' contains no messages; add one")
        prompt = _with_system(entry, prompt)
    else:
        messages, _ = record_messages(entry)
        prompt, answer = messages[:-1], messages[-1:]
        if not prompt or answer[0]['role'] != 'assistant':
            raise ValueError(f'{LABEL!r} marks the last message, which must be an answer of the assistant to a prompt')
    conversation = _conversation(entry, 'completion', prompt, answer)
    return Preference(conversation, None, len(prompt)) if is_good else Preference(None, conversation, len(prompt))


def _with_system(entry: Mapping[str, Any], prompt: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the prompt with the system message of the record, if the prompt has none."""
    if prompt[-1]['role'] == 'assistant':
        raise ValueError(
            'the prompt ends with an assistant message, so there is nothing to answer; remove that message'
        )
    return [*(system_of(entry) if prompt[0]['role'] != 'system' else []), *prompt]


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
    if not isinstance(text := _text_or_messages(entry, key), str):
        return parse_messages(text, key)
    history = []
    if key == 'instruction':
        text, history = f'{text}\n\n{entry["input"]}' if entry.get('input') else text, history_of(entry)
    messages = [*history, *(_dialogue(text) or [{'role': 'user', 'content': text}])]
    # An empty last turn of the assistant only prompts for the answer.
    return messages[:-1] if messages[-1] == {'role': 'assistant', 'content': ''} else messages


def _answer(entry: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns the messages of an answer, or of the conversation that ends with it; at least one."""
    answer = _text_or_messages(entry, key)
    if isinstance(answer, str):
        has_prompt = any(entry.get(name) is not None for name in PROMPTS)
        return _dialogue(answer, is_exact=has_prompt) or [{'role': 'assistant', 'content': answer}]
    messages = parse_messages(answer, key)
    if not messages:
        raise ValueError(f'{key!r} contains no messages; add one')
    return messages


def _text_or_messages(entry: Mapping[str, Any], key: str) -> str | list[Any]:
    """Returns the text of a field, or its messages in a list."""
    value = text_or_messages(entry[key])
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, str | list):
        raise ValueError(f'{key!r} must be a text, a message or messages; found {repr(value)[:80]}')
    return value


def _dialogue(text: str, *, is_exact: bool = False) -> list[dict[str, Any]]:
    """Returns the turns of a text in the format of HH; empty for other texts.

    Without the blank lines at its beginning, a text with one turn is another text, and with `is_exact` any text.
    """
    stripped = text.lstrip('\r\n')
    beginning, *parts = _TURN.split(stripped)
    if beginning or not parts or (stripped == text and (is_exact or len(parts) < 4)):
        return []
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


def _holds(messages: Sequence[Message], answer: Message) -> bool:
    return any(message['content'].strip() == answer['content'].strip() for message in messages)
