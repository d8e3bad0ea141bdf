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
        ids, _ = conversation_ids(request.messages, served, options=request)
    else:
        try:
            ids = text_prompt(
                served.tokenizer,
                request.prompt or '',
                add_special_tokens=request.add_special_tokens is not False,
                parse_special=served.parse_special if request.parse_special is None else request.parse_special,
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


def tokenizer_info(served: ServedModel) -> dict[str, Any]:
    """Returns properties of the tokenizer for clients that tokenize with this server, such as lm-eval.

    They encode the names of special tokens with /tokenize, so these must become ids.

    Raises:
        ApiError: the server encodes names of special tokens as text.
    """
    if not served.parse_special:
        raise ApiError(
            404, 'tokenizer_info: requires a server with --parse-special; restart it with this option', code='not_found'
        )
    tokenizer = served.tokenizer
    beginning = tokenizer.beginning_of_document
    return {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'model_max_length': served.engine.max_context,
        'bos_token': tokenizer.special_tokens[beginning[-1]].content if beginning else None,
        'eos_token': tokenizer.special_tokens[tokenizer.end_of_document].content,
        'pad_token': None,
        'chat_template': None if served.chat is None else served.chat.template.source,
    }
