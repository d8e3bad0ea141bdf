"""Encodes prompts as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.data.documents.messages import parse_messages
from maxlm.data.tokenizer.parse_special import encode_with_special
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.inference.load import LoadedModel
from maxlm.workdir.files import CHAT_TEMPLATE


def text_prompt(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
) -> list[int]:
    """Returns the token ids of a text to continue.

    Args:
        tokenizer: tokenizer of the model.
        text: the text.
        add_special_tokens: put the beginning of text before it, unless the parsed text begins with it.
        parse_special: names of special tokens become their ids; otherwise they are ordinary characters.
    """
    beginning = list(tokenizer.beginning_of_document) if add_special_tokens else []
    if not parse_special:
        (ids,) = tokenizer.encode_batch([text])
        return [*beginning, *ids.tolist()]
    parsed = encode_with_special(tokenizer, text).tolist()
    # A rendered chat often begins with the token, and a model does not expect it twice.
    return parsed if parsed[: len(beginning)] == beginning else [*beginning, *parsed]


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Returns the token ids of a fill-in-the-middle prompt: beginning of text, prefix, suffix, middle.

    This is the order in which `maxlm.data.tokenizer.fim` trains the model.

    Raises:
        InputError: the tokenizer has no fill-in-the-middle tokens.
    """
    if tokenizer.infill_ids is None:
        raise InputError(
            'the tokenizer has no fill-in-the-middle tokens; use a model trained with maxlm prepare --fim-rate'
        )
    (prefix_ids,), (suffix_ids,) = tokenizer.encode_batch([prefix]), tokenizer.encode_batch_inside([suffix])
    prefix_id, middle_id, suffix_id = tokenizer.infill_ids
    beginning = tokenizer.beginning_of_document
    return [*beginning, prefix_id, *prefix_ids.tolist(), suffix_id, *suffix_ids.tolist(), middle_id]


def chat_prompt(
    model: LoadedModel, messages: Sequence[Mapping[str, Any]] | str, *, tools: Sequence[Any] = ()
) -> list[int]:
    """Returns the token ids of a conversation, followed by the generation prompt of the assistant.

    Args:
        model: the model.
        messages: messages, or their JSON text; see `maxlm.data.documents.messages`.
        tools: tools for the chat template, in the form of `parse_tools`.

    Raises:
        InputError: the model has no chat template, a message is malformed, or the template rejects the messages.
    """
    try:
        turns = parse_messages(messages, 'messages')
        if model.chat is None:
            raise InputError(
                f'{model.tokenizer_path.parent} has no usable {CHAT_TEMPLATE}; use a model trained on conversations '
                f'(maxlm prepare --format=chat) or imported with a chat template'
            )
        return model.chat.encode_prompt(turns, tools=tools).tolist()
    except ValueError as error:
        raise InputError(str(error)) from error
