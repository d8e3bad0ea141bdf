"""Locates the turns of the assistant in templates that mark them with `{% generation %}` … `{% endgeneration %}`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from maxlm.data.chat.escape import special_token_pattern
from maxlm.data.chat.marks import ContentSpans, read_marks
from maxlm.data.chat.rendered import ChatError, Span
from maxlm.data.chat.turns import NO_END, Render, mark_visibly
from maxlm.data.documents.messages import Message


def find_blocks(
    messages: Sequence[Message],
    render: Render,
    special: tuple[str, ...],
    *,
    end_of_turn: Callable[[], str],
    is_trusted: bool,
) -> tuple[str, list[Span]]:
    """Returns the output of a template, and the spans of its blocks, as in the mask of Transformers.

    A block without a special token at its end is extended by the special token that follows it.

    Args:
        messages: messages of the conversation.
        render: renders messages of this conversation.
        special: the special tokens.
        end_of_turn: returns the token that may follow a block; '' = any.
        is_trusted: do not check that the blocks contain only messages of the assistant.

    Raises:
        ChatError: a turn has no special token at its end, or a block contains another message.
    """
    output = read_marks(render(messages))
    spans = [Span(*span) for span in output.blocks()]
    if not is_trusted:
        _, marks = mark_visibly(messages, render, output.text)
        contents = ContentSpans(marks)
        owners = {owner for span in spans for owner in contents.messages_in(*span)}
        if others := [messages[owner]['role'] for owner in sorted(owners) if messages[owner]['role'] != 'assistant']:
            raise ChatError(
                f'the chat template has a message of the role {others[0]} between {{% generation %}} and '
                '{% endgeneration %}; put only the text of the assistant between them'
            )
    spans = _joined(output.text, spans, special)
    starts = [*(span.start for span in spans[1:]), len(output.text)]
    ends = [
        _with_end(output.text, span, following, special, end_of_turn)
        for span, following in zip(spans, starts, strict=True)
    ]
    return output.text, [span for span in ends if span.start < span.stop]


def _joined(text: str, spans: list[Span], special: tuple[str, ...]) -> list[Span]:
    """Joins each block without a special token at its end with the block that follows it immediately."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].stop == span.start and not _has_end(text, joined[-1], special):
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return joined


def _has_end(text: str, span: Span, special: tuple[str, ...]) -> bool:
    return text[slice(*span)].rstrip().endswith(special)


def _with_end(text: str, span: Span, following: int, special: tuple[str, ...], end_of_turn: Callable[[], str]) -> Span:
    """Extends a block by the special token that follows it, unless it ends with one, or another block of its turn.

    Args:
        text: the output.
        span: the block.
        following: position of the next block, or the length of the output.
        special: the special tokens.
        end_of_turn: see `find_blocks`.
    """
    if _has_end(text, span, special):
        return span
    pattern = special_token_pattern(special)
    end = pattern.match(text, span.stop)
    if end is not None and end.group() in (end_of_turn() or end.group(),):
        return Span(span.start, end.end())
    if span.start == span.stop or (following < len(text) and not pattern.search(text, span.stop, following)):
        return span
    raise ChatError(f'{NO_END}; put this token between {{% generation %}} and {{% endgeneration %}}')
