"""The counts of all groups, added up to a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.data.groups import Group, SplitCounts, read_result
from maxlm.data.records import Dataset, Shard, SourceCounts, Split, dataset_fingerprint, token_dtype
from maxlm.data.tokenizer import TOKENIZER_FILE, Tokenizer
from maxlm.errors import InputError


def assemble(
    groups: Sequence[Group], tokenizer: Tokenizer, *, tokenizer_kind: str, made_from: dict[str, Any], output: Path
) -> Dataset:
    """The data set that the groups, all of them written, make together; at least one.

    Raises:
        InputError: no document is left to train on, or somebody removed what a group had written.
    """
    sums = {name: _Sum(tokenizer.vocab_size) for name in ('train', 'validation')}
    left_out: list[dict[str, str]] = []
    # One result at a time: their token counts would not fit into memory together.
    for group in groups:
        result = read_result(group)
        if result is None:
            raise InputError(f'{group.result_path}: removed or changed while maxlm.prepare was running; run it again')
        left_out += result.left_out
        for name, counts in result.splits.items():
            sums[name].add(counts)
    splits = {name: total.split() for name, total in sums.items()}
    if not splits['train'].documents:
        raise InputError('--input gives no document to train on; give more text')
    block, dtype = groups[0].block, token_dtype(tokenizer.vocab_size)
    end_of_document = tokenizer.end_of_document
    return Dataset(
        path=output,
        tokenizer=tokenizer_kind,
        tokenizer_file=TOKENIZER_FILE,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_of_document=end_of_document,
        dtype=dtype,
        block=block,
        splits=splits,
        left_out=tuple(left_out),
        made_from=made_from,
        fingerprint=dataset_fingerprint(block=block, dtype=dtype, end_of_document=end_of_document, splits=splits),
    )


class _Sum:
    """The growing counts of one split."""

    def __init__(self, vocab_size: int):
        self._token_counts = np.zeros(vocab_size, np.int64)
        # Source → [documents, tokens, text_bytes].
        self._sources: dict[str, np.ndarray] = {}
        self._shards: list[Shard] = []

    def add(self, counts: SplitCounts) -> None:
        self._token_counts += counts.token_counts
        for source, new in counts.sources.items():
            self._sources[source] = self._sources.get(source, np.zeros(3, np.int64)) + new
        if counts.shard is not None:
            self._shards.append(counts.shard)

    def split(self) -> Split:
        documents, tokens, text_bytes = sum(self._sources.values(), np.zeros(3, np.int64)).tolist()
        sources = {}
        for source, counts in self._sources.items():
            num_documents, num_tokens, num_bytes = counts.tolist()
            sources[source] = SourceCounts(num_documents, num_tokens, num_bytes, share=num_tokens / tokens)
        return Split(
            documents=documents,
            tokens=tokens,
            text_bytes=text_bytes,
            unigram_entropy=_entropy(self._token_counts),
            sources=sources,
            shards=tuple(self._shards),
        )


def _entropy(counts: np.ndarray) -> float:
    """Entropy of a distribution given by counts, in nats; 0 where there is nothing."""
    counts = counts[counts > 0]
    frequencies = counts / max(counts.sum(), 1)
    # abs: one kind of token only gives -0.0.
    return abs(float((frequencies * np.log(frequencies)).sum()))
