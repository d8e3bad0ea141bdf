"""Measures the memory of `maxlm hf`: export and import of a LLaMA-7B, each in a separate process.

    python -m benchmarks.hf_memory [--num-layers=32] [--directory=DIR] [--output=FILE]

Writes a synthetic checkpoint layer by layer, exports it in bfloat16, imports the export and compares all parameters of
both checkpoints. The peak is VmHWM of the process, which includes Python, libraries and pages of mapped files. The
bound is the size of the largest tensor in float32 plus 2 GB. Needs Linux and about 15 GB of disk for 32 layers; the
synthetic parameters compress well on disk.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.step import machine
from maxlm.checkpoint.streaming import ParamsReader, StreamedArray, write_step
from maxlm.cli.models import hf
from maxlm.cli.parser import ArgumentParser
from maxlm.config.loading import build, default
from maxlm.config.resolve import resolve
from maxlm.config.serialization import to_json
from maxlm.errors import EXIT_DONE, EXIT_FAILED, exit_code
from maxlm.huggingface.state_dict import parameter_shapes, tensors
from maxlm.workdir.files import CONFIG, read_config

GB = 10**9
# Shape from Touvron et al. 2023, "LLaMA", with the vocabulary size of its tokenizer.
LLAMA_7B = {'dim': 4096, 'num_heads': 32, 'ffn_dim': 11_008, 'vocab_size': 32_000, 'max_positions': 2048}
PACKAGES = ('orbax-checkpoint', 'tensorstore', 'safetensors', 'ml_dtypes')


def main(argv: list[str]) -> int:
    """Runs the stages and compares their peaks with the bound."""
    parser = ArgumentParser(prog='benchmarks.hf_memory', allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('--num-layers', type=int, default=32, help='fewer make a smaller model (default 32)')
    parser.add_argument('--directory', type=Path, help='where the files go for a while (default: that of the system)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    parser.add_argument('--stage', choices=list(STAGES), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.stage:
        # Runs in a child process, which prints its peak on the last line.
        seconds = _timed(lambda: STAGES[options.stage](options.directory, options.num_layers))
        print(json.dumps({'peak_bytes': _peak_bytes(), 'seconds': seconds}))
        return EXIT_DONE

    directory = Path(tempfile.mkdtemp(prefix='hf_memory_', dir=options.directory))
    try:
        stages = {stage: _run(stage, directory, options.num_layers) for stage in STAGES}
        shapes = _shapes(directory / 'made')
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    largest = 4 * max(math.prod(shape) for shape in shapes.values())
    parameters = sum(
        math.prod(shape) * (options.num_layers if path.startswith('blocks.') else 1) for path, shape in shapes.items()
    )
    result = {
        'name': 'hf_memory',
        'parameters': parameters,
        'num_layers': options.num_layers,
        'largest_tensor_bytes': largest,
        'bound_bytes': largest + 2 * GB,
        **{f'{stage}_{key}': value for stage, values in stages.items() for key, value in values.items()},
        'machine': {**machine(), **{package: version(package) for package in PACKAGES}},
    }
    peaks = {stage: stages[stage]['peak_bytes'] for stage in ('export', 'import')}
    for stage, peak in peaks.items():
        print(
            f'{stage} of {parameters / 1e9:.2f}B parameters: peak {peak / GB:.2f} GB, bound '
            f'{result["bound_bytes"] / GB:.2f} GB, {stages[stage]["seconds"]:.0f} s'
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    return EXIT_DONE if max(peaks.values()) < result['bound_bytes'] else EXIT_FAILED


def _write(directory: Path, num_layers: int) -> None:
    values = default()
    values.model.update(family='llama', num_layers=num_layers, **LLAMA_7B)
    values.train.update(num_steps=1, global_batch_size=1)
    config = resolve(build(values), platform='cpu', num_devices=1, vocab_size=LLAMA_7B['vocab_size'], windows=1)
    workdir = directory / 'made'
    workdir.mkdir()
    (workdir / CONFIG).write_text(to_json(config))
    write_step(
        workdir,
        0,
        {
            path: _array(path, shape, num_layers if path.startswith('blocks.') else 0)
            for path, shape in _shapes(workdir).items()
        },
    )


def _array(path: str, shape: tuple[int, ...], num_layers: int) -> StreamedArray:
    """Returns an array that bfloat16 represents exactly: a ramp that differs by array, layer and row."""
    seed = sum(path.encode())

    def read(layer: int | None) -> np.ndarray:
        index = np.arange(shape[0], dtype=np.int64) * 7 + seed + 31 * (layer or 0)
        rows = (index % 251).astype(np.float32) / 256
        values = np.empty(shape, np.float32)
        values[...] = rows.reshape(-1, *[1] * (len(shape) - 1))
        # The last element of each row is the row number modulo 256.
        values.reshape(shape[0], -1)[:, -1] = np.arange(shape[0]) % 256
        return values

    return StreamedArray((num_layers, *shape) if num_layers else shape, read, is_stacked=num_layers > 0)


def _export(directory: Path, num_layers: int) -> None:
    del num_layers
    _succeed(['export', f'--checkpoint={directory}/made', f'--output={directory}/exported'])


def _import(directory: Path, num_layers: int) -> None:
    del num_layers
    _succeed(['import', f'--input={directory}/exported', f'--output={directory}/imported'])


def _compare(directory: Path, num_layers: int) -> None:
    shutil.rmtree(directory / 'exported')
    made, imported = (ParamsReader(directory / name / 'checkpoints' / '0') for name in ('made', 'imported'))
    assert made.shapes == imported.shapes
    for path in made.shapes:
        for layer in range(num_layers) if path.startswith('blocks.') else (None,):
            assert np.array_equal(made.read(path, layer), imported.read(path, layer)), (path, layer)


STAGES: dict[str, Callable[[Path, int], None]] = {
    'write': _write,
    'export': _export,
    'import': _import,
    'compare': _compare,
}


def _shapes(workdir: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter by dotted path, without the layer axis of stacked parameters."""
    shapes = parameter_shapes(tensors('llama', read_config(workdir).model))
    return {path: shape[1:] if path.startswith('blocks.') else shape for path, shape in shapes.items()}


def _run(stage: str, directory: Path, num_layers: int) -> dict[str, Any]:
    command = [sys.executable, '-m', 'benchmarks.hf_memory', f'--stage={stage}', f'--directory={directory}']
    process = subprocess.run([*command, f'--num-layers={num_layers}'], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def _succeed(argv: list[str]) -> None:
    code = exit_code(hf.main, argv)
    if code != EXIT_DONE:
        sys.exit(code)


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _peak_bytes() -> int:
    status = Path('/proc/self/status').read_text()
    return int(status.partition('VmHWM:')[2].split()[0]) * 1024


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
