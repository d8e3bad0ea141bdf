"""Text, tokenizer and rows that both sides of `benchmarks.nanochat_peer` train on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.data.loader.best_fit import pack_documents
from maxlm.data.tokenizer.tokenizer import Tokenizer, train_bpe
from maxlm.errors import InputError

VOCABULARY, SEQ_LEN, BATCH, VALIDATION_ROWS = 4096, 256, 4, 64
HELD_OUT_EVERY = 20
# Lognormal distribution of the bytes of a document: median, and standard deviation of the logarithm.
MEDIAN_BYTES, DEVIATION = 1300, 0.8


def write_rows(text: Path, file: Path, tokenizer_file: Path) -> dict[str, Any]:
    """Writes the rows as an archive of arrays, and the tokenizer. Returns facts about them.

    Rows contain SEQ_LEN inputs and their targets. Training rows have the three kinds of `data.rows`:

        documents   int32 [rows, SEQ_LEN + 1], each begins at a document (`pack_documents`)
        best_fit    the same, but what remains of a cut document begins the next row
        stream      windows of all documents in their order
        validation  int32 [VALIDATION_ROWS, SEQ_LEN + 1], of the kind `documents`
        token_bytes int32 [VOCABULARY], 0 for special tokens
        end         id of the token between documents

    Raises:
        InputError: the directory contains too little text.
    """
    train, validation = split_text(text)
    tokenizer = train_bpe(train, VOCABULARY)
    tokenizer.save(tokenizer_file)
    end = np.int32(tokenizer.end_of_document)
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for name, texts in (('train', train), ('validation', validation)):
        encoded = tokenizer.encode_batch([texts[i] for i in rng.permutation(len(texts))])
        documents = [np.append(ids.astype(np.int32), end) for ids in encoded]
        rows, cut = rows_of(documents, end)
        facts[name] = {'documents': len(texts), 'bytes': sum(len(one.encode()) for one in texts), 'cut_fraction': cut}
        if name == 'train':
            arrays['documents'] = rows
            arrays['best_fit'], _ = rows_of(documents, end, keeps_rests=True)
            arrays['stream'] = stream_rows(documents, end)
        elif len(rows) < VALIDATION_ROWS:
            raise InputError(f'--text={text}: gives {len(rows)} validation rows of {VALIDATION_ROWS}; choose more text')
        else:
            arrays['validation'] = rows[:VALIDATION_ROWS]
    sizes = token_bytes(tokenizer)
    arrays |= {'token_bytes': sizes, 'end': end}
    np.savez(file, **arrays)
    targets = arrays['validation'][:, 1:]
    facts['validation']['bytes_of_rows'] = int(sizes[targets].sum())
    return facts


def split_text(directory: Path) -> tuple[list[str], list[str]]:
    """Returns documents for training and validation: parts of the text files, of which one in twenty is held out."""
    files = sorted(path for path in directory.rglob('*') if path.suffix in ('.txt', '.rst', '.md') and path.is_file())
    rng = np.random.default_rng(0)
    train: list[str] = []
    validation: list[str] = []
    for number, path in enumerate(files):
        part = validation if number % HELD_OUT_EVERY == 0 else train
        part.extend(_parts(path.read_text(errors='ignore'), rng))
    return list(dict.fromkeys(train)), list(dict.fromkeys(validation))


def _parts(text: str, rng: np.random.Generator) -> Iterator[str]:
    """Splits a text at blank lines into documents of random lengths."""
    part, size = '', MEDIAN_BYTES * rng.lognormal(0, DEVIATION)
    for paragraph in text.split('\n\n'):
        part += paragraph + '\n\n'
        if len(part) >= size:
            yield part
            part, size = '', MEDIAN_BYTES * rng.lognormal(0, DEVIATION)
    if part.strip():
        yield part


def rows_of(documents: list[np.ndarray], end: np.int32, *, keeps_rests: bool = False) -> tuple[np.ndarray, float]:
    """Returns the complete rows, int32 [rows, SEQ_LEN + 1], and the fraction of the tokens that is cut."""
    lengths = np.array([len(document) for document in documents])
    packed = pack_documents(lengths, SEQ_LEN, keeps_rests=keeps_rests)
    rows = []
    for start, stop in zip(packed.firsts[:-1], packed.firsts[1:], strict=True):
        pieces = [
            documents[packed.documents[piece]][packed.starts[piece] :][: packed.lengths[piece]]
            for piece in range(start, stop)
        ]
        # The first token of a row is its last context, and is no target.
        first = packed.starts[start]
        before = documents[packed.documents[start]][first - 1] if first else end
        row = np.concatenate([np.array([before]), *pieces])
        if len(row) == SEQ_LEN + 1:
            rows.append(row)
    return np.array(rows), float(1 - packed.lengths.sum() / lengths.sum())


def stream_rows(documents: list[np.ndarray], end: np.int32) -> np.ndarray:
    """Returns the windows of a stream of documents, int32 [rows, SEQ_LEN + 1], which overlap by one token."""
    stream = np.concatenate([np.array([end]), *documents])
    starts = np.arange((len(stream) - 1) // SEQ_LEN) * SEQ_LEN
    return stream[starts[:, None] + np.arange(SEQ_LEN + 1)]


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Returns the number of bytes of each id of a byte-level BPE tokenizer, int32 [vocabulary]."""
    sizes = np.zeros(VOCABULARY, np.int32)
    for token, number in json.loads(tokenizer.to_json())['model']['vocab'].items():
        # Each character of a token stands for a byte.
        sizes[number] = len(token)
    sizes[tokenizer.end_of_document] = 0
    return sizes
