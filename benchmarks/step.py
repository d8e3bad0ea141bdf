"""Times the training step of a config on this device.

    python -m benchmarks.step --config=configs/1b.py [--config.section.key=value …] [--output=FILE]

Steps run on random tokens packed into documents; each step waits for the device. Prints the median over the steps after
the warm-up, and writes JSON with machine and versions. Needs only jax, flax, optax and ml_collections.

To compare two settings, pass the JSON of the first call to the second with --beside. With --tokens=text both train on
the bytes of this repository, so that their losses are meaningful.

The result has the loss, gradient norm, update norm and second-moment ratio of each step, and whether it was skipped.
The exit code is 1 if a loss is far from those of its neighbors, or from that of the same step of the other call. Steps
are counted from 0, as in the lists of the result. After a short learning rate warm-up, AdamW itself may cause spikes
(see benchmarks/adamw_warmup.py).
"""

from __future__ import annotations

import datetime
import gzip
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.config.loading import load
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError, exit_code
from maxlm.hardware.chips import capability_of, find_peak
from maxlm.hardware.identity import identify
from maxlm.parallel.layout import make_layout
from maxlm.planning.estimate.memory import estimate_memory
from maxlm.planning.forecast import compile_for
from maxlm.planning.machine import local_resolver, present_machine
from maxlm.runtime.malloc import disable_malloc_trim
from maxlm.training.flops import training_flops
from maxlm.training.state import abstract_state, init_state

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy')
ROOT = Path(__file__).parent.parent
# Batches alternate, so that none stays in a cache.
BATCHES = 4
# The number of neighbors of a step on each side, the first step that is checked, and the largest excess of its loss.
# The excess is relative to the median of the step and its neighbors. A falling loss is its own median. From that step
# on, the two runs of 43 steps in benchmarks/results/1b_*h200.json exceed the median by at most 4.6 %. The only
# exception is the spike, which exceeds it by 155 %.
NEIGHBORS, FIRST, SPIKE = 4, 4, 0.10
# Allowed relative difference between two runs at each of the first EARLY steps, and later. While the loss falls by 5 to
# 30 % per step, a small lag is a large difference. In the same two results, bfloat16 and fp8 differ by at most 3 %
# there and by 0.6 % later, except at steps 28 and 29.
EARLY, SAME_EARLY, SAME_LOSS = 15, 0.10, 0.05
# Vocabulary of configs that take it from the data set, and mean tokens of a document.
VOCABULARY, MEAN_DOCUMENT = 50_257, 1000
# Number of last steps whose mean loss is printed.
LAST = 10
# Metrics of each step in the result, by name of the step's metric.
RECORDED = {
    'loss': 'losses',
    'grad_norm': 'grad_norms',
    'update_norm': 'update_norms',
    'second_moment_ratio': 'second_moment_ratios',
    'skipped': 'skipped',
}


def main(argv: list[str]) -> int:
    """Measures one config."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.step', allow_abbrev=False, description=__doc__)
    parser.add_argument('--config', required=True, help='config file, with a variant after a colon')
    parser.add_argument('--name', help='name of the result (default: the config)')
    parser.add_argument('--steps', type=int, default=20, help='timed steps (default 20)')
    parser.add_argument('--warmup', type=int, default=3, help='steps before the timed ones (default 3)')
    parser.add_argument('--vocab-size', type=int, default=VOCABULARY, help='for configs that take it from the data set')
    parser.add_argument('--document', type=int, default=MEAN_DOCUMENT, help='mean tokens of a document (default 1000)')
    parser.add_argument('--tokens', choices=('random', 'text'), default='random', help='text: of this repository')
    parser.add_argument(
        '--xla', action='append', default=[], metavar='NAME=VALUE', help="an option of XLA's; repeatable"
    )
    parser.add_argument('--profile', type=Path, help='directory for a trace of two steps and the compiled program')
    parser.add_argument('--beside', type=Path, help='JSON file of another call, to compare speed and loss with')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(rest)
    _set_xla(options.xla)
    other = _read_other(options.beside)

    config = resolve_here(options.config, overrides, vocab_size=options.vocab_size)
    result = {
        'name': options.name or options.config,
        'overrides': overrides,
        'xla': options.xla,
        'tokens': options.tokens,
        **measure(
            config,
            steps=options.steps,
            warmup=options.warmup,
            document=options.document,
            tokens=options.tokens,
            profile=options.profile,
        ),
        'machine': machine(),
    }
    if other:
        result['beside'] = compare(result, other)
    _print(result)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    failures = failed_checks(result, other)
    for failure in failures:
        print(f'error: {failure}', file=sys.stderr)
    return EXIT_FAILED if failures else EXIT_DONE


def resolve_here(spec: str, overrides: Sequence[str], *, vocab_size: int = VOCABULARY) -> Config:
    """Returns a config resolved for the devices of this process.

    Args:
        spec: config file, with a variant after a colon.
        overrides: overrides as `section.key=value`.
        vocab_size: vocabulary of configs that take it from the data set.

    Raises:
        InputError: the config or an override is not usable.
    """
    config = load(spec, overrides)
    return local_resolver(vocab_size=config.model.vocab_size or vocab_size, windows=1)(config)


def measure(
    config: Config, *, steps: int, warmup: int, document: int, tokens: str, profile: Path | None = None
) -> dict[str, Any]:
    """Returns the median step time of a resolved config and derived values.

    With `profile`, two more steps are traced into this directory, and the text of the program is written there.
    """
    layout = make_layout(config.mesh)
    abstract = abstract_state(config, layout)
    forecast = compile_for(config, present_machine(config), layout)
    compiled = forecast.compiled
    assert compiled is not None, 'the step does not fit'
    state = init_state(config, layout)
    global_batch, window = config.train.global_batch_size, config.data.seq_len
    rng = np.random.default_rng(config.train.seed)
    text = repository_text() if tokens == 'text' else None
    batches = []
    # Text needs new batches for each step, so that the model does not memorize a batch.
    for _ in range(BATCHES if text is None else warmup + steps):
        batch = random_batch(rng, global_batch, window, config.model.vocab_size, document)
        if text is not None:
            batch |= text_tokens(rng, text, global_batch, window)
        batches.append(layout.put_batch(batch, global_batch))
    seconds: list[float] = []
    recorded: dict[str, list[float]] = {}
    for index in range(warmup + steps):
        start = time.perf_counter()
        state, metrics = compiled.step(state, batches[index % len(batches)])
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
        for name, key in RECORDED.items():
            if name in metrics:
                recorded.setdefault(key, []).append(metrics[name].item())

    if profile:
        profile.mkdir(parents=True, exist_ok=True)
        (profile / 'step.hlo.gz').write_bytes(gzip.compress((compiled.step.as_text() or '').encode()))
        with jax.profiler.trace(str(profile)):
            for index in range(2):
                state, metrics = compiled.step(state, batches[index % len(batches)])
            jax.block_until_ready((state, metrics))

    counted = seconds[warmup:]
    median = statistics.median(counted)
    devices = jax.device_count()
    peak = find_peak(config.metrics.peak_tflops, config.model.dtype)
    flops = training_flops(config.model, window)
    tokens_per_second = global_batch * window / median
    device = jax.local_devices()[0]
    memory, capability = device.memory_stats() or {}, capability_of(device)
    predicted = forecast.time.total
    return {
        'parameters': sum(leaf.size for leaf in jax.tree.leaves(abstract.params)),
        'global_batch': global_batch,
        'micro_batch': config.train.per_device_batch_size,
        'window': window,
        'remat': config.model.remat_policy,
        'attention': config.model.attention,
        'matmul': config.model.matmul_precision,
        'optimizer': config.optimizer.name,
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
        # Prediction of maxlm plan for this machine; null if the chip is unknown.
        'predicted_seconds': predicted if math.isfinite(predicted) else None,
        'predicted_memory_bytes': forecast.needed,
        'estimated_memory_bytes': estimate_memory(config, jax.default_backend(), capability).total,
        'loss': recorded['losses'][-1],
        **recorded,
    }


def compare(result: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Compares a result with that of another call.

    Raises:
        InputError: the other call used other tokens.
    """
    for key in ('tokens', 'global_batch', 'window', 'steps'):
        if result[key] != other[key]:
            raise InputError(f'--beside: {other["name"]} has {key}={other[key]}, not {result[key]}')
    if len(result['losses']) != len(other['losses']):
        raise InputError(f'--beside: {other["name"]} has another number of warm-up steps; use the same --warmup')
    mine, its = (float(np.mean(each['losses'][-LAST:])) for each in (result, other))
    return {
        'name': other['name'],
        'speed': other['step_seconds'] / result['step_seconds'],
        'loss': mine,
        'other_loss': its,
        'same_loss': not different_steps(result['losses'], other['losses']),
    }


def failed_checks(result: dict[str, Any], other: dict[str, Any] | None) -> list[str]:
    """Returns one line for each step whose loss is not finite, a spike, or different from that of the other result."""
    losses = result['losses']

    def about(step: int) -> str:
        values = [f'{name} {result[key][step]:.4g}' for name, key in RECORDED.items() if key in result]
        return f'step {step}: {"  ".join(values)}'

    # A step without a finite loss may be faster than a real one.
    failures = [f'{about(step)}; the loss is not finite' for step in np.flatnonzero(~np.isfinite(losses)).tolist()]
    for step, median in spikes(losses).items():
        failures.append(f'{about(step)}; the loss is over {SPIKE:.0%} above the median of its neighbors, {median:.4g}')
    if other:
        for step in different_steps(losses, other['losses']):
            failures.append(f'{about(step)}; {other["name"]} has loss {other["losses"][step]:.4g} at this step')
    return failures


def spikes(losses: list[float]) -> dict[int, float]:
    """Returns the steps whose loss is far above that of their neighbors, with the median of these."""
    found = {}
    for step in range(FIRST, len(losses)):
        median = statistics.median(losses[step - NEIGHBORS : step + 1 + NEIGHBORS])
        if losses[step] > (1 + SPIKE) * median:
            found[step] = median
    return found


def different_steps(losses: list[float], others: list[float]) -> list[int]:
    """Returns the steps whose losses differ by more than the bound, or are not finite in either run."""
    bounds = np.where(np.arange(len(losses)) < EARLY, SAME_EARLY, SAME_LOSS)
    is_same = np.abs(np.subtract(losses, others)) <= bounds * np.abs(others)
    return np.flatnonzero(~is_same).tolist()


def repository_text() -> np.ndarray:
    """Returns the bytes of documentation and source code as token ids."""
    files = sorted([*ROOT.glob('docs/*.md'), *ROOT.glob('*.md'), *ROOT.glob('maxlm/**/*.py')])
    return np.frombuffer(b''.join(file.read_bytes() for file in files), np.uint8).astype(np.int32)


def text_tokens(rng: np.random.Generator, text: np.ndarray, rows: int, window: int) -> dict[str, np.ndarray]:
    """Returns tokens and targets [rows, window] from random positions of a text."""
    starts = rng.integers(0, len(text) - window, rows)
    cut = np.stack([text[start : start + window + 1] for start in starts])
    return {'tokens': cut[:, :-1], 'targets': cut[:, 1:]}


def random_batch(
    rng: np.random.Generator, rows: int, window: int, vocab_size: int, document: int
) -> dict[str, np.ndarray]:
    """Returns uniformly random tokens [rows, window], packed from documents of geometric length."""
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
    """Returns the hardware and versions on which results depend."""
    device = jax.local_devices()[0]
    return {
        'device': device.device_kind,
        'devices': jax.device_count(),
        'processor': platform.machine(),
        'python': platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        'date': datetime.date.today().isoformat(),
        **({'identity': identify()} if device.platform != 'cpu' else {}),
    }


def _set_xla(options: list[str]) -> None:
    """Sets XLA flags. Call it before JAX initializes a device; XLA aborts the process at an unknown flag."""
    for option in options:
        if '=' not in option:
            raise InputError(f'--xla={option}: needs NAME=VALUE, e.g. --xla=xla_gpu_enable_triton_gemm=false')
    flags = [os.environ.get('XLA_FLAGS', ''), *(f'--{option}' for option in options)]
    os.environ['XLA_FLAGS'] = ' '.join(flags).strip()


def _read_other(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        other: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f'--beside={path}: needs a JSON file that benchmarks.step wrote: {error}') from error
    return other


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
    if 'beside' in result:
        beside = result['beside']
        print(
            f'beside {beside["name"]}: {beside["speed"]:.3f} × its speed, loss {beside["loss"]:.4f} where it has '
            f'{beside["other_loss"]:.4f}{"" if beside["same_loss"] else ": NOT THE SAME"}'
        )
    if result['predicted_seconds'] is not None:
        print(
            f'predicted: step {result["predicted_seconds"] * 1e3:,.1f} ms, '
            f'{result["predicted_seconds"] / result["step_seconds"]:.2f} of measured; memory '
            f'{result["predicted_memory_bytes"] / 2**30:.1f} GiB as compiled, '
            f'{result["estimated_memory_bytes"] / 2**30:.1f} estimated'
        )


if __name__ == '__main__':
    # `maxlm train` does this too.
    disable_malloc_trim()
    sys.exit(exit_code(main, sys.argv[1:]))
