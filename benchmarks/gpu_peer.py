"""One side of `benchmarks.peers_gpu`, in a separate process: `python -m benchmarks.gpu_peer SIDE TASK`.

The process prepares everything that needs no GPU and then waits for the first line on standard input before it uses the
device. Its first response contains the losses of the first steps, which must agree on all sides. Each further line is a
number of steps; the response is the mean time of one step. As in training, the process only waits for the last step.
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

# The losses of these steps are compared; each batch occurs twice.
FIRST = 2 * BATCHES
# Differences from the comparison on CPUs. The results of matrix products are saved and cheap operations are recomputed,
# as `torch.compile` does.
OVERRIDES = {
    'model.dtype': 'bfloat16',
    'model.scan_layers': True,
    'model.remat_policy': 'dots',
    'optimizer.learning_rate': 3e-4,
    'optimizer.min_learning_rate': 3e-5,
    # The warm-up must be short enough for the first steps to change the parameters, so that updates are compared too.
    'optimizer.warmup_steps': FIRST,
}


class Task(NamedTuple):
    """Work of all sides.

    Attributes:
        sizes: shape of the model and the batch; see `make_config`.
        device: gpu or cpu.
        compiled: PyTorch's side uses torch.compile.
    """

    sizes: dict[str, int]
    device: str
    compiled: bool

    @property
    def config(self) -> Config:
        return make_config(self.sizes, self.device, OVERRIDES)


class Peer(NamedTuple):
    """A side that is ready to start.

    Attributes:
        start: loads the model onto the device and returns its step.
        describe: returns versions and device.
        memory: returns peak bytes of arrays, bytes reserved by the process, and their limit; None if unknown.
    """

    start: Callable[[], Run]
    describe: Callable[[], dict[str, Any]]
    memory: Callable[[], dict[str, int | None]]


def prepare_maxlm(task: Task) -> Peer:
    """Prepares the step that `maxlm train` compiles."""

    def memory() -> dict[str, int | None]:
        stats = jax.local_devices()[0].memory_stats() or {}
        held = stats.get('pool_bytes', stats.get('peak_bytes_in_use'))
        return {'peak': stats.get('peak_bytes_in_use'), 'held': held, 'limit': stats.get('bytes_limit')}

    def describe() -> dict[str, Any]:
        return {**machine(), 'peak_tflops': find_peak(0.0, 'bfloat16').tflops}

    return Peer(lambda: maxlm(task.config), describe, memory)


def prepare_torch(task: Task, attention: str) -> Peer:
    """Prepares `benchmarks.torch_gpt`: bfloat16 autocast, float32 parameters, the attention kernel, fused AdamW."""
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
            # fullgraph=True makes graph breaks an error, because they would slow PyTorch down.
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
    """Trains on request until standard input ends."""
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
