"""Endpoints /tokenize and /detokenize, with the requests and responses of vLLM."""

from __future__ import annotations

from typing import Any

from maxlm.errors import InputError
from maxlm.inference.prompts import text_prompt
from maxlm.serving.request_parsing import ServedModel, conversation_ids
from maxlm.serving.responses import TokenDecoder
from maxlm.serving.schema.errors import ApiError
from maxlm.serving.schema.tokens import DetokenizeRequest, TokenizeRequest


def tokenize(request: TokenizeRequest, served: ServedModel, token_decoder: TokenDecoder) -> dict[str, Any]:
    """Returns the response with the token ids of a text or conversation.

    Raises:
        ApiError: the text cannot be tokenized, or the conversation cannot be rendered.
    """
    if request.messages:
        ids = conversation_ids(request.messages, served)
    else:
        try:
            ids = text_prompt(
                served.tokenizer, request.prompt or '', add_special_tokens=request.add_special_tokens is not False
            )
        except InputError as error:
            raise ApiError(400, f'prompt: {error}', param='prompt') from error
    texts = [token_decoder.decode(i).text for i in ids] if request.return_token_strs else None
    return {'count': len(ids), 'max_model_len': served.engine.max_context, 'tokens': ids, 'token_strs': texts}


def detokenize(request: DetokenizeRequest, served: ServedModel) -> dict[str, Any]:
    """Returns the response with the text of token ids.

    Raises:
        ApiError: an id is not in the vocabulary.
    """
    vocab_size = served.tokenizer.vocab_size
    if not all(0 <= i < vocab_size for i in request.tokens):
        raise ApiError(400, f'tokens: token ids must be from 0 to {vocab_size - 1}', param='tokens')
    return {'prompt': served.tokenizer.decode(request.tokens)}
