"""Compiles training steps for absent TPUs and estimates how much communication overlaps with computation.

    python -m benchmarks.tpu_overlap [--case='v5p:2x2x2 configs/1b.py'] [--output=FILE]

Each step is compiled with the options of its chip (`maxlm.training.compile`) and without. For each kind of
collective, the results contain the time on the links, the hidden fraction (`benchmarks.overlap`), and the numbers of
collectives and of asynchronous collectives. Other cases in the file are kept. Needs `pip install 'maxlm[tpu]'`; a case
takes two minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from benchmarks.overlap import read_overlap
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.errors import EXIT_DONE, ArgumentParser, exit_code
from maxlm.planning.targets import parse_target, target_devices, target_layout
from maxlm.training import compile as compiling
from maxlm.training.state import abstract_state

RESULTS = Path('benchmarks/results/tpu_overlap.json')
# Slices on which the models are trained.
CASES = (
    'v4:2x2x4 configs/1b.py model.scan_layers=true mesh.zero_stage=1 train.per_device_batch_size=4',
    'v4:2x2x4 configs/1b.py model.scan_layers=true mesh.zero_stage=3 train.per_device_batch_size=4',
    'v4:4x4x4 configs/code.py:7b',
    'v5p:2x2x2 configs/1b.py model.scan_layers=true',
    'v5p:4x4x4 configs/code.py:7b',
)


def main(argv: list[str]) -> int:
    """Compiles the cases and rewrites the file."""
    parser = ArgumentParser(prog='benchmarks.tpu_overlap', allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('--case', action='append', help='target, config and overrides, with spaces between')
    parser.add_argument('--output', type=Path, default=RESULTS, help=f'JSON file to write (default {RESULTS})')
    options = parser.parse_args(argv)
    jax.config.update('jax_platforms', 'cpu')
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    for case in options.case or CASES:
        ours = measure(case, with_options=True)
        (device, *_) = target_devices(parse_target(case.split()[0]))
        has_options = device.device_kind in compiling.DEVICE_OPTIONS
        results[case] = {
            'with_options': ours,
            # Without options for the chip, both programs are the same.
            'without': measure(case, with_options=False) if has_options else ours,
            'libtpu': version('libtpu'),
            'jax': version('jax'),
        }
        options.output.write_text(json.dumps(results, indent=1) + '\n')
    return EXIT_DONE


def measure(case: str, *, with_options: bool) -> dict[str, Any]:
    """Compiles one step and returns the overlap of its collectives by kind, and its memory."""
    spec, path, *overrides = case.split()
    target, config = parse_target(spec), load(path, overrides)
    config = resolve(
        config,
        platform='tpu',
        num_devices=target.num_devices,
        vocab_size=config.model.vocab_size or 32_000,
        windows=10**7,
    )
    layout = target_layout(target, config.mesh)
    with contextlib.nullcontext() if with_options else _without_options():
        compiled = compiling.compile_train_step(config, layout, abstract_state(config, layout))
    overlaps = read_overlap(
        compiled.step.as_text() or '', config.mesh.sizes, target.chip, num_devices=target.num_devices
    )
    memory = compiled.total_bytes()
    print(f'{case}, {"with" if with_options else "without"} options: {(memory or 0) / 2**30:.2f} GiB', flush=True)
    for kind, overlap in overlaps.items():
        print(
            f'  {kind:18} {overlap.seconds * 1e3:9.1f} ms, hidden {overlap.share:6.1%}, '
            f'{overlap.count_async:g} of {overlap.count:g} asynchronous',
            flush=True,
        )
    return {
        'attention': config.model.attention,
        'memory_bytes': memory,
        'overlap': {kind: {**overlap._asdict(), 'share': overlap.share} for kind, overlap in overlaps.items()},
    }


@contextlib.contextmanager
def _without_options() -> Iterator[None]:
    options = dict(compiling.DEVICE_OPTIONS)
    compiling.DEVICE_OPTIONS.clear()
    try:
        yield
    finally:
        compiling.DEVICE_OPTIONS.update(options)


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
