"""Trains a 124M model on real text with `maxlm train`, kills it once, resumes, evaluates and exports it.

    python -m benchmarks.gpu_run DIRECTORY [--minutes=6] [--config.section.key=value …] [--output=FILE]

DIRECTORY is that of `benchmarks.gpu_run_prepare`. The run is killed with SIGKILL after its first checkpoint and then
started again with the same command. The steps that it repeats are compared with those before the kill. The JSON file
has the curve, speed, goodput and device statistics of the run. It is written after each part, so an interrupted
benchmark keeps what it has. Exits with 1 if a part fails, or with --exact if a repeated step differs.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_run_prepare import ARCHIVE, DATA
from benchmarks.gpu_run_results import compare_repeated, describe_export, results_of
from benchmarks.step import machine
from maxlm.checkpoint.manager import saved_steps
from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError, exit_code
from maxlm.storage.atomic import atomic_write
from maxlm.telemetry.metrics import read_metrics

CONFIG = 'configs/1b.py'
# GPT-2 with 124M parameters. In the stable part of the schedule, the learning rate does not depend on the length of the
# run, which follows the speed: the repeated steps have the rates that they had before the kill.
SETTINGS = {
    'model.num_layers': 12,
    'model.dim': 768,
    'model.num_heads': 12,
    'model.max_positions': 1024,
    'data.seq_len': 1024,
    'train.global_batch_size': 64,
    'train.per_device_batch_size': 64,
    'train.log_every': 10,
    'optimizer.learning_rate': 6e-4,
    'optimizer.min_learning_rate': 6e-5,
    'optimizer.warmup_steps': 200,
    'optimizer.schedule': 'wsd',
    'optimizer.wsd_decay_fraction': 0.3,
    'eval.interval': 250,
    'eval.num_samples': 0,
    'checkpoint.save_interval_steps': 400,
    'checkpoint.max_to_keep': 1,
    'export.at_end': 'false',
    # Needs TensorFlow.
    'metrics.tensorboard': 'false',
    'metrics.device_stats_interval_seconds': 2,
    'metrics.progress_bar': 'false',
}
# Number of lines of metrics between the first save and the kill, and seconds between two looks at them.
LINES_AFTER_SAVE, POLL_SECONDS = 5, 0.05
PROMPT = 'The following options are available:'
NEW_TOKENS = 48
# Prints the continuation of a prompt, and the number of parameters. The arguments are the directory, the prompt and the
# number of new tokens.
TRANSFORMERS = """
import json, sys, transformers
directory, prompt, count = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype='float32')
inputs = tokenizer(prompt, return_tensors='pt', return_token_type_ids=False)
(row,) = model.generate(**inputs, max_new_tokens=int(count), do_sample=False)
text = tokenizer.decode(row[inputs['input_ids'].shape[1]:])
print(json.dumps({'version': transformers.__version__, 'prompt': prompt, 'text': text}))
"""


class PartError(Exception):
    """A part of the benchmark failed."""


def main(argv: list[str]) -> int:
    """Runs all parts and writes the results."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.gpu_run', allow_abbrev=False, description=__doc__)
    parser.add_argument('directory', type=Path, help='directory of benchmarks.gpu_run_prepare')
    parser.add_argument('--config', default=CONFIG, help=f'config file (default {CONFIG})')
    parser.add_argument('--minutes', type=float, default=6.0, help='duration; 0 = train.num_steps (default 6)')
    parser.add_argument('--exact', action='store_true', help='fail if a repeated step differs in any bit')
    parser.add_argument('--output', type=Path, required=True, help='JSON file to write')
    options = parser.parse_args(rest)
    archive = options.directory / ARCHIVE
    if not archive.is_file():
        raise InputError(f'{archive}: file not found; run benchmarks/gpu_run.sh prepare {options.directory} first')
    options.output.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {'config': options.config, 'minutes': options.minutes, 'seconds': {}, 'failed': []}
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory)
        with tarfile.open(archive) as file:
            file.extractall(data, filter='data')
        settings = [f'{key}={value}' for key, value in SETTINGS.items()]
        settings += [f'train.hours={options.minutes / 60}'] if options.minutes else []
        result['overrides'] = [*settings, *overrides]
        words = [f'--config={options.config}', f'--config.data.path={data / DATA}']
        words += [f'--config.{override}' for override in result['overrides']]
        try:
            _run(data / 'run', words, result, options.output)
        except PartError as error:
            result['failed'].append(str(error))
            print(f'error: {error}', file=sys.stderr)
    resumption = result.get('resumption', {})
    if options.exact and resumption.get('different'):
        result['failed'].append(f'{resumption["different"]} repeated steps differ')
        print(f'error: {result["failed"][-1]}: {resumption}', file=sys.stderr)
    _write(result, options.output)
    return EXIT_FAILED if result['failed'] else EXIT_DONE


def _run(workdir: Path, words: list[str], result: dict[str, Any], output: Path) -> None:
    """Runs the parts, and adds their results to `result`.

    Raises:
        PartError: a part failed.
    """
    train = ['maxlm.train', f'--workdir={workdir}', *words]
    log = output.with_suffix('.log')

    def part(name: str, action: Callable[[], Any]) -> Any:
        print(f'-- {name}', flush=True)
        start = time.perf_counter()
        found = action()
        result['seconds'][name] = time.perf_counter() - start
        _write(result, output)
        return found

    before = part('train until killed', lambda: _train_and_kill(train, workdir, log))
    part('resume', lambda: _call(train, log))
    result['resumption'] = compare_repeated(before, workdir)
    result |= results_of(workdir)
    evaluate = ['maxlm.evaluate', f'--checkpoint={workdir}', '--json']
    result['evaluation'] = json.loads(part('evaluate', lambda: _call(evaluate, log)).splitlines()[-1])
    exported = workdir / 'exported'
    part('export', lambda: _call(['maxlm.hf', 'export', f'--checkpoint={workdir}', f'--output={exported}'], log))
    result['exported'] = describe_export(exported)
    result['transformers'] = None
    if all(importlib.util.find_spec(name) for name in ('torch', 'transformers')):
        load = ['-c', TRANSFORMERS, str(exported), PROMPT, str(NEW_TOKENS)]
        result['transformers'] = json.loads(part('transformers', lambda: _call(load, log)).splitlines()[-1])
    # The processes above have released the devices.
    result['machine'] = machine()


def _train_and_kill(command: list[str], workdir: Path, log: Path) -> list[dict[str, Any]]:
    """Starts a run, kills it LINES_AFTER_SAVE lines after its first checkpoint, and returns its lines of metrics.

    Raises:
        PartError: the run ended before.
    """
    with log.open('w') as file, subprocess.Popen(_python(command), stdout=file, stderr=file) as process:
        try:
            while True:
                if process.poll() is not None:
                    raise PartError(
                        f'the run ended before it was killed, with exit code {process.returncode}; see {log}'
                    )
                saved = saved_steps(workdir)
                after = [line for line in read_metrics(workdir) if saved and line['step'] > saved[-1]]
                if len(after) >= LINES_AFTER_SAVE:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            process.kill()
    return read_metrics(workdir)


def _call(command: list[str], log: Path) -> str:
    """Runs a module and returns its standard output, which is also appended to the log.

    Raises:
        PartError: it failed.
    """
    with log.open('a') as file:
        done = subprocess.run(_python(command), stdout=subprocess.PIPE, stderr=file, text=True)
        file.write(done.stdout)
    if done.returncode:
        raise PartError(f'{command[0]} failed with exit code {done.returncode}; see {log}')
    return done.stdout


def _python(command: list[str]) -> list[str]:
    return [sys.executable, *(command if command[0] == '-c' else ['-m', *command])]


def _write(result: dict[str, Any], output: Path) -> None:
    atomic_write(output, json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
