"""Bytes per token of a tokenizer on sample texts, beside those of GPT-2 and cl100k_base.

The texts were written for this purpose. `reference.json` contains the numbers of tokens of the published tokenizers.
`python -m tests.conformance.reference_tokenizers` writes it.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.storage.json_text import parse_json

# Files of the texts → kinds of text, in the order of the table.
KINDS = {
    'english': 'English',
    'code': 'Python',
    'maths': 'Maths (LaTeX)',
    'russian': 'Russian',
    'arabic': 'Arabic',
    'hindi': 'Hindi',
    'chinese': 'Chinese',
    'korean': 'Korean',
}
# Key of the tokenizer itself in the table.
OWN = 'tokenizer'
_DIRECTORY = Path(__file__).parent
REFERENCE = _DIRECTORY / 'reference.json'

# Kind of text → tokenizer → bytes per token.
BytesPerToken = dict[str, dict[str, float]]


@functools.cache
def sample_texts() -> Mapping[str, str]:
    """Returns the sample texts by the names of `KINDS`."""
    return {name: (_DIRECTORY / 'texts' / f'{name}.txt').read_bytes().decode() for name in KINDS}


def bytes_per_token(tokenizer: Tokenizer) -> BytesPerToken:
    """Returns the UTF-8 bytes per token of `tokenizer` and of the reference tokenizers on each kind of text.

    Kinds that the ids of `tokenizer` cannot represent have only the values of the reference tokenizers. The table is
    empty for tokenizers of kind `ids`, whose text is numbers.
    """
    if tokenizer.kind == 'ids':
        return {}
    reference = parse_json(REFERENCE.read_text(encoding='utf-8'))['tokens']
    table: BytesPerToken = {}
    for name, text in sample_texts().items():
        counts = {OWN: _count(tokenizer, text), **{other: tokens[name] for other, tokens in reference.items()}}
        size = len(text.encode())
        table[KINDS[name]] = {key: size / count for key, count in counts.items() if count}
    return table


def _count(tokenizer: Tokenizer, text: str) -> int:
    """Returns the number of tokens of a text; 0 if they do not represent it."""
    try:
        # The fast encoder of a large vocabulary takes longer to create than these texts take.
        (ids,) = tokenizer.encode_batch_by_library([text])
        decoded = tokenizer.decode(ids)
    except InputError:
        return 0
    # Some tokenizers normalize a text, or put a space before it.
    same = unicodedata.normalize('NFKC', decoded).split() == unicodedata.normalize('NFKC', text).split()
    return len(ids) if same else 0
