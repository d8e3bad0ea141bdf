"""Time the training step of a config on the present device.

    python -m benchmarks.step --config=configs/1b.py [--config.section.key=value …] [--output=FILE]

Steps run on random tokens packed into documents, one after the other, each waited for on the device. Prints the median
over steps after the warm-up and writes JSON with machine and versions. Needs jax, flax, optax and ml_collections only.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlm.config.keys import Config
from maxlm.config.load import load, split_overrides
from maxlm.config.resolve import resolve
from maxlm.errors import EXIT_DONE, ArgumentParser, exit_code
from maxlm.planning.chips import find_peak
from maxlm.planning.flops import training_flops
from maxlm.planning.forecast import compile_for
from maxlm.planning.machine import present_machine
from maxlm.planning.memory import estimate_memory
from maxlm.training.sharding import make_layout
from maxlm.training.step import abstract_state, init_state

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy')


def main(argv: list[str]) -> int:
    """Measures one config."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.step', allow_abbrev=False, description=__doc__)
    parser.add_argument('--config', required=True, help='config file, with a variant after a colon')
    parser.add_argument('--name', help='what to call the result (default: the config)')
    parser.add_argument('--steps', type=int, default=20, help='steps that count (default 20)')
    parser.add_argument('--warmup', type=int, default=3, help='steps before them (default 3)')
    parser.add_argument('--vocab_size', type=int, default=50_257, help='for configs that take it from the data set')
    parser.add_argument('--document', type=int, default=1000, help='mean tokens of a document (default 1000)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(rest)

    config = load(options.config, overrides)
    config = resolve(
        config,
        platform=jax.default_backend(),
        num_devices=jax.device_count(),
        vocab_size=config.model.vocab_size or options.vocab_size,
        windows=1,
    )
    result = {
        'name': options.name or options.config,
        'overrides': overrides,
        **measure(config, steps=options.steps, warmup=options.warmup, document=options.document),
        'machine': machine(),
    }
    _print(result)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    return EXIT_DONE


def measure(config: Config, *, steps: int, warmup: int, document: int) -> dict[str, Any]:
    """Median step time of a resolved config and what follows from it."""
    layout = make_layout(config.mesh)
    abstract = abstract_state(config, layout)
    forecast = compile_for(config, present_machine(config), layout)
    compiled = forecast.compiled
    assert compiled is not None, 'the step does not fit'
    state = init_state(config, layout)
    global_batch, window = config.train.global_batch, config.data.window
    rng = np.random.default_rng(0)
    # Several batches in turn, so that none is in a cache because it was just there.
    batches = [
        layout.put_batch(random_batch(rng, global_batch, window, config.model.vocab_size, document), global_batch)
        for _ in range(4)
    ]
    seconds = []
    for index in range(warmup + steps):
        start = time.perf_counter()
        state, metrics = compiled.step(state, batches[index % len(batches)])
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    loss = float(metrics['loss'])
    assert np.isfinite(loss), 'a step without a finite loss may have been faster than a real one'

    counted = seconds[warmup:]
    median = statistics.median(counted)
    devices = jax.device_count()
    peak = find_peak(config.metrics.peak_tflops)
    flops = training_flops(config.model, window)
    tokens_per_second = global_batch * window / median
    memory = jax.local_devices()[0].memory_stats() or {}
    predicted = forecast.time.total
    return {
        'parameters': sum(leaf.size for leaf in jax.tree.leaves(abstract.params)),
        'global_batch': global_batch,
        'micro_batch': config.train.micro_batch,
        'window': window,
        'remat': config.model.remat,
        'attention': config.model.attention,
        'step_seconds': median,
        'step_seconds_min': min(counted),
        'step_seconds_max': max(counted),
        'steps': steps,
        'tokens_per_second': tokens_per_second,
        'mfu_causal': _share(tokens_per_second * flops.causal, peak.tflops * devices),
        'mfu_full': _share(tokens_per_second * flops.full, peak.tflops * devices),
        'peak_tflops': peak.tflops,
        'peak_source': peak.source,
        'peak_memory_bytes': memory.get('peak_bytes_in_use'),
        'compiled_memory_bytes': compiled.memory_bytes(),
        'compile_seconds': compiled.seconds,
        # What maxlm.plan says of this machine; null where it knows none.
        'predicted_seconds': predicted if math.isfinite(predicted) else None,
        'predicted_memory_bytes': forecast.needed,
        'estimated_memory_bytes': estimate_memory(config, jax.default_backend()).total,
        'loss': loss,
    }


def random_batch(
    rng: np.random.Generator, rows: int, window: int, vocab_size: int, document: int
) -> dict[str, np.ndarray]:
    """Uniform tokens [rows, window]; documents of geometric length, as packing makes them."""
    tokens = rng.integers(0, vocab_size, (rows, window + 1), dtype=np.int32)
    ends = rng.random((rows, window)) < 1 / document
    starts = np.concatenate([np.ones((rows, 1), bool), ends[:, :-1]], axis=1)
    index = np.broadcast_to(np.arange(window, dtype=np.int32), (rows, window))
    last_start = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return {
        'tokens': tokens[:, :-1],
        'targets': tokens[:, 1:],
        'weights': np.where(ends, 0, 1).astype(np.float32),
        'segments': np.cumsum(starts, axis=1, dtype=np.int32),
        'positions': (index - last_start).astype(np.int32),
    }


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    device = jax.local_devices()[0]
    return {
        'device': device.device_kind,
        'devices': jax.device_count(),
        'processor': platform.machine(),
        'python': platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        'date': datetime.date.today().isoformat(),
    }


def _share(flops_per_second: float, peak_tflops: float) -> float | None:
    return flops_per_second / (peak_tflops * 1e12) if peak_tflops else None


def _print(result: dict[str, Any]) -> None:
    mfu = 'MFU unknown'
    if result['mfu_causal'] is not None:
        mfu = f'MFU {result["mfu_causal"]:.1%} causal, {result["mfu_full"]:.1%} full'
    memory = result['peak_memory_bytes']
    print(
        f'{result["name"]} {" ".join(result["overrides"])}: {result["parameters"] / 1e6:,.1f}M parameters, '
        f'step {result["step_seconds"] * 1e3:,.1f} ms '
        f'({result["step_seconds_min"] * 1e3:,.1f}–{result["step_seconds_max"] * 1e3:,.1f}), '
        f'{result["tokens_per_second"]:,.0f} tokens/s, {mfu} of {result["peak_tflops"]:,.3g} TFLOP/s, '
        f'peak memory {f"{memory / 2**30:.1f} GiB" if memory else "unknown"}'
    )
    if result['predicted_seconds'] is not None:
        print(
            f'predicted: step {result["predicted_seconds"] * 1e3:,.1f} ms, '
            f'{result["predicted_seconds"] / result["step_seconds"]:.2f} of measured; memory '
            f'{result["predicted_memory_bytes"] / 2**30:.1f} GiB as compiled, '
            f'{result["estimated_memory_bytes"] / 2**30:.1f} estimated'
        )


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
