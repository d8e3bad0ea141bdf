"""Schema of embedding and tokenization requests: OpenAI's parameters, and those of vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import FailFast, Field, ValidationError, WithJsonSchema

from maxlm.serving.schema.base import PROMPTS_SCHEMA, RequestObject
from maxlm.serving.schema.errors import ApiError, from_validation_error
from maxlm.serving.schema.generation import (
    ADD_SPECIAL_TOKENS,
    UNSUPPORTED,
    Message,
    TemplateOptions,
    check_messages,
    check_template_options,
    reject_unsupported,
)

# Maximum number of inputs of an embedding request, the same as OpenAI's.
MAX_INPUTS = 2048

_T = TypeVar('_T', bound=RequestObject)


class EmbeddingRequest(RequestObject):
    """The body of /v1/embeddings."""

    model: str | None = Field(None, description='Name of the served model.')
    # Validated by `parse_prompts`.
    input: Annotated[Any, WithJsonSchema(PROMPTS_SCHEMA)] = Field(
        description=f'A string, strings, token ids, or lists of token ids: up to {MAX_INPUTS} inputs.'
    )
    encoding_format: Literal['float', 'base64'] | None = Field(
        None, description='Numbers, or the bytes of little-endian float32 numbers in base64. Default: float.'
    )
    dimensions: int | None = Field(None, description="Number of dimensions. Only the model's own number is supported.")


class TokenizeRequest(TemplateOptions):
    """The body of /tokenize: a text or a conversation."""

    model: str | None = Field(None, description='Name of the served model.')
    prompt: str | None = Field(None, description='The text.')
    messages: Annotated[list[Message], FailFast()] = Field(
        [], description='A conversation, which the chat template renders. Replaces prompt.'
    )
    add_special_tokens: bool | None = Field(None, description=ADD_SPECIAL_TOKENS)
    parse_special: bool | None = Field(
        None, description='Encode names of special tokens in prompt as their ids. Default: that of the server.'
    )
    return_token_strs: bool | None = Field(None, description='Also return the text of each token.')


class DetokenizeRequest(RequestObject):
    """The body of /detokenize."""

    model: str | None = Field(None, description='Name of the served model.')
    tokens: Annotated[list[int], FailFast()] = Field(description='Token ids.')


def parse_request(kind: type[_T], body: bytes) -> _T:
    """Parses a request. Raises ApiError if it is invalid or uses unsupported parameters."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation_error(error) from None
    reject_unsupported(request, UNSUPPORTED)
    return request


def parse_tokenize(body: bytes, *, max_context: int) -> TokenizeRequest:
    """Parses a request of /tokenize. Raises ApiError if it is invalid or uses unsupported parameters."""
    request = parse_request(TokenizeRequest, body)
    if (request.prompt is None) == (not request.messages):
        raise ApiError(400, 'prompt: send either prompt or messages', param='prompt')
    if request.messages and request.parse_special:
        raise ApiError(400, 'parse_special: not supported with messages; remove it', param='parse_special')
    check_messages(request.messages, max_context=max_context)
    check_template_options(request)
    return request
