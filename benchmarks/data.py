"""Measures the throughput of data loaders on one core: maxlm against other loaders of the same tokens.

    python -m benchmarks.data [--tokens=100e6] [--rounds=9] [--peer-python=PYTHON] [--output=FILE]

All loaders yield batches of 64 sequences of 2 048 tokens in random order and run in turns. Throughputs are medians over
the rounds; ratios compare medians. `memmap` reads tokens and targets (int32) from one flat file with NumPy. It either
stacks slices, as small trainers do, or fills preallocated rows, which is the minimum of work. maxlm yields five arrays
(tokens, targets, weights, segments, positions). Public loaders run if they can be imported, here or by --peer-python
(an environment with torch, mosaicml-streaming and litdata).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from benchmarks.data_peers import BATCH, WINDOW, MemmapLoader
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.config.schema import DataConfig
from maxlm.data.dataset.records import (
    DatasetManifest,
    SourceCounts,
    Split,
    dataset_fingerprint,
    save_manifest,
)
from maxlm.data.dataset.shard_writer import ShardWriter
from maxlm.data.dataset.token_reader import READER_OPTIONS
from maxlm.data.loader.batches import TrainingRows, iterate
from maxlm.data.loader.dataset import open_training_data
from maxlm.data.loader.shuffle import ShuffledIndex
from maxlm.data.loader.windows import window_batch
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import EXIT_DONE, exit_code

MEAN_DOCUMENT = 600
PEERS = ('torch', 'streaming', 'litdata')


def main(argv: list[str]) -> int:
    """Measures all loaders and prints a table."""
    parser = ArgumentParser(prog='benchmarks.data', allow_abbrev=False, description=__doc__)
    parser.add_argument('--tokens', type=float, default=100e6, help='size of the data set (default 100e6)')
    parser.add_argument('--shards', type=int, default=16, help='its shards (default 16)')
    parser.add_argument('--rounds', type=int, default=9, help='turns of each loader (default 9)')
    parser.add_argument('--batches', type=int, default=60, help='batches in a turn (default 60)')
    parser.add_argument('--peer-python', default=sys.executable, help='interpreter that has the public loaders')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        # Child processes inherit the affinity.
        os.sched_setaffinity(0, {max(cores)})
        stack.callback(os.sched_setaffinity, 0, cores)
        at = Path(directory)
        # Each shard has only complete sequences, so that all loaders yield batches of the same size.
        per_shard = int(options.tokens) // (options.shards * WINDOW) * WINDOW + 1
        tokens = random_tokens(options.shards * per_shard)
        tokens.tofile(at / 'tokens.bin')
        dataset = write_dataset(tokens, at / 'data', options.shards)
        turns = _own_loaders(at, dataset, options.batches)
        peers = [_Peer(options.peer_python, name, at, options.batches) for name in PEERS]
        for peer in peers:
            if peer.missing:
                print(f'{peer.name}: not measured ({peer.missing})')
            else:
                turns[peer.title] = peer.turn
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(options.rounds + 1):
            for name, turn in turns.items():
                took = turn()
                if number:  # The first round fills caches.
                    seconds[name].append(took)
        for peer in peers:
            peer.close()
        parts = _parts(dataset, options.batches)

    rates = {name: options.batches * BATCH * WINDOW / statistics.median(values) for name, values in seconds.items()}
    stacked, floor, own = rates['memmap, slices stacked'], rates['memmap, rows filled'], rates['maxlm']
    print(f'{"loader":<44}{"tokens/s":>16}{"of stacked":>12}{"of filled":>12}')
    for name, rate in rates.items():
        print(f'{name:<44}{rate:>16,.0f}{rate / stacked:>12.2f}{rate / floor:>12.2f}')
    print('maxlm, µs per window: ' + ', '.join(f'{name} {value:.1f}' for name, value in parts.items()))
    order = {f'{count:.0e}': _order_cost(count) for count in (10**6, 10**9, 10**12)}
    for count, (microseconds, size) in order.items():
        print(f'order of {count} windows: {microseconds:.1f} µs per window, {size / 1024:,.0f} KiB')
    result = {
        'machine': {**machine(), **{package: version(package) for package in ('grain', 'array_record')}},
        'window': WINDOW,
        'batch': BATCH,
        'tokens': len(tokens),
        'shards': options.shards,
        'tokens_per_second': rates,
        'microseconds_per_window': parts,
        'of_memmap_stacked': own / stacked,
        'of_memmap_filled': own / floor,
        'order': {count: {'microseconds': cost[0], 'bytes': cost[1]} for count, cost in order.items()},
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    print(
        f'maxlm on one core: {own / 1e6:.0f}M tokens/s, '
        f'{own / stacked:.2f} of stacked memmap, {own / floor:.2f} of filled'
    )
    return EXIT_DONE


def _own_loaders(at: Path, dataset: DatasetManifest, batches: int) -> dict[str, Callable[[], float]]:
    memmap = MemmapLoader(at / 'tokens.bin')
    data = DataConfig(path=str(dataset.path), seq_len=WINDOW)
    corpus = open_training_data(data)
    own = corpus.train_batches(BATCH)
    position = iter(range(10**9))

    def same_arrays() -> None:
        window_batch(memmap.streams(), WINDOW, end_of_document=dataset.end_of_document, isolate_documents=True)

    def window(record: bytes) -> tuple[np.ndarray, np.ndarray]:
        stream = np.frombuffer(record, np.uint16).astype(np.int32)
        return stream[:-1], stream[1:]

    files = [str(dataset.path / shard.name) for shard in dataset.splits['train'].shards]
    records = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(files)).shuffle(seed=0).repeat()
    plain = records.map(window).batch(BATCH)
    read_ahead = iterate(own, 10**6, data)
    return {
        'memmap, slices stacked': _turn(batches, memmap.stacked),
        'memmap, rows filled': _turn(batches, memmap.filled),
        'memmap, rows filled, with the five arrays': _turn(batches, same_arrays),
        f'grain {version("grain")} over the same records': _turn(batches, lambda: plain[next(position)]),
        'maxlm': _turn(batches, lambda: own[next(position)]),
        'maxlm, read ahead by threads': _turn(batches, lambda: next(read_ahead)),
    }


def _parts(dataset: DatasetManifest, batches: int) -> dict[str, float]:
    """Returns the microseconds per window of the parts of maxlm's loader, and of ArrayRecord's own reads."""
    data = DataConfig(path=str(dataset.path), seq_len=WINDOW)
    corpus = open_training_data(data)
    own, windows = corpus.train_batches(BATCH), corpus.sources[0].windows('train', data)
    order, rows = own.order, iter(range(10**9))
    assert isinstance(order, TrainingRows)
    places = [[order.locate(next(rows))[1] for _ in range(BATCH)] for _ in range(batches + 1)]
    shards = [ArrayRecordReader(str(dataset.path / shard.name), READER_OPTIONS) for shard in windows.shards]
    per_shard = windows.shard_windows[0]

    def read(place: int) -> bytes:
        shard, record = divmod(place, per_shard)
        shards[shard].seek(record)
        return shards[shard].read()

    streams = [windows.stream(place) for place in places[0]]
    timed: dict[str, Callable[[list[int]], object]] = {
        'order': lambda of: [order.locate(next(rows)) for _ in of],
        'seek and read of ArrayRecord': lambda of: [read(place) for place in of],
        'complete read': lambda of: [windows.stream(place) for place in of],
        'arrays': lambda _: windows.batch(streams),
    }
    found = {}
    for name, function in timed.items():
        turns = []
        for of in places:
            start = time.perf_counter()
            function(of)
            turns.append((time.perf_counter() - start) / BATCH * 1e6)
        found[name] = statistics.median(turns)
    return found


def _turn(batches: int, batch: Callable[[], object]) -> Callable[[], float]:
    def turn() -> float:
        start = time.perf_counter()
        for _ in range(batches):
            batch()
        return time.perf_counter() - start

    return turn


class _Peer:
    """A public loader in a separate process on the same core, which reads batches on request."""

    def __init__(self, python: str, name: str, at: Path, batches: int):
        self.name = name
        command = [python, '-m', 'benchmarks.data_peers', name, str(at), str(batches)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        answer = self._stdout.readline().strip()
        ready, _, rest = answer.partition(' ')
        self.title = rest
        self.missing = '' if ready == 'ready' else answer or 'it ended at once'

    def turn(self) -> float:
        self._stdin.write('go\n')
        self._stdin.flush()
        return float(self._stdout.readline())

    def close(self) -> None:
        self._stdin.close()
        self._process.wait()
        self._stdout.close()


def random_tokens(count: int) -> np.ndarray:
    """Returns random bytes as documents with a mean length of MEAN_DOCUMENT tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, count).astype('<u2')
    tokens[rng.integers(0, count, count // MEAN_DOCUMENT)] = 256
    return tokens


def write_dataset(tokens: np.ndarray, path: Path, num_shards: int) -> DatasetManifest:
    """Writes the tokens as a prepared data set."""
    path.mkdir()
    tokenizer = bytes_tokenizer()
    tokenizer.save(path / 'tokenizer.json')
    shards = []
    for number, part in enumerate(np.array_split(tokens, num_shards)):
        file = path / f'train-{number:05d}.arrayrecord'
        with ShardWriter(file, source='random', block=WINDOW, dtype='uint16') as writer:
            writer.write([part])
            shards.append(writer.finish())
    counts = {'random': SourceCounts(num_shards, len(tokens), len(tokens), 1.0)}
    splits = {
        'train': Split(num_shards, len(tokens), len(tokens), 0.0, counts, tuple(shards)),
        'validation': Split(0, 0, 0, 0.0, {}, ()),
    }
    end = tokenizer.end_of_document
    dataset = DatasetManifest(
        path=path,
        tokenizer='bytes',
        tokenizer_file='tokenizer.json',
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_of_document=end,
        dtype='uint16',
        block=WINDOW,
        splits=splits,
        left_out=(),
        made_from={},
        fingerprint=dataset_fingerprint(block=WINDOW, dtype='uint16', end_of_document=end, splits=splits),
    )
    save_manifest(dataset)
    return dataset


def _order_cost(count: int) -> tuple[float, int]:
    """Returns microseconds per sequence and bytes of memory of shuffling `count` sequences in a thousand shards."""
    tracemalloc.start()
    order = ShuffledIndex([count // 1000] * 1000, seed=0)
    order[0]
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    start = time.perf_counter()
    for place in range(20_000):
        order[place]
    return (time.perf_counter() - start) / 20_000 * 1e6, size


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
