"""Measures the memory bandwidth that decoding uses: `python -m benchmarks.decode --config=FILE [--batches=1,32]`.

The engine decodes with all slots busy, random weights and prompts of half the context. A pass reads the parameters once
and the keys and values of all allocated positions. An embedding table that is only gathered from does not count. Prints
and writes the fraction of the device's memory bandwidth. With `--peer`, Transformers decodes a model of the same shape
afterwards, with a static cache and CUDA graphs (`benchmarks.decode_static_peer`). Needs only jax, flax, optax and
ml_collections, and torch and transformers for the peer.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.config.loading import load
from maxlm.config.resolve import resolve, resolve_on
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.hardware.chips import find_chip
from maxlm.inference.cast_params import cast_params
from maxlm.inference.engine.compiled import DECODE_OPTIONS, MAX_PASSES, CompiledFunctions, PrefillChunk
from maxlm.inference.engine.model_runner import PendingPrompt
from maxlm.inference.engine.slots import CacheLength
from maxlm.inference.sampling import Sampling, stack_settings
from maxlm.model.value_embedding import VALUE_TABLES
from maxlm.parallel.layout import make_layout
from maxlm.training.state import init_state

GREEDY = Sampling(temperature=0)


def main(argv: list[str]) -> int:
    """Measures one config."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.decode', allow_abbrev=False, description=__doc__)
    parser.add_argument('--config', required=True, help='config file, with a variant after a colon')
    parser.add_argument('--batches', default='1,32', help='numbers of slots, with commas between them (default 1,32)')
    parser.add_argument('--context', type=int, default=1024, help='positions of a slot (default 1024)')
    parser.add_argument('--passes', type=int, default=50, help='that count (default 50)')
    parser.add_argument('--vocab-size', type=int, default=50_257, help='for configs that take it from the data set')
    parser.add_argument('--cache', choices=('model', 'int8'), default='model', help='type of keys and values')
    parser.add_argument('--peer', action='store_true', help='measure Transformers too')
    parser.add_argument('--host-loop', action='store_true', help='the host starts each pass, for comparison')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(rest)
    config = load(options.config, overrides)
    platform = jax.default_backend()
    config = resolve(
        config, platform=platform, num_devices=1, vocab_size=config.model.vocab_size or options.vocab_size, windows=1
    )
    config = resolve_on(config, platform=platform, num_devices=1)
    if not 2 <= options.context <= config.model.max_positions:
        raise InputError(f'--context={options.context}: must be from 2 to {config.model.max_positions}')
    # An unknown device has no known bandwidth; on a CPU the parameters may even fit into the cache.
    chip = find_chip(jax.local_devices()[0].device_kind)
    bandwidth = chip.memory_bandwidth if chip else None
    if options.host_loop:
        DECODE_OPTIONS.clear()
    results = []
    for batch in map(int, options.batches.split(',')):
        results.append(measure(config, batch, options.context, options.passes, options.cache == 'int8', bandwidth))
        share = results[-1]['share']
        bandwidth_text = '' if share is None else f', {share:.1%} of the bandwidth'
        print(f'batch {batch}: {results[-1]["tokens_per_second"]:.1f} tokens/s{bandwidth_text}')
        if options.peer:
            peer = measure_peer(config, batch, options.context, options.passes)
            ratio = peer['pass_seconds'] / results[-1]['pass_seconds']
            results[-1] |= {'transformers': peer, 'ratio': ratio}
            print(f'batch {batch}: Transformers {batch / peer["pass_seconds"]:.1f} tokens/s; maxlm {ratio:.2f} ×')
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        asked = {'config': options.config, 'overrides': overrides, 'cache': options.cache, 'context': options.context}
        asked['host_loop'] = options.host_loop
        options.output.write_text(json.dumps({**asked, 'machine': machine(), 'results': results}, indent=1) + '\n')
    return EXIT_DONE


def measure(
    config: Config, slots: int, context: int, passes: int, int8: bool, bandwidth: float | None
) -> dict[str, Any]:
    """Returns the median seconds of a pass, the bytes that it reads, and the used fraction of `bandwidth` (bytes/s)."""
    layout = make_layout(config.mesh, jax.devices()[:1])
    programs = CompiledFunctions(
        config,
        layout,
        num_ids=config.model.vocab_size,
        num_slots=slots,
        max_context=context,
        int8=int8,
        chunk=min(512, context // 2),
    )
    params = cast_params(init_state(config, layout).params, config, layout)
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    if not config.model.tie_embeddings:
        weights -= params['embedding'].nbytes
    if config.model.value_embedding_pattern:
        weights -= params[VALUE_TABLES].nbytes
    room = CacheLength(programs.cache_lengths).fit(context // 2 + 1)
    params, state = programs.prepare(params), programs.resize(programs.init_state(), room)
    rng = np.random.default_rng(0)
    chunk = min(512, context // 2)
    for slot in range(slots):
        prompt = rng.integers(0, config.model.vocab_size, context // 2).tolist()
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            made = PrefillChunk(part, start, slot, prompt, GREEDY, 0, 0)
            state, *_ = programs.prefill(params, state, [made], with_top=False)
    rest = PendingPrompt(np.zeros(slots, np.uint32), np.zeros(slots, np.uint32))
    rows, rest = programs.to_devices((stack_settings([GREEDY] * slots), rest))
    no_mask = programs.token_mask([None] * slots)
    calls = -(-passes // MAX_PASSES)
    # The first pass compiles, the second warms up. Passes beyond the last position are equally fast, because each pass
    # reads all positions.
    left = np.full(slots, MAX_PASSES, np.int32)
    seconds = []
    for _ in range(calls + 2):
        start_time = time.perf_counter()
        state, drawn, _ = programs.decode(params, state, left, rows, rest, no_mask, with_top=False)
        jax.block_until_ready(drawn)
        seconds.append((time.perf_counter() - start_time) / MAX_PASSES)
    median = statistics.median(seconds[2:])
    read = weights + programs.cache_bytes() * room / context
    return {
        'slots': slots,
        'room': room,
        'pass_seconds': median,
        'tokens_per_second': slots / median,
        'bytes': read,
        'bandwidth': bandwidth,
        'share': None if bandwidth is None else read / median / bandwidth,
    }


def measure_peer(config: Config, slots: int, context: int, passes: int) -> dict[str, Any]:
    """Returns the result of `benchmarks.decode_static_peer` for a model of the same shape."""
    mode = 'none' if jax.default_backend() == 'cpu' else 'reduce-overhead'
    dtype = jnp.dtype(config.model.dtype).name
    # A machine without the packages of the conversion can measure maxlm alone.
    from maxlm.huggingface.config_conversion import to_config

    task = {'config': to_config(config.model), 'slots': slots, 'context': context, 'passes': passes}
    task |= {'dtype': dtype, 'mode': mode}
    command = [sys.executable, '-m', 'benchmarks.decode_static_peer', json.dumps(task)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def run() -> None:
    """Entry point of `python -m benchmarks.decode`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
