"""Compiles training steps for absent hardware and records memory, traffic, operations and expected time.

    python -m benchmarks.plan_programs --target=h100:8 [--add='configs/code.py:7b train.per_device_batch_size=2']
    [--add-only] [--output=FILE]
    python -m benchmarks.plan_programs --fit

Recompiles all programs of the target in the file and adds those of --add. With --add-only, it compiles only those of
--add that are not in the file. The tests of `maxlm.planning.estimate` compare the estimates with the file, and the
settings of the shipped configs are the fastest ones in it. --fit fits the coefficients of
`maxlm.planning.estimate.gpu_traffic` to the programs for GPUs and prints the errors. Needs the target's compiler:
`pip install 'maxlm[tpu]'` or `'maxlm[cuda12]'`, and `'maxlm[experts]'` for experts on GPUs. State in host memory
(`mesh.host_offload`) cannot be compiled for an absent GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.optimize

from maxlm.cli.parser import ArgumentParser
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.planning.compiled.traffic import bytes_by_cause
from maxlm.planning.estimate.gpu_traffic import SAVED, estimate_gpu_traffic, features, fixed_bytes
from maxlm.planning.estimate.work import tokens_per_device
from maxlm.planning.forecast import Forecast, compile_ahead, estimate
from maxlm.planning.machine import Machine, usable_memory
from maxlm.planning.targets import Target, parse_target
from maxlm.training.flops import needs_mask

PROGRAMS = Path('tests/planning/estimate/programs.json')
# Vocabulary size for configs that take it from the data set.
VOCAB_SIZE = 32


def main(argv: list[str]) -> int:
    """Compiles the programs and rewrites the file after each."""
    parser = ArgumentParser(prog='benchmarks.plan_programs', allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('--target', help='as in maxlm plan, e.g. h100:8 or v4:2x2x4')
    parser.add_argument('--add', action='append', default=[], help='a config and its overrides, with spaces between')
    parser.add_argument('--add-only', action='store_true', help='do not recompile the programs in the file')
    parser.add_argument('--output', type=Path, default=PROGRAMS, help=f'JSON file to write (default {PROGRAMS})')
    parser.add_argument('--fit', action='store_true', help='fit the traffic of GPUs instead of compiling')
    options = parser.parse_args(argv)
    if bool(options.target) == options.fit:
        raise InputError('give either --target or --fit')
    jax.config.update('jax_platforms', 'cpu')
    if options.fit:
        fit(json.loads(options.output.read_text()))
        return EXIT_DONE
    target = parse_target(options.target)
    recorded = json.loads(options.output.read_text()) if options.output.exists() else []
    entries = {_key(entry): entry for entry in recorded}
    cases = [] if options.add_only else [key[1:] for key in entries if key[0] == target.spec]
    added = [tuple(words.split()) for words in options.add]
    cases += [case for case in added if not (options.add_only and (target.spec, *case) in entries)]
    for config, *overrides in cases:
        entry = _compile(target, config, overrides)
        # Other processes may have added programs meanwhile.
        recorded = json.loads(options.output.read_text()) if options.output.exists() else []
        entries = {_key(entry): entry for entry in (*recorded, entry)}
        ordered = sorted(entries.values(), key=_key)
        options.output.write_text('[\n' + ',\n'.join(map(json.dumps, ordered)) + '\n]\n')
    return EXIT_DONE


def _compile(target: Target, config: str, overrides: list[str]) -> dict[str, Any]:
    resolved = resolve_for(target, config, overrides)
    machine = Machine(target, usable_memory(target.chip))
    compiled, estimated = compile_ahead(resolved, machine), estimate(resolved, machine)
    print(
        f'{config} {" ".join(overrides)}: {compiled.needed / 2**30:.2f} GiB (estimate {estimated.needed / 2**30:.2f}), '
        f'{compiled.work.memory_bytes / 1e9:.0f} GB of traffic (estimate {estimated.work.memory_bytes / 1e9:.0f}), '
        f'{compiled.time.total:.4g} s (estimate {estimated.time.total:.4g}), MFU {compiled.mfu.causal:.1%}',
        flush=True,
    )
    return {
        'target': target.spec,
        'config': config,
        'overrides': overrides,
        'platform': target.chip.platform,
        'jax': jax.__version__,
        **_figures(compiled),
    }


def resolve_for(target: Target, config: str, overrides: Sequence[str]) -> Config:
    """Returns the config of a program in the file."""
    loaded = load(config, list(overrides))
    return resolve(
        loaded,
        platform=target.chip.platform,
        num_devices=target.num_devices,
        vocab_size=loaded.model.vocab_size or VOCAB_SIZE,
        windows=10**7,
        capability=target.chip.capability,
    )


def fit(programs: Sequence[dict[str, Any]]) -> None:
    """Prints the least-squares coefficients of `estimate_gpu_traffic` by relative error, and the errors."""
    groups: dict[tuple[bool, str], list[tuple[dict[str, Any], Config, Target]]] = defaultdict(list)
    for program in programs:
        if is_present(program):
            target = parse_target(program['target'])
            config = resolve_for(target, program['config'], program['overrides'])
            groups[config.model.scan_layers, SAVED[config.model.remat_policy]].append((program, config, target))
    for group, members in sorted(groups.items()):
        fitted = [(program, config) for program, config, target in members if is_fitted(config, target)]
        sizes = np.array(
            [
                np.array(features(config))
                * (2 * tokens_per_device(config) * config.model.num_layers / config.mesh.stage / program['traffic'])
                for program, config in fitted
            ]
        )
        rest = np.array([1 - fixed_bytes(config) / program['traffic'] for program, config in fitted])
        print(group, [round(float(factor), 2) for factor in scipy.optimize.nnls(sizes, rest)[0]])
        for program, config, _ in members:
            error = estimate_gpu_traffic(config) / program['traffic'] - 1
            print(f'  {error:+.1%}', program['target'], program['config'], *program['overrides'])


def is_present(program: dict[str, Any]) -> bool:
    """Returns True if the traffic of a program in the file is that of the present step.

    Programs without the version of JAX are older: their micro-batches copied the kernels of each layer, and their
    losses read the logits twice.
    """
    return 'traffic' in program and 'jax' in program


def is_fitted(config: Config, target: Target) -> bool:
    """Returns True for programs of bfloat16 products with fused attention.

    Programs with mask arrays, FP8 or MXFP8, pipelines or experts are not fitted.
    """
    is_plain = config.model.matmul_precision == 'default' and config.mesh.stage == config.mesh.context == 1
    return is_plain and not config.model.num_experts and not needs_mask(config, target.chip.capability)


def _figures(compiled: Forecast) -> dict[str, Any]:
    if compiled.compiled is None or compiled.program is None:
        return {'overflow': compiled.needed}
    traffic: dict[str, Any] = {}
    if compiled.program.traffic:
        causes = bytes_by_cause(compiled.program.traffic)
        traffic = {'traffic': compiled.work.memory_bytes, 'causes': {name: int(size) for name, size in causes.items()}}
    return {
        'total': compiled.compiled.total_bytes(),
        **(compiled.compiled.memory_bytes() or {}),
        **traffic,
        'flops': compiled.work.flops,
        'sent': sum(transfer.sent for transfer in compiled.program.transfers),
        'seconds': compiled.time.total,
        'mfu': compiled.mfu.causal,
        'compile_seconds': round(compiled.compiled.seconds, 1),
    }


def _key(entry: dict[str, Any]) -> tuple[str, ...]:
    return entry['target'], entry['config'], *entry['overrides']


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
