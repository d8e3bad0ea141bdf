"""One side of `benchmarks.peers_gpu`, in a separate process: `python -m benchmarks.gpu_peer SIDE TASK`.

The process prepares everything that needs no GPU and then waits for the first line on standard input before it uses the
device. Its first response contains the losses of the first steps, which must agree on all sides with the same model.
Each further line is a number of steps; the response is the mean time of one step. As in training, the process only
waits for the last step. It exits with code 3 if the batch does not fit into the memory.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from benchmarks.nanochat_step import make_nanochat, nanochat_classes
from benchmarks.peer_worker import (
    BATCHES,
    Run,
    make_resolver,
    maxlm,
    torch_batches,
    torch_weights,
    transformers_model,
    unresolved_config,
)
from benchmarks.step import machine
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.hardware.chips import find_peak
from maxlm.parallel.layout import make_layout
from maxlm.planning.forecast import compile_for
from maxlm.planning.machine import present_machine
from maxlm.planning.search import Candidate, search_layouts, verify_by_compiling

# The losses of these steps are compared; each batch occurs twice.
FIRST = 2 * BATCHES
EXIT_NO_MEMORY = 3
# Settings of maxlm that `Candidate`s change.
SEARCHED = (('train', 'per_device_batch_size'), ('model', 'remat_policy'), ('model', 'scan_layers'))
# Differences from the comparison on CPUs.
OVERRIDES = {
    'model.dtype': 'bfloat16',
    'model.remat_policy': 'none',
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
        mode: mode of torch.compile; none: PyTorch's sides are not compiled.
        nanochat: directory of nanochat's source, for its side.
    """

    sizes: dict[str, int]
    device: str
    mode: str
    nanochat: str = ''

    @property
    def unresolved(self) -> Config:
        return unresolved_config(self.sizes, OVERRIDES)

    @property
    def resolver(self) -> Callable[[Config], Config]:
        return make_resolver(self.sizes, self.device)

    @property
    def config(self) -> Config:
        return self.resolver(self.unresolved)


class Peer(NamedTuple):
    """A side that is ready to start.

    Attributes:
        start: loads the model onto the device and returns its step.
        describe: returns versions, device and settings, after `start`.
        memory: returns peak bytes of arrays, bytes reserved by the process, and their limit; None if unknown.
    """

    start: Callable[[], Run]
    describe: Callable[[], dict[str, Any]]
    memory: Callable[[], dict[str, int | None]]


def fastest_layout(task: Task) -> Candidate:
    """Returns the fastest layout that fits into this device's memory, compiled, as `maxlm plan --search` finds it.

    Raises:
        MemoryError: no layout fits.
    """
    present = present_machine(task.config)
    layout = make_layout(task.config.mesh, jax.devices()[:1])
    candidates = search_layouts(task.unresolved, present, task.resolver)
    found = verify_by_compiling(candidates, lambda config: compile_for(config, present, layout))
    if found is None:
        raise MemoryError('out of memory: no layout fits')
    return found


def prepare_maxlm(task: Task) -> Peer:
    """Prepares the step that `maxlm train` compiles for the layout that `maxlm plan --search` recommends."""
    settings: dict[str, Any] = {}

    def start() -> Run:
        forecast = fastest_layout(task).forecast
        config = forecast.config
        settings.update({name: getattr(getattr(config, section), name) for section, name in SEARCHED})
        settings.update(attention=config.model.attention, dtype=config.model.dtype, parameters='float32')
        return maxlm(config, forecast.compiled)

    def memory() -> dict[str, int | None]:
        stats = jax.local_devices()[0].memory_stats() or {}
        held = stats.get('pool_bytes', stats.get('peak_bytes_in_use'))
        return {'peak': stats.get('peak_bytes_in_use'), 'held': held, 'limit': stats.get('bytes_limit')}

    def describe() -> dict[str, Any]:
        return {**machine(), 'peak_tflops': find_peak(0.0, 'bfloat16').tflops, 'settings': settings}

    return Peer(start, describe, memory)


def prepare_torch(task: Task, attention: str) -> Peer:
    """Prepares `benchmarks.torch_gpt` with the given attention kernel."""
    torch = _import_torch(task)
    from torch.nn.attention import SDPBackend

    from benchmarks.torch_gpt import GPT, load_weights, make_step

    config = task.config
    model = GPT(config)
    load_weights(model, torch_weights(config))

    def start(device: str) -> Any:
        model.to(device).train()
        # fullgraph=True makes graph breaks an error, because they would slow PyTorch down.
        loss_of = _compiled(task, model, fullgraph=True)
        kernel = SDPBackend.__members__[attention]
        return make_step(loss_of, model, config, autocast=torch.bfloat16, attention=kernel)

    return _torch_peer(task, start, {'attention': attention, **AUTOCAST})


def prepare_transformers(task: Task) -> Peer:
    """Prepares Transformers' GPT-2, whose attention is PyTorch's choice of kernels."""
    torch = _import_torch(task)
    try:
        import transformers
    except ImportError as error:
        raise InputError(f'Transformers is needed for this side: {error}') from error
    from benchmarks.torch_gpt import load_weights, make_step

    config = task.config
    model, loss_of = transformers_model(config)
    load_weights(model, torch_weights(config))

    def start(device: str) -> Any:
        model.to(device).train()
        return make_step(_compiled(task, loss_of), model, config, autocast=torch.bfloat16)

    return _torch_peer(task, start, {'transformers': transformers.__version__, 'attention': 'sdpa', **AUTOCAST})


def prepare_nanochat(task: Task) -> Peer:
    """Prepares nanochat's own model and optimizer at the shape of the others."""
    _import_torch(task)
    classes = nanochat_classes(task.nanochat)
    settings: dict[str, Any] = {'dtype': 'bfloat16', 'optimizer': 'Muon and AdamW of nanochat'}

    def start(device: str) -> Any:
        nanochat = make_nanochat(classes, task.config, device, lambda model: _compiled(task, model))
        settings.update(parameters=nanochat.parameters, matrix_parameters=nanochat.matrix_parameters)
        return nanochat.step

    return _torch_peer(task, start, settings)


# Settings of the sides that use `benchmarks.torch_gpt.make_step`.
AUTOCAST = {'autocast': 'bfloat16', 'parameters': 'float32', 'optimizer': 'fused AdamW'}


def _import_torch(task: Task) -> Any:
    try:
        import torch
        import torch.nn.attention
    except ImportError as error:
        raise InputError(f'PyTorch 2.4 or later is needed here: {error}') from error
    if not hasattr(torch, 'get_autocast_dtype'):
        raise InputError(f'PyTorch 2.4 or later is needed here; this is {torch.__version__}')
    if task.device == 'gpu' and not torch.cuda.is_available():
        raise InputError(f'PyTorch {torch.__version__} sees no GPU')
    return torch


def _compiled(task: Task, function: Any, *, fullgraph: bool = False) -> Any:
    import torch

    if task.mode == 'none':
        return function
    return torch.compile(function, dynamic=False, fullgraph=fullgraph, mode=task.mode)


def _torch_peer(task: Task, start_on: Callable[[str], Any], settings: dict[str, Any]) -> Peer:
    """Returns a side of PyTorch. `start_on` moves the model to a device and returns its step."""
    import torch

    device = {'gpu': 'cuda', 'cpu': 'cpu'}[task.device]

    def start() -> Run:
        step = start_on(device)
        batches = torch_batches(task.config, device)
        return lambda index: step(*batches[index]).item

    def memory() -> dict[str, int | None]:
        if device == 'cpu':
            return {'peak': None, 'held': None, 'limit': None}
        peak, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {'peak': peak, 'held': held, 'limit': torch.cuda.mem_get_info()[1]}

    def describe() -> dict[str, Any]:
        name = torch.cuda.get_device_name() if device == 'cuda' else platform.machine()
        versions = {'torch': torch.__version__, 'cuda': torch.version.cuda, 'device': name}
        return {**versions, 'settings': {'compile': task.mode, **settings}}

    return Peer(start, describe, memory)


SIDES: dict[str, Callable[[Task], Peer]] = {
    'maxlm': prepare_maxlm,
    'torch': lambda task: prepare_torch(task, 'FLASH_ATTENTION'),
    'torch_cudnn': lambda task: prepare_torch(task, 'CUDNN_ATTENTION'),
    'transformers': prepare_transformers,
    'nanochat': prepare_nanochat,
}
# Sides that train another model, whose losses are not compared.
OTHER_MODELS = ('nanochat',)


def serve(argv: list[str]) -> int:
    """Trains on request until standard input ends."""
    # Libraries print to standard output too, which only the responses may reach.
    responses = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    side, words = argv
    peer = SIDES[side](Task(**json.loads(words)))
    if not sys.stdin.readline():
        return EXIT_DONE
    begun = time.perf_counter()
    try:
        run = peer.start()
        losses = [run(index % BATCHES)() for index in range(FIRST)]
    except Exception as error:
        # PyTorch and JAX have different classes for this error.
        if 'out of memory' not in str(error).lower():
            raise
        return EXIT_NO_MEMORY
    first = {'losses': losses, 'start_seconds': time.perf_counter() - begun}
    print(json.dumps({**first, 'memory': peer.memory(), 'versions': peer.describe()}), file=responses, flush=True)
    for line in sys.stdin:
        steps = int(line)
        begun = time.perf_counter()
        for index in range(steps):
            wait = run(index % BATCHES)
        wait()
        seconds = (time.perf_counter() - begun) / steps
        print(json.dumps({'seconds': seconds, 'memory': peer.memory()}), file=responses, flush=True)
    return EXIT_DONE


if __name__ == '__main__':
    sys.exit(exit_code(serve, sys.argv[1:]))
