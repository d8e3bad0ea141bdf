"""Runs a preparation by stages and shares, and texts in several formats for it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard

from maxlm.data.parts.share import PARALLEL, STAGES
from tests.buckets.gcs import GcsServer
from tests.killing import write_corpus
from tests.preparing import run

# All stages of a preparation have results that other stages read.
OPTIONS = ['--tokenizer', 'bpe:300', '--filter', 'c4', '--deduplicate', 'near', '--fim-rate', 0.5, '--quiet']
OPTIONS += ['--workers', 1, '--validation-fraction', 0.1]


def write_inputs(directory: Path) -> list[object]:
    """Writes texts as text, compressed JSONL and Parquet of two sources, and returns the options that name them."""
    directory.mkdir()
    write_corpus(directory / 'web', 3)
    first, second, third = sorted((directory / 'web').iterdir())
    (directory / 'web' / '0.jsonl.gz').write_bytes(gzip.compress(first.read_bytes(), mtime=0))
    (directory / 'web' / '1.jsonl.zst').write_bytes(zstandard.compress(second.read_bytes()))
    texts = [json.loads(line)['text'] for line in third.read_text().splitlines()]
    (directory / 'books').mkdir()
    for path in (first, second, third):
        path.unlink()
    pyarrow.parquet.write_table(
        pyarrow.table({'text': texts[:40]}), directory / 'books' / 'a.parquet', row_group_size=10
    )
    for number, text in enumerate(texts[40:]):
        (directory / 'books' / f'{number}.txt').write_text(text)
    return ['--input', directory / 'web', directory / 'books']


def run_stages(*arguments: object, count: int = 2, stages: tuple[str, ...] = STAGES) -> list[int]:
    """Runs the stages one after the other, `count` shares of each parallel one, and returns the exit codes."""
    return [
        run(*arguments, '--stage', stage, *(['--task', f'{index}/{count}'] if stage in PARALLEL else []))
        for stage in stages
        for index in range(count if stage in PARALLEL else 1)
    ]


def objects(server: GcsServer, name: str = 'web') -> dict[str, bytes]:
    """Returns the objects of a data set by name."""
    return {
        path.removeprefix(f'{name}/'): stored.content
        for (_, path), stored in server.objects.items()
        if path.startswith(f'{name}/')
    }
