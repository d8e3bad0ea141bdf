"""Measures the data pipeline over data set size, shards, sources, and the step at which a run resumes."""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.data import random_tokens, write_dataset
from benchmarks.growth_curves import Curve
from maxlm.config.schema import DataConfig
from maxlm.data.dataset.records import DatasetManifest, Shard, SourceCounts, Split
from maxlm.data.loader.batches import Batches, TrainingRows, WeightedSource
from maxlm.data.loader.dataset import open_training_data
from maxlm.data.loader.mixture import NUM_CACHED_ROWS, PERIOD, Mixture
from maxlm.data.loader.shuffle import ShuffledIndex
from maxlm.data.loader.windows import Sequences

BATCH = 32
# Short sequences, so that a million of them are small files.
WINDOW = 16
# Shards of the data sets on disk.
NUM_SHARDS = 16
WINDOWS = (10**3, 10**4, 10**5, 10**6)
SHARDS = (16, 64, 256, 1024, 4096)
# Sequences per shard of data sets that exist only as metadata.
WINDOWS_PER_SHARD = 10**5
STEPS = (1, 10**2, 10**4, 10**6, 10**8)
SOURCES = (4, 16, 64, 128, 256)
# Bytes of one integer in a table of all sequences.
NUMBER = 8
PLACES = 2000


def measure_windows(rounds: int, sizes: Sequence[int] = WINDOWS) -> list[Curve]:
    """Measures opening a data set on disk, its memory, first batch and order, over its number of sequences."""
    with tempfile.TemporaryDirectory() as directory:
        figures = [_of_windows(size, Path(directory) / str(size), rounds) for size in sizes]
    x, (kept, opening, first, place) = tuple(map(float, sizes)), zip(*figures, strict=True)
    table = 'table of all windows', x, tuple(NUMBER * size for size in x)
    return [
        Curve('index memory', 'B', x, kept, 0.0, 'the index lists shards and computes windows', table),
        Curve('time to open', 's', x, opening, 0.0, f'reads the manifest of {NUM_SHARDS} shards'),
        Curve('time to first batch', 's', x, first, 0.0, 'opens files that have a record index'),
        Curve('time per position lookup', 's', x, place, 0.0, 'computed by a cipher'),
    ]


def measure_shards(rounds: int, sizes: Sequence[int] = SHARDS) -> list[Curve]:
    """Measures the index and the first position of the order over the number of shards.

    The first position needs the sizes of all shards.
    """
    firsts = [partial(_first_place, [WINDOWS_PER_SHARD] * size) for size in sizes]
    x = tuple(map(float, sizes))
    kept, seconds = tuple(map(bytes_kept, firsts)), tuple(_least(rounds, first) for first in firsts)
    table = 'table of all windows', x, tuple(NUMBER * WINDOWS_PER_SHARD * size for size in x)
    return [
        Curve('index memory', 'B', x, kept, 1.0, 'the index lists shards', table),
        Curve('time to first position', 's', x, seconds, 1.0, 'sums over the shards once per epoch'),
    ]


def measure_places(rounds: int, sizes: Sequence[int] = STEPS) -> list[Curve]:
    """Measures the time to find the rows of a step, over the resumed step, for one source and for several."""
    curves = []
    for num_sources in (1, 4):
        shard_windows = [[WINDOWS_PER_SHARD] * NUM_SHARDS] * num_sources
        seconds = tuple(_least(rounds, partial(_rows_of_step, step, *shard_windows)) for step in sizes)
        name = f'time to find rows, {num_sources} {"source" if num_sources == 1 else "sources"}'
        why = 'computed from the step number without replay'
        curves.append(Curve(name, 's', tuple(map(float, sizes)), seconds, 0.0, why))
    return curves


def measure_sources(rounds: int, sizes: Sequence[int] = SOURCES) -> list[Curve]:
    """Measures the time per row, the time to arrange a period of rows, and memory, over the number of sources."""
    x, (row, arranging, kept) = tuple(map(float, sizes)), zip(*(_of_sources(s, rounds) for s in sizes), strict=True)
    return [
        Curve('time per row', 's', x, row, 0.0, 'lookup in the period'),
        Curve('ordering time per row', 's', x, arranging, 0.0, 'one sort per period'),
        Curve('mixture memory', 'B', x, kept, 0.0, 'a number of rows, or two periods of sources²'),
    ]


def described_dataset(shard_windows: Sequence[int]) -> DatasetManifest:
    """Returns the metadata of a data set with the given sequences per shard, without files."""
    shards = tuple(
        Shard(f'train-{number:05}.arrayrecord', 'described', windows * WINDOW + 1, 1, 0, f'{number:064x}')
        for number, windows in enumerate(shard_windows)
    )
    tokens = sum(shard.tokens for shard in shards)
    counts = {'described': SourceCounts(len(shards), tokens, tokens, 1.0)}
    splits = {
        'train': Split(len(shards), tokens, tokens, 0.0, counts, shards),
        'validation': Split(0, 0, 0, 0.0, {}, ()),
    }
    return DatasetManifest(
        path=Path('nowhere'),
        tokenizer='bytes',
        tokenizer_file='tokenizer.json',
        tokenizer_sha256='',
        vocab_size=257,
        end_of_document=256,
        dtype='uint16',
        block=2048,
        splits=splits,
        left_out=(),
        made_from={},
        fingerprint='',
    )


def described_batches(*shard_windows: Sequence[int]) -> Batches:
    """Returns training batches of one described data set per source, as `TrainingData.train_batches` does."""
    parts = [
        WeightedSource(Sequences(described_dataset(sizes), 'train', WINDOW), [0] * len(sizes))
        for sizes in shard_windows
    ]
    orders = [ShuffledIndex(part.windows.shard_windows, seed=number) for number, part in enumerate(parts)]
    return Batches(parts, TrainingRows(Mixture([1.0] * len(parts), seed=0), orders), global_batch=BATCH)


def bytes_kept(make: Callable[[], object]) -> float:
    """Returns the memory of the result of `make`, in Python objects and NumPy arrays."""
    make()
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del made
    return float(size)


def _of_windows(size: int, path: Path, rounds: int) -> tuple[float, float, float, float]:
    # A shard of n tokens has (n - 1) / WINDOW sequences.
    dataset = write_dataset(random_tokens(size // NUM_SHARDS * NUM_SHARDS * WINDOW + NUM_SHARDS), path, NUM_SHARDS)
    data = DataConfig(path=str(dataset.path), seq_len=WINDOW)

    def open_batches() -> Batches:
        return open_training_data(data).train_batches(BATCH)

    def first_batch() -> Batches:
        batches = open_batches()
        batches[0]
        return batches

    opening, first = _least(rounds, open_batches), _least(rounds, first_batch)
    order = open_batches().order
    place = _least(rounds, lambda: [order.locate(place) for place in range(PLACES)]) / PLACES
    return bytes_kept(first_batch), opening, first, place


def _first_place(shard_windows: Sequence[int]) -> Batches:
    batches = described_batches(shard_windows)
    batches.order.locate(0)
    return batches


def _rows_of_step(step: int, *shard_windows: Sequence[int]) -> list[tuple[int, int] | None]:
    order = described_batches(*shard_windows).order
    return [order.locate(step * BATCH + row) for row in range(BATCH)]


def _of_sources(size: int, rounds: int) -> tuple[float, float, float]:
    period = max(PERIOD, size**2)

    def read_on() -> Mixture:
        mixture = Mixture([1.0] * size, seed=0)
        for number in range(NUM_CACHED_ROWS // PERIOD + 1):
            mixture[number * period]
        return mixture

    mixture, firsts = Mixture([1.0] * size, seed=0), itertools.count(0, period)
    arranging = _least(rounds, lambda: mixture[next(firsts)]) / period
    row = _least(rounds, lambda: [mixture[place] for place in range(PLACES)]) / PLACES
    return row, arranging, bytes_kept(read_on)


def _least(rounds: int, action: Callable[[], object]) -> float:
    """Returns the minimum seconds over the rounds, because other processes can only add time."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
