"""Runs code of the user in the first process of a run, and sends the result to all processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxlm.errors import InputError


def run_in_first_process(function: Callable[[], Any]) -> Any:
    """Returns the result of `function` in the first process, a value that JSON can express, in all processes.

    A second execution could have another result. All processes must call this at the same point.

    Raises:
        InputError: `function` raised it. All processes raise it.
    """
    if jax.process_count() == 1:
        return function()
    text = b''
    if jax.process_index() == 0:
        try:
            text = json.dumps({'result': function()}).encode()
        except InputError as error:
            text = json.dumps({'error': str(error)}).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(text), np.int32)))
    data = multihost_utils.broadcast_one_to_all(np.frombuffer(text.ljust(size)[:size], np.uint8))
    answer = json.loads(np.asarray(data).astype(np.uint8).tobytes())
    if 'error' in answer:
        raise InputError(answer['error'])
    return answer['result']
