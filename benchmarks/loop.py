"""Measures the overhead of the training loop over the bare step, of saving, and of starting a run.

    python -m benchmarks.loop [--config=configs/tiny.py] [--config.section.key=value …] [--steps=N] [--output=FILE]

`maxlm train` runs with data, metrics, checkpoints and evaluation on text of Python's standard library. It runs with all
monitoring (TensorBoard, W&B offline, device statistics every second, samples) and without. The bare step is the same
program in a separate process with batches on the device. The variants run in turns; results are medians over the
rounds. If packages for data or checkpoints (grain, Orbax) are missing, only the bare step is measured.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.errors import EXIT_DONE, InputError, exit_code

# Packages that a run requires.
NEEDED = ('grain', 'array_record', 'orbax', 'tokenizers', 'tqdm', 'tensorstore')
FOR_TENSORBOARD = ('clu', 'tensorflow')
FOR_WANDB = ('wandb',)
PACKAGES = ('asyncio', 'concurrent', 'email', 'http', 'importlib', 'json', 'logging', 'multiprocessing', 'unittest')
VOCABULARY = 4096
# Warm-up steps, which are slower and do not count.
WARMUP = 20
# A model whose step takes almost no time, so that the overhead of the loop dominates.
NOTHING = {
    'model.num_layers': 1,
    'model.dim': 16,
    'model.num_heads': 1,
    'model.num_kv_heads': 0,
    'model.head_dim': 0,
    'model.ffn_dim': 16,
    'data.seq_len': 16,
    'eval.interval': 0,
    'checkpoint.save_interval_steps': 0,
}
# Disables all monitoring except the log and metrics.jsonl.
OFF = {
    'metrics.tensorboard': False,
    'metrics.wandb': '',
    'metrics.device_stats_interval_seconds': 0,
    'eval.num_samples': 0,
}
# Settings for measuring a start: two steps, each logged.
START = {
    'train.num_steps': 2,
    'train.log_every': 1,
    'eval.interval': 0,
    'checkpoint.save_interval_steps': 0,
    'optimizer.warmup_steps': 0,
}


class Turn(NamedTuple):
    """Seconds per step of a run of `maxlm train` after the warm-up, and fractions of its time."""

    step_seconds: float
    with_evaluation: float
    save_share: float
    evaluation_share: float
    data_wait_share: float


def main(argv: list[str]) -> int:
    """Measures one config and prints the results."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.loop', allow_abbrev=False, description=__doc__)
    parser.add_argument('--config', default='configs/tiny.py', help='with a variant after a colon')
    parser.add_argument('--steps', type=int, default=300, help='steps of a turn that count (default 300)')
    parser.add_argument('--rounds', type=int, default=5, help='turns of each (default 5)')
    parser.add_argument('--starts', type=int, default=3, help='starts of each kind (default 3)')
    parser.add_argument('--host-steps', type=int, default=2000, help='steps of the model of no size (default 2000)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(rest)
    if min(options.steps, options.rounds, options.starts, options.host_steps) < 1:
        raise InputError('--steps, --rounds, --starts and --host-steps must be at least 1')
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(options.config, overrides, Path(directory))
        result = {
            'config': options.config,
            'overrides': overrides,
            'steps': options.steps,
            'missing': bench.missing,
            'import_seconds': _spread([bench.import_seconds() for _ in range(options.starts)]),
            'start': bench.starts(options.starts),
            **bench.loop(options.rounds, options.steps),
            **bench.host(options.rounds, options.host_steps),
            'machine': bench.machine,
        }
    _print(result)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    return EXIT_DONE


class Bench:
    """Runs and bare steps of one config, each in a separate process."""

    def __init__(self, config: str, overrides: list[str], directory: Path):
        """Prepares the data in `directory` if all packages that a run requires are installed."""
        self._config = config
        self._overrides = [f'--config.{override}' for override in overrides]
        self._directory = directory
        self._number = 0
        self.machine: dict[str, Any] = {}
        wanted = (*NEEDED, *FOR_TENSORBOARD, *FOR_WANDB)
        self.missing = [name for name in wanted if importlib.util.find_spec(name) is None]
        self._runs = not set(self.missing) & set(NEEDED)
        self._vocabulary = VOCABULARY
        if not self._runs:
            print(f'only the bare step is measured: {", ".join(self.missing)} cannot be imported')
            return
        if self.missing:
            print(f'without a part of what tells of a run: {", ".join(self.missing)} cannot be imported')
        self._prepare()

    def import_seconds(self) -> float:
        """Returns the seconds of a process that only imports the modules of a run."""
        module = 'maxlm.cli.execution.train' if self._runs else 'maxlm.training.step'
        start = time.perf_counter()
        self._call('-c', f'import {module}')
        return time.perf_counter() - start

    def starts(self, count: int) -> dict[str, Any]:
        """Measures the seconds until the first step is done, with an empty and with a full compilation cache."""
        seconds: dict[str, list[float]] = {}
        for number in range(count):
            programs = self._directory / f'programs_{number}'
            for kind in ('cold', 'warm'):
                seconds.setdefault(f'bare_{kind}', []).append(self._bare(1, programs / 'bare')[1])
                if self._runs:
                    began = time.time()
                    first = self._train(programs / 'train', START)[0]
                    seconds.setdefault(f'train_{kind}', []).append(first['time'] - began)
        return {kind: _spread(values) for kind, values in seconds.items()}

    def loop(self, rounds: int, steps: int) -> dict[str, Any]:
        """Measures the run with all monitoring, the run without, and the bare step in turns."""
        turns, quiet, bare = self._turns(rounds, steps, {}, off=OFF)
        if not turns:
            return {'bare_step_seconds': _spread(bare)}
        # Ratios compare measurements of the same round.
        pairs = list(zip(turns, bare, strict=True))
        on_off = zip(turns, quiet, strict=True)
        return {
            'bare_step_seconds': _spread(bare),
            'quiet_step_seconds': _spread([turn.step_seconds for turn in quiet]),
            'share_of_quiet': _spread([off.step_seconds / on.step_seconds for on, off in on_off]),
            'step_seconds': _spread([turn.step_seconds for turn in turns]),
            'share_of_bare': _spread([seconds / turn.step_seconds for turn, seconds in pairs]),
            'share_of_bare_with_evaluation': _spread([seconds / turn.with_evaluation for turn, seconds in pairs]),
            **{name: _spread([getattr(turn, name) for turn in turns]) for name in Turn._fields if 'share' in name},
        }

    def host(self, rounds: int, steps: int) -> dict[str, Any]:
        """Measures the time that the loop adds to a step of almost no duration."""
        turns, _, bare = self._turns(rounds, steps, {**NOTHING, **OFF})
        added = [(turn.step_seconds - seconds) * 1e6 for turn, seconds in zip(turns, bare, strict=False)]
        of_nothing = {'bare_step_of_no_size_microseconds': _spread([seconds * 1e6 for seconds in bare])}
        return {**of_nothing, 'host_microseconds': _spread(added)} if added else of_nothing

    def _turns(
        self, rounds: int, steps: int, settings: dict[str, Any], off: dict[str, Any] | None = None
    ) -> tuple[list[Turn], list[Turn], list[float]]:
        """Returns the runs, the runs with the settings `off` (if given), and the seconds of bare steps."""
        programs = self._directory / 'programs'
        length = {'train.num_steps': WARMUP + steps, 'optimizer.warmup_steps': 10}
        bare: list[float] = []
        runs: dict[str, list[Turn]] = {'run': [], 'quiet': []}
        kinds = ['bare', *(['run'] if self._runs else []), *(['quiet'] if self._runs and off else [])]
        for number in range(rounds):
            # The order rotates.
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                if kind == 'bare':
                    known = {key: value for key, value in settings.items() if key not in OFF}
                    bare.append(self._bare(steps, programs / 'bare', known)[0])
                else:
                    chosen = {**settings, **length, **(off or {} if kind == 'quiet' else {})}
                    runs[kind].append(_read(self._train(programs / 'train', chosen)))
        return runs['run'], runs['quiet'], bare

    def _bare(self, steps: int, programs: Path, settings: dict[str, Any] | None = None) -> tuple[float, float]:
        """Returns the seconds of a step, and the seconds from the start of the process to the end of the first step."""
        words = [f'--config={self._config}', *self._overrides, *_words(settings or {})]
        words += [f'--vocab-size={self._vocabulary}', f'--steps={steps}', f'--warmup={WARMUP if steps > 1 else 0}']
        # The bare step uses JAX's own cache, because maxlm's cache needs packages that may be missing.
        environment = {
            'JAX_COMPILATION_CACHE_DIR': str(programs),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        }
        began = time.time()
        result = json.loads(
            self._call('-m', 'benchmarks.loop_worker', *words, environment=environment).splitlines()[-1]
        )
        self.machine = result['machine']
        return result['step_seconds'], result['first_step_at'] - began

    def _train(self, programs: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
        """Trains and returns the training lines of metrics.jsonl."""
        self._number += 1
        workdir = self._directory / f'run_{self._number}'
        settings = {
            'data.path': self._directory / 'data',
            'train.compilation_cache_dir': programs,
            'metrics.tensorboard': not set(self.missing) & set(FOR_TENSORBOARD),
            'metrics.wandb': '' if set(self.missing) & set(FOR_WANDB) else 'offline',
            'metrics.device_stats_interval_seconds': 1,
            'eval.num_samples': 2,
            **settings,
        }
        words = [f'--config={self._config}', f'--workdir={workdir}', *self._overrides, *_words(settings)]
        self._call('-m', 'maxlm.train', *words)
        lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
        shutil.rmtree(workdir)
        return [line for line in lines if 'train/loss' in line]

    def _prepare(self) -> None:
        from maxlm.data.dataset.records import load_manifest

        library = Path(sysconfig.get_path('stdlib'))
        inputs = [str(library / name) for name in PACKAGES]
        output = self._directory / 'data'
        options = [f'--tokenizer=bpe:{VOCABULARY}', '--validation-fraction=0.05', '--quiet']
        self._call('-m', 'maxlm.prepare', '--input', *inputs, f'--output={output}', *options)
        self._vocabulary = load_manifest(output).vocab_size

    def _call(self, *words: str, environment: dict[str, str] | None = None) -> str:
        kept = {key: value for key, value in os.environ.items() if not key.startswith('JAX_COMPILATION_CACHE')}
        done = subprocess.run(
            [sys.executable, *words], env={**kept, **(environment or {})}, capture_output=True, text=True
        )
        if done.returncode:
            raise InputError(f'{" ".join(words[:2])} ended with code {done.returncode}: {done.stderr.strip()[-500:]}')
        return done.stdout


def _read(lines: list[dict[str, Any]]) -> Turn:
    """Summarizes the training lines of a run."""
    first, *later = [line for line in lines if line['step'] >= WARMUP]
    last = later[-1]
    steps, seconds = last['step'] - first['step'], last['time'] - first['time']
    evaluation = sum(line.get('perf/eval_seconds', 0.0) for line in later)
    saving = sum(line.get('perf/checkpoint_blocked_seconds', 0.0) for line in later)
    # The values of a line are means over the steps since the previous line.
    lengths = [line['step'] - before['step'] for before, line in itertools.pairwise([first, *later])]
    waits, times = (
        sum(length * line[f'perf/{name}_seconds'] for length, line in zip(lengths, later, strict=True))
        for name in ('data_loading', 'step_time')
    )
    return Turn((seconds - evaluation) / steps, seconds / steps, saving / seconds, evaluation / seconds, waits / times)


def _words(settings: dict[str, Any]) -> list[str]:
    return [f'--config.{key}={value}' for key, value in settings.items()]


def _spread(values: list[float]) -> dict[str, float]:
    return {'median': statistics.median(values), 'min': min(values), 'max': max(values)}


def _print(result: dict[str, Any]) -> None:
    for name, value in {**result, **{f'start {kind}': value for kind, value in result['start'].items()}}.items():
        if isinstance(value, dict) and 'median' in value:
            print(f'{name:<36}{value["median"]:>12.6g}  ({value["min"]:.6g}–{value["max"]:.6g})')


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
