"""Compares decoding on a CPU with llama.cpp and Transformers: `python -m benchmarks.decode_peers [--size=small|0.1b]`.

A Llama with random weights is written in the formats of all sides. Each side is a process that continues 1 or 8 prompts
at the same time, greedily, on all cores. Weights are float32 (`maxlm`, `llama.cpp`, `transformers`) or have 8 bits
(`maxlm int8`, `maxlm w8a8`, `llama.cpp q8_0`). The first tokens of the float32 sides are compared before. The sides run
in turns in a changing order; ratios compare medians over the rounds. A repetition would find its prompt in maxlm's
cache, so each round has other prompts.

Needs maxlm's `dev` extra, and llama-cpp-python compiled for this machine. `--llama-python` is the interpreter of the
environment that contains it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_process import Peer
from benchmarks.serve import SIZES
from benchmarks.serve_peer import write_llama
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.data.tokenizer.tokenizer import train_bpe
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.huggingface.gguf.export_gguf import export_gguf
from maxlm.huggingface.import_model import import_model
from maxlm.log import progress_bar

STREAMS = (1, 8)
PROMPT_TOKENS = 16
NEW_TOKENS = 128
# Number of tokens that must agree on the sides with float32 weights.
SAME = 8
FLOAT32 = ('maxlm', 'llama.cpp', 'transformers')
# Pairs (side, peer) whose rates are compared.
PAIRS = (
    ('maxlm', 'llama.cpp'),
    ('maxlm', 'transformers'),
    ('maxlm int8', 'llama.cpp q8_0'),
    ('maxlm w8a8', 'llama.cpp q8_0'),
)


def main(argv: list[str]) -> int:
    """Measures all sides, prints a table and writes JSON."""
    parser = ArgumentParser(prog='benchmarks.decode_peers', allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('--size', choices=SIZES, default='small', help='of the model (default small)')
    parser.add_argument('--rounds', type=int, default=7, help='turns of each side (default 7)')
    parser.add_argument('--llama-python', default=sys.executable, help='Python with llama-cpp-python (default: this)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    if options.rounds < 1:
        raise InputError(f'--rounds={options.rounds}: must be at least 1')
    sizes = SIZES[options.size]
    with tempfile.TemporaryDirectory() as folder:
        sides = start(Path(folder), sizes, options.llama_python)
        try:
            results = measure(sides, sizes['vocab'], options.rounds)
        finally:
            for side in sides.values():
                side.end()
    for result in results:
        rates = ', '.join(f'{name} {rate:.1f}' for name, rate in result['tokens_per_second'].items())
        ratios = ', '.join(f'{name} {ratio:.2f}' for name, ratio in result['ratios'].items())
        print(f'{result["streams"]} streams, tokens/s: {rates}; ratios: {ratios}')
    ready = {name: side.ready for name, side in sides.items()}
    versions = {package: version(package) for package in ('torch', 'transformers')}
    print(json.dumps({**ready, **versions}))
    if options.output:
        found = {'machine': {**machine(), **versions}, 'sides': ready, 'sizes': sizes, 'results': results}
        options.output.write_text(json.dumps(found, indent=1) + '\n')
    return EXIT_DONE


def start(folder: Path, sizes: dict[str, int], llama_python: str) -> dict[str, Peer]:
    """Writes the model and starts all sides."""
    transformers, workdir = str(folder / 'transformers'), str(folder / 'workdir')
    write_llama(folder / 'transformers', sizes, end=0)
    # llama.cpp needs a byte-level tokenizer. Random words give as many merges as the vocabulary needs.
    rng = random.Random(0)
    words = (''.join(rng.choices(string.ascii_lowercase, k=8)) for _ in range(2 * sizes['vocab']))
    tokenizer = train_bpe([' '.join(words)], sizes['vocab'])
    assert tokenizer.vocab_size == sizes['vocab']
    tokenizer.save(folder / 'transformers' / 'tokenizer.json')
    import_model(transformers, workdir, show=False)
    for dtype in ('f32', 'q8_0'):
        export_gguf(workdir, str(folder / f'{dtype}.gguf'), dtype=dtype, show=False)
    ours = [sys.executable, '-m', 'benchmarks.decode_peer']
    threads, slots = str(len(os.sched_getaffinity(0))), str(max(STREAMS))
    # -P: this directory contains modules with names of the standard library.
    llama = [llama_python, '-P', str(Path(__file__).with_name('llama_cpp_peer.py'))]
    commands = {
        'maxlm': [*ours, 'maxlm', workdir],
        'maxlm int8': [*ours, 'maxlm', workdir, 'int8'],
        'maxlm w8a8': [*ours, 'maxlm', workdir, 'w8a8'],
        'llama.cpp': [*llama, str(folder / 'f32.gguf'), threads, slots],
        'llama.cpp q8_0': [*llama, str(folder / 'q8_0.gguf'), threads, slots],
        'transformers': [*ours, 'transformers', transformers],
    }
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
    return {name: Peer(name, command, environment) for name, command in commands.items()}


def measure(sides: Mapping[str, Peer], vocab: int, rounds: int) -> list[dict[str, Any]]:
    """Measures all sides in turns for each number of streams; `vocab` is the model's vocabulary size."""
    rng, order = np.random.default_rng(0), random.Random(0)

    def prompts(num: int) -> list[list[int]]:
        found: list[list[int]] = rng.integers(1, vocab, (num, PROMPT_TOKENS)).tolist()
        return found

    probe = prompts(1)
    first = {name: sides[name].work(prompts=probe, num=SAME)['tokens'] for name in FLOAT32}
    if len({json.dumps(tokens) for tokens in first.values()}) > 1:
        raise SystemExit(f'not the same model: {first}')
    results = []
    with progress_bar('benchmark', total=len(STREAMS) * (rounds + 1), unit='round', show=True) as bar:
        for streams in STREAMS:
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(rounds + 1):
                asked = prompts(streams)
                for name in order.sample(sorted(sides), len(sides)):
                    seconds = sides[name].work(prompts=asked, num=NEW_TOKENS)['seconds']
                    # The first round compiles programs.
                    if number:
                        rates[name].append(streams * NEW_TOKENS / seconds)
                bar.update()
            medians = {name: statistics.median(values) for name, values in rates.items()}
            ratios = {f'{ours} / {peer}': medians[ours] / medians[peer] for ours, peer in PAIRS}
            results.append({'streams': streams, 'tokens_per_second': medians, 'ratios': ratios, 'turns': rates})
    return results


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
