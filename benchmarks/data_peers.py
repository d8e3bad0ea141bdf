"""Runs another data loader for `benchmarks.data`: `python -m benchmarks.data_peers NAME DIR BATCHES`.

The process prints `ready TITLE`, or the reason why it cannot run. For each input line it reads BATCHES batches and
prints the seconds. It reads DIR/tokens.bin (uint16) and needs NumPy and the loader's packages, but not maxlm.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 64
WINDOW = 2048


class MemmapLoader:
    """Reads sequences at random positions of a flat file with NumPy."""

    def __init__(self, path: Path):
        self._tokens = np.memmap(path, np.uint16, 'r')
        self._rng = np.random.default_rng(0)

    def streams(self) -> list[np.ndarray]:
        """Returns the tokens of each sequence and its last target."""
        starts = self._rng.integers(0, len(self._tokens) // WINDOW - 1, BATCH) * WINDOW
        return [self._tokens[start : start + WINDOW + 1] for start in starts]

    def stacked(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and targets, int32 [BATCH, WINDOW], by stacking slices as small trainers do."""
        streams = self.streams()
        tokens = np.stack([stream[:-1].astype(np.int32) for stream in streams])
        return tokens, np.stack([stream[1:].astype(np.int32) for stream in streams])

    def filled(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the arrays of `stacked` with fewer copies: each slice is converted directly into its row."""
        both = np.empty((BATCH, WINDOW + 1), np.int32)
        for row, stream in enumerate(self.streams()):
            both[row] = stream
        return np.ascontiguousarray(both[:, :-1]), np.ascontiguousarray(both[:, 1:])


def torch_loader(at: Path) -> tuple[str, Iterator[Any]]:
    import torch

    class Windows(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self._tokens = np.memmap(at / 'tokens.bin', np.uint16, 'r')

        def __len__(self) -> int:
            return len(self._tokens) // WINDOW - 1

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            stream = self._tokens[index * WINDOW : index * WINDOW + WINDOW + 1].astype(np.int32)
            return torch.from_numpy(stream[:-1]), torch.from_numpy(stream[1:])

    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(Windows(), batch_size=BATCH, shuffle=True, drop_last=True)
    return f'PyTorch {version("torch")} DataLoader over a memmap', _endless(loader)


def streaming_loader(at: Path) -> tuple[str, Iterator[Any]]:
    import streaming
    import torch

    torch.set_num_threads(1)
    path = str(at / 'mds')
    tokens = np.memmap(at / 'tokens.bin', np.uint16, 'r')
    with streaming.MDSWriter(out=path, columns={'tokens': f'ndarray:uint16:{WINDOW + 1}'}) as writer:
        for start in range(0, len(tokens) - WINDOW, WINDOW):
            writer.write({'tokens': np.array(tokens[start : start + WINDOW + 1])})

    def collate(samples: list[dict[str, np.ndarray]]) -> tuple[Any, Any]:
        rows = torch.from_numpy(np.stack([sample['tokens'] for sample in samples]).astype(np.int32))
        return rows[:, :-1], rows[:, 1:]

    data = streaming.StreamingDataset(local=path, shuffle=True, batch_size=BATCH)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, collate_fn=collate, drop_last=True)
    return f'MosaicML Streaming {version("mosaicml-streaming")}', _endless(loader)


def litdata_loader(at: Path) -> tuple[str, Iterator[Any]]:
    import litdata
    import torch
    from litdata.streaming.cache import Cache

    torch.set_num_threads(1)
    path = str(at / 'litdata')
    tokens = np.memmap(at / 'tokens.bin', np.uint16, 'r')
    loader = litdata.TokensLoader(block_size=WINDOW + 1)
    cache = Cache(path, chunk_bytes='64MB', item_loader=loader)
    step = 100 * (WINDOW + 1)
    for index, start in enumerate(range(0, len(tokens) - step, step)):
        cache[index] = torch.from_numpy(tokens[start : start + step].astype(np.int32))
    cache.done()
    cache.merge()
    data = litdata.StreamingDataset(path, item_loader=litdata.TokensLoader(block_size=WINDOW + 1), shuffle=True)
    batches = litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=0, drop_last=True)
    return f'litdata {version("litdata")}', _endless(batches)


def _endless(loader: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


LOADERS: dict[str, Callable[[Path], tuple[str, Iterator[Any]]]] = {
    'torch': torch_loader,
    'streaming': streaming_loader,
    'litdata': litdata_loader,
}


def main() -> None:
    name, directory, count = sys.argv[1:]
    # Libraries must not print to the stream of results.
    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        title, batches = LOADERS[name](Path(directory))
        next(batches)
    except Exception as error:  # a failing library must not stop the benchmark of the other loaders
        print(f'{type(error).__name__}: {error}'.splitlines()[0], file=answers, flush=True)
        return
    print(f'ready {title}', file=answers, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(count)):
            next(batches)
        print(time.perf_counter() - start, file=answers, flush=True)


if __name__ == '__main__':
    main()
