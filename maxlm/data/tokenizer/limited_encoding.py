"""Encodes texts that can need too much time or memory in a process with limits.

The regular expressions of some published tokenizers need quadratic time: 4 MB of digits take hours. A thread of a
server cannot be stopped, a process can. A normalizer can expand a text a thousand times, and the library aborts the
process that runs out of memory.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import json
import struct
import time
from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers

from maxlm.data.tokenizer.library import encode_batch
from maxlm.data.tokenizer.limits.expansion import MAX_TEXT_FACTOR, expansion_factor
from maxlm.errors import InputError
from maxlm.sandbox.limited_process import LimitError, ProcessLimits, limited_process

_LIMITS = ProcessLimits(cpu_seconds=10.0, memory_bytes=2 << 30, memory_per_byte=256)
# Limits outside of `limit_encoding`, where texts may have any length.
_MEMORY_LIMITS = _LIMITS._replace(cpu_seconds=3600.0)
# Texts that can become longer before the model are encoded in a process if the tokenizer expands them by more than this
# factor. Tokenizers of causal language models do not exceed it.
_MAX_EXPANDED_BYTES, _MAX_FACTOR = 2**24, 24
# Shorter texts take at most a second.
_SHORT_CHARACTERS = 2**14
# Number of tokenizers that the process keeps, and number of changed copies of one tokenizer.
_KEPT = 4
# A request with the SHA-256 of a tokenizer and its flag `encode_special_tokens`.
_HEAD = struct.Struct('32s?')
_LOAD, _ENCODE, _UNKNOWN = b'L', b'E', b'?'

# Maximum number of seconds for all texts of one block of `limit_encoding`.
_MAX_SECONDS = 30.0


@dataclasses.dataclass
class _Budget:
    """Time that a block of `limit_encoding` has spent, in seconds."""

    seconds: float = 0.0


_budget: contextvars.ContextVar[_Budget | None] = contextvars.ContextVar('budget', default=None)
_libraries: dict[bytes, tokenizers.Tokenizer] = {}


@contextlib.contextmanager
def limit_encoding() -> Iterator[None]:
    """Makes this thread encode long texts in a process with limits, and limits the total time of all texts."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def encode_long(library: tokenizers.Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns `encode_batch`, computed in a process if the texts can need too much time or memory.

    Raises:
        InputError: a text has no ids, or takes too much time or memory.
    """
    budget, size = _budget.get(), sum(map(len, texts))
    expands = _expands(library, size)
    if budget is None:
        return _encode_in_process(library, texts, _MEMORY_LIMITS) if expands else encode_batch(library, texts)
    if budget.seconds > _MAX_SECONDS:
        raise InputError(f'the tokenization of the texts takes more than {_MAX_SECONDS:g} s; use shorter texts')
    start = time.monotonic()
    try:
        if expands or size > _SHORT_CHARACTERS:
            return _encode_in_process(library, texts, _LIMITS)
        return encode_batch(library, texts)
    finally:
        budget.seconds += time.monotonic() - start


def _expands(library: tokenizers.Tokenizer, size: int) -> bool:
    """Returns True if texts of `size` characters, of at most 4 bytes each, can become very long before the model."""
    if 4 * size * MAX_TEXT_FACTOR <= _MAX_EXPANDED_BYTES:
        return False
    factor = expansion_factor(library)
    return factor > _MAX_FACTOR and 4 * size * factor > _MAX_EXPANDED_BYTES


def _encode_in_process(library: tokenizers.Tokenizer, texts: Sequence[str], limits: ProcessLimits) -> list[np.ndarray]:
    process = limited_process(f'{__name__}:answer', limits)
    content, digest = _serialized(library)
    request = _ENCODE + _HEAD.pack(digest, library.encode_special_tokens) + json.dumps(list(texts)).encode()
    try:
        result = process.call(request)
        if result == _UNKNOWN:
            process.call(_LOAD + content)
            result = process.call(request)
    except LimitError as error:
        raise InputError(f'the tokenization of the text {error}; use a shorter text') from None
    counts = np.frombuffer(result, np.uint32, len(texts))
    ids = np.frombuffer(result, np.uint32, offset=counts.nbytes)
    return np.split(ids, np.cumsum(counts)[:-1])


def answer(request: bytes) -> bytes:
    """Loads a tokenizer, or returns the numbers of ids of texts and their ids. Raises InputError."""
    kind, content = request[:1], request[1:]
    if kind == _LOAD:
        while len(_libraries) >= _KEPT:
            del _libraries[next(iter(_libraries))]
        _libraries[hashlib.sha256(content).digest()] = tokenizers.Tokenizer.from_str(content.decode())
        return b''
    digest, encodes_special = _HEAD.unpack_from(content)
    if digest not in _libraries:
        return _UNKNOWN
    library = _libraries[digest]
    library.encode_special_tokens = encodes_special
    encoded = encode_batch(library, json.loads(content[_HEAD.size :]))
    return np.concatenate([np.array([len(ids) for ids in encoded], np.uint32), *encoded]).tobytes()


@functools.lru_cache(_KEPT)
def _serialized(library: tokenizers.Tokenizer) -> tuple[bytes, bytes]:
    content = library.to_str().encode()
    return content, hashlib.sha256(content).digest()
