"""Tests bytes per token: known tokenizers, texts that a tokenizer cannot represent, and the stored counts."""

import hashlib
import json

import pytest

from maxlm.data.compression.bytes_per_token import KINDS, OWN, REFERENCE, bytes_per_token, sample_texts
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer, chars_tokenizer, ids_tokenizer, train_bpe


def own(tokenizer):
    return {kind: values[OWN] for kind, values in bytes_per_token(tokenizer).items() if OWN in values}


def test_a_byte_tokenizer_has_one_byte_per_token():
    assert own(bytes_tokenizer()) == dict.fromkeys(KINDS.values(), 1.0)


def test_a_character_tokenizer_has_the_bytes_of_its_characters():
    tokenizer = chars_tokenizer([sample_texts()['english'], sample_texts()['russian']])
    text = sample_texts()['russian']
    # The ids of the other texts would be those of unknown characters.
    assert own(tokenizer) == {'English': pytest.approx(1.0, abs=0.01), 'Russian': len(text.encode()) / len(text)}


def test_a_tokenizer_compresses_its_training_text():
    values = own(train_bpe([sample_texts()['code']], 500))
    assert values['Python'] > 2 * values['Korean']


def test_numbers_are_no_text():
    assert bytes_per_token(ids_tokenizer(9, 8)) == {}


def test_the_reference_tokenizers():
    # Published: cl100k_base has fewer tokens than GPT-2, in particular for code and other scripts.
    values = bytes_per_token(bytes_tokenizer())
    assert all(kind['cl100k_base'] > kind['GPT-2'] for kind in values.values())
    assert 4 < values['English']['GPT-2'] < 5


def test_the_counts_belong_to_the_texts():
    # tests/conformance/test_reference_tokenizers.py counts again if the packages can be downloaded.
    stored = json.loads(REFERENCE.read_text())['sha256']
    assert stored == {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sample_texts().items()}
