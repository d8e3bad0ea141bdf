"""One side of `benchmarks.peers_gpu`, in a process of its own: `python -m benchmarks.gpu_peer SIDE TASK`.

What needs no GPU is made ready first; then the first line on standard input gives it the device. The first answer has
the losses of the first steps, which must be the same for all sides. Each further line is a number of steps, and is
answered with what one took. Steps follow each other without a wait, as in training; the last one is waited for.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from benchmarks.peer_worker import BATCHES, Run, make_config, maxlm, torch_batches, torch_weights
from benchmarks.step import machine
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.hardware.chips import find_peak

# Steps that are compared: every batch, and every batch again.
FIRST = 2 * BATCHES
# What differs from the CPU's comparison. Of a block all products are kept and what is cheap is computed again, as
# `torch.compile` does too.
OVERRIDES = {
    'model.dtype': 'bfloat16',
    'model.scan_layers': True,
    'model.remat_policy': 'dots',
    'optimizer.learning_rate': 3e-4,
    'optimizer.min_learning_rate': 3e-5,
    # The first steps must change something, or only forward passes would be compared.
    'optimizer.warmup_steps': FIRST,
}


class Task(NamedTuple):
    """What all sides do."""

    sizes: dict[str, int]
    # gpu | cpu.
    device: str
    # Of PyTorch's side: under torch.compile.
    compiled: bool

    @property
    def config(self) -> Config:
        return make_config(self.sizes, self.device, OVERRIDES)


class Peer(NamedTuple):
    """A side that is ready to start."""

    start: Callable[[], Run]
    # Versions and the like.
    describe: Callable[[], dict[str, Any]]
    # Bytes that its arrays took at most, that the process holds, and that it may hold; null where nothing tells.
    memory: Callable[[], dict[str, int | None]]


def prepare_maxlm(task: Task) -> Peer:
    """The very step that `maxlm.train` compiles."""

    def memory() -> dict[str, int | None]:
        stats = jax.local_devices()[0].memory_stats() or {}
        held = stats.get('pool_bytes', stats.get('peak_bytes_in_use'))
        return {'peak': stats.get('peak_bytes_in_use'), 'held': held, 'limit': stats.get('bytes_limit')}

    def describe() -> dict[str, Any]:
        return {**machine(), 'peak_tflops': find_peak(0.0).tflops}

    return Peer(lambda: maxlm(task.config), describe, memory)


def prepare_torch(task: Task, attention: str) -> Peer:
    """The benchmark's own GPT: autocast to bfloat16 over float32 parameters, one attention kernel, fused AdamW."""
    try:
        import torch
        from torch.nn.attention import SDPBackend

        from benchmarks.torch_gpt import GPT, load_weights, make_step
    except ImportError as error:
        raise InputError(f'PyTorch 2.4 or later is needed here: {error}') from error
    if not hasattr(torch, 'get_autocast_dtype'):
        raise InputError(f'PyTorch 2.4 or later is needed here; this is {torch.__version__}')
    device = {'gpu': 'cuda', 'cpu': 'cpu'}[task.device]
    if device == 'cuda' and not torch.cuda.is_available():
        raise InputError(f'PyTorch {torch.__version__} sees no GPU')
    config = task.config
    model = GPT(config)
    load_weights(model, torch_weights(config))

    def start() -> Run:
        model.to(device).train()
        step = make_step(
            # A program in pieces would be slower than what a careful user has: it is an error.
            torch.compile(model, dynamic=False, fullgraph=True) if task.compiled else model,
            model,
            config,
            autocast=torch.bfloat16,
            attention=SDPBackend.__members__[attention],
        )
        batches = torch_batches(config, device)
        return lambda index: step(*batches[index]).item

    def memory() -> dict[str, int | None]:
        if device == 'cpu':
            return {'peak': None, 'held': None, 'limit': None}
        peak, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {'peak': peak, 'held': held, 'limit': torch.cuda.mem_get_info()[1]}

    def describe() -> dict[str, Any]:
        name = torch.cuda.get_device_name() if device == 'cuda' else platform.machine()
        return {'torch': torch.__version__, 'cuda': torch.version.cuda, 'device': name, 'compiled': task.compiled}

    return Peer(start, describe, memory)


SIDES: dict[str, Callable[[Task], Peer]] = {
    'maxlm': prepare_maxlm,
    'torch': lambda task: prepare_torch(task, 'FLASH_ATTENTION'),
    'torch_cudnn': lambda task: prepare_torch(task, 'CUDNN_ATTENTION'),
}


def serve(argv: list[str]) -> int:
    """Until standard input ends."""
    side, words = argv
    peer = SIDES[side](Task(**json.loads(words)))
    if not sys.stdin.readline():
        return EXIT_DONE
    begun = time.perf_counter()
    run = peer.start()
    losses = [run(index % BATCHES)() for index in range(FIRST)]
    first = {'losses': losses, 'start_seconds': time.perf_counter() - begun}
    print(json.dumps({**first, 'memory': peer.memory(), 'versions': peer.describe()}), flush=True)
    for line in sys.stdin:
        steps = int(line)
        begun = time.perf_counter()
        for index in range(steps):
            wait = run(index % BATCHES)
        wait()
        print(json.dumps({'seconds': (time.perf_counter() - begun) / steps, 'memory': peer.memory()}), flush=True)
    return EXIT_DONE


if __name__ == '__main__':
    sys.exit(exit_code(serve, sys.argv[1:]))
