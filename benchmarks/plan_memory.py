"""Compiles training steps for absent hardware and records their memory, as a reference for estimates.

    python -m benchmarks.plan_memory --target=h100:8 [--add='configs/code.py:7b train.per_device_batch_size=2']
    [--output=FILE]

Recompiles all programs of the target in the file and adds those of --add. tests/planning/estimate/test_memory.py reads
the file. Needs the target's compiler: `pip install 'maxlm[tpu]'` or `'maxlm[cuda12]'`. State in host memory
(`mesh.host_offload`) cannot be compiled for an absent GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax

from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.errors import EXIT_DONE, ArgumentParser, exit_code
from maxlm.planning.compiled.compile import compile_train_step
from maxlm.planning.compiled.memory import overflow_of
from maxlm.planning.estimate.memory import estimate_memory
from maxlm.planning.targets import Target, compiling_for, parse_target, target_layout
from maxlm.training.state import abstract_state

ANALYSES = Path('tests/planning/estimate/memory_analyses.json')
# Vocabulary size for configs that take it from the data set.
VOCAB_SIZE = 32


def main(argv: list[str]) -> int:
    """Compiles the programs and rewrites the file."""
    parser = ArgumentParser(prog='benchmarks.plan_memory', allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('--target', required=True, help='as in maxlm.plan, e.g. h100:8 or v4:2x2x4')
    parser.add_argument('--add', action='append', default=[], help='a config and its overrides, with spaces between')
    parser.add_argument('--output', type=Path, default=ANALYSES, help=f'JSON file to write (default {ANALYSES})')
    options = parser.parse_args(argv)
    jax.config.update('jax_platforms', 'cpu')
    target = parse_target(options.target)
    known = json.loads(options.output.read_text()) if options.output.exists() else []
    cases = [(entry['config'], entry['overrides']) for entry in known if entry['target'] == target.spec]
    for words in map(str.split, options.add):
        cases.append((words[0], words[1:]))
    entries = {_key(entry): entry for entry in known}
    for config, overrides in cases:
        entry = _compile(target, config, overrides)
        entries[_key(entry)] = entry
        ordered = sorted(entries.values(), key=_key)
        options.output.write_text('[\n' + ',\n'.join(map(json.dumps, ordered)) + '\n]\n')
    return EXIT_DONE


def _compile(target: Target, config: str, overrides: list[str]) -> dict[str, Any]:
    loaded = load(config, overrides)
    vocab_size = loaded.model.vocab_size or VOCAB_SIZE
    resolved = resolve(
        loaded,
        platform=target.chip.platform,
        num_devices=target.num_devices,
        vocab_size=vocab_size,
        windows=10**7,
        capability=target.chip.capability,
    )
    entry: dict[str, Any] = {
        'target': target.spec,
        'config': config,
        'overrides': overrides,
        'platform': target.chip.platform,
        'num_devices': target.num_devices,
        'vocab_size': vocab_size,
    }
    layout = target_layout(target, resolved.mesh)
    estimate = estimate_memory(resolved, target.chip.platform, target.chip.capability)
    try:
        with compiling_for(target):
            compiled = compile_train_step(resolved, layout, abstract_state(resolved, layout))
    except jax.errors.JaxRuntimeError as error:
        overflow = overflow_of(error)
        if overflow is None:
            raise
        entry['overflow'] = overflow.needed
    else:
        entry |= {'total': compiled.total_bytes(), **(compiled.memory_bytes() or {})}
    reported = entry.get('overflow') or entry['total']
    print(
        f'{config} {" ".join(overrides)}: compiled {reported / 2**30:.2f} GiB, '
        f'estimated {estimate.total / 2**30:.2f} GiB'
    )
    return entry


def _key(entry: dict[str, Any]) -> tuple[str, ...]:
    return entry['target'], entry['config'], *entry['overrides']


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
