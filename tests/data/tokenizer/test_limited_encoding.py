"""Tests that long texts are encoded in a process with limits, to the same ids."""

import contextlib

import numpy as np
import pytest

from maxlm.data.tokenizer import limited_encoding
from maxlm.data.tokenizer.limited_encoding import limit_encoding
from maxlm.data.tokenizer.parse_special import encode_with_special
from maxlm.errors import InputError
from maxlm.sandbox.limited_process import ProcessLimits
from tests.data.tokenizer.hostile_files import ACCEPTED, load, replace, token, tokenizer_file


@pytest.fixture
def requests(monkeypatch):
    """Returns the sizes of the requests to the process."""
    sizes, original = [], limited_encoding.limited_process

    class Recorder:
        def __init__(self, process):
            self.process = process

        def call(self, request):
            sizes.append(len(request))
            return self.process.call(request)

    monkeypatch.setattr(limited_encoding, 'limited_process', lambda *args: Recorder(original(*args)))
    return sizes


def test_ids_are_equal(requests):
    tokenizer = load(tokenizer_file(**ACCEPTED['Llama 2']))
    texts = ['a b </s> ü ' * 3000, '', 'x']
    calls = [
        lambda: tokenizer.encode_batch(texts),
        lambda: tokenizer.encode_batch_inside(texts),
        lambda: tokenizer.encode_batch_inside(texts, after_special=True),
        lambda: [encode_with_special(tokenizer, texts[0])],
    ]
    expected = [call() for call in calls]
    assert not requests
    with limit_encoding():
        for call, rows in zip(calls, expected, strict=True):
            found = call()
            assert [row.tolist() for row in found] == [row.tolist() for row in rows]
            assert all(row.dtype == np.uint32 for row in found)
        assert len(requests) >= len(calls)
        requests.clear()
        tokenizer.encode_batch(['short'])
    tokenizer.encode_batch(texts)
    assert not requests


def test_a_text_that_takes_too_long_is_an_error(monkeypatch):
    monkeypatch.setattr(limited_encoding, '_LIMITS', ProcessLimits(cpu_seconds=0.5))
    tokenizer = load(tokenizer_file(**ACCEPTED['digits from the right, as a separator']))
    with limit_encoding():
        with pytest.raises(InputError, match=r'the tokenization of the text takes more than 0\.5 s of CPU time'):
            tokenizer.encode_batch(['1' * 100_000])
        # The next text starts another process, which has to load the tokenizer again.
        assert len(tokenizer.encode_batch(['1 ' * 10_000])[0]) == 20_000


def test_many_short_texts_have_a_limit_in_total(monkeypatch):
    tokenizer = load(tokenizer_file(**ACCEPTED['digits from the right, as a separator']))
    tokenizer.encode_batch(['1'])
    monkeypatch.setattr(limited_encoding, '_MAX_SECONDS', 0.0)
    with limit_encoding():
        assert len(tokenizer.encode_batch(['1' * 1000])[0]) == 1000
        with pytest.raises(InputError, match='the tokenization of the texts takes more than 0 s; use shorter texts'):
            tokenizer.encode_batch(['1'])
    # Each request has its own limit, and there is none outside of requests.
    for block in (limit_encoding(), contextlib.nullcontext()):
        with block:
            assert len(tokenizer.encode_batch(['1'])[0]) == 1


EXPANDING = {
    'replacement': ({'normalizer': replace('a', 'b' * 2000)}, 'a' * 200_000),
    # The normalizer of a part of the text shows nothing.
    'after letters': ({'normalizer': replace('(?<=a{5000})a', 'b' * 2000, is_regex=True)}, 'a' * 100_000),
    'between added tokens': (
        {'normalizer': {'type': 'Prepend', 'prepend': 'b' * 2000}, 'added': [token('x', 200)]},
        'ax' * 50_000,
    ),
}


@pytest.mark.parametrize('name', EXPANDING)
@pytest.mark.parametrize('is_server', [False, True])
def test_a_text_that_expands_too_much_is_an_error(monkeypatch, name, is_server):
    limits = ProcessLimits(cpu_seconds=30, memory_bytes=64 << 20)
    monkeypatch.setattr(limited_encoding, '_LIMITS', limits)
    monkeypatch.setattr(limited_encoding, '_MEMORY_LIMITS', limits)
    parts, text = EXPANDING[name]
    tokenizer = load(tokenizer_file(**parts))
    with limit_encoding() if is_server else contextlib.nullcontext():
        with pytest.raises(InputError, match=r'the tokenization of the text needs more than \d+ MiB of memory'):
            tokenizer.encode_batch([text])
        assert len(tokenizer.encode_batch(['c'])[0]) in (1, 2001)


def test_only_tokenizers_that_expand_texts_use_the_process_outside_of_servers(requests):
    text = 'c ' * 50_000
    for steps, is_used in ((ACCEPTED['Llama 2'], False), ({'normalizer': replace('a', 'b' * 100)}, True)):
        tokenizer = load(tokenizer_file(**steps))
        expected = tokenizer.encode_batch_by_library([text])[0] if not is_used else None
        requests.clear()
        (ids,) = tokenizer.encode_batch([text])
        assert bool(requests) == is_used
        assert expected is None or ids.tolist() == expected.tolist()
        assert len(ids) >= len(text)


def test_errors_of_texts_reach_the_caller():
    tokenizer = load(tokenizer_file())
    with limit_encoding(), pytest.raises(InputError, match='not valid UTF-8 at character 20000'):
        tokenizer.encode_batch(['a' * 20_000 + '\ud800'])


def test_the_limit_ends_with_the_block():
    with contextlib.suppress(KeyError), limit_encoding():
        raise KeyError
    assert limited_encoding._budget.get() is None
