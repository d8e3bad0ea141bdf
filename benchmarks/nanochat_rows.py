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

VOCABULARY, SEQ_LEN, BATCH, STEPS, VALIDATION_ROWS = 4096, 256, 4, 300, 64
HELD_OUT_EVERY = 20
# Lognormal distribution of the bytes of a document: median, and standard deviation of the logarithm.
MEDIAN_BYTES, DEVIATION = 1300, 0.8


def write_rows(text: Path, file: Path, tokenizer_file: Path) -> dict[str, Any]:
    """Writes the rows as an archive of arrays, and the tokenizer. Returns facts about them.

    Rows begin at documents (`pack_documents`) and contain SEQ_LEN inputs and their targets:

        train       int32 [STEPS · BATCH, SEQ_LEN + 1]
        validation  int32 [VALIDATION_ROWS, SEQ_LEN + 1]
        token_bytes int32 [VOCABULARY], 0 for special tokens
        end         id of the token between documents, with which each row begins

    Raises:
        InputError: the directory contains too little text.
    """
    train, validation = split_text(text)
    tokenizer = train_bpe(train, VOCABULARY)
    tokenizer.save(tokenizer_file)
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for name, texts, count in (('train', train, STEPS * BATCH), ('validation', validation, VALIDATION_ROWS)):
        rows, cut = rows_of(tokenizer, [texts[i] for i in rng.permutation(len(texts))])
        if len(rows) < count:
            raise InputError(f'--text={text}: gives {len(rows)} {name} rows of {count}; choose more text')
        arrays[name] = rows[:count]
        facts[name] = {'documents': len(texts), 'bytes': sum(len(one.encode()) for one in texts), 'cut_fraction': cut}
    sizes = token_bytes(tokenizer)
    arrays |= {'token_bytes': sizes, 'end': np.int32(tokenizer.end_of_document)}
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


def rows_of(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, float]:
    """Returns the complete rows, int32 [rows, SEQ_LEN + 1], and the fraction of the tokens that is cut."""
    end = np.int32(tokenizer.end_of_document)
    documents = [np.append(ids.astype(np.int32), end) for ids in tokenizer.encode_batch(texts)]
    lengths = np.array([len(document) for document in documents])
    packed = pack_documents(lengths, SEQ_LEN, keeps_rests=False)
    rows = []
    for start, stop in zip(packed.firsts[:-1], packed.firsts[1:], strict=True):
        pieces = zip(packed.documents[start:stop], packed.lengths[start:stop], strict=True)
        row = np.concatenate([np.array([end]), *(documents[document][:length] for document, length in pieces)])
        if len(row) == SEQ_LEN + 1:
            rows.append(row)
    return np.array(rows), float(1 - packed.lengths.sum() / lengths.sum())


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Returns the number of bytes of each id of a byte-level BPE tokenizer, int32 [vocabulary]."""
    sizes = np.zeros(VOCABULARY, np.int32)
    for token, number in json.loads(tokenizer.to_json())['model']['vocab'].items():
        # Each character of a token stands for a byte.
        sizes[number] = len(token)
    sizes[tokenizer.end_of_document] = 0
    return sizes
