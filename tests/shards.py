"""Byte-level data sets with a given number of shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxlm.data.dataset.records import (
    DatasetManifest,
    SourceCounts,
    Split,
    dataset_fingerprint,
    load_manifest,
    save_manifest,
)
from maxlm.data.dataset.shard_writer import ShardWriter
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer


def write_dataset(
    path: Path, train: Sequence[Sequence[str]], validation: Sequence[Sequence[str]] = ()
) -> DatasetManifest:
    """Writes one shard for each list of texts, all from the source `texts`."""
    path.mkdir(parents=True)
    tokenizer = bytes_tokenizer()
    tokenizer.save(path / 'tokenizer.json')
    end, block, dtype = tokenizer.end_of_document, 32, 'uint16'
    splits = {}
    for name, shards in {'train': train, 'validation': validation}.items():
        written = []
        for number, texts in enumerate(shards):
            file = path / f'{name}-{number:05d}.arrayrecord'
            with ShardWriter(file, source='texts', block=block, dtype=dtype) as writer:
                writer.write([np.append(ids, np.uint32(end)) for ids in tokenizer.encode_batch(texts)])
                written.append(writer.finish())
        documents, tokens = sum(shard.documents for shard in written), sum(shard.tokens for shard in written)
        counts = {'texts': SourceCounts(documents, tokens, tokens - documents, 1.0)} if written else {}
        splits[name] = Split(documents, tokens, tokens - documents, 2.0, counts, tuple(written))
    save_manifest(
        DatasetManifest(
            path=path,
            tokenizer='bytes',
            tokenizer_file='tokenizer.json',
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            end_of_document=end,
            dtype=dtype,
            block=block,
            splits=splits,
            left_out=(),
            made_from={},
            fingerprint=dataset_fingerprint(block=block, dtype=dtype, end_of_document=end, splits=splits),
        )
    )
    return load_manifest(path)
