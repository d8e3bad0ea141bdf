"""Counts what a token costs on an absent GPU: `python -m benchmarks.decode_program --config=FILE [--output=FILE]`.

Compiles decoding and counts the kernels of a pass, the bytes that they move, and the decisions for which the GPU waits
for the host. Nothing is measured. Needs the target's compiler: `maxlm plan --install-compiler`. Without a GPU, XLA
cannot try products with Triton, so cuBLAS computes them.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from benchmarks.plan_programs import resolve_for
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.inference.cast_params import cast_params
from maxlm.inference.engine.compiled import CompiledFunctions
from maxlm.planning.compiled.hlo import Module, parse_hlo
from maxlm.planning.compiled.traffic import Traffic, bytes_by_cause, read_traffic
from maxlm.planning.targets import Target, compiling_for, parse_target, target_layout
from maxlm.training.compile import AHEAD_OPTIONS
from maxlm.training.state import abstract_state

# File with the order in which the host starts kernels and graphs, among those that XLA dumps, and a line of it.
_THUNKS = '*thunk_sequence_after_thunk_passes.txt'
_THUNK = re.compile(r'^( *)\d+: k(\w+)')


def main(argv: list[str]) -> int:
    """Compiles one config and writes the counts."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.decode_program', allow_abbrev=False, description=__doc__)
    parser.add_argument('--config', required=True, help='config file, with a variant after a colon')
    parser.add_argument('--target', default='h100:1', help='as in maxlm plan (default h100:1)')
    parser.add_argument('--batches', default='1,32', help='numbers of slots, with commas between them (default 1,32)')
    parser.add_argument('--context', type=int, default=1024, help='positions of a slot (default 1024)')
    parser.add_argument('--beside', type=Path, help='JSON file of an earlier version, to be copied to the output')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(rest)
    jax.config.update('jax_platforms', 'cpu')
    target = parse_target(options.target)
    if target.chip.platform != 'gpu' or target.num_devices != 1:
        raise InputError(f'--target={options.target}: must be one GPU')
    results = []
    for slots in map(int, options.batches.split(',')):
        results.append(count(target, options.config, overrides, slots, options.context))
        print(json.dumps(results[-1]), flush=True)
    if options.output:
        asked = {'config': options.config, 'overrides': overrides, 'target': target.spec, 'context': options.context}
        found = {**asked, 'measured': False, 'machine': machine(), 'results': results}
        if options.beside:
            found['before'] = json.loads(options.beside.read_text())['results']
        options.output.write_text(json.dumps(found, indent=1) + '\n')
    return EXIT_DONE


def count(target: Target, config: str, overrides: list[str], slots: int, context: int) -> dict[str, Any]:
    """Returns the counts of one pass of all slots over caches of `context` positions."""
    resolved = resolve_for(target, config, overrides)
    layout = target_layout(target, resolved.mesh)
    functions = CompiledFunctions(
        resolved,
        layout,
        num_ids=resolved.model.vocab_size,
        num_slots=slots,
        max_context=context,
        int8=False,
        chunk=min(512, context // 2),
    )
    # Every pass reads the complete cache.
    functions.cache_lengths = [context]
    params = jax.eval_shape(
        lambda params: functions.prepare(cast_params(params, resolved, layout)), abstract_state(resolved, layout).params
    )
    state = jax.eval_shape(functions.init_state)
    with tempfile.TemporaryDirectory() as folder, compiling_for(target):
        compiled = functions.compile_decode(params, state, {**AHEAD_OPTIONS['gpu'], 'xla_dump_to': folder})
        thunks = next(Path(folder).glob(_THUNKS)).read_text()
    module = parse_hlo(compiled.as_text() or '')
    inside, outside = _kernels(module)
    return {
        'slots': slots,
        'kernels_per_pass': len(inside),
        'kernels_per_call': len(outside),
        'bytes_per_pass': sum(kernel.total for kernel in inside),
        'bytes_per_call': sum(kernel.total for kernel in outside),
        'bytes_by_cause': bytes_by_cause(inside),
        'weight_and_cache_bytes': sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state.caches))),
        **host_turns(thunks),
    }


def _kernels(module: Module) -> tuple[list[Traffic], list[Traffic]]:
    """Returns the kernels of a pass and those outside of the loop, with the largest branch of each condition."""
    (loop,) = (each for each in module.entry.values() if each.opcode == 'while')
    inside = read_traffic(module._replace(entry=module.computations[loop.called['body']]))
    names = {kernel.name for kernel in inside}
    return inside, [kernel for kernel in read_traffic(module) if kernel.name not in names]


def host_turns(thunks: str) -> dict[str, int]:
    """Returns how often the host acts in a pass, given the steps of a program as XLA prints them.

    The condition of a loop or branch outside of a graph is copied to the host, which waits for it. A graph (a CUDA
    graph, which XLA calls a command buffer) is started by one call.
    """
    counts = {'host_waits_per_pass': 0, 'launches_per_pass': 0, 'is_one_graph': 0}
    graph, loop = None, None
    for line in thunks.splitlines():
        found = _THUNK.match(line)
        if found is None:
            continue
        indent, kind = len(found[1]), found[2]
        if graph is not None and indent > graph:
            continue
        graph = indent if kind == 'CommandBuffer' else None
        loop = indent if kind == 'While' and loop is None else loop
        counts['host_waits_per_pass'] += kind in ('While', 'Conditional')
        counts['launches_per_pass'] += loop is not None and indent > loop
    counts['is_one_graph'] = int(loop is None)
    return counts


def run() -> None:
    """Entry point of `python -m benchmarks.decode_program`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
