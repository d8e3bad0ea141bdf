"""Fixtures that write small data sets in the record format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from maxlm.data.dataset.records import (
    DatasetManifest,
    SourceCounts,
    Split,
    dataset_fingerprint,
    load_manifest,
    save_manifest,
)
from maxlm.data.dataset.shard_writer import ShardWriter

END = 0
Documents = Sequence[Sequence[int]]


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., DatasetManifest]:
    """Returns a function that writes shards of documents (token ids without end token) and loads them as a data set."""

    def make(
        train: Sequence[Documents],
        validation: Sequence[Documents] = (),
        *,
        block: int = 8,
        sources: Sequence[str] = ('texts',),
        directory: str = 'data',
    ) -> DatasetManifest:
        # Shards cycle through the sources.
        path = tmp_path / directory
        path.mkdir(exist_ok=True)
        (path / 'tokenizer.json').write_text('{}')
        splits = {}
        for name, shards in {'train': train, 'validation': validation}.items():
            written = []
            for number, documents in enumerate(shards):
                file, source = path / f'{name}-{number:05d}.arrayrecord', sources[number % len(sources)]
                with ShardWriter(file, source=source, block=block, dtype='uint16') as writer:
                    for document in documents:
                        writer.write([np.array([*document, END], np.uint32)])
                    written.append(writer.finish())
            tokens = sum(shard.tokens for shard in written)
            counts = {}
            for source in {shard.source: None for shard in written}:
                own = [shard for shard in written if shard.source == source]
                counts[source] = SourceCounts(sum(s.documents for s in own), sum(s.tokens for s in own), 0, 0.5)
            splits[name] = Split(sum(map(len, shards)), tokens, 0, 0.0, counts, tuple(written))
        checksum = hashlib.sha256(b'{}').hexdigest()
        fingerprint = dataset_fingerprint(block=block, dtype='uint16', end_of_document=END, splits=splits)
        save_manifest(
            DatasetManifest(
                path, 'bytes', 'tokenizer.json', checksum, 1000, END, 'uint16', block, splits, (), {}, fingerprint
            )
        )
        return load_manifest(path)

    return make


@pytest.fixture
def random_shards() -> list[list[list[int]]]:
    """Returns three shards of documents with 1 to 40 tokens; the second shard is a single short document."""
    rng = np.random.default_rng(7)
    shards = [[rng.integers(1, 1000, rng.integers(1, 41)).tolist() for _ in range(count)] for count in (23, 0, 9)]
    shards[1] = [[5]]
    return shards
