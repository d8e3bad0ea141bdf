"""Compares the throughput of `maxlm prepare` with that of the tokenizers library on the same cores.

    python -m benchmarks.tokenize [--megabytes=60] [--rounds=3] [--output=FILE]

The text is Python's standard library, repeated, as JSONL; the tokenizer is a byte-level BPE with 32 000 ids. The
library encodes texts in memory with all threads and discards the ids. `prepare` starts its processes, reads and parses
the file, and encodes, counts, writes and hashes the records. Both run in turns; results are medians.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import tokenizers

from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.cli.setup import prepare
from maxlm.data.tokenizer.tokenizer import train_bpe
from maxlm.errors import EXIT_DONE, exit_code

VOCAB = 32_000
TEXTS_AT_A_TIME = 256


def main(argv: list[str]) -> int:
    """Measures both and prints the ratio."""
    parser = ArgumentParser(prog='benchmarks.tokenize', allow_abbrev=False, description=__doc__)
    parser.add_argument('--megabytes', type=int, default=60, help='text to encode (default 60)')
    parser.add_argument('--rounds', type=int, default=3, help='turns of each (default 3)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))

    texts = list(_texts(options.megabytes * 10**6))
    size = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as directory:
        at = Path(directory)
        train_bpe(texts[: len(texts) // 10], VOCAB).save(at / 'tokenizer.json')
        with (at / 'texts.jsonl').open('w', encoding='utf-8') as file:
            file.writelines(json.dumps({'text': text}) + '\n' for text in texts)
        library = tokenizers.Tokenizer.from_file(str(at / 'tokenizer.json'))
        turns: dict[str, Callable[[int], None]] = {
            'library': lambda number: _encode(library, texts),
            'prepare': lambda number: _prepare(at, number, cores),
        }
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(options.rounds):
            for name, turn in turns.items():
                start = time.perf_counter()
                turn(number)
                seconds[name].append(time.perf_counter() - start)
    rates = {name: size / statistics.median(values) for name, values in seconds.items()}
    ratio = rates['prepare'] / rates['library']
    result = {
        'machine': {**machine(), **{package: version(package) for package in ('tokenizers', 'tiktoken')}},
        'cores': cores,
        'bytes': size,
        'bytes_per_second': rates,
        'ratio': ratio,
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    for name, rate in rates.items():
        print(f'{name}: {rate / 1e6:.1f} MB/s on {cores} cores')
    print(f'prepare: {ratio:.2f} of the library alone')
    return EXIT_DONE


def _texts(size: int) -> Iterator[str]:
    files = sorted(Path(sysconfig.get_paths()['stdlib']).glob('*.py'))
    while size > 0:
        for file in files:
            text = file.read_text(encoding='utf-8', errors='replace')
            yield text
            size -= len(text)
            if size <= 0:
                return


def _encode(library: tokenizers.Tokenizer, texts: list[str]) -> None:
    for start in range(0, len(texts), TEXTS_AT_A_TIME):
        library.encode_batch_fast(texts[start : start + TEXTS_AT_A_TIME], add_special_tokens=False)


def _prepare(at: Path, number: int, cores: int) -> None:
    arguments = ['--input', at / 'texts.jsonl', '--output', at / str(number), '--tokenizer', at / 'tokenizer.json']
    prepare.main([*map(str, arguments), '--workers', str(cores), '--quiet'])


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
