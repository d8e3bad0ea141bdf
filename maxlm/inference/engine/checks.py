"""Checks of the settings of an engine and of its requests."""

from __future__ import annotations

from maxlm.config.sections.model import KV_CACHE_DTYPES
from maxlm.errors import InputError
from maxlm.inference.engine.requests import Request


def check_settings(context: int, *, max_context: int, cache: str, max_queue_size: int) -> None:
    """Raises InputError if a setting of `Engine` is out of range. `context` is the context length of the model."""
    if not 0 <= max_context <= context:
        raise InputError(
            f'max_context={max_context}: must be from 1 to {context}, the context length of the model, or 0 for all'
        )
    if cache not in KV_CACHE_DTYPES:
        raise InputError(f'cache={cache}: must be one of {", ".join(KV_CACHE_DTYPES)}')
    if max_queue_size < 0:
        raise InputError(f'max_queue_size={max_queue_size}: must be at least 0')


def check_request(request: Request, *, max_context: int, num_ids: int) -> None:
    """Raises InputError if a request does not fit into the context, or contains an id that is not below `num_ids`."""
    prompt_length = len(request.prompt)
    if prompt_length + request.max_tokens > max_context:
        raise InputError(
            f'max_tokens={request.max_tokens}: the prompt has {prompt_length} tokens and the context length is '
            f'{max_context}; use at most {max(0, max_context - prompt_length)} tokens, or shorten the prompt'
        )
    if not 0 <= min(request.prompt) <= max(request.prompt) < num_ids:
        raise InputError(f'token ids of the prompt must be from 0 to {num_ids - 1}')
