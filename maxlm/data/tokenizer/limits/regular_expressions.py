"""Limits the time that regular expressions of a `tokenizer.json` take.

The library matches by backtracking: `(a+)+b` needs a time that doubles with each letter of a text. Each regular
expression is therefore compiled, and applied to runs of the characters that it names, in a process with limits.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator

import tokenizers
from tokenizers import pre_tokenizers

from maxlm.errors import InputError, surrogate_in
from maxlm.sandbox.limited_process import LimitError, ProcessLimits, limited_process
from maxlm.storage.errors import catch_panics

# Published tokenizers take less than 0.3 s. Some are quadratic in the number of digits.
_LIMITS = ProcessLimits(cpu_seconds=3.0)
_RUN_CHARACTERS = 4096
# Exponential time shows in short runs, between which other characters make a match fail.
_SHORT_RUN = 24
# One character of each class that published tokenizers name.
_CLASSES = ('a', 'A', '0', ' ', '\n', '\r\n', '\t', '!', "'", 'é', '一', 'あ', '가', '\u0301', '٣', 'ǅ')
_MAX_NAMED = 24
# SHA-256 of regular expressions of published tokenizers, whose loading need not start a process.
_KNOWN = frozenset(
    {
        'd98f9631be1e9607',  # Llama 3
        '1ff7f41064896984',  # Qwen2
        '37eeaf14e325fd50',  # DeepSeek-V3
        'b17444129c80d563',  # DeepSeek-V3
        'c903ee638e48e525',  # DeepSeek-V3
        '1d64a9a8eaf9f1bd',  # Tekken
        '2d1b8dc11e89af71',  # gpt-oss
    }
)
_WORDS = re.compile(r'\w{2,16}')
_ESCAPES = re.compile(r'\\(?:x\{([0-9A-Fa-f]{1,5})\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4}))')


@functools.lru_cache(256)
def check_regex(regex: str) -> None:
    """Raises InputError if a regular expression takes too much time or memory."""
    if hashlib.sha256(regex.encode('utf-8', 'surrogatepass')).hexdigest()[:16] in _KNOWN:
        return
    try:
        limited_process(f'{__name__}:apply_regex', _LIMITS).call(regex.encode('utf-8', 'surrogatepass'))
    except LimitError as error:
        raise InputError(f'its regular expression {regex!r:.200} {error}; use another tokenizer') from None


def apply_regex(request: bytes) -> bytes:
    """Applies a regular expression to texts that can make it slow. Raises InputError if the library fails."""
    regex = request.decode('utf-8', 'surrogatepass')
    try:
        with catch_panics('tokenizers'):
            step = pre_tokenizers.Split(tokenizers.Regex(regex), 'isolated')
            for text in _probes(regex):
                step.pre_tokenize_str(text)
    except Exception as error:  # the library raises bare Exception
        reason = ' '.join(str(error).split())
        raise InputError(f'its regular expression {regex!r:.200} fails: {reason:.200}; use another tokenizer') from None
    return b''


def _probes(regex: str) -> Iterator[str]:
    escaped = [chr(int(next(filter(None, match.groups())), 16)) for match in _ESCAPES.finditer(regex)]
    # The library accepts no unpaired surrogates.
    characters = (character for character in dict.fromkeys([*escaped, *regex]) if surrogate_in(character) < 0)
    named = [character for character in characters if character not in _CLASSES][:_MAX_NAMED]
    words = list(dict.fromkeys(_WORDS.findall(regex)))[:_MAX_NAMED]
    # The library searches at once for characters that a match must contain, so each text has all of them, at its end.
    tail = '\0' + ''.join([*named, *_CLASSES])
    for unit in (*_CLASSES, *named, *words):
        run, short_run = unit * (_RUN_CHARACTERS // len(unit)), unit * (_SHORT_RUN // len(unit))
        yield run
        yield run + tail
        for separator in ('\0', '\n'):
            yield 8 * f'{short_run}{separator}' + tail
