"""Token ids of what a model is asked to go on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.data.chat.jinja import ChatError
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.inference.load import LoadedModel
from maxlm.workdir.files import CHAT_TEMPLATE


def text_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Of a text that is continued."""
    (ids,) = tokenizer.encode_batch([text])
    return ids.tolist()


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Of a hole between two texts: prefix, suffix, then the middle, as `maxlm.data.tokenizer.fim` trains it.

    Raises:
        InputError: the tokenizer has no tokens for that.
    """
    if tokenizer.infill_ids is None:
        raise InputError(
            'the tokenizer has no tokens for text with a hole; the model was not trained to fill one '
            '(maxlm.prepare --fim-rate)'
        )
    (before,), (behind,) = tokenizer.encode_batch([prefix]), tokenizer.encode_batch_inside([suffix])
    prefix_id, middle_id, suffix_id = tokenizer.infill_ids
    return [prefix_id, *before.tolist(), suffix_id, *behind.tolist(), middle_id]


def chat_prompt(model: LoadedModel, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Of a conversation, with what invites the assistant to answer.

    Raises:
        InputError: the model has no chat template, or that does not take the messages.
    """
    if model.chat is None:
        raise InputError(
            f'{model.tokenizer_path.parent} has no {CHAT_TEMPLATE} that can be used; it comes with a run on '
            f'conversations (maxlm.prepare --format=chat) or an import of a model that has one'
        )
    try:
        return model.chat.encode_prompt([dict(message) for message in messages]).tolist()
    except ChatError as error:
        raise InputError(str(error)) from error
