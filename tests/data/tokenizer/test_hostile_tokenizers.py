"""Tests that a tokenizer file either is a one-line error, or encodes and decodes texts in bounded time and memory.

The files are loaded in a process with limits, because a defect can take forever or exhaust the memory.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from maxlm.data.tokenizer.parse_special import encode_with_special
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.sandbox.limited_process import LimitError, ProcessLimits, limited_process
from tests.data.tokenizer.hostile_files import (
    BERT,
    BYTE_LEVEL,
    METASPACE,
    REJECTED,
    UNIGRAM,
    WORD_PIECE,
    A,
    X,
    charsmap,
    decoders,
    normalizers,
    pre_tokenizers,
    replace,
    split,
    template,
    token,
    tokenizer_file,
)

LIMITS = ProcessLimits(cpu_seconds=5.0)
TEXTS = ('a', 'aaaa 12 ü ﷺ\n', 'ab' * 500)
MAX_IDS = 10**6

strings = st.sampled_from(['', ' ', 'a', 'aa', '▁', 'ﷺ', ' ا', 'x' * 16, 'é', '\0', 'b' * 5000]) | st.text(max_size=3)
regexes = st.sampled_from(
    ['', '.', r'\s+', '(?=.)', '(a+)+b', 'a*a*a*b', r'(\w+\s?)*$', '[', ' {2,}', r'(.*)\1x', r'\d{1,3}', 'ab|cd']
) | st.text(alphabet='ab.*+?()[]{1,}|\\ws$^', max_size=10)
counts = st.integers(0, 3) | st.sampled_from([64, 10**9, 2**63, 2**64 - 1, -1])
replacements = st.builds(replace, strings, strings) | st.builds(
    lambda regex, new: replace(regex, new, is_regex=True), regexes, strings
)


def fixed(*kinds):
    return st.sampled_from([{'type': kind} for kind in kinds])


def sequence(steps, make):
    """Returns a strategy of steps, and of short, long and nested sequences of them."""
    several = st.lists(steps, max_size=4) | st.builds(lambda step, n: [step] * n, steps, st.sampled_from([8, 30, 65]))
    flat = several.map(lambda found: make(*found))
    return st.none() | steps | flat | st.lists(flat | steps, max_size=3).map(lambda found: make(*found))


normalizer = sequence(
    replacements
    | fixed('NFC', 'NFD', 'NFKC', 'NFKD', 'Lowercase', 'StripAccents', 'Nmt', 'ByteLevel', 'Other')
    | st.builds(lambda text: {'type': 'Prepend', 'prepend': text}, strings)
    | st.just({'type': 'Strip', 'strip_left': True, 'strip_right': True})
    | st.just(BERT)
    | st.builds(charsmap, st.sampled_from([0, 3, 4, 64, 2**31]), strings.map(str.encode)),
    normalizers,
)
pre_tokenizer = sequence(
    st.builds(split, regexes)
    | fixed('BertPreTokenizer', 'Whitespace', 'WhitespaceSplit', 'UnicodeScripts')
    | st.builds(lambda on: {'type': 'Digits', 'individual_digits': on}, st.booleans())
    | st.builds(lambda n: {'type': 'FixedLength', 'length': n}, counts)
    | st.builds(lambda c: {**METASPACE, 'replacement': c}, strings)
    | st.builds(lambda c: {'type': 'CharDelimiterSplit', 'delimiter': c}, strings)
    | st.sampled_from([BYTE_LEVEL, {'type': 'Punctuation', 'behavior': 'Isolated'}]),
    pre_tokenizers,
)
decoder = sequence(
    replacements
    | fixed('ByteFallback', 'Fuse')
    | st.builds(lambda c, n, m: {'type': 'Strip', 'content': c, 'start': n, 'stop': m}, strings, counts, counts)
    | st.builds(lambda text: {'type': 'WordPiece', 'prefix': text, 'cleanup': True}, strings)
    | st.builds(lambda text: {'type': 'BPEDecoder', 'suffix': text}, strings)
    | st.builds(
        lambda a, b: {'type': 'CTC', 'pad_token': a, 'word_delimiter_token': b, 'cleanup': True}, strings, strings
    )
    | st.sampled_from([BYTE_LEVEL, METASPACE]),
    decoders,
)
post_processor = st.none() | st.builds(
    template,
    st.lists(st.sampled_from([A, X]), max_size=4) | st.sampled_from([[X, A] * 500, [*[X] * 500, A]]),
    st.sampled_from([0, 1, 65, 1000]),
)
model = (
    st.none()
    | st.builds(lambda n: {**WORD_PIECE, 'max_input_chars_per_word': n}, counts)
    | st.builds(lambda text: {**UNIGRAM, 'vocab': [['<unk>', 0.0], ['</s>', 0.0], [text, -1.0]]}, strings)
)
added = st.lists(
    st.builds(
        lambda text, flags: (text, flags),
        strings,
        st.dictionaries(st.sampled_from(['lstrip', 'rstrip', 'single_word', 'normalized']), st.booleans()),
    ),
    max_size=3,
)
files = st.builds(
    lambda model, added, **parts: tokenizer_file(
        **parts,
        **({} if model is None else {'model': model}),
        added=[token(text, 200 + i, **flags) for i, (text, flags) in enumerate(added)],
    ),
    model,
    added,
    normalizer=normalizer,
    pre_tokenizer=pre_tokenizer,
    decoder=decoder,
    post_processor=post_processor,
)


def load_and_use(request: bytes) -> bytes:
    """Loads a file, and encodes and decodes texts. Raises InputError."""
    tokenizer = Tokenizer.from_json(request.decode(), name='x')
    for text in TEXTS:
        for ids in (tokenizer.encode_batch([text])[0], encode_with_special(tokenizer, text)):
            assert len(ids) <= MAX_IDS
            tokenizer.decode(ids[:1000])
    return b'used'


def used_or_one_line(facts):
    """Returns True if a tokenizer can be used, False if it is a one-line error, and fails otherwise."""
    try:
        return limited_process(f'{__name__}:load_and_use', LIMITS).call(json.dumps(facts).encode()) == b'used'
    except InputError as error:
        message = str(error)
    except LimitError as error:
        pytest.fail(f'the tokenizer {error}')
    assert '\n' not in message.strip(), message
    assert len(message) < 1000
    return False


def test_an_intact_file_is_used():
    assert used_or_one_line(tokenizer_file())


# Seeds: a text of 16 ** 12 letters, the growth of compositions, a regular expression, and a panic of a decoder.
@example(REJECTED['sequence of replacements'][0])
@example(REJECTED['compositions'][0])
@example(REJECTED['normalizer of bytes'][0])
@example(REJECTED['pre-tokenizers of bytes'][0])
@example(REJECTED['normalized added tokens'][0])
@example(REJECTED['exponential time'][0])
@example(REJECTED['repeated text'][0])
@example(REJECTED['map with a false size'][0])
@example(tokenizer_file(decoder=decoders({'type': 'Strip', 'content': 'a', 'start': 10**9, 'stop': 1})))
@example(tokenizer_file(pre_tokenizer={'type': 'FixedLength', 'length': 0}))
@given(facts=files)
def test_files_are_used_or_one_line_errors(facts):
    used_or_one_line(facts)
