"""One side of `benchmarks.peers_cpu`, in a separate process: `python -m benchmarks.peer_worker PEER SIZES THREADS`.

The process first prints the losses of the first steps, which must agree on all sides. For each line of standard input,
which is a number of steps, it runs these steps and prints their seconds as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.step import random_batch
from maxlm.config.loading import build, default
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.huggingface.config_conversion import to_config
from maxlm.huggingface.state_dict import tensors
from maxlm.parallel.layout import make_layout
from maxlm.runtime.malloc import disable_malloc_trim
from maxlm.training.compile import CompiledStep, compile_train_step
from maxlm.training.state import abstract_state, init_state

# Steps whose losses are compared.
FIRST = 3
# Batches alternate, so that none stays in a cache.
BATCHES = 4

# Starts a step on the batch with an index; the returned function waits for the step and returns its loss.
Run = Callable[[int], Callable[[], float]]


def make_config(sizes: Mapping[str, int], platform: str = 'cpu', overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns a GPT-2 config of given sizes, resolved for one device; keys of `overrides` are `section.key`."""
    return make_resolver(sizes, platform)(unresolved_config(sizes, overrides))


def make_resolver(sizes: Mapping[str, int], platform: str) -> Callable[[Config], Config]:
    """Returns `resolve` for one device of a platform."""
    return partial(resolve, platform=platform, num_devices=1, vocab_size=sizes['vocab_size'], windows=10**6)


def unresolved_config(sizes: Mapping[str, int], overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the config of `make_config` before it is resolved."""
    config = default()
    config.model.family = 'gpt2'
    # GPT-2 uses the tanh approximation of GELU.
    config.model.activation = 'gelu_tanh'
    config.model.dtype = 'float32'
    # On a CPU, scanning copies each layer's parameters out of the stacked arrays.
    config.model.scan_layers = False
    config.data.seq_len = sizes['window']
    # PyTorch's side does not separate documents.
    config.data.document_mask = False
    config.train.global_batch_size = sizes['batch']
    config.train.num_steps = 10_000
    config.optimizer.warmup_steps = 100
    config.optimizer.learning_rate = 1e-3
    config.optimizer.min_learning_rate = 1e-4
    for name in sizes.keys() - {'window', 'batch'}:
        config.model[name] = sizes[name]
    for key, value in (overrides or {}).items():
        section, _, name = key.partition('.')
        config[section][name] = value
    return build(config)


def make_batches(config: Config) -> list[dict[str, np.ndarray]]:
    """Returns batches of random tokens, equal on all sides; every token counts."""
    rng = np.random.default_rng(0)
    rows, window, vocab_size = config.train.global_batch_size, config.data.seq_len, config.model.vocab_size
    return [random_batch(rng, rows, window, vocab_size, document=10**9) for _ in range(BATCHES)]


def maxlm(config: Config, compiled: CompiledStep | None = None) -> Run:
    """Returns the step that `maxlm train` compiles, which may be compiled already."""
    layout = make_layout(config.mesh, jax.devices()[:1])
    step = (compiled or compile_train_step(config, layout, abstract_state(config, layout))).step
    state = init_state(config, layout)
    batches = [layout.put_batch(batch, config.train.global_batch_size) for batch in make_batches(config)]

    def run(index: int) -> Callable[[], float]:
        nonlocal state
        state, metrics = step(state, batches[index])

        def wait() -> float:
            # Older states were donated to later steps, so this waits for the newest.
            jax.block_until_ready(state)
            return float(metrics['loss'])

        return wait

    return run


def torch_gpt(config: Config, *, compiled: bool) -> Run:
    """Returns the step of `benchmarks.torch_gpt`."""
    from benchmarks.torch_gpt import GPT

    model = GPT(config)
    return _torch_run(config, model, model, compiled=compiled)


def transformers_gpt2(config: Config, *, compiled: bool) -> Run:
    """Returns the step of Transformers' GPT-2."""
    model, loss_of = transformers_model(config)
    return _torch_run(config, model, loss_of, compiled=compiled)


def transformers_model(config: Config) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Returns Transformers' GPT-2 and a loss of tokens and targets, because the model's own shifts the targets."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {**to_config(config.model), 'attn_pdrop': 0.0, 'embd_pdrop': 0.0, 'resid_pdrop': 0.0}
    settings['attn_implementation'] = 'sdpa'
    model = GPT2LMHeadModel(GPT2Config(**settings, use_cache=False))

    def loss_of(tokens: Any, targets: Any) -> Any:
        logits = model(tokens).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return model, loss_of


def torch_weights(config: Config) -> dict[str, np.ndarray]:
    """Returns maxlm's initial parameters with the names of Transformers' GPT-2."""
    layout = make_layout(config.mesh, jax.devices()[:1])
    # XLA removes the unused moments from this program.
    params = jax.tree.map(np.asarray, jax.jit(lambda: init_state(config, layout).params)())
    flat = {'.'.join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def source(path: str, layer: int | None) -> np.ndarray:
        return flat[path] if layer is None else flat[path][layer]

    rows = tensors('gpt2', config.model)
    return {row.name: row.to_hf([source(path, row.layer) for path in row.sources]) for row in rows}


def torch_batches(config: Config, device: str) -> list[tuple[Any, ...]]:
    """Returns tokens and targets of `make_batches` on the device."""
    import torch

    return [
        tuple(torch.from_numpy(np.ascontiguousarray(batch[name])).long().to(device) for name in ('tokens', 'targets'))
        for batch in make_batches(config)
    ]


def _torch_run(config: Config, model: Any, loss_of: Any, *, compiled: bool) -> Run:
    import torch

    from benchmarks.torch_gpt import load_weights, make_step

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    load_weights(model, torch_weights(config))
    model.train()
    step = make_step(torch.compile(loss_of) if compiled else loss_of, model, config)
    batches = torch_batches(config, 'cpu')
    return lambda index: step(*batches[index]).item


PEERS: dict[str, Callable[[Config], Run]] = {
    'maxlm': maxlm,
    'torch': lambda config: torch_gpt(config, compiled=False),
    'torch, compiled': lambda config: torch_gpt(config, compiled=True),
    'transformers': lambda config: transformers_gpt2(config, compiled=False),
    'transformers, compiled': lambda config: transformers_gpt2(config, compiled=True),
}


def main(peer: str, sizes: str, threads: str) -> None:
    """Runs steps on request until standard input ends."""
    # Set before any library counts the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    disable_malloc_trim()
    run = PEERS[peer](make_config(json.loads(sizes)))
    print(json.dumps([run(index)() for index in range(FIRST)]), flush=True)
    for line in sys.stdin:
        seconds = []
        for index in range(int(line)):
            start = time.perf_counter()
            run(index % BATCHES)()
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
