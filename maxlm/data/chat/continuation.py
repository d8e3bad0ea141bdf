"""Renders a conversation whose last message is continued, like `continue_final_message` of Transformers."""

from __future__ import annotations

from collections.abc import Sequence

from maxlm.data.chat.marks import CLOSE, mark, read_marks
from maxlm.data.chat.rendered import ChatError
from maxlm.data.chat.turns import Render
from maxlm.data.documents.messages import Message


def render_continued(messages: Sequence[Message], render: Render) -> str:
    """Returns the output up to the end of the last message's content, without the end of its turn.

    If the template strips the content, the spaces at its end are not part of the output.

    Raises:
        ChatError: there is no last message with a content, or the template does not output all of it.
    """
    content = messages[-1].get('content') if messages else None
    if not isinstance(content, str):
        raise ChatError('continue_final_message: the last message has no text to continue; add it')
    end = mark(CLOSE)
    # The space after the mark shows whether the template strips the content.
    output = render([*messages[:-1], {**messages[-1], 'content': f'{content}{end} '}])
    before, found, after = output.rpartition(end)
    text = read_marks(before).text
    if not found or content.strip() not in text:
        raise ChatError(
            'continue_final_message: the chat template changes the last message, so it cannot be continued; '
            'send another last message, or set continue_final_message to false'
        )
    return text if after.startswith(' ') else text.rstrip()
