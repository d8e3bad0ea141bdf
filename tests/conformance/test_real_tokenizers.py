"""Tests real tokenizers of packages below 10 MB: ids, texts, special tokens, the exported copy and GGUF."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
import transformers

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.huggingface.gguf_tokenizer import vocabulary
from maxlm.huggingface.tokenizer_files import files_for_export, files_for_import
from tests.conformance.real_models_prompts import LICENSE, TEXTS
from tests.conformance.real_models_tokenizers import TOKENIZERS, Encode, RealTokenizer
from tests.small import small_config

MORE_TEXTS = (
    '',
    ' ',
    '\n',
    '\t\t  \r\n\r\n ',
    'x',
    '1234567890 3.14 1e-5 ½ ٣',
    "I'm you're WE'LL don't",
    'https://example.org/?q=1&x=%20#top',
    'CamelCase snake_case SCREAMING_CASE kebab-case',
    'e\u0301 \u00e9 \u1e9b\u0323 \ufb01 \u2126',
    '\u200b\u200d\ufeff\u00a0\u3000',
    '\x00\x01\x7f',
    '👩‍👩‍👧‍👦🏳️‍🌈🇳🇴',
    'हिन्दी ไทย עברית 한국어 中文简体繁體',
    '<|endoftext|> </s> <|im_end|> [INST] <｜end▁of▁sentence｜> <|begin_of_text|>',
    'a' * 300,
    ' ' * 100 + 'end',
    LICENSE,
)


class Opened(NamedTuple):
    """A real tokenizer in a directory, maxlm's reading of it, and the function with the expected ids."""

    real: RealTokenizer
    directory: object
    tokenizer: Tokenizer
    expected: Encode


@pytest.fixture(scope='module', params=TOKENIZERS)
def opened(request, tmp_path_factory):
    real = TOKENIZERS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    expected = real.write(directory)
    return Opened(real, directory, Tokenizer.load(directory / 'tokenizer.json'), expected)


@pytest.mark.slow
def test_ids_equal_those_of_the_library_of_the_authors(opened):
    texts = [*TEXTS, *MORE_TEXTS]
    ids = [row.tolist() for row in opened.tokenizer.encode_batch(texts)]
    wanted = opened.expected(texts)
    assert {text: row for text, row, right in zip(texts, ids, wanted, strict=True) if row != right} == {}
    # Control: other texts have other ids.
    assert ids[0] != opened.expected(['The capital of Norway is'])[0]
