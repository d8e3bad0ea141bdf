"""Base class of request schemas, and prompts given as texts or token ids."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from maxlm.serving.schema.errors import ApiError

_TEXT: dict[str, Any] = {'type': 'string'}
_IDS: dict[str, Any] = {'type': 'array', 'items': {'type': 'integer', 'minimum': 0}}
_TEXTS: dict[str, Any] = {'type': 'array', 'items': _TEXT}
PROMPTS_SCHEMA: dict[str, Any] = {'anyOf': [_TEXT, _TEXTS, _IDS, {'type': 'array', 'items': _IDS}]}
OPTIONAL_TEXTS_SCHEMA: dict[str, Any] = {'anyOf': [_TEXT, _TEXTS, {'type': 'null'}]}


class RequestObject(BaseModel):
    """A JSON object of a request. Unknown fields are kept, so that unsupported ones can be rejected by name."""

    model_config = ConfigDict(strict=True, extra='allow', allow_inf_nan=False, hide_input_in_errors=True)


def parse_prompts(
    prompts: Any, param: str, *, max_prompts: int, vocab_size: int, max_context: int
) -> list[str] | list[list[int]]:
    """Returns prompts as a list: all texts or all lists of token ids.

    Their number is checked first, because there may be millions.

    Args:
        prompts: a string, strings, token ids or lists of token ids.
        param: name of the parameter.
        max_prompts: maximum number of prompts.
        vocab_size: number of token ids.
        max_context: maximum number of tokens of a prompt.

    Raises:
        ApiError: the prompts are invalid, too many or too long.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, list) and prompts:
        if type(prompts[0]) is int:
            prompts = [prompts]
        if len(prompts) > max_prompts:
            raise ApiError(400, f'{param}: {len(prompts)} entries; send at most {max_prompts}', param=param)
        if all(isinstance(prompt, str) for prompt in prompts):
            return prompts
        longest = max((len(prompt) for prompt in prompts if isinstance(prompt, list)), default=0)
        if longest > max_context:
            raise ApiError(
                400,
                f'the context length is {max_context} tokens; the prompt has {longest}',
                param=param,
                code='context_length_exceeded',
            )
        if all(isinstance(prompt, list) and all(type(i) is int for i in prompt) for prompt in prompts):
            if all(0 <= i < vocab_size for prompt in prompts for i in prompt):
                return prompts
            raise ApiError(400, f'{param}: token ids must be from 0 to {vocab_size - 1}', param=param)
    raise ApiError(400, f'{param}: must be a string, strings, token ids, or lists of token ids', param=param)
