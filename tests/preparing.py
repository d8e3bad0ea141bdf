"""Runs `maxlm prepare` on small texts and reads the resulting data sets."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from maxlm.cli.setup import prepare
from maxlm.data.dataset.records import DatasetManifest
from maxlm.data.dataset.token_reader import TokenReader
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import exit_code

WORDS = ['alpha', 'beta', 'gamma', 'größe', '\r\n', '<|endoftext|>', '🙂']


def run(*arguments: object) -> int:
    """Runs `maxlm prepare` and returns its exit code."""
    return exit_code(prepare.main, [str(argument) for argument in arguments])


def contents(directory: Path) -> dict[str, bytes]:
    """Returns the contents of all files in a directory by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def write_texts(directory: Path) -> Path:
    """Writes forty text files, an empty one, and a JSONL file of ten lines."""
    rng = random.Random(5)
    directory.mkdir()
    for i in range(40):
        (directory / f'{i}.txt').write_text(' '.join(rng.choices(WORDS, k=rng.randrange(1, 300))), newline='')
    lines = [json.dumps({'text': ' '.join(rng.choices(WORDS, k=50))}) for _ in range(10)]
    (directory / 'web.jsonl').write_text('\n'.join(lines) + '\n\n')
    (directory / 'empty.txt').touch()
    return directory


def ids_of(dataset: DatasetManifest, split: str) -> list[np.ndarray]:
    """Returns the token ids of each document of a split in order, without the end token."""
    found = []
    for number, shard in enumerate(dataset.splits[split].shards):
        stream = TokenReader(dataset, dataset.splits[split].shards).read(number, 0, shard.tokens)
        ends = np.flatnonzero(stream == dataset.end_of_document)
        found += [part[part != dataset.end_of_document] for part in np.split(stream, ends + 1)[:-1]]
    return found


def documents_of(dataset: DatasetManifest, split: str) -> list[str]:
    """Returns the texts of a split, in order."""
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    return [tokenizer.decode(ids) for ids in ids_of(dataset, split)]
