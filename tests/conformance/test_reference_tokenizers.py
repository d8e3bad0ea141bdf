"""Tests the stored numbers of tokens of GPT-2 and cl100k_base with their published vocabularies."""

import json

from maxlm.data.compression.bytes_per_token import REFERENCE
from tests.conformance.reference_tokenizers import count_tokens


def test_stored_counts():
    assert json.loads(REFERENCE.read_text())['tokens'] == count_tokens()
